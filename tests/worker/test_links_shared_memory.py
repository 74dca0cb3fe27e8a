"""Shared memory and the mailbox edge, inside one process."""

import pytest
import torch

from gearshift.proto.errors import ProtocolError
from gearshift.worker.links import CollectiveTimeoutError, LinkFailedError, mailbox, shared_memory
from gearshift.worker.links.pipeline import DistributedReceiver, Incoming, PipelineEdges
from gearshift.worker.links.shared_group import SLOT_BYTES, SharedExchange
from gearshift.worker.links.waiting import FlagWait

SOON = FlagWait(timeout_seconds=0.05, crowded=False)


@pytest.fixture
def segment():
    name = shared_memory.fresh_name("unit")
    lines, payload_bytes = 4, mailbox.BUFFERS * mailbox.BUFFER_BYTES
    made = shared_memory.create(name, lines, payload_bytes)
    try:
        yield name, made, lines, payload_bytes
    finally:
        shared_memory.remove(name)


def message(value: int, count: int = 100) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.uint8)


def test_a_segment_is_private_new_and_seen_by_whoever_attaches(segment):
    name, made, lines, payload_bytes = segment
    assert (shared_memory.FOLDER / name).stat().st_mode & 0o777 == 0o600
    other = shared_memory.attach(name, lines, payload_bytes)
    made.flags[3] = 1 << 40
    made.bytes[-1] = 7
    assert other.flags[3] == 1 << 40
    assert other.bytes[-1] == 7
    with pytest.raises(FileExistsError):
        shared_memory.create(name, lines, payload_bytes)
    with pytest.raises(OSError, match="another size"):
        shared_memory.attach(name, lines, payload_bytes + 1)
    shared_memory.remove(name)
    with pytest.raises(FileNotFoundError):
        shared_memory.attach(name, lines, payload_bytes)
    other.bytes[0] = 9
    assert made.bytes[0] == 9, "a removed segment stays with those who have it open"


def test_a_segment_larger_than_the_memory_there_is_leaves_no_name():
    name = shared_memory.fresh_name("unit")
    with pytest.raises(OSError, match=r"space|large|memory"):
        shared_memory.create(name, 4, 1 << 50)
    assert not (shared_memory.FOLDER / name).exists()


def test_a_name_says_nothing_a_file_system_could_misread():
    name = shared_memory.fresh_name("../../etc/\0 ü")
    assert name.isascii()
    assert "/" not in name
    assert len(name) < 64
    assert name != shared_memory.fresh_name("../../etc/\0 ü")


def test_a_sender_waits_only_when_two_messages_lie_untaken(segment):
    _, made, _, _ = segment
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


def test_a_receiver_names_the_rank_that_sends_nothing(segment):
    _, made, _, _ = segment
    receiver = mailbox.MailboxReceiver(made.flags, made.bytes, peer=5, wait=SOON)
    receiver.post(message(0))
    with pytest.raises(CollectiveTimeoutError, match="rank 5 to send hidden rows number 0"):
        receiver.receive()


def test_a_message_of_another_size_is_an_error_and_not_a_wrong_activation(segment):
    _, made, _, _ = segment
    mailbox.MailboxSender(made.flags, made.bytes, peer=1, wait=SOON).send(message(1, 12))
    receiver = mailbox.MailboxReceiver(made.flags, made.bytes, peer=0, wait=SOON)
    receiver.post(message(0, 16))
    with pytest.raises(LinkFailedError, match="12 bytes of hidden rows, 16 were expected"):
        receiver.receive()


def test_at_most_two_receives_are_posted(segment):
    _, made, _, _ = segment
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
