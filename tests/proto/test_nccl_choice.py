"""Who goes without NCCL: the rule as a table."""

import pytest

from gearshift.proto.errors import InputError
from gearshift.proto.nccl_choice import NcclAsked, NcclCase, parse_nccl

AUTO, ON, OFF = NcclAsked
TWO = NcclCase(on_cards=True, one_host=True, ranks=2)


@pytest.mark.parametrize(
    ("ranks", "no_peer", "reach", "asked", "without"),
    [
        (1, True, False, AUTO, False),
        (1, True, False, OFF, False),
        (2, False, True, AUTO, False),
        (2, True, True, AUTO, True),
        (2, False, False, AUTO, True),
        (2, True, False, AUTO, True),
        (2, True, False, ON, False),
        (2, False, True, OFF, True),
        (3, True, False, AUTO, False),
        (4, True, False, AUTO, False),
        (3, False, True, OFF, True),
        (8, True, False, ON, False),
    ],
)
def test_two_cards_without_peer_access_go_without_nccl_unless_another_way_is_asked_for(
    ranks: int, no_peer: bool, reach: bool, asked: NcclAsked, without: bool
) -> None:
    assert NcclCase(True, True, ranks, asked, no_peer, reach).without is without


def test_on_the_cpu_and_between_hosts_the_choice_does_not_come_up() -> None:
    for asked in NcclAsked:
        assert not NcclCase(False, True, 2, asked, True, False).without
        assert not NcclCase(False, False, 2, asked, True, False).without
    for asked in (AUTO, ON):
        assert not NcclCase(True, False, 2, asked, True, False).without
    with pytest.raises(InputError, match="GEARSHIFT_NCCL=off is for workers of one host"):
        NcclCase(True, False, 2, OFF).without  # noqa: B018 (it raises)


@pytest.mark.parametrize(
    ("text", "asked"), [("", AUTO), ("auto", AUTO), (" On ", ON), ("off", OFF), ("OFF", OFF)]
)
def test_a_word_in_any_case_says_what_is_asked_for(text: str, asked: NcclAsked) -> None:
    assert parse_nccl(text) is asked


@pytest.mark.parametrize("text", ["1", "yes", "no", "nccl"])
def test_another_word_is_an_error_of_the_user(text: str) -> None:
    with pytest.raises(InputError, match=f"GEARSHIFT_NCCL takes auto, on or off, not '{text}'"):
        parse_nccl(text)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (TWO, "the cards reach into each other's memory"),
        (NcclCase(True, True, 2, reach=False), "the cards do not reach into each other's memory"),
        (NcclCase(True, True, 2, no_peer=True), "peer access is switched off"),
        (NcclCase(True, True, 3, no_peer=True), "3 workers"),
        (NcclCase(True, False, 2, no_peer=True), "workers of several hosts"),
        (NcclCase(True, True, 2, OFF), "GEARSHIFT_NCCL=off"),
    ],
)
def test_what_decided_it_is_told(case: NcclCase, why: str) -> None:
    assert case.why == why
