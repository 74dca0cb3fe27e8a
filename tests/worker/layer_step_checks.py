"""Steps of the layer layout against the passes that run kernel by kernel, stage by stage, over the same made-up caches.

Run as `quant_kernel_checks` is, with TRITON_INTERPRET=1: what is launched, with which buffers, tables and sums, is the
same on a device; graphs and branches are not there, see tests/parity/test_layer_steps_on_cuda.py.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gearshift.coordinator.model_files import resolve_model
from gearshift.coordinator.model_spec import build_spec
from gearshift.proto.ids import KvType, Layout, Rank, RequestId
from gearshift.proto.kv import KvFormat
from gearshift.proto.model import ModelSpec
from gearshift.proto.placement.bundles import held_bundles
from gearshift.proto.placement.cuts import place
from gearshift.proto.placement.plan import Placement
from gearshift.tests.helpers.gguf_builder import build_model
from gearshift.tests.helpers.interpreted_triton import mend_scalars
from gearshift.worker.kernels import quant_ops
from gearshift.worker.kernels.quant_matrix import EmbeddingTable
from gearshift.worker.kernels.quant_ops import QuantizedRows
from gearshift.worker.kernels.quant_planes import Planes, dequantize
from gearshift.worker.kernels.step_ops import Exchange
from gearshift.worker.kv import KvStore, SlotRun
from gearshift.worker.memory import MemoryLedger
from gearshift.worker.model import layer_steps
from gearshift.worker.model.decoder import Decoder, Segment
from gearshift.worker.model.device_decoder import DeviceDecoder
from gearshift.worker.model.layer_steps import LayerSteps, can_step_in_layers
from gearshift.worker.requests import RequestState
from gearshift.worker.weights import device_load
from gearshift.worker.weights.load import WeightLoader
from gearshift.worker.weights.mapped_file import MappedModel

CPU = torch.device("cpu")
HALF = torch.float16  # the interpreter has no bf16 products
FORM = KvFormat(KvType.F16, KvType.F16)
CONTEXT = 128
SHAPE = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_width": 32, "feed_forward": 128, "vocab": 320}
POSITIONS = (70, 5, 0)


class Upload:
    """`Uploader` where there is no device."""

    def __init__(self, device: torch.device) -> None:
        assert device == CPU

    def upload(self, raw: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(np.array(raw))


@dataclass
class Stage:
    """One rank: its decoder over quantised parts, its steps and its cache."""

    spec: ModelSpec
    placement: Placement
    rank: int
    decoder: DeviceDecoder
    steps: LayerSteps
    kv: KvStore
    states: list[RequestState]

    @classmethod
    def of(cls, path: Path, placement: Placement, rank: int) -> "Stage":
        spec, ledger = build_spec(resolve_model(str(path)), CONTEXT), MemoryLedger()
        files = MappedModel(spec)
        loader = WeightLoader(spec, placement, rank, files, torch.bfloat16, CPU, ledger, lambda _: None)
        loader._device_loader = device_load.DeviceLoader(files, CPU)
        weights = loader.load()
        blocks = CONTEXT // 64 + 1
        bundles = list(held_bundles(placement, Rank(rank), Layout.LAYER))
        slots = len(POSITIONS) * len(bundles) * blocks
        kv = KvStore(spec, placement, Rank(rank), FORM, slots, HALF, CPU, ledger)
        kv.arena.view(HALF).normal_()
        table = spec.tensors["token_embd.weight"]
        rows = torch.from_numpy(files.gather_rows(table, np.arange(spec.vocab))).contiguous()
        embedding = EmbeddingTable(rows, spec.embedding_scale, CPU)
        stage_of = [placement.stage_of(layer) for layer in range(len(spec.layers))]
        decoder = DeviceDecoder(
            spec, weights, kv, stage_of, HALF, CPU, lambda x: x, lambda x: None, FORM, embedding
        )
        assert can_step_in_layers(spec, decoder, placement.stages[rank])
        exchange = Exchange.alone(CPU, spec.hidden) if placement.ranks == 1 else None
        steps = LayerSteps(spec, placement, rank, decoder, lambda rows, root: rows, exchange, CONTEXT)
        order = iter(torch.randperm(slots).tolist())
        states = []
        for number in range(len(POSITIONS)):
            runs = {b: SlotRun.of(tuple(next(order) for _ in range(blocks)), CPU) for b in bundles}
            states.append(RequestState(RequestId(number), Layout.LAYER, runs, greedy=True, last_token=number + 7))
        return cls(spec, placement, rank, decoder, steps, kv, states)

    def feed(self, tokens: Sequence[int], positions: Sequence[int]) -> None:
        self.steps.feed(self.states[: len(tokens)], tokens, positions)


def stepped(stages: Sequence[Stage], tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """Logits [B, vocab] of one step, its rows carried from stage to stage as the ranks would make them known."""
    count = len(tokens)
    for stage in stages:
        stage.feed(tokens, positions)
    for stage in stages:
        if stage.rank:
            stage.steps.hidden(count).copy_(stages[stage.rank - 1].steps.hidden(count))
        stage.steps.run_stage(count)
    for stage in stages:
        stage.steps.hidden(count).copy_(stages[-1].steps.hidden(count))
        stage.steps.run_head(count, choose=False)
    return torch.cat([stage.steps._bucket(count).logits[:count] for stage in stages], dim=1)


def passed(
    stages: Sequence[Stage], tokens: Sequence[int], positions: Sequence[int], kind: type[Decoder] = DeviceDecoder
) -> torch.Tensor:
    """The same kernel by kernel, or by plain torch."""
    rows = stages[0].decoder.embed(tokens)
    for stage in stages:
        segments = [Segment(stage.states[row], row, 1, position) for row, position in enumerate(positions)]
        rows = kind.layers(stage.decoder, rows, stage.placement.stages[stage.rank], Layout.LAYER, segments)
    return torch.cat([stage.decoder.head(rows) for stage in stages], dim=1) / stages[0].spec.logit_scale


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def plain_product(planes: Planes, x: QuantizedRows, out: torch.Tensor) -> None:
    """`quant_ops.multiply`, which has its own checks and takes most of the interpreter's time."""
    rows = (x.codes.float().unflatten(1, (-1, 32)) * x.scales[..., None]).flatten(1)
    out.copy_(rows @ dequantize(planes).T)


