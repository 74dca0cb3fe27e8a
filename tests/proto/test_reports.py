"""Reports whose numbers are none never reach what learns from them."""

from math import inf, nan

import msgspec
import pytest

from gearshift.proto.ids import Rank
from gearshift.proto.reports import TickFinished

SECONDS = ("busy_seconds", "waiting_seconds", "decode_seconds", "between_seconds", "moving_seconds")


@pytest.mark.parametrize("value", [nan, inf, -inf, -1e-9, 1e10])
@pytest.mark.parametrize("field", SECONDS)
def test_a_ticks_seconds_are_numbers_and_not_below_nothing(field: str, value: float) -> None:
    sound = TickFinished(Rank(1), 4, 0.1, 0.2, 0.3, between_seconds=0.4, moving_seconds=0.5)
    codec = msgspec.msgpack.Decoder(TickFinished)
    assert codec.decode(msgspec.msgpack.encode(sound)) == sound
    with pytest.raises(msgspec.ValidationError, match=field):
        codec.decode(msgspec.msgpack.encode(msgspec.structs.replace(sound, **{field: value})))
