"""What NCCL takes of a card: the arithmetic held against what was measured with other numbers of channels."""

import pytest

from gearshift.proto import nccl_channels
from gearshift.proto.nccl_channels import nccl_bytes

MIB = 1 << 20


@pytest.mark.parametrize(("most", "measured"), [(8, 930), (32, 2230)])
def test_the_arithmetic_meets_what_two_h200_took(monkeypatch: pytest.MonkeyPatch, most: int, measured: int) -> None:
    """Then all ways had `most` channels, but rings no more than 24, and there was a ring of all ranks beside them."""
    for name in ("SUM_CHANNELS", "EDGE_CHANNELS", "MOVE_CHANNELS"):
        monkeypatch.setattr(nccl_channels, name, most)
    ring, all_ranks = min(24, most), most * 6 + 6
    of_rings = 2 * 12 * ring - 12 * most  # two of them where the arithmetic has one
    sender = -8 * most  # rank 0 was measured: its edge sends
    assert nccl_bytes(2) / MIB + all_ranks + of_rings + sender == pytest.approx(measured, rel=0.02)


def test_alone_there_is_nobody_to_talk_to_and_each_peer_takes_room_for_its_moves() -> None:
    assert nccl_bytes(1) == 0
    assert nccl_bytes(4) - nccl_bytes(3) == nccl_channels.MOVE_CHANNELS * 12 * MIB
