"""How many shapes the library's attention is compiled for, whatever prompts come."""

import pytest

from gearshift.proto.past_runs import past_runs
from gearshift.worker.kernels.attention_shapes import compiled_rows, usual_shapes

LONGEST = 1 << 17


def test_all_pasts_of_a_long_context_are_runs_of_few_lengths() -> None:
    lengths = {end - first for cached in range(0, LONGEST + 1, 7) for first, end in past_runs(cached)}
    assert lengths <= {512 << doubled for doubled in range(9)}


def test_runs_follow_each_other_from_the_start_and_leave_less_than_the_least() -> None:
    for cached in range(0, LONGEST + 1, 11):
        ends = [0, *(end for _, end in past_runs(cached))]
        assert [first for first, _ in past_runs(cached)] == ends[:-1]
        assert 0 <= cached - ends[-1] < 512


def test_the_longest_run_comes_first() -> None:
    assert past_runs(7000) == [(0, 4096), (4096, 6144), (6144, 6656)]
    assert past_runs(8192) == [(0, 8192)]
    assert past_runs(511) == []


def test_chunks_of_up_to_2048_rows_are_ten_sizes() -> None:
    sizes = {compiled_rows(rows) for rows in range(1, 2049)}
    assert len(sizes) == 10
    assert all(compiled_rows(rows) >= rows for rows in range(1, 2049))


@pytest.mark.parametrize("context", [2048, 5000])
def test_what_is_prepared_is_what_chunks_ask_for(context: int) -> None:
    prepared = {shape for rows in range(1, 1025) for shape in usual_shapes(compiled_rows(rows), context)}
    asked = {
        (compiled_rows(rows), end - first)
        for rows in (128, 200, 512, 1024)
        for cached in range(0, context - rows, 64)
        for first, end in past_runs(cached)
    }
    assert asked <= prepared
    assert len(prepared) <= 5 * (1 + 4)
