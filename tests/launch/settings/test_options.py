"""Flags into settings."""

import pytest

from gearshift.launch.settings.options import (
    group_settings,
    parse_compute_type,
    parse_cut_points,
    parse_kv_format,
    parse_layout,
    parse_logit_bias,
    parse_seed,
    parse_shares,
)
from gearshift.proto.commands import LinkOptions
from gearshift.proto.errors import InputError
from gearshift.proto.ids import ComputeType, KvType, Layout
from gearshift.proto.kv import KvFormat


def test_auto_leaves_the_choice_to_the_program() -> None:
    assert parse_layout("--prefill", "auto") is None
    assert parse_compute_type("--compute-type", "auto") is None
    assert parse_kv_format("--kv-type", "auto") is None


def test_choices_become_their_types() -> None:
    assert parse_layout("--prefill", "tensor") is Layout.TENSOR
    assert parse_compute_type("--compute-type", "bf16") is ComputeType.BF16
    assert parse_kv_format("--kv-type", "f16") == KvFormat(KvType.F16, KvType.F16)
    assert parse_kv_format("--kv-type", "q8_0,f16") == KvFormat(KvType.Q8_0, KvType.F16)


@pytest.mark.parametrize("text", ["", "Layer", "pipeline", "auto,layer"])
def test_an_unknown_choice_names_the_flag_and_the_choices(text: str) -> None:
    with pytest.raises(InputError, match=r"--prefill takes one of auto, layer, tensor, not"):
        parse_layout("--prefill", text)


@pytest.mark.parametrize("text", ["q4_0", "f16,f16,f16", "f16,"])
def test_a_bad_kv_type_names_its_flag(text: str) -> None:
    with pytest.raises(InputError, match="--kv-type"):
        parse_kv_format("--kv-type", text)


def test_lists_of_numbers() -> None:
    assert parse_cut_points("--layer-split", None) is None
    assert parse_cut_points("--layer-split", "12,24,36") == (12, 24, 36)
    assert parse_shares("--layer-share", "3,1") == (3.0, 1.0)


@pytest.mark.parametrize("text", ["", "12,", "1.5", "a", "12;24"])
def test_cut_points_that_are_not_whole_numbers_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--layer-split"):
        parse_cut_points("--layer-split", text)


def test_logit_biases() -> None:
    assert parse_logit_bias("--logit-bias", ["5=-1.5", "7=100"]) == ((5, -1.5), (7, 100.0))


@pytest.mark.parametrize("entry", ["abc=1", "5", "5=", "=1", "-1=2", "5=nan", "5=inf", "1.5=2"])
def test_f37_a_bad_logit_bias_names_its_flag(entry: str) -> None:
    with pytest.raises(InputError, match="--logit-bias"):
        parse_logit_bias("--logit-bias", [entry])


def test_a_token_biased_twice_is_refused() -> None:
    with pytest.raises(InputError, match="token 5 twice"):
        parse_logit_bias("--logit-bias", ["5=1", "5=2"])


def test_seeds_are_64_bits_and_minus_one_draws_one() -> None:
    assert parse_seed("--seed", 2**64 - 1) == 2**64 - 1
    assert 0 <= parse_seed("--seed", -1) < 2**64
    for seed in (-2, 2**64):
        with pytest.raises(InputError, match="--seed"):
            parse_seed("--seed", seed)


def test_exact_activations_are_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GEARSHIFT_EXACT_ACTIVATIONS", raising=False)
    assert not group_settings().exact_activations
    assert group_settings(exact_activations=True).exact_activations
    monkeypatch.setenv("GEARSHIFT_EXACT_ACTIVATIONS", "on")
    assert group_settings().exact_activations
    assert not group_settings(exact_activations=False).exact_activations


def test_flags_for_tests_of_slow_links_reach_the_links(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GEARSHIFT_NO_PEER", "GEARSHIFT_THROTTLE_LINK"):
        monkeypatch.delenv(name, raising=False)
    assert group_settings().link_options == LinkOptions()
    assert group_settings(no_peer=True, throttle_link=2.5).link_options == LinkOptions(True, 2.5e9)
    monkeypatch.setenv("GEARSHIFT_NO_PEER", "1")
    assert group_settings().link_options == LinkOptions(no_peer=True)


@pytest.mark.parametrize("speed", [0.0, -1.0, 1e9, float("nan")])
def test_a_speed_that_no_link_has_is_refused(speed: float) -> None:
    with pytest.raises(InputError, match=r"--throttle-link takes a number from 0.001 to 10000"):
        group_settings(throttle_link=speed)
