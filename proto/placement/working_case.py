"""How a model is to be run, as far as memory beside weights and KV depends on it. Pure."""

from typing import TypeAlias

from msgspec import Struct

from ..ids import Layout
from ..kv import KvFormat
from .memory import Holding

Journey: TypeAlias = tuple[Layout, Layout]  # (prefill, decode)


class WorkingCase(Struct, frozen=True):
    """How a model is to be run."""

    holding: Holding
    kv_format: KvFormat
    journeys: tuple[Journey, ...]
    context_tokens: int
    max_chunk_tokens: int
    batch: int = 1  # requests in one decode step
    wide_sums: bool = False  # on a GPU in f16: sums of products are f32 (worker/kernels/half.py)
    exact_activations: bool = False  # on a GPU: those of decode steps are f32, not int8

    @property
    def sum_bytes(self) -> int:
        """Of a chunk's sums of products on a GPU."""
        return 4 if self.wide_sums else 2

    @property
    def on_gpu(self) -> bool:
        return self.holding is Holding.PLANES

    @property
    def chunk_rows(self) -> int:
        return min(self.max_chunk_tokens, self.context_tokens)

    @property
    def element_bytes(self) -> int:
        """Of activations in the compute type."""
        return 4 if self.holding is Holding.F32 else 2
