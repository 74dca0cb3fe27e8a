"""How many shapes the library's attention is compiled for, whatever prompts come."""

from gearshift.worker.kernels.attention_shapes import compiled_past, compiled_rows

LONGEST = 1 << 17


def test_all_pasts_of_a_long_context_are_few_lengths() -> None:
    lengths = {compiled_past(cached) for cached in range(512, LONGEST + 1)}
    assert len(lengths) <= 31 + 4 * 32 + 1
    assert min(lengths) == 512
    assert max(lengths) == LONGEST


def test_what_the_grid_leaves_is_less_than_a_thirty_second_or_a_step() -> None:
    for cached in range(512, LONGEST + 1, 7):
        assert 0 <= cached - compiled_past(cached) < max(256, cached / 32)


def test_a_past_on_the_grid_stays_whole() -> None:
    on_it = [512, 768, 2816, 5632, 8192, 8448, 9216, 32768]
    assert [compiled_past(cached) for cached in on_it] == on_it
    assert compiled_past(255) == 0


def test_chunks_of_up_to_2048_rows_are_ten_sizes() -> None:
    sizes = {compiled_rows(rows) for rows in range(1, 2049)}
    assert len(sizes) == 10
    assert all(compiled_rows(rows) >= rows for rows in range(1, 2049))
