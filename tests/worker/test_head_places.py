"""Heads of parts that run together: each KV head once, whatever group a cut falls into."""

import pytest

from gearshift.proto.placement.cuts import place
from gearshift.tests.helpers.specs import layer_spec, model_spec
from gearshift.worker.kernels.attention import head_runs
from gearshift.worker.kernels.matrix import AbsentMatrix
from gearshift.worker.model.head_places import HeadPlace, head_places
from gearshift.worker.weights.layer import PartWeights

ABSENT = AbsentMatrix()


def parts_of(query_heads: int, kv_heads: int, shares: tuple[float, ...]) -> list[PartWeights]:
    spec = model_spec([layer_spec(query_heads, kv_heads)])
    group = query_heads // kv_heads
    return [
        PartWeights(
            number, len(cut.query), len(cut.kv), cut.kv.first,
            tuple(head // group - cut.kv.first for head in cut.query), len(cut.feed_forward), ABSENT, None,
            *(3 * [ABSENT]),
        )
        for number, cut in enumerate(place(spec, len(shares), tensor_shares=shares).layers[0].parts)
    ]  # fmt: skip


def new_kv(one: HeadPlace) -> slice:
    """KV heads that no part before this one has, of all KV heads."""
    return slice(one.kv.start + one.is_first_kv_shared, one.kv.stop)


def test_a_kv_head_that_two_parts_have_is_read_by_the_first_for_both() -> None:
    ((first, second),) = head_places(parts_of(9, 3, (0.8, 0.2)))
    assert (first.query, first.kv, new_kv(first)) == (slice(0, 7), slice(0, 3), slice(0, 3))
    assert (first.readers, first.kv_head_of_reader) == (slice(0, 9), (0, 0, 0, 1, 1, 1, 2, 2, 2))
    assert (second.query, second.kv, new_kv(second)) == (slice(7, 9), slice(2, 3), slice(3, 3))
    assert second.kv_head_of_reader == ()


def test_parts_of_whole_groups_run_apart() -> None:
    assert [[one.part for one in some] for some in head_places(parts_of(9, 3, (0.67, 0.0, 0.33)))] == [[0], [2]]


@pytest.mark.parametrize(
    "shares", [(0.5, 0.5), (0.83, 0.17), (0.4, 0.3, 0.2, 0.1), (0.1, 0.0, 0.9), (1.0, 0.0), (0.2,) * 5]
)
@pytest.mark.parametrize(("query_heads", "kv_heads"), [(9, 3), (8, 2), (12, 1), (16, 16), (10, 5)])
def test_every_head_of_a_layer_is_placed_once(query_heads: int, kv_heads: int, shares: tuple[float, ...]) -> None:
    parts, group = parts_of(query_heads, kv_heads, shares), query_heads // kv_heads
    together = head_places(parts)
    assert [one.part for some in together for one in some] == [part.part for part in parts if part.query_heads]
    read = []
    for some in together:
        first_query, first_kv = len(read), parts[some[0].index].first_kv_head
        assert first_query == first_kv * group
        for one in some:
            part = parts[one.index]
            assert one.kv == slice(part.first_kv_head - first_kv, part.first_kv_head - first_kv + part.kv_heads)
            assert one.query.stop - one.query.start == part.query_heads
            read += [first_kv + new_kv(one).start + head for head in one.kv_head_of_reader]
            assert len(read) == first_query + max(one.readers.stop, one.readers.start)
            assert len(head_runs(one.kv_head_of_reader)) <= 1  # whole groups
    assert read == [head // group for head in range(query_heads)]


def test_a_part_alone_has_all_of_its_heads() -> None:
    _, second = parts_of(9, 3, (0.8, 0.2))
    ((alone,),) = head_places([second])
    assert (alone.index, alone.part) == (0, 1)
    assert (alone.query, alone.kv, new_kv(alone)) == (slice(0, 2), slice(0, 1), slice(0, 1))
    assert (alone.readers, alone.kv_head_of_reader) == (slice(0, 2), (0, 0))


def test_a_part_that_begins_and_ends_inside_groups_is_three_runs() -> None:
    runs = head_runs((0, 1, 1, 1, 2, 2, 2, 3, 3))
    assert [(run.query, run.kv, run.group) for run in runs] == [
        (slice(0, 1), slice(0, 1), 1), (slice(1, 7), slice(1, 3), 3), (slice(7, 9), slice(3, 4), 2),
    ]  # fmt: skip
    assert runs[1].kv_head_of_query == (0, 0, 0, 1, 1, 1)
