"""How long an answer is expected to be where nobody has said."""

import pytest

from gearshift.coordinator.policy.answer_length import FIRST_GUESS_TOKENS, AnswerLengths


def after(*lengths: int) -> AnswerLengths:
    mean = AnswerLengths()
    for tokens in lengths:
        mean = mean.after(tokens, complete=True)
    return mean


def test_before_any_answer_there_is_a_guess() -> None:
    assert AnswerLengths().expected_tokens == FIRST_GUESS_TOKENS


def test_the_first_answer_replaces_the_guess_and_a_few_more_are_averaged() -> None:
    assert after(10).expected_tokens == 10
    assert after(10, 20, 30).mean == pytest.approx(20)


def test_answers_long_ago_are_forgotten() -> None:
    assert after(*[1000] * 20, *[10] * 60).expected_tokens == 10


def test_a_cut_answer_raises_the_mean_but_never_lowers_it() -> None:
    lengths = after(100, 100)
    assert lengths.after(5, complete=False) == lengths
    assert lengths.after(400, complete=False).mean > lengths.mean


def test_an_answer_of_no_token_says_nothing() -> None:
    assert after(50).after(0, complete=True) == after(50)
