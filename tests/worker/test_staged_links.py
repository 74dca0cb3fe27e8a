"""Staged links over streams that are lists: what each call orders, and what becomes of a peer that does not answer."""

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from gearshift.tests.worker.staged_helpers import CPU, FakeStreams, fake_streams, made_ring
from gearshift.tests.worker.test_ring import SHAPE
from gearshift.worker.links import staged
from gearshift.worker.links.errors import CollectiveTimeoutError, LinkFailedError
from gearshift.worker.links.staged import Lanes, Piles, StagedHandle, StagedLink
from gearshift.worker.links.staged_sums import StagedSums


class KeepingLink(StagedLink):
    """Keeps all tensors: on a card memory is reused in the order of streams, here it would be at once."""

    kept: list[Tensor]

    def start(self, sends: Piles, receives: Piles, what: str, timeout_seconds: float | None = None) -> StagedHandle:
        self.kept.extend(tensor for _, tensor in (*sends, *receives))
        return super().start(sends, receives, what, timeout_seconds)


class Cards:
    """All ranks' streams, and the links between them."""

    def __init__(self, streams: FakeStreams, ranks: int, timeout_seconds: float) -> None:
        self.streams = streams
        streams.computing = [streams.new() for _ in range(ranks)]
        pairs = [(one, other) for one in range(ranks) for other in range(ranks) if one != other]
        self.rings = {pair: made_ring(streams, SHAPE) for pair in pairs}
        self.links = [self._link(rank, timeout_seconds) for rank in range(ranks)]

    def _link(self, rank: int, timeout_seconds: float) -> KeepingLink:
        lanes = Lanes([self.streams.new(), self.streams.new()], [self.streams.new(), self.streams.new()])  # type: ignore[list-item]
        rings = {pair: ring for pair, ring in self.rings.items() if rank in pair}
        link = KeepingLink("keys", rank, rings, SHAPE, self.streams, lanes, timeout_seconds)
        link.kept = []
        return link


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Cards]]:
    monkeypatch.setattr(staged, "CLOSING_SECONDS", 0.01)
    with fake_streams(monkeypatch) as streams:
        yield lambda ranks=2, timeout_seconds=30.0: Cards(streams, ranks, timeout_seconds)


def noise(draw: random.Random, count: int) -> Tensor:
    return torch.frombuffer(bytearray(draw.randbytes(count)), dtype=torch.uint8)


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_issued_behind_order_sees_all_that_came(cards: Callable[..., Cards], ranks: int) -> None:
    draw, group = random.Random(ranks), cards(ranks)
    seen, sent = {}, {}
    for number in range(6):
        for rank in range(ranks):
            for peer in range(ranks):
                sent[number, rank, peer] = [noise(draw, count) for count in draw.sample([1, 64, 999, 5000], 2)]
        for rank in range(ranks):
            group.streams.rank = rank
            others = [peer for peer in range(ranks) if peer != rank]
            sends = [(peer, one) for peer in others for one in sent[number, rank, peer]]
            into = [(peer, torch.zeros_like(one)) for peer in others for one in sent[number, peer, rank]]
            group.links[rank].start(sends, into, "noise").order()

            def look(key: tuple[int, int] = (number, rank), into: list[tuple[int, Tensor]] = into) -> None:
                seen[key] = [(peer, one.clone()) for peer, one in into]

            group.streams.current().do(look)
    group.streams.step_all(draw)
    assert group.streams.idle
    assert len(seen) == 6 * ranks
    for (number, rank), came in seen.items():
        truth = [one for peer in range(ranks) if peer != rank for one in sent[number, peer, rank]]
        assert all(torch.equal(one, other) for (_, one), other in zip(came, truth, strict=True))


def test_copies_begin_behind_what_was_issued_before_them(cards: Callable[..., Cards]) -> None:
    group, draw = cards(), random.Random(1)
    data, into = torch.zeros(1000, dtype=torch.uint8), torch.zeros(1000, dtype=torch.uint8)
    group.streams.current().do(lambda: data.fill_(7))
    group.links[0].start([(1, data)], [], "sevens")
    group.streams.rank = 1
    handle = group.links[1].start([], [(0, into)], "sevens")
    assert not handle.is_over()
    group.streams.step_all(draw)
    assert handle.is_over()
    assert bool((into == 7).all())
    handle.wait()


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_sums_are_issued_by_all_ranks_without_waiting_for_each_other(cards: Callable[..., Cards], ranks: int) -> None:
    """Of the adding itself only a GPU can tell: here it is done when it is issued, on what has not come yet."""
    group, draw = cards(ranks), random.Random(2)
    for rank, link in enumerate(group.links):
        group.streams.rank = rank
        sums = StagedSums(link, rank, ranks, CPU)
        for count in (1, 3000, 20_000):
            sums.add_up(torch.zeros(count))
    group.streams.step_all(draw)
    assert group.streams.idle


