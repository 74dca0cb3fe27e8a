"""Where a bundle's bytes lie. Bundle (s, r) holds one block of 64 tokens:

    [layer of stage s][KV head of rank r in that layer][64 rows of K | 64 rows of V]

contiguous, without padding. In the layer layout rank s holds (s, r) for all r; in the tensor layout rank r holds
(s, r) for all s. Head counts and widths may differ between layers.
"""

from dataclasses import dataclass

from ..ids import Layout
from ..kv import BLOCK_TOKENS, KvFormat, row_bytes
from ..model import ModelSpec
from .plan import Placement

SLOT_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class LayerRegion:
    """One layer's run of a bundle: `heads` times [64 rows of K | 64 rows of V], from `first_byte` on."""

    layer: int
    first_byte: int
    heads: int
    key_row_bytes: int
    value_row_bytes: int

    @property
    def head_bytes(self) -> int:
        """Bytes of one head's K and V rows."""
        return BLOCK_TOKENS * (self.key_row_bytes + self.value_row_bytes)

    @property
    def end_byte(self) -> int:
        return self.first_byte + self.heads * self.head_bytes


def regions(
    spec: ModelSpec, placement: Placement, stage: int, part: int, kv_format: KvFormat
) -> tuple[LayerRegion, ...]:
    """The layers of bundle (stage, part), in order. Raises `ValueError` where a row is not whole KV blocks."""
    found = []
    first_byte = 0
    for layer in placement.stages[stage]:
        facts = spec.layers[layer]
        region = LayerRegion(
            layer=layer,
            first_byte=first_byte,
            heads=len(placement.layers[layer].parts[part].kv),
            key_row_bytes=row_bytes(kv_format.key, facts.key_width),
            value_row_bytes=row_bytes(kv_format.value, facts.value_width),
        )
        found.append(region)
        first_byte = region.end_byte
    return tuple(found)


def bundle_bytes(spec: ModelSpec, placement: Placement, stage: int, part: int, kv_format: KvFormat) -> int:
    """Bytes of one bundle (stage, part); 0 where the stage or its part is empty."""
    found = regions(spec, placement, stage, part, kv_format)
    return found[-1].end_byte if found else 0


def head_offset(
    spec: ModelSpec,
    placement: Placement,
    stage: int,
    part: int,
    layer: int,
    head_index_in_part: int,
    kv_format: KvFormat,
) -> int:
    """Byte offset of a head's K rows in bundle (stage, part); its V rows follow the 64 rows of K.

    `head_index_in_part` counts from the part's first KV head in that layer. Raises `ValueError` where the stage does
    not own the layer or the part has no such head.
    """
    for region in regions(spec, placement, stage, part, kv_format):
        if region.layer == layer and 0 <= head_index_in_part < region.heads:
            return region.first_byte + head_index_in_part * region.head_bytes
    raise ValueError(f"bundle ({stage}, {part}) has no head {head_index_in_part} of layer {layer}")


def held_bundles(placement: Placement, rank: int, layout: Layout) -> tuple[tuple[int, int], ...]:
    """The (stage, part) pairs whose bundles a rank holds for a request in that layout."""
    match layout:
        case Layout.LAYER:
            return tuple((rank, part) for part in range(placement.ranks))
        case Layout.TENSOR:
            return tuple((stage, rank) for stage in range(placement.ranks))


def slot_bytes(spec: ModelSpec, placement: Placement, rank: int, kv_format: KvFormat) -> int:
    """Bytes of one slot on a rank: its largest bundle of either layout, rounded up to 64 bytes."""
    held = {pair for layout in Layout for pair in held_bundles(placement, rank, layout)}
    largest = max(bundle_bytes(spec, placement, stage, part, kv_format) for stage, part in held)
    return -(-largest // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
