"""The runs that a past is attended in."""

from gearshift.proto.past_runs import past_runs

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
