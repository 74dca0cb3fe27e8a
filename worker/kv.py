"""KV in bundles: one arena of equal slots a rank; a request's tables say which slot holds which bundle.

Bundle (s, r) is one block of 64 tokens: [layer of stage s][KV head of rank r][K rows | V rows]. Views into the arena
are made once; nothing is copied to change layout but the bundles that change rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..proto.ids import KvType, Rank
from ..proto.kv import BLOCK_TOKENS, KvFormat, block_count
from ..proto.model import ModelSpec
from ..proto.placement import bundles
from ..proto.placement.plan import Placement
from .kernels.kv_rows import dequantize_q8_0, quantize_q8_0
from .memory import MemoryLedger

Bundle = tuple[int, int]  # (stage, part)

_DTYPES = {KvType.F32: torch.float32, KvType.F16: torch.float16, KvType.BF16: torch.bfloat16, KvType.Q8_0: torch.uint8}


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Slots of one bundle, a block each; `first` is set where they follow one another, so that no index is needed."""

    index: Tensor  # int64 [blocks]
    first: int | None

    @classmethod
    def of(cls, slots: tuple[int, ...], device: torch.device) -> "SlotRun":
        consecutive = bool(slots) and slots == tuple(range(slots[0], slots[0] + len(slots)))
        index = torch.tensor(slots, dtype=torch.int64, device=device)
        return cls(index, slots[0] if consecutive else None)

    def blocks(self, slots_first: Tensor, count: int) -> Tensor:
        """The first `count` blocks of a tensor indexed by slot."""
        if self.first is not None:
            return slots_first[self.first : self.first + count]
        return slots_first[self.index[:count]]

    def whole_blocks(self, start: int, tokens: int) -> slice | None:
        """The slots of these positions, where they are whole blocks in slots that follow one another."""
        first, end = start // BLOCK_TOKENS, (start + tokens) // BLOCK_TOKENS
        if self.first is None or start % BLOCK_TOKENS or tokens % BLOCK_TOKENS or end > len(self.index):
            return None
        return slice(self.first + first, self.first + end)


@dataclass(frozen=True, slots=True)
class Region:
    """One layer's keys and values inside every slot: raw rows [slots, heads, 64, row elements]."""

    keys: Tensor
    values: Tensor


