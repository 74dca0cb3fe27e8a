"""How many shapes the library's attention is compiled for, whatever prompts come."""

import pytest

from gearshift.proto.past_runs import past_runs
from gearshift.worker.kernels.attention_shapes import compiled_rows, usual_shapes


def test_chunks_of_up_to_2048_rows_are_ten_sizes() -> None:
    sizes = {compiled_rows(rows) for rows in range(1, 2049)}
    assert len(sizes) == 10
    assert all(compiled_rows(rows) >= rows for rows in range(1, 2049))


@pytest.mark.parametrize("context", [2048, 5000])
def test_what_is_prepared_is_what_chunks_ask_for(context: int) -> None:
    prepared = {shape for rows in range(1, 1025) for shape in usual_shapes(compiled_rows(rows), context)}
    asked = set[tuple[int, int]]()
    for rows in (128, 200, 512, 1024):
        for cached in range(0, context - rows, 64):
            runs = past_runs(cached)
            asked |= {(compiled_rows(rows), end - first) for first, end in runs}
            asked.add((compiled_rows(rows + cached - (runs[-1][1] if runs else 0)), 0))
    assert asked <= prepared
    assert len(prepared) <= 5 * (1 + 4) + 2  # squares of 1,024 rows and what no run has
