"""Shared memory and the mailbox edge, inside one process."""

from pathlib import Path

import pytest
import torch

from gearshift.proto.errors import ProtocolError
from gearshift.worker.links import CollectiveTimeoutError, LinkFailedError, mailbox, shared_memory
from gearshift.worker.links import open as links_open
from gearshift.worker.links.host_memory import NamedMemory, NamelessMemory, mapped
from gearshift.worker.links.open import PATH_BYTES, name_of_opening
from gearshift.worker.links.pipeline import DistributedReceiver, Incoming, PipelineEdges
from gearshift.worker.links.shared_group import SLOT_BYTES, SharedExchange
from gearshift.worker.links.tensor_group import LoneTensorGroup
from gearshift.worker.links.waiting import FlagWait

SOON = FlagWait(timeout_seconds=0.05, crowded=False)


LINES, PAYLOAD_BYTES = 4, mailbox.BUFFERS * mailbox.BUFFER_BYTES
ENDS = (0, 1)


def opened(path: str) -> shared_memory.SharedSegment:
    memory = mapped(path, shared_memory.segment_bytes(LINES, PAYLOAD_BYTES))
    return shared_memory.SharedSegment(memory.segment, LINES, PAYLOAD_BYTES)


@pytest.fixture
def path():
    """Of memory for a segment."""
    source = NamelessMemory()
    told = source.make(ENDS, shared_memory.segment_bytes(LINES, PAYLOAD_BYTES))
    yield source.path(ENDS, told)
    source.forget()


def message(value: int, count: int = 100) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.uint8)


def test_a_segment_is_new_and_seen_by_whoever_opens_it(path):
    made, other = opened(path), opened(path)
    assert not any(made.flags)
    made.flags[3] = 1 << 40
    made.bytes[-1] = 7
    assert other.flags[3] == 1 << 40
    assert other.bytes[-1] == 7


def test_a_name_says_nothing_a_file_system_could_misread():
    name = name_of_opening("../../etc/\0 ü")
    assert name.isascii()
    assert "/" not in name
    longest = NamedMemory(name).path((0, 1023), (0, 0))
    assert len(longest) < PATH_BYTES
    assert name != name_of_opening("../../etc/\0 ü")


@pytest.mark.parametrize("works", ["nameless", "named", "neither"])
def test_the_segment_of_all_ranks_never_has_a_name_unless_there_is_no_other_way(works, monkeypatch):
    def refused(self, ends, byte_count):
        raise OSError("not here")

    seen = []
    if works != "nameless":
        monkeypatch.setattr(NamelessMemory, "make", refused)
    if works == "neither":
        monkeypatch.setattr(NamedMemory, "make", refused)

    def noted(path, byte_count):
        seen.append(path)
        return mapped(path, byte_count)

    monkeypatch.setattr(links_open, "mapped", noted)
    segment = links_open._share(0, 1, "unit", LoneTensorGroup())
    assert (segment is None) == (works == "neither")
    assert [path.split("/")[1] for path in seen] == {"nameless": ["proc"], "named": ["dev"], "neither": []}[works]
    assert not any(Path(path).exists() for path in seen), "all have it open: the way to it is gone"


def test_a_sender_waits_only_when_two_messages_lie_untaken(path):
    made = opened(path)
    sender = mailbox.MailboxSender(made.flags, made.bytes, peer=1, wait=SOON)
    receiver = mailbox.MailboxReceiver(made.flags, made.bytes, peer=0, wait=SOON)
    sender.send(message(1))
    sender.send(message(2))
    with pytest.raises(CollectiveTimeoutError, match="rank 1 to take hidden rows number 0"):
        sender.send(message(3))
    into = [message(0), message(0)]
    for buffer in into:
        receiver.post(buffer)
    receiver.receive()
    sender.send(message(3))
    receiver.receive()
    assert torch.equal(into[0], message(1))
    assert torch.equal(into[1], message(2))


def test_a_receiver_names_the_rank_that_sends_nothing(path):
    made = opened(path)
    receiver = mailbox.MailboxReceiver(made.flags, made.bytes, peer=5, wait=SOON)
    receiver.post(message(0))
    with pytest.raises(CollectiveTimeoutError, match="rank 5 to send hidden rows number 0"):
        receiver.receive()


def test_a_message_of_another_size_is_an_error_and_not_a_wrong_activation(path):
    made = opened(path)
    mailbox.MailboxSender(made.flags, made.bytes, peer=1, wait=SOON).send(message(1, 12))
    receiver = mailbox.MailboxReceiver(made.flags, made.bytes, peer=0, wait=SOON)
    receiver.post(message(0, 16))
    with pytest.raises(LinkFailedError, match="12 bytes of hidden rows, 16 were expected"):
        receiver.receive()


def test_at_most_two_receives_are_posted(path):
    made = opened(path)
    box = mailbox.MailboxReceiver(made.flags, made.bytes, peer=0, wait=SOON)
    edges = PipelineEdges(Incoming(DistributedReceiver(None, 0, 0.05), box), None, torch.device("cpu"))
    with pytest.raises(ProtocolError, match="no receive"):
        edges.receive()
    edges.post_receive((2, 3), torch.float32)
    edges.post_receive((2, 3), torch.float32)
    with pytest.raises(ProtocolError, match="2 receives"):
        edges.post_receive((2, 3), torch.float32)


@pytest.mark.parametrize("crowded", [False, True])
def test_a_collective_names_every_rank_that_did_not_come(crowded):
    flags = memoryview(bytearray(4 * shared_memory.CACHE_LINE_BYTES)).cast("q")
    slots = torch.zeros(2 * 4 * SLOT_BYTES, dtype=torch.uint8)
    exchange = SharedExchange(flags, slots, rank=1, size=4, wait=FlagWait(0.05, crowded))
    flags[2 * shared_memory.WORDS_PER_LINE] = 1
    with pytest.raises(CollectiveTimeoutError, match=r"rank 0, rank 3 in collective 1 of rank 1"):
        exchange.exchange()
