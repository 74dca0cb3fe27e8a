"""Passes in f16 against f32 on the CPU: many rows and few, by the kernels and without them, with wide gates.

One line a check. Run with TRITON_INTERPRET=1 where there is no CUDA device; with `--card` on one: the same there, with
the libraries' products and attention, as on a card before compute capability 8.0.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.model.spec import build_spec
from gearshift.proto.ids import KvType, Layout, Rank, RequestId
from gearshift.proto.kv import KvFormat
from gearshift.proto.placement.cuts import place
from gearshift.tests.helpers.gguf_builder import build_model
from gearshift.tests.helpers.interpreted_steps import plain_exact_product, plain_product
from gearshift.tests.helpers.interpreted_triton import mend_scalars
from gearshift.tests.helpers.kernel_checks import relative_error
from gearshift.tests.helpers.layer_stages import CONTEXT, Stage, Upload
from gearshift.worker.kernels import attention, quant_ops, step_ops
from gearshift.worker.kernels.elementwise import gated
from gearshift.worker.kv import KvStore, SlotRun
from gearshift.worker.memory import MemoryLedger
from gearshift.worker.model.decoder import Decoder, Segment
from gearshift.worker.requests import RequestState
from gearshift.worker.weights import device_load
from gearshift.worker.weights.layer import PartWeights
from gearshift.worker.weights.load import WeightLoader
from gearshift.worker.weights.mapped_file import MappedModel

CPU = torch.device("cpu")
ROWS, LATER = 24, 3  # of a first pass, and of one behind it
WIDE = 250.0  # times what feed-forward blocks are fed: what their gates let by is beyond f16 then

Found = Iterator[tuple[str, float, float]]  # (what, found, most allowed)


class _Watched(Decoder):
    """Notes the largest value that a gate lets by."""

    widest = 0.0

    def _feed_forward(self, normed_TD: torch.Tensor, part: PartWeights) -> torch.Tensor:
        gate, up = part.gate_up(normed_TD).chunk(2, dim=1)
        self.widest = max(self.widest, float(gated(gate, up, self._spec.activation).abs().max()))
        return super()._feed_forward(normed_TD, part)


def reference(path: Path, tokens: list[int]) -> tuple[list[torch.Tensor], float]:
    """Hidden rows of the two passes in f32, and the largest value that a gate let by."""
    spec, ledger = build_spec(resolve_model(str(path)), CONTEXT), MemoryLedger()
    placement, form = place(spec, 1), KvFormat(KvType.F32, KvType.F32)
    files = MappedModel(spec)
    weights = WeightLoader(spec, placement, 0, files, torch.float32, CPU, ledger, lambda _: None).load()
    kv = KvStore(spec, placement, Rank(0), form, CONTEXT // 64, torch.float32, CPU, ledger)
    decoder = _Watched(spec, weights, kv, [0] * len(spec.layers), torch.float32, CPU, lambda rows: rows)
    slots = {(0, 0): SlotRun.of(tuple(range(CONTEXT // 64)), CPU)}
    state = RequestState(RequestId(0), Layout.LAYER, slots, greedy=True, last_token=0)
    table = torch.from_numpy(files.gather_rows(spec.tensors["token_embd.weight"], np.asarray(tokens)))
    return list(passes(decoder, state, table * spec.embedding_scale)), decoder.widest


def passes(decoder: Decoder, state: RequestState, rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """Many rows, and a few behind them."""
    layers = range(len(decoder.weights.layers))
    for first, end in ((0, ROWS), (ROWS, ROWS + LATER)):
        segment = Segment(state, 0, end - first, first)
        yield decoder.layers(rows[first:end].to(decoder.device), layers, Layout.LAYER, [segment]).cpu()


def check_model(folder: Path, arch: str, down: str, device: torch.device, *, wide: bool) -> Found:
    """`down`: the type of the matrices behind the gates."""
    norm = np.full(64, WIDE if wide else 1.0, np.float32)
    path = build_model(
        folder / f"{arch}-{down}-{wide}.gguf", arch, layers=2, hidden=64, heads=4, kv_heads=2, head_width=32,
        feed_forward=128, vocab=320, quant="Q8_0", seed=9, types={"ffn_down.weight": down},
        tensors={f"blk.{layer}.ffn_norm.weight": norm for layer in range(2)},
    )  # fmt: skip
    tokens = torch.randint(0, 320, (ROWS + LATER,), generator=torch.Generator().manual_seed(1)).tolist()
    wanted, widest = reference(path, tokens)
    name = f"{arch}, {down}{', wide' * wide}"
    print(f"{name}: gates let up to {widest:.3g} by")
    yield f"{name}: gates beyond f16", float(wide != (widest > 65_504)), 0.5
    spec = build_spec(resolve_model(str(path)), CONTEXT)
    stage = Stage.of(path, place(spec, 1), 0, device, requests=1, half=torch.float16)
    rows = stage.decoder.embed(tokens)
    yield from check_exact(path, name, tokens, wanted[1], device)
    for fused in (True, False):
        stage.decoder.fused = fused
        many, few = passes(stage.decoder, stage.states[0], rows)
        told = f"{name}{', kernel by kernel' * (not fused)}"
        yield f"{told}: many rows", relative_error(many, wanted[0]), 2e-3
        yield f"{told}: few rows", relative_error(few, wanted[1]), 4e-2  # activations in int8


def check_exact(path: Path, name: str, tokens: list[int], wanted: torch.Tensor, device: torch.device) -> Found:
    """Few rows behind many without activations in int8: as a chunk, and step by step."""
    spec = build_spec(resolve_model(str(path)), CONTEXT)
    stage = Stage.of(path, place(spec, 1), 0, device, requests=1, half=torch.float16, exact=True)
    _, few = passes(stage.decoder, stage.states[0], stage.decoder.embed(tokens))
    yield f"{name}: few rows, exact", relative_error(few, wanted), 2e-3
    steps = []
    for position, token in enumerate(tokens[ROWS:], ROWS):
        stage.steps.feed(stage.states, [token], [position])
        stage.steps.run_stage(1)
        steps.append(stage.steps.hidden(1).cpu().clone())
    yield f"{name}: steps, exact", relative_error(torch.cat(steps), wanted), 2e-3


def check_library_attention(device: torch.device) -> Found:
    """One head of a group at a time, as on an old card, is what all together are; and no mask means a causal one."""
    generator = torch.Generator().manual_seed(2)
    query, key, value = (
        torch.randn(shape, generator=generator).half().to(device)
        for shape in ((50, 8, 64), (2, 200, 64), (2, 200, 64))
    )
    mask = attention.causal_mask(50, 200, 0, device)
    found = [attention.attend_by_library(query, key, value, mask, 0.1, older) for older in (True, False)]
    yield "attention by heads", relative_error(*found), 1e-3
    for older in (True, False):
        causal = attention.attend_by_library(query, key, value, None, 0.1, older)
        yield f"attention without a mask{', by heads' * older}", relative_error(causal, found[1]), 1e-3


def main() -> int:
    on_card = "--card" in sys.argv
    device = torch.device("cuda:0") if on_card else CPU
    if on_card:
        step_ops.is_older = attention.is_older = lambda device: True  # type: ignore[assignment]
    else:
        mend_scalars()
        device_load.Uploader = Upload  # type: ignore[assignment,misc]
        quant_ops.multiply = plain_product  # type: ignore[assignment]
        quant_ops.multiply_exactly = plain_exact_product
    bad = 0
    # What such a card has of the library's ways to attend.
    ways = sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]) if on_card else nullcontext()
    with ways, tempfile.TemporaryDirectory() as folder:
        cases = [("llama", "Q8_0", False), ("llama", "Q8_0", True), ("gemma3", "F16", True)]
        checks = [check_model(Path(folder), arch, down, device, wide=wide) for arch, down, wide in cases]
        for check in (*checks, check_library_attention(device)):
            for name, value, limit in check:
                right = value <= limit
                bad += not right
                print(name, "right" if right else "wrong", value, flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