class KvStore:
    """This rank's arena and the views of each bundle's layers in it."""

    def __init__(
        self, spec: ModelSpec, placement: Placement, rank: Rank, kv_format: KvFormat, slots: int, dtype: torch.dtype,
        device: torch.device, ledger: MemoryLedger,
    ) -> None:
        self._format, self._dtype = kv_format, dtype
        slot_bytes = bundles.slot_bytes(spec, placement, rank, kv_format)
        self.arena = ledger.allocate("kv", (slots, slot_bytes), torch.uint8, device)
        held = {(stage, rank) for stage in range(placement.ranks)} | {(rank, part) for part in range(placement.ranks)}
        self.bundle_bytes: dict[Bundle, int] = {}
        self._layer_bytes: dict[tuple[Bundle, int], tuple[int, int]] = {}
        self._regions: dict[tuple[Bundle, int], Region] = {}
        for stage, part in held:
            self.bundle_bytes[stage, part] = bundles.bundle_bytes(spec, placement, stage, part, kv_format)
            for region in bundles.regions(spec, placement, stage, part, kv_format):
                self._layer_bytes[(stage, part), region.layer] = region.first_byte, region.end_byte
                self._regions[(stage, part), region.layer] = self._region(region)

    def _region(self, region: bundles.LayerRegion) -> Region:
        head_bytes = BLOCK_TOKENS * (region.key_row_bytes + region.value_row_bytes)
        values_first = region.first_byte + BLOCK_TOKENS * region.key_row_bytes
        return Region(
            keys=self._rows(self._format.key, region.first_byte, region.heads, head_bytes, region.key_row_bytes),
            values=self._rows(self._format.value, values_first, region.heads, head_bytes, region.value_row_bytes),
        )

    def _rows(self, kv_type: KvType, first_byte: int, heads: int, head_bytes: int, bytes_a_row: int) -> Tensor:
        dtype = _DTYPES[kv_type]
        # A rank without heads has slots of no bytes, which torch cannot view as another type.
        typed = self.arena.view(dtype) if self.arena.shape[1] else self.arena.new_empty(self.arena.shape, dtype=dtype)
        size = typed.element_size()
        slots, slot_elements = typed.shape
        shape = (slots, heads, BLOCK_TOKENS, bytes_a_row // size)
        strides = (slot_elements, head_bytes // size, bytes_a_row // size, 1)
        return typed.as_strided(shape, strides, first_byte // size)

    def region(self, bundle: Bundle, layer: int) -> Region:
        """Where a layer's rows of a bundle lie; for kernels that write and read them in place."""
        return self._regions[bundle, layer]

    def layer_bytes(self, bundle: Bundle, layers: Sequence[int]) -> tuple[int, int]:
        """(first, end) of the bytes in a bundle's slots that some of its layers have, which follow one another."""
        if not layers:
            return 0, 0
        return self._layer_bytes[bundle, layers[0]][0], self._layer_bytes[bundle, layers[-1]][1]

    def append(self, bundle: Bundle, layer: int, run: SlotRun, start: int, key_THK: Tensor, value_THV: Tensor) -> None:
        """Store rows of consecutive positions from `start` on."""
        region = self._regions[bundle, layer]
        if key_THK.shape[0] == 1:
            slot, row = run.index[start // BLOCK_TOKENS], start % BLOCK_TOKENS
            region.keys[slot, :, row] = self._encode(self._format.key, key_THK[0])
            region.values[slot, :, row] = self._encode(self._format.value, value_THV[0])
            return
        key_THK, value_THV = self._encode(self._format.key, key_THK), self._encode(self._format.value, value_THV)
        blocks = run.whole_blocks(start, key_THK.shape[0])
        if blocks is not None:  # no index: a third of the time on a CPU
            region.keys[blocks] = key_THK.unflatten(0, (-1, BLOCK_TOKENS)).transpose(1, 2)
            region.values[blocks] = value_THV.unflatten(0, (-1, BLOCK_TOKENS)).transpose(1, 2)
            return
        position = torch.arange(start, start + key_THK.shape[0], device=key_THK.device)
        slot_T, row_T = run.index[position // BLOCK_TOKENS], position % BLOCK_TOKENS
        region.keys[slot_T, :, row_T] = key_THK
        region.values[slot_T, :, row_T] = value_THV

    def read(
        self, bundle: Bundle, layer: int, run: SlotRun, first: int, length: int, first_head: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of positions [first, length) for attention, of heads from one on: ([H, n, K], [H, n, V])."""
        region = self._regions[bundle, layer]
        keys, values = region.keys, region.values
        if first_head:
            keys, values = keys[:, first_head:], values[:, first_head:]
        return self.gather(keys, run, first, length), self.gather(values, run, first, length)

    def gather(self, rows: Tensor, run: SlotRun, first: int, length: int) -> Tensor:
        """The same of a region's keys or values alone."""
        skipped = first // BLOCK_TOKENS
        blocks = run.blocks(rows, block_count(length))[skipped:].transpose(0, 1)
        if rows.dtype is _DTYPES[KvType.Q8_0]:
            blocks = dequantize_q8_0(blocks, self._dtype)
        # One pass that gathers, joins the blocks and converts.
        joined = torch.empty(blocks.shape, dtype=self._dtype, device=blocks.device).copy_(blocks).flatten(1, 2)
        return joined[:, first - skipped * BLOCK_TOKENS : length - skipped * BLOCK_TOKENS]

    def _encode(self, kv_type: KvType, rows: Tensor) -> Tensor:
        return quantize_q8_0(rows) if kv_type is KvType.Q8_0 else rows.to(_DTYPES[kv_type])

    def raw_rows(self, bundle: Bundle, layer: int, run: SlotRun, tokens: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(head index, key rows, value rows) as stored, the first `tokens` positions in order."""
        region = self._regions[bundle, layer]
        count = block_count(tokens)
        keys, values = run.blocks(region.keys, count), run.blocks(region.values, count)
        for head in range(keys.shape[1]):
            yield head, keys[:, head].flatten(0, 1)[:tokens], values[:, head].flatten(0, 1)[:tokens]
