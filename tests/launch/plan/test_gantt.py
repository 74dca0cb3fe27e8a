"""The text chart of who works when."""

from gearshift.coordinator.policy.outlook import Bar
from gearshift.launch.plan.gantt import gantt

PIPELINE = (
    Bar(0, 0, 1, 0, 0),
    Bar(0, 1, 2, 1, 1),
    Bar(1, 1, 2, 0, 1),
    Bar(1, 2, 3, 1, 2),
    Bar(0, 4, 8),
    Bar(1, 4, 8),
)


def test_a_rank_is_a_line_of_chunks_waiting_and_answer() -> None:
    lines = gantt(PIPELINE, 2, 7 + 32, waiting=(3, 4))
    assert lines == (
        "       0 s" + " " * 26 + "8 s",
        "tick   0   1   2",
        "rank 0 00001111....::::================",
        "rank 1 ....00001111::::================",
    )


def test_steps_by_turns_have_a_sign_of_their_own() -> None:
    assert gantt((Bar(0, 0, 1, by_turns=True),), 1, 27)[-1] == "rank 0 " + "-" * 20


def test_no_line_is_wider_than_asked_for() -> None:
    many = [
        Bar(stage, chunk + stage, chunk + stage + 1, chunk, chunk + stage)
        for chunk in range(300)
        for stage in (0, 1)
    ]
    for width in (40, 80, 113):
        lines = gantt(many, 2, width)
        assert max(map(len, lines)) <= width
        assert len(lines[-1]) == width


def test_nothing_to_do_gives_no_chart() -> None:
    assert gantt((), 2, 80) == ()