def test_two_ranks_have_the_sum_of_what_came_in_either_type(cards: Callable[..., Cards]) -> None:
    """One rank's side with the other's bytes there already."""
    for dtype in (torch.float32, torch.bfloat16):
        group, draw = cards(), random.Random(3)
        mine, theirs = torch.randn(5000).to(dtype), torch.randn(5000).to(dtype)
        truth = (mine.float() + theirs.float()).to(dtype)
        sums = StagedSums(group.links[0], 0, 2, CPU)
        sums._buffer(theirs.nbytes)[:] = theirs.view(torch.uint8)
        sums.add_up(mine)
        assert torch.equal(mine, truth)
        group.streams.rank = 1
        group.links[1].start([(0, theirs)], [(0, torch.empty_like(theirs))], "the other half")
        group.streams.step_all(draw)


def test_a_peer_that_never_sends_is_named_and_no_stream_waits_for_it_any_more(cards: Callable[..., Cards]) -> None:
    group = cards(timeout_seconds=0.01)
    handle = group.links[0].start([], [(1, torch.zeros(5000, dtype=torch.uint8))], "keys and values from rank 1")
    group.streams.step_all(random.Random(3))
    assert not group.streams.idle
    with pytest.raises(CollectiveTimeoutError, match=r"waited .* s for keys and values from rank 1"):
        handle.wait()
    group.streams.step_all(random.Random(3))
    assert group.streams.idle


def test_what_the_host_does_not_wait_for_is_given_up_by_whoever_looks(cards: Callable[..., Cards]) -> None:
    """As the host may wait for a stream that waits for a lost peer."""
    group, draw = cards(timeout_seconds=10.0), random.Random(4)
    data = torch.zeros(5000, dtype=torch.uint8)
    handle = group.links[0].start([(1, data)], [], "keys")
    group.links[0].look(100.0)
    group.streams.step_all(draw)
    group.links[0].look(105.0)  # it went on since
    group.links[0].look(114.0)
    assert not group.streams.idle
    group.links[0].look(116.0)
    group.streams.step_all(draw)
    assert group.streams.idle
    for call in (handle.order, group.links[0].check, lambda: group.links[0].start([(1, data)], [], "other keys")):
        with pytest.raises(CollectiveTimeoutError, match=r"waited 11.0 s for rank 1: .*keys, from rank 0 to"):
            call()


def test_a_link_at_rest_is_never_given_up(cards: Callable[..., Cards]) -> None:
    group, draw = cards(timeout_seconds=10.0), random.Random(5)
    data, into = torch.zeros(5000, dtype=torch.uint8), torch.zeros(5000, dtype=torch.uint8)
    group.links[0].start([(1, data)], [], "keys")
    group.links[1].start([], [(0, into)], "keys")
    group.streams.step_all(draw)
    for now in (0.0, 100.0, 200.0):
        for link in group.links:
            link.look(now)
            link.check()
    assert group.streams.idle


def test_the_other_end_hears_that_this_one_has_given_up(cards: Callable[..., Cards]) -> None:
    """What it fetches from then on is not what was sent, and its own streams must not stand still either."""
    group, draw = cards(), random.Random(6)
    group.links[1].start([], [(0, torch.zeros(50_000, dtype=torch.uint8))], "keys")
    group.links[0].give_up("a fault")
    group.links[1].look(1.0)
    group.streams.step_all(draw)
    assert group.streams.idle
    with pytest.raises(CollectiveTimeoutError, match="rank 0 has given up on copies staged in host memory"):
        group.links[1].check()


def test_a_driver_that_refuses_a_piece_ends_the_link_on_both_ends(
    cards: Callable[..., Cards], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = cards()
    queue = type(group.streams.current().queue)

    def refused(*_: object) -> None:
        raise RuntimeError("cuMemcpyDtoHAsync of the CUDA driver failed: CUDA_ERROR_INVALID_VALUE (1)")

    with monkeypatch.context() as patch:
        patch.setattr(queue, "copy_out", refused)
        with pytest.raises(LinkFailedError, match=r"keys: .*CUDA_ERROR_INVALID_VALUE"):
            group.links[0].start([(1, torch.zeros(100, dtype=torch.uint8))], [], "keys")
    with pytest.raises(CollectiveTimeoutError, match="rank 0 has given up"):
        group.links[1].check()


def test_a_link_that_is_idle_gives_its_memory_back_and_one_that_is_not_keeps_it(cards: Callable[..., Cards]) -> None:
    group, draw = cards(), random.Random(4)
    data = torch.zeros(100, dtype=torch.uint8)
    group.links[0].start([(1, data)], [], "keys")
    group.streams.step_all(draw)
    group.links[0].close()
    assert not group.streams.registered
    for ring in group.rings.values():
        group.streams.registered.add(ring.memory.address)
    group.streams.rank = 1
    group.links[1].start([], [(0, data), (0, torch.zeros(5000, dtype=torch.uint8))], "keys, and some that never come")
    group.streams.step_all(draw)
    group.links[1].close()
    assert len(group.streams.registered) == len(group.rings)
    group.streams.step_all(draw)
    assert group.streams.idle
