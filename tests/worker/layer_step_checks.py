"""Steps of the layer layout against the passes that run kernel by kernel, stage by stage, over the same made-up caches.

Run as `quant_kernel_checks` is, with TRITON_INTERPRET=1: what is launched, with which buffers, tables and sums, is the
same on a device; graphs and branches are not there, see tests/parity/test_layer_steps_on_cuda.py.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.model.spec import build_spec
from gearshift.proto.ids import KvType, Layout
from gearshift.proto.kv import KvFormat
from gearshift.proto.placement import step_buffers
from gearshift.proto.placement.cuts import place
from gearshift.proto.placement.memory import Holding
from gearshift.proto.placement.working_case import WorkingCase
from gearshift.tests.helpers.gguf_builder import build_model
from gearshift.tests.helpers.interpreted_steps import CPU, CUT, POSITIONS, SHAPE, Found, run_checks
from gearshift.tests.helpers.kernel_checks import HALF, relative_error, worst
from gearshift.tests.helpers.layer_stages import CONTEXT, Stage, cached, passed, stepped
from gearshift.worker.kernels.draw_ops import DrawBuffers
from gearshift.worker.model import step_parts
from gearshift.worker.model.decoder import Segment
from gearshift.worker.model.step_parts import BatchBuffers, PartRoom

# Types that are kept as the file's blocks, a group of q, k and v of two of them, beside one in planes.
BLOCKS = SHAPE | {"hidden": 256, "feed_forward": 512, "head_width": 64}
BLOCKS["types"] = {
    "attn_q.weight": "IQ2_XXS", "attn_k.weight": "IQ3_S", "attn_v.weight": "IQ3_S", "attn_output.weight": "IQ4_NL",
    "ffn_gate.weight": "Q2_K", "ffn_down.weight": "IQ4_XS", "output.weight": "Q3_K",
}  # fmt: skip


def bytes_of(item: object) -> int:
    """Of the tensors that something holds, each memory counted once."""
    found: dict[int, int] = {}
    rest = [item]
    while rest:
        match rest.pop():
            case torch.Tensor() as tensor:
                found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            case DrawBuffers() as draws:
                rest += [getattr(draws, one.name) for one in fields(draws) if one.name != "host_tables"]
            case dict() as several:
                rest += several.values()
            case list() | tuple() as several:
                rest += several
            case BatchBuffers() | PartRoom() as holder:
                rest += [value for name, value in vars(holder).items() if name not in ("members", "_decoder")]
            case holder if is_dataclass(holder):
                rest += [getattr(holder, one.name) for one in fields(holder)]
            case _:
                pass
    return sum(found.values())


def check_stages(
    folder: Path, arch: str, steps: int, whole: frozenset[int] = frozenset(), kv_type: KvType = KvType.F16,
    shares: tuple[float, float] = (1.0, 1.0), shape: dict[str, Any] = SHAPE, most: float = 1.5e-2,
    exact: bool = False,
) -> Found:  # fmt: skip
    """Two stages of two parts: steps, each written where the next reads it; (what, found, most allowed)."""
    name = f"{arch}, {len(whole)} whole, {kv_type}, {shares[0]:g} to {shares[1]:g}{', exact' * exact}"
    path = build_model(folder / f"{name}.gguf", arch, quant="Q8_0", seed=3, **shape)
    spec = build_spec(resolve_model(str(path)), CONTEXT)
    placement = place(spec, 2, whole_layers=whole, tensor_shares=shares)
    stages = [Stage.of(path, placement, rank, CPU, kv_type=kv_type, exact=exact) for rank in range(2)]
    before = [stage.kv.arena.clone() for stage in stages]
    tokens = [[5, 300, 77], [6, 8, 319]][:steps]

    def both(run: Callable[[Sequence[Stage], Sequence[int], Sequence[int]], torch.Tensor]) -> list[torch.Tensor]:
        for stage, arena in zip(stages, before, strict=True):
            stage.kv.arena.copy_(arena)
        return [run(stages, line, [p + index for p in POSITIONS]) for index, line in enumerate(tokens)]

    found = both(stepped)
    written, caches = [stage.kv.arena.clone() for stage in stages], [cached(stage) for stage in stages]
    wanted = both(passed)
    # There int8 is of attention's results in f16.
    limit = 1e-3 if exact else most  # f16 there, f32 in exact steps
    yield f"{name}: logits", relative_error(torch.stack(found), torch.stack(wanted)), limit
    for stage, cache, arena, old in zip(stages, caches, written, before, strict=True):
        yield f"{name}: cache of {stage.rank}", relative_error(cache, cached(stage)), 5e-3
        changed = (arena != old).any(dim=1).sum()
        # Each bundle's block of each request and nothing else: 3 requests, 2 parts (1 where the layer is whole).
        parts = sum(bool(part.query_heads) for part in stage.decoder.weights.layers[stage.rank].parts)
        yield f"{name}: blocks written", float(changed != 3 * parts), 0.5
    if steps < 2:
        return
    alone = stepped(stages, tokens[0][:1], POSITIONS[:1])
    # Another batch size: another product, whose int8 may have scales of other widths.
    yield f"{name}: a request alone", relative_error(alone, found[0][:1]), 1e-5 if exact else 3e-2
    case = WorkingCase(Holding.PLANES, KvFormat(kv_type, kv_type), ((Layout.LAYER, Layout.LAYER),), CONTEXT, CONTEXT)
    case = replace(case, exact_activations=exact)
    step_buffers.LAUNCH_BYTES = 0
    for stage in stages:
        planned = step_buffers.layer_step_bytes(spec, placement, stage.rank, case)
        yield f"{name}: bytes planned of {stage.rank}", abs(planned / bytes_of(stage.steps._bucket(1)) - 1), 0.02
    others = stepped(stages, [5, 1, 2], [70, 100, 64])
    yield f"{name}: a request among others", float(not torch.equal(others[0], found[0][0])), 0.5


def check_chunk_attention(folder: Path, kv_type: KvType, window: int) -> Found:
    """Rows of a chunk over what is cached, of parts whose groups are cut: against every head alone, in f32."""
    path = build_model(folder / f"chunk-{kv_type}-{window}.gguf", "qwen3", quant="Q8_0", seed=8, **CUT)
    spec = build_spec(resolve_model(str(path)), CONTEXT)
    spec = replace(spec, layers=tuple(replace(layer, sliding_window=window) for layer in spec.layers))
    stage = Stage.of(path, place(spec, 2, tensor_shares=(9.0, 7.0)), 0, CPU, kv_type=kv_type)
    segment, layer = Segment(stage.states[0], 0, 20, 60), stage.spec.layers[0]
    stage.decoder._spec = spec
    for part in stage.decoder.weights.layers[0].parts:
        query = torch.randn(20, part.query_heads, layer.key_width).to(HALF)
        found = stage.decoder.attend_all(query, [part], 0, [segment], torch.full_like(query, float("nan")))
        bundle = 0, part.part
        keys, values = (rows.float() for rows in stage.kv.read(bundle, 0, stage.states[0].slots[bundle], 0, 80))
        wanted = torch.empty(query.shape)
        for row, head in product(range(20), range(part.query_heads)):
            first, kv = max(0, 61 + row - window) if window else 0, part.kv_head_of_query[head]
            scores = keys[kv, first : 61 + row] @ query[row, head].float() * spec.attention_scale
            wanted[row, head] = torch.softmax(scores, 0) @ values[kv, first : 61 + row]
        yield f"chunk's attention, {kv_type}, window {window}", relative_error(found, wanted), 2e-3


def check_choice(folder: Path) -> Found:
    """Greedy steps of one rank, chosen inside, in two runs of the results' lines: what each step's logits say."""
    path = build_model(folder / "one.gguf", quant="Q8_0", seed=4, **SHAPE)
    spec = build_spec(resolve_model(str(path)), CONTEXT)
    step_parts.MOST_STEPS = 2
    stage = Stage.of(path, place(spec, 1), 0, CPU)
    before = stage.kv.arena.clone()
    result = stage.steps.run(stage.states, POSITIONS, 3)
    stage.kv.arena.copy_(before)
    tokens, wrong, far = [state.last_token for state in stage.states], 0, 0.0
    for step, (ids, logprobs) in enumerate(zip(result.ids, result.logprobs, strict=True)):
        rows = torch.log_softmax(stage.steps.logits(stage.states, tokens, [p + step for p in POSITIONS]), -1)
        wrong += sum(int(row.argmax()) != token for row, token in zip(rows, ids, strict=True))
        far = worst(far, relative_error(torch.tensor(logprobs), rows.amax(-1)))
        tokens = ids
    yield "choice", float(wrong or len(result.ids) != 3), 0.5
    yield "choice: logprobs", far, 1e-5


def checks(folder: Path) -> Iterator[Found]:
    yield check_stages(folder, "llama", 2)
    yield check_stages(folder, "gemma3", 1, frozenset({0}))
    yield check_stages(folder, "qwen3", 2, frozenset(), KvType.Q8_0, (9.0, 7.0), CUT)
    yield check_stages(folder, "qwen3", 1, shape=BLOCKS, most=3e-2)
    yield check_stages(folder, "llama", 2, exact=True)
    yield check_stages(folder, "qwen3", 1, shape=BLOCKS, exact=True)
    yield check_chunk_attention(folder, KvType.Q8_0, 0)
    yield check_chunk_attention(folder, KvType.F16, 30)
    yield check_choice(folder)


if __name__ == "__main__":
    sys.exit(run_checks(checks))
