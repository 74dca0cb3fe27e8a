"""What is decided before a worker is started."""

import pytest

from gearshift.coordinator.chunk_plan import Auto, Fixed, Sqrt
from gearshift.launch.options import LayoutSettings
from gearshift.launch.session_setup import USUAL_CONTEXT_TOKENS, choose_context, costs_are_needed
from gearshift.proto.errors import DoesNotFitError
from gearshift.proto.ids import Layout


def test_a_context_that_was_asked_for_is_never_changed() -> None:
    assert choose_context(64, 64, 0, 8192) == 64
    assert choose_context(64, 10, 1000, 8192) == 64  # the answer ends where the context does
    assert choose_context(64, 10, None, 8192) == 64


def test_a_context_above_the_trained_one_is_taken_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert choose_context(10_000, 10, None, 8192) == 10_000
    assert "8192" in capsys.readouterr().err


def test_a_chosen_context_holds_prompt_and_answer_within_the_trained_length() -> None:
    assert choose_context(None, 10, 20, 131_072) == USUAL_CONTEXT_TOKENS
    assert choose_context(None, 10, None, 131_072) == USUAL_CONTEXT_TOKENS
    assert choose_context(None, 5000, 100, 131_072) == 5100
    assert choose_context(None, 10, 20, 64) == 64
    assert choose_context(None, 60, 20, 64) == 64


def test_f35_a_prompt_longer_than_the_context_is_refused_with_both_counts() -> None:
    with pytest.raises(DoesNotFitError, match=r"65 tokens, --context is 64"):
        choose_context(64, 65, 0, 8192)
    with pytest.raises(DoesNotFitError, match=r"9000 tokens.*8192"):
        choose_context(None, 9000, 0, 8192)


def test_costs_are_measured_only_where_something_depends_on_them() -> None:
    def needed(
        workers: int, prefill: Layout | None, decode: Layout | None, rule: Auto | Sqrt | Fixed
    ) -> bool:
        return costs_are_needed(workers, LayoutSettings(prefill, decode, rule))

    assert not needed(1, None, None, Auto())
    assert needed(2, None, Layout.TENSOR, Fixed((64,)))
    assert needed(2, Layout.LAYER, Layout.TENSOR, Auto())
    assert needed(2, Layout.LAYER, Layout.TENSOR, Sqrt(None))
    assert not needed(2, Layout.LAYER, Layout.TENSOR, Sqrt(1024.0))
    assert not needed(2, Layout.LAYER, Layout.TENSOR, Fixed((64,)))
    assert not needed(2, Layout.TENSOR, Layout.TENSOR, Auto())
