"""How ranks agree whether they go without NCCL: what each knows, together, and by a real store."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import msgspec
import pytest
import torch
import torch.distributed as dist

from gearshift.proto.commands import LinkOptions
from gearshift.proto.errors import InputError
from gearshift.proto.nccl_choice import NCCL_VARIABLE, NcclAsked, NcclCase
from gearshift.worker.links.errors import CollectiveTimeoutError
from gearshift.worker.links.meeting_place import MeetingPlace
from gearshift.worker.links.nccl_agreement import RankFacts, agree, agreed_case, case_of, facts_here
from gearshift.worker.links.options import NCCL_NO_PEER_VARIABLE, NO_PEER_VARIABLE, settle

AUTO, ON, OFF = NcclAsked
CARDS = ("one", "other", "third")


def rank(number: int, asked: NcclAsked = AUTO, no_peer: bool = False, out_of_reach: tuple[str, ...] = ()) -> RankFacts:
    return RankFacts(asked, no_peer, CARDS[number], out_of_reach)


@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        ([rank(0), rank(1)], NcclCase(True, True, 2)),
        ([rank(0, out_of_reach=("third",)), rank(1)], NcclCase(True, True, 2)),  # no rank's card
        ([rank(0), rank(1, out_of_reach=("one",))], NcclCase(True, True, 2, reach=False)),
        ([rank(0, out_of_reach=("other",)), rank(1)], NcclCase(True, True, 2, reach=False)),
        ([rank(0), rank(1, no_peer=True)], NcclCase(True, True, 2, no_peer=True)),
        ([rank(0), rank(1, OFF)], NcclCase(True, True, 2, OFF)),
        ([rank(0, ON), rank(1)], NcclCase(True, True, 2, ON)),
        ([rank(0), rank(1), rank(2, out_of_reach=("one",))], NcclCase(True, True, 3, reach=False)),
    ],
)
def test_what_one_rank_knows_or_asks_for_counts_for_all(ranks: list[RankFacts], case: NcclCase) -> None:
    assert case_of(ranks) == case


def test_ranks_that_ask_for_both_are_told_so() -> None:
    with pytest.raises(InputError, match="GEARSHIFT_NCCL is on for rank 2 and off for rank 0"):
        case_of([rank(0, OFF), rank(1), rank(2, ON)])


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (NO_PEER_VARIABLE, NCCL_NO_PEER_VARIABLE, NCCL_VARIABLE):
        monkeypatch.setenv(name, "")
    return monkeypatch


def test_a_rank_looks_from_its_own_card_at_all_that_it_sees(environment: pytest.MonkeyPatch) -> None:
    asked_about = []

    def reaches(own: int, other: int) -> bool:
        asked_about.append((own, other))
        return other == 2

    environment.setattr(torch.cuda, "device_count", lambda: 3)
    environment.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=CARDS[index]))
    environment.setattr(torch.cuda, "can_device_access_peer", reaches)
    assert facts_here(torch.device("cuda", 1)) == RankFacts(AUTO, False, "other", ("one",))
    assert asked_about == [(1, 0), (1, 2)]
    environment.setenv(NCCL_VARIABLE, "on")
    settle(LinkOptions(no_peer=True))  # as a group is started again whose cards changed what they moved
    assert facts_here(torch.device("cuda", 1)) == RankFacts(ON, True, "other", ("one",))

    with_nccl_left_open = msgspec.structs.replace(facts_here(torch.device("cuda", 1)), asked=AUTO)
    assert case_of([rank(0), with_nccl_left_open]).without


def test_on_the_cpu_and_between_hosts_nobody_is_asked(environment: pytest.MonkeyPatch) -> None:
    place = MeetingPlace(dist.HashStore(), 0, 2, 0.1)  # where nobody else is
    assert agreed_case(place, torch.device("cpu"), True) == NcclCase(False, True, 2)
    assert agreed_case(place, torch.device("cuda", 0), False) == NcclCase(True, False, 2)


def test_all_ranks_agree_by_the_store_that_they_meet_by() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    facts = [rank(0), rank(1, out_of_reach=("one",))]

    def of(number: int) -> NcclCase:
        client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        return agree(MeetingPlace(client, number, 2, 20.0), facts[number])

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(of, range(2))) == [NcclCase(True, True, 2, reach=False)] * 2


def test_a_rank_that_says_nothing_is_waited_for_no_longer_than_the_bound() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    with pytest.raises(CollectiveTimeoutError, match="rank 0 of 2, whether to go without NCCL"):
        agree(MeetingPlace(store, 0, 2, 0.2), rank(0))
