"""What is decided before a worker is started."""

import msgspec
import pytest

from gearshift.coordinator.chunks.plan import Auto, Fixed, Sqrt
from gearshift.coordinator.fit.choice import ContextWish
from gearshift.coordinator.group.load_result import LoadResult
from gearshift.launch.settings.options import LayoutSettings
from gearshift.launch.start import session_setup
from gearshift.launch.start.session_setup import USUAL_CONTEXT_TOKENS, costs_are_needed, wish_context
from gearshift.proto.errors import DoesNotFitError
from gearshift.proto.ids import ComputeType, KvType, Layout
from gearshift.proto.kv import KvFormat
from gearshift.tests.helpers.specs import layer_spec, model_spec


def asked(tokens: int) -> ContextWish:
    return ContextWish(tokens, asked=True)


def test_a_context_that_was_asked_for_is_never_changed() -> None:
    assert wish_context(64, 64, 0, 8192) == asked(64)
    assert wish_context(64, 10, 1000, 8192) == asked(64)  # the answer ends where the context does
    assert wish_context(64, 10, None, 8192) == asked(64)


def test_a_context_above_the_trained_one_is_taken_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert wish_context(10_000, 10, None, 8192) == asked(10_000)
    assert "8192" in capsys.readouterr().err


def test_a_chosen_context_holds_prompt_and_answer_within_the_trained_length() -> None:
    wishes = [
        wish_context(None, 10, 20, 131_072),
        wish_context(None, 10, None, 131_072),
        wish_context(None, 5000, 100, 131_072),
        wish_context(None, 10, 20, 64),
        wish_context(None, 60, 20, 64),
    ]
    assert [one.tokens for one in wishes] == [USUAL_CONTEXT_TOKENS, USUAL_CONTEXT_TOKENS, 5100, 64, 64]
    assert not any(one.asked for one in wishes)
    # Where memory is short less will do, but never less than the prompt and a token.
    assert [one.needed for one in wishes] == [512, 512, 5001, 64, 64]


def test_f35_a_prompt_longer_than_the_context_is_refused_with_both_counts() -> None:
    with pytest.raises(DoesNotFitError, match=r"65 tokens, --context is 64"):
        wish_context(64, 65, 0, 8192)
    with pytest.raises(DoesNotFitError, match=r"9000 tokens.*8192; --context N goes beyond it"):
        wish_context(None, 9000, 0, 8192)


def test_an_answer_that_the_context_will_cut_short_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    wish_context(None, 8190, 3, 8192)
    wish_context(64, 10, None, 8192)
    assert capsys.readouterr().err == ""
    wish_context(None, 8190, 50, 8192)
    assert "a prompt of 8190 tokens a context of 8192 holds 3 tokens of answer, not 50" in capsys.readouterr().err
    wish_context(64, 64, 2, 8192)
    assert "holds 1 token of answer, not 2" in capsys.readouterr().err


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


def test_a_load_is_told_with_its_speed(capsys: pytest.CaptureFixture[str]) -> None:
    spec = model_spec([layer_spec()] * 2, vocab=60)
    spec = msgspec.structs.replace(spec, files=(msgspec.structs.replace(spec.files[0], byte_count=6_000_000_000),))
    loaded = LoadResult(1.5, ComputeType.BF16, KvFormat(KvType.BF16, KvType.Q8_0), (1 << 30,) * 2, (1 << 20,) * 2)
    session_setup._tell_loaded(spec, loaded, 4096)
    told = capsys.readouterr().err
    assert "2,048 MiB of weights in bf16, 2 MiB of KV in bf16/q8_0 for 4096 tokens" in told
    assert "loaded in 1.5 s (4 GB/s of its file)" in told