def check_stages(
    folder: Path, arch: str, steps: int, whole: frozenset[int] = frozenset()
) -> Iterator[tuple[str, float, float]]:
    """Two stages of two parts: steps, each written where the next reads it; (what, found, most allowed)."""
    path = build_model(folder / f"{arch}-{len(whole)}.gguf", arch, quant="Q8_0", seed=3, **SHAPE)
    spec = build_spec(resolve_model(str(path)), CONTEXT)
    placement = place(spec, 2, whole_layers=whole)
    stages = [Stage.of(path, placement, rank) for rank in range(2)]
    before = [stage.kv.arena.clone() for stage in stages]
    tokens = [[5, 300, 77], [6, 8, 319]][:steps]

    def both(run: Callable[[Sequence[Stage], Sequence[int], Sequence[int]], torch.Tensor]) -> list[torch.Tensor]:
        for stage, arena in zip(stages, before, strict=True):
            stage.kv.arena.copy_(arena)
        return [run(stages, line, [p + index for p in POSITIONS]) for index, line in enumerate(tokens)]

    found = both(stepped)
    written = [stage.kv.arena.clone().view(HALF).float() for stage in stages]
    wanted = both(passed)
    name = f"{arch}, {len(whole)} whole"
    yield f"{name}: logits", error(torch.stack(found), torch.stack(wanted)), 1.5e-2  # int8 of attention in f16 there
    for stage, cache, arena in zip(stages, written, before, strict=True):
        yield f"{name}: cache of {stage.rank}", error(cache, stage.kv.arena.view(HALF).float()), 5e-3
        changed = (cache != arena.view(HALF).float()).any(dim=1).sum()
        # Each bundle's block of each request and nothing else: 3 requests, 2 parts (1 where the layer is whole).
        parts = sum(bool(part.query_heads) for part in stage.decoder.weights.layers[stage.rank].parts)
        yield f"{name}: blocks written", float(changed != 3 * parts), 0.5
    if steps < 2:
        return
    alone = stepped(stages, tokens[0][:1], POSITIONS[:1])
    yield f"{name}: a request alone", error(alone, found[0][:1]), 1e-6
    others = stepped(stages, [5, 1, 2], [70, 100, 64])
    yield f"{name}: a request among others", float(not torch.equal(others[0], found[0][0])), 0.5


def check_choice(folder: Path) -> Iterator[tuple[str, float, float]]:
    """Greedy steps of one rank, chosen inside, in two runs of the results' lines: what each step's logits say."""
    path = build_model(folder / "one.gguf", quant="Q8_0", seed=4, **SHAPE)
    spec = build_spec(resolve_model(str(path)), CONTEXT)
    layer_steps.MOST_STEPS = 2
    stage = Stage.of(path, place(spec, 1), 0)
    before = stage.kv.arena.clone()
    result = stage.steps.run(stage.states, POSITIONS, 3)
    stage.kv.arena.copy_(before)
    tokens, wrong, far = [state.last_token for state in stage.states], 0, 0.0
    for step, (ids, logprobs) in enumerate(zip(result.ids, result.logprobs, strict=True)):
        rows = torch.log_softmax(stage.steps.logits(stage.states, tokens, [p + step for p in POSITIONS]), -1)
        wrong += sum(int(row.argmax()) != token for row, token in zip(rows, ids, strict=True))
        far = max(far, error(torch.tensor(logprobs), rows.amax(-1)))
        tokens = ids
    yield "choice", float(wrong or len(result.ids) != 3), 0.5
    yield "choice: logprobs", far, 1e-5


def main() -> int:
    assert os.environ.get("TRITON_INTERPRET") == "1", "a device runs these in tests/parity/test_layer_steps_on_cuda.py"
    mend_scalars()
    torch.manual_seed(0)
    device_load.Uploader = Upload  # type: ignore[assignment, misc]
    quant_ops.multiply = plain_product  # type: ignore[assignment]
    layer_steps.SPLITS = 2
    bad = 0
    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        folder = Path(name)
        checks = [check_stages(folder, "llama", 2), check_stages(folder, "gemma3", 1, frozenset({0}))]
        checks.append(check_choice(folder))
        for check in checks:
            for what, value, most in check:
                print(what, "right" if value < most else "wrong", value, flush=True)
                bad += not value < most
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
