"""What figures of `gpu.py` are held against: the peer's, the bars that were set, and the floors of the machine itself.

All of two H200 (one, where `workers` is 1). The peer is llama.cpp, its better build and micro-batch of each cell,
synthetic files of the same shapes, the same machine. Floors are what the hardware's own limits leave: bf16 products and
attention as measured there, each byte of weights and cache read once at the memory's speed, one-shot sums in between.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from gearshift.proto.ids import Layout
from gearshift.proto.kv import KvFormat, row_bytes
from gearshift.proto.model import ModelSpec, TensorInfo

PRODUCT_FLOPS = 765e12  # a GPU, bf16
ATTENTION_FLOPS = 340e12
READ_BYTES_A_SECOND = 4.3e12
SUM_SECONDS = {"nvlink": 6.6e-6, "no peer": 7.7e-6}  # of 16 KB, in a graph

L, T = Layout.LAYER, Layout.TENSOR
EIGHT, THIRTY_TWO = (32, 4096), (64, 5120)  # layers and hidden width of a model: which it is
Key = tuple[tuple[int, int], int, str]  # model, workers, links
PEERS: Mapping[Key, Mapping[str, Mapping[Layout, float]]] = {
    (EIGHT, 2, "nvlink"): {
        "prompt 2048": {L: 14840, T: 15786}, "prompt 8192": {L: 16478, T: 16627}, "prompt 32768": {L: 14644},
        "decode": {L: 264, T: 300}, "decode at 16384": {L: 216, T: 245}, "batch of 16": {L: 1761, T: 2028},
    },
    (EIGHT, 2, "no peer"): {
        "prompt 2048": {T: 10616}, "prompt 8192": {L: 16478, T: 12538}, "decode": {T: 262},
    },
    (EIGHT, 1, "nvlink"): {"prompt 2048": {L: 9630}, "prompt 8192": {L: 9402}, "decode": {L: 277}},
    (THIRTY_TWO, 2, "nvlink"): {"prompt 8192": {L: 4076, T: 3676}, "decode": {L: 73.8, T: 100.9}},
    (THIRTY_TWO, 2, "no peer"): {"prompt 8192": {T: 3162}, "decode": {T: 92.0}},
}  # fmt: skip
BARS: Mapping[Key, Mapping[str, float]] = {
    (EIGHT, 2, "nvlink"): {
        "prompt 2048": 42000, "prompt 8192": 50000, "prompt 32768": 36000, "decode": 600, "decode at 16384": 480,
        "batch of 16": 5000, "shift after 8192, exposed ms": 2,
    },
    (EIGHT, 2, "no peer"): {"prompt 8192, layer": 46000, "decode": 560, "shift after 8192, exposed ms": 5},
    (EIGHT, 2, "sockets"): {"prompt 8192": 42000, "shift after 8192, exposed ms": 10},
    (THIRTY_TWO, 2, "nvlink"): {"prompt 8192": 12000, "decode": 185},
}  # fmt: skip
ANSWERS = ("decode", "batch")  # how figures begin that are of answers


def links_here(environment: Mapping[str, str] = os.environ) -> str:
    """`nvlink`, `no peer` or `sockets`: as the variables have it that switch ways off."""
    if environment.get("NCCL_SHM_DISABLE") == "1":
        return "sockets"
    off = environment.get("NCCL_P2P_DISABLE") == "1" or environment.get("GEARSHIFT_NO_PEER", "0") not in ("0", "")
    return "no peer" if off else "nvlink"


@dataclass(frozen=True, slots=True)
class Floors:
    """Tokens a second that the machine's limits allow a model on `workers` GPUs."""

    spec: ModelSpec
    workers: int
    kv: KvFormat
    sum_seconds: float

    def prompt(self, tokens: int) -> float:
        """All GPUs at their products' and attention's speed, nothing else."""
        weights = sum(one.shape[0] * one.shape[1] for one in self._matrices())
        pairs = sum(
            2 * layer.query_heads * (layer.key_width + layer.value_width) * tokens / 2 for layer in self.spec.layers
        )
        return self.workers / (2 * weights / PRODUCT_FLOPS + pairs / ATTENTION_FLOPS)

    def decode(self, depth: int, layout: Layout, batch: int = 1) -> float:
        """In all. Under tensor parallelism each reads its share, and sums twice a layer; by layers all take turns."""
        weights = sum(one.byte_count for one in self._matrices()) + self.spec.tensors[self.spec.head_tensor].byte_count
        cache = sum(
            layer.kv_heads * (row_bytes(self.kv.key, layer.key_width) + row_bytes(self.kv.value, layer.value_width))
            for layer in self.spec.layers
        )
        read = (weights + batch * depth * cache) / READ_BYTES_A_SECOND
        if layout is Layout.LAYER or self.workers == 1:
            return batch / read
        return batch / (read / self.workers + 2 * len(self.spec.layers) * self.sum_seconds)

    def _matrices(self) -> list[TensorInfo]:
        return [one for name, one in self.spec.tensors.items() if name.startswith("blk.") and len(one.shape) == 2]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a figure of this model on these workers is held against."""

    floors: Floors
    links: str

    def of(self, figure: str, layout: Layout | None, value: float) -> dict[str, object]:
        """`figure`: its name before the layout, as in PEERS. `value`: tokens a second, or ms. For a line of JSON."""
        spec = self.floors.spec
        key = ((len(spec.layers), spec.hidden), self.floors.workers, self.links)
        peer = PEERS.get(key, {}).get(figure, {})
        found: dict[str, object] = {"peer": {str(one): rate for one, rate in peer.items()}} if peer else {}
        if peer:
            found["times_peers_best"] = round(value / max(peer.values()), 2)
        floor = self._floor(figure, layout)
        if floor is not None:
            found |= {"floor": round(floor), "of_floor": round(value / floor, 3)}
        bars = BARS.get(key, {})
        bar = bars.get(f"{figure}, {layout}", bars.get(figure))
        if bar is not None:
            reached = value <= bar if figure.endswith("ms") else value >= bar
            found |= {"bar": bar, "of_bar": round(value / bar, 3), "reached": reached}
        return found

    def _floor(self, figure: str, layout: Layout | None) -> float | None:
        words = figure.split()
        if words[0] == "prompt":
            return self.floors.prompt(int(words[1]))
        if words[0] not in ANSWERS or layout is None:
            return None
        if words[0] == "batch":
            return self.floors.decode(2048 + 64, layout, int(words[-1]))
        return self.floors.decode(int(words[-1]) if words[-1].isdigit() else 164, layout)
