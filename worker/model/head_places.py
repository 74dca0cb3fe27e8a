"""Where the heads of parts lie that run together: all query heads side by side, each KV head there once.

A cut may fall inside a KV head's group: two parts have that head then, and both keep its keys and values. Who runs
both parts computes them once and reads them once, for the queries of both. Pure.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from ..weights.layer import PartWeights


@dataclass(frozen=True, slots=True)
class HeadPlace:
    """One part's place among the heads of those that run together."""

    index: int  # of the part among all that were given
    part: int
    query: slice  # its query heads, of all query heads
    kv: slice  # its KV heads, of all KV heads
    is_first_kv_shared: bool  # with the part before it
    readers: slice  # of all query heads, those that read KV heads which no part before this one has
    kv_head_of_reader: tuple[int, ...]  # index within those KV heads, one a reader


def head_places(parts: Sequence[PartWeights]) -> tuple[tuple[HeadPlace, ...], ...]:
    """Which of some parts run together: those that share KV heads. Parts without heads have no place.

    The parts are in order, with none between them left out.
    """
    together: list[list[int]] = []
    kv_end = -1
    for index, part in enumerate(parts):
        if not part.query_heads:
            continue
        if part.first_kv_head < kv_end:
            together[-1].append(index)
        else:
            together.append([index])
        kv_end = part.first_kv_head + part.kv_heads
    return tuple(_places(parts, indices) for indices in together)


def _places(parts: Sequence[PartWeights], indices: Sequence[int]) -> tuple[HeadPlace, ...]:
    base = parts[indices[0]].first_kv_head
    kv_head_of_query = [
        parts[index].first_kv_head - base + head for index in indices for head in parts[index].kv_head_of_query
    ]
    places = []
    query = kv = 0
    for index in indices:
        part = parts[index]
        first, kv_end = part.first_kv_head - base, part.first_kv_head - base + part.kv_heads
        readers = slice(bisect_left(kv_head_of_query, kv), bisect_left(kv_head_of_query, kv_end))
        places.append(
            HeadPlace(
                index=index,
                part=part.part,
                query=slice(query, query + part.query_heads),
                kv=slice(first, kv_end),
                is_first_kv_shared=first < kv,
                readers=readers,
                kv_head_of_reader=tuple(head - kv for head in kv_head_of_query[readers]),
            )
        )
        query, kv = query + part.query_heads, kv_end
    return tuple(places)
