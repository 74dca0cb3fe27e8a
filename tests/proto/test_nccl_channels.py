"""What NCCL takes of a card: the arithmetic held against what was measured with other numbers of channels."""

from dataclasses import replace

import pytest

from gearshift.proto.nccl_channels import (
    CHANNEL_BYTES,
    COMMUNICATOR_BYTES,
    NCCL_USE,
    SENT_BYTES,
    SMALL_BUFFERS,
    USUAL,
    NcclUse,
    nccl_bytes,
)

MIB = 1 << 20


@pytest.mark.parametrize(("most", "measured"), [(8, 930), (32, 2230)])
def test_the_arithmetic_meets_what_two_h200_took(most: int, measured: int) -> None:
    """Then all ways had `most` channels, but rings no more than 24, and there was a ring of all ranks beside them."""
    ring, all_ranks = min(24, most), most * 6 + 6
    of_rings = 2 * 12 * ring - 12 * most  # two of them where the arithmetic has one
    sender = -8 * most  # rank 0 was measured: its edge sends
    use = NcclUse(sums=most, edges=most, moves=most)
    assert nccl_bytes(2, use) / MIB + all_ranks + of_rings + sender == pytest.approx(measured, rel=0.02)


def test_sends_and_sums_over_one_communicator_have_connections_of_their_own() -> None:
    """Measured on rank 0 of 2, MiB: sums and a gather, which it sends, 486 with 24 channels; moves 582 with 32."""
    both = SENT_BYTES + USUAL.received_bytes
    assert (24 * (CHANNEL_BYTES + both + SENT_BYTES) + COMMUNICATOR_BYTES) / MIB == 486
    assert (32 * (CHANNEL_BYTES + both) + COMMUNICATOR_BYTES) / MIB == 582


def test_alone_there_is_nobody_to_talk_to_and_each_peer_takes_room_for_its_moves() -> None:
    assert nccl_bytes(1) == 0
    assert nccl_bytes(4) - nccl_bytes(3) == NCCL_USE.moves * (SENT_BYTES + NCCL_USE.received_bytes)


def test_smaller_buffers_and_fewer_channels_take_less_of_a_card() -> None:
    assert USUAL.received_bytes == 10 * MIB
    assert SMALL_BUFFERS.received_bytes == 4 * MIB
    assert nccl_bytes(2, USUAL) - nccl_bytes(2, SMALL_BUFFERS) == (16 + 4 + 8) * 6 * MIB
    fewer = NcclUse(sums=8, edges=2, moves=4)
    assert nccl_bytes(2, USUAL) - nccl_bytes(2, fewer) == (8 * 18 + 2 * 16 + 4 * 18) * MIB


def test_only_sizes_that_are_not_nccls_own_are_told_to_it() -> None:
    assert USUAL.environment == {}
    assert SMALL_BUFFERS.environment == {"NCCL_BUFFSIZE": "1048576", "NCCL_LL128_BUFFSIZE": "1228800"}
    assert replace(USUAL, buffer_bytes=2 * MIB).environment == {"NCCL_BUFFSIZE": "2097152"}
