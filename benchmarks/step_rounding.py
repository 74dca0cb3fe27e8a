"""What rounding alone does to captured decode steps on a card, against the passes kernel by kernel: played through on a
CPU, rounding by rounding, over the model and the made-up caches of tests/parity/test_layer_steps_on_cuda.py.

python benchmarks/step_rounding.py [--seeds N] [--shape small] [--quant Q4_K]

Both multiply by activations in int8, by one scale a 32 columns for one request and a 256 for several. Passes round
them to bf16 first, and keys, values, scores and weights of attention too; steps have keys and values of q8_0 in f16.
`exact` rounds what is cached alone. A case is 40 greedy steps of one batch; of each: divergence, and by how much the
first's choice was below the second's best, in the mean and at most: least, median and greatest of all cases. `cut off`,
`lost key`: steps with such a fault.
Then one line of JSON.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gearshift.benchmarks.machine import machine_facts
from gearshift.benchmarks.synthetic_models import SHAPES, Shape, write_model
from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.model.spec import build_spec
from gearshift.proto.ranges import ColumnRange
from gearshift.worker.kernels.kv_rows import BLOCK_VALUES, dequantize_q8_0, quantize_q8_0
from gearshift.worker.weights.mapped_file import MappedModel

CONTEXT, STEPS = 128, 40
POSITIONS = (70, 40, 0)
PAIRS = (
    ("steps", "passes"), ("steps", "exact"), ("passes", "exact"), ("cut off", "passes"), ("lost key", "passes"),
)  # fmt: skip
ROPE_BASE, EPSILON = 500_000.0, 1e-5

Weights = dict[str, Tensor]
Store = Callable[[Tensor], Tensor]  # f32 rows as they come back from the cache, before attention rounds them


def as_bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def as_f16(x: Tensor) -> Tensor:
    return x.half().float()


def as_q8_0(x: Tensor) -> Tensor:
    return dequantize_q8_0(quantize_q8_0(x), torch.float32)


def cut_off(x: Tensor) -> Tensor:
    """As q8_0, but for codes that are not rounded to nearest."""
    blocks = x.unflatten(-1, (-1, BLOCK_VALUES))
    scale = blocks.abs().amax(-1, keepdim=True) / 127.0
    return ((blocks / scale).trunc() * as_f16(scale)).flatten(-2)


def as_int8(x: Tensor, together: int) -> Tensor:
    """As `quant_triton.store_quantized`: half away from zero."""
    spans = x.unflatten(-1, (-1, together))
    scale = (spans.abs().amax(-1, keepdim=True) / 127.0).clamp_min(1e-30)
    codes = spans / scale
    return (torch.where(codes >= 0, codes + 0.5, codes - 0.5).trunc() * scale).flatten(-2)


def exact_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """[R, H, G, W] over [R, L, H, W]; `mask` [R, L]: what is seen."""
    scores = torch.einsum("rhgw,rlhw->rhgl", query, keys) * query.shape[-1] ** -0.5
    return torch.einsum("rhgl,rlhw->rhgw", torch.softmax(masked(scores, mask), -1), values)


def passes_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """As `attention.attend` for one row in bf16, whose products come out in bf16."""
    query, keys, values = as_bf16(query), as_bf16(keys), as_bf16(values)
    scores = as_bf16(torch.einsum("rhgw,rlhw->rhgl", query, keys)) * query.shape[-1] ** -0.5
    return as_bf16(torch.einsum("rhgl,rlhw->rhgw", as_bf16(torch.softmax(masked(scores, mask), -1)), values))


def steps_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, half: Store) -> Tensor:
    """As `attention_triton.attend_split`, whose sums are f32. `half`: f16 over q8_0, else bf16."""
    scores = torch.einsum("rhgw,rlhw->rhgl", as_bf16(query), half(keys)) * query.shape[-1] ** -0.5
    scores = masked(scores, mask)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return torch.einsum("rhgl,rlhw->rhgw", half(weights), half(values)) / weights.sum(-1, keepdim=True)


def masked(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(~mask[:, None, None], float("-inf"))


@dataclass(frozen=True, slots=True)
class Way:
    """How activations, what is cached and attention are rounded. `loses_key`: the position before is not seen."""

    activations: Store
    store: Store
    attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    loses_key: bool = False


class Played:
    """A model's steps one way, over caches [layers, R, CONTEXT, H, W] of its own."""

    def __init__(self, weights: Weights, shape: Shape, way: Way, keys: Tensor, values: Tensor) -> None:
        self._weights, self._shape, self._way = weights, shape, way
        self._keys, self._values = way.store(keys), way.store(values)

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits [R, vocab]."""
        way, shape, row = self._way, self._shape, torch.arange(len(tokens))
        seen = torch.arange(CONTEXT)[None, :]
        mask = seen <= positions[:, None]
        if way.loses_key:
            mask &= seen != positions[:, None] - 1
        hidden = self._weights["token_embd"][tokens]
        for layer in range(shape.layers):
            at = f"blk.{layer}."
            normed = self._normed(hidden, at + "attn_norm")
            query, key, value = (
                self._product(normed, f"{at}attn_{name}").unflatten(1, (-1, shape.head_width)) for name in "qkv"
            )
            self._keys[layer][row, positions] = way.store(rotated(key, positions))
            self._values[layer][row, positions] = way.store(value)
            grouped = rotated(query, positions).unflatten(1, (shape.kv_heads, -1))
            attended = way.attend(grouped, self._keys[layer], self._values[layer], mask)
            hidden = hidden + self._product(way.activations(attended.flatten(1)), at + "attn_output")
            normed = self._normed(hidden, at + "ffn_norm")
            gate, up = self._product(normed, at + "ffn_gate"), self._product(normed, at + "ffn_up")
            inner = way.activations(torch.nn.functional.silu(gate) * up)
            hidden = hidden + self._product(inner, at + "ffn_down")
        return self._product(self._normed(hidden, "output_norm"), "output")

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return self._way.activations(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * self._weights[name])

    def _product(self, x: Tensor, name: str) -> Tensor:
        return x @ self._weights[name].T


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """[R, heads, W], neighbours in pairs."""
    width = x.shape[-1]
    angles = positions.float()[:, None] * ROPE_BASE ** (-torch.arange(0, width, 2) / width)
    cosine, sine = angles.cos()[:, None], angles.sin()[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cosine - odd * sine, odd * cosine + even * sine), -1).flatten(-2)


def ways(batch: int, kv_type: str) -> dict[str, Way]:
    store, half = (as_q8_0, as_f16) if kv_type == "q8_0" else (as_bf16, as_bf16)
    together = 32 if batch == 1 else 256

    def int8(x: Tensor) -> Tensor:
        return as_int8(x, together)

    def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return steps_attention(query, keys, values, mask, half)

    found = {
        "steps": Way(int8, store, attend),
        "passes": Way(lambda x: int8(as_bf16(x)), store, passes_attention),
        "exact": Way(lambda x: x, store, exact_attention),
        "lost key": Way(int8, store, attend, loses_key=True),
    }
    return found | ({"cut off": Way(int8, cut_off, attend)} if kv_type == "q8_0" else {})


def played(weights: Weights, shape: Shape, batch: int, kv_type: str, seeds: int) -> dict[str, Tensor]:
    """Logits [STEPS, seeds, batch, vocab] of each way, fed with the greedy tokens of `steps`."""
    generator = torch.Generator().manual_seed(seeds)
    cached = shape.layers, seeds * batch, CONTEXT, shape.kv_heads, shape.head_width
    keys, values = torch.randn(cached, generator=generator), torch.randn(cached, generator=generator)
    models = {name: Played(weights, shape, way, keys, values) for name, way in ways(batch, kv_type).items()}
    tokens = torch.randint(3, shape.vocab, (seeds * batch,), generator=generator)
    positions = torch.tensor(POSITIONS[:batch] * seeds)
    rows: dict[str, list[Tensor]] = {name: [] for name in models}
    for step in range(STEPS):
        for name, model in models.items():
            rows[name].append(model.step(tokens, positions + step))
        tokens = rows["steps"][-1].argmax(-1)
    return {name: torch.stack(each).unflatten(1, (seeds, batch)) for name, each in rows.items()}


def compared(found: Tensor, others: Tensor) -> dict[str, Tensor]:
    """Of each case: the divergence of `found` from `others`, and how far what it took was below their best."""
    wanted, chosen = torch.log_softmax(others.double(), -1), torch.log_softmax(found.double(), -1)
    divergence = (wanted.exp() * (wanted - chosen)).sum(-1)
    gaps = wanted.amax(-1) - wanted.gather(-1, found.argmax(-1, keepdim=True))[..., 0]
    return {"KL": divergence.mean((0, 2)), "gap": gaps.mean((0, 2)), "greatest gap": gaps.amax((0, 2))}


def spread(cases: Tensor) -> list[float]:
    """Least, median, greatest."""
    return [round(float(one), 5) for one in (cases.min(), cases.median(), cases.max())]


def read_weights(path: Path) -> Weights:
    spec = build_spec(resolve_model(str(path)), CONTEXT)
    files, found = MappedModel(spec), {}
    for name, tensor in spec.tensors.items():
        rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
        pieces = files.rows(tensor, ColumnRange(0, rows), ColumnRange(0, tensor.shape[-1]))
        whole = torch.cat([torch.tensor(values) for _, values in pieces])
        found[name.removesuffix(".weight")] = whole if len(tensor.shape) > 1 else whole[0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--shape", choices=[name for name, one in SHAPES.items() if one.architecture == "llama"],
                        default="small")  # fmt: skip
    parser.add_argument("--quant", default="Q4_K")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        path = Path(folder) / "model.gguf"
        write_model(str(path), options.shape, options.quant)
        weights, cells = read_weights(path), []
        for batch, kv_type in ((1, "q8_0"), (3, "q8_0"), (1, "bf16"), (3, "bf16")):
            rows = played(weights, SHAPES[options.shape], batch, kv_type, options.seeds)
            for name, other in PAIRS:
                if name not in rows:
                    continue
                facts = {what: spread(cases) for what, cases in compared(rows[name], rows[other]).items()}
                told = "  ".join(f"{what} {' '.join(map('{:.4f}'.format, spans))}" for what, spans in facts.items())
                print(f"{kv_type:5} batch {batch}  {name + ' / ' + other:18}  {told}", flush=True)
                cells.append({"kv_type": kv_type, "batch": batch, "ways": [name, other], **facts})
    print(json.dumps({"benchmark": "step_rounding", "seeds": options.seeds, "cells": cells, **machine_facts(["cpu"])}))


if __name__ == "__main__":
    main()
