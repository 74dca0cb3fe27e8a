"""Where the heads of parts that run together lie: all query heads side by side, each KV head there once.

A cut may fall inside a KV head's group: two parts have that head then, and both keep its keys and values. Who runs
both parts computes them once and reads them once, for the queries of both. Pure.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from ..weights.layer import PartWeights


@dataclass(frozen=True, slots=True)
class HeadPlace:
    """One part's place among the heads of all that run."""

    part: int
    query: slice  # its query heads, of all query heads
    kv: slice  # its KV heads, of all KV heads
    new_kv: slice  # those of `kv` that no part before it has
    own_new: slice  # the same of the part's own KV heads
    readers: slice  # of all query heads those that read these
    kv_head_of_reader: tuple[int, ...]  # index within `new_kv`, one a reader


def head_places(parts: Sequence[PartWeights]) -> tuple[HeadPlace, ...]:
    """Of parts in order, none between them left out; parts without heads have no place."""
    working = [part for part in parts if part.query_heads]
    if not working:
        return ()
    firsts = [part.first_kv_head - working[0].first_kv_head for part in working]
    kv_head_of_query = [
        first + head for part, first in zip(working, firsts, strict=True) for head in part.kv_head_of_query
    ]
    places = []
    query = kv = 0
    for part, first in zip(working, firsts, strict=True):
        kv_end = first + part.kv_heads
        readers = slice(bisect_left(kv_head_of_query, kv), bisect_left(kv_head_of_query, kv_end))
        places.append(
            HeadPlace(
                part=part.part,
                query=slice(query, query + part.query_heads),
                kv=slice(first, kv_end),
                new_kv=slice(kv, kv_end),
                own_new=slice(kv - first, part.kv_heads),
                readers=readers,
                kv_head_of_reader=tuple(head - kv for head in kv_head_of_query[readers]),
            )
        )
        query, kv = query + part.query_heads, kv_end
    return tuple(places)
