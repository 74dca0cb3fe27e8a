"""Strangers' words and values in messages: harmless and short."""

import numpy as np
import pytest

from gearshift.proto.shown import LONGEST_MESSAGE, SHOWN_CHARACTERS, printable, shortened, shown, told


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("a", "'a'"),
        ("\x1b[31m", r"'\x1b[31m'"),
        ([1, 2], "[1, 2]"),
        (np.zeros((2, 2), int), "array([[0, 0], [0, 0]])"),
        (None, "None"),
    ],
)
def test_a_value_is_shown_on_one_line(value: object, said: str) -> None:
    assert shown(value) == said


def test_a_number_that_python_does_not_write_is_shown_by_its_kind() -> None:
    assert shown(1 << 40_000) == "int of too many digits to show"
    assert shown([1 << 40_000]) == "list of too many digits to show"


@pytest.mark.parametrize(
    "value", ["a" * 1_000_000, list(range(100_000)), b"\0" * 1_000, 10**4000, {"a" * 1000: 1}], ids=lambda _: ""
)
def test_no_value_is_shown_without_end(value: object) -> None:
    assert len(shown(value)) <= SHOWN_CHARACTERS + 2
    assert "..." in shown(value)


def test_what_a_terminal_obeys_becomes_a_question_mark() -> None:
    assert printable("a\x1b[31m\x07\x9b\u202e\n\ud800é日") == "a?[31m????" + "?é日"
    assert told("a\x1b\nb\r\tc") == "a?\nb??c"


def test_of_a_long_message_its_start_and_its_end_are_told() -> None:
    message = told("what: " + "x" * 1_000_000 + "; do this")
    assert message.startswith("what: xxx")
    assert message.endswith("xxx; do this")
    assert "(1000015 characters)" in message
    assert len(message) < LONGEST_MESSAGE + 50
    assert told("a" * LONGEST_MESSAGE) == "a" * LONGEST_MESSAGE


def test_a_text_that_is_short_enough_stays() -> None:
    assert shortened("a" * 80) == "a" * 80
    assert shortened("a" * 81) == "a" * 77 + "..."
