"""MessagePack on the wire: the only place that knows it. Every message is validated against its class."""

from typing import TypeVar

import msgspec

from .commands import AnyCommand
from .errors import ProtocolError
from .reports import AnyReport

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 256 << 20

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_command_decoder = msgspec.msgpack.Decoder(AnyCommand)
_report_decoder = msgspec.msgpack.Decoder(AnyReport)


def encode(message: AnyCommand | AnyReport) -> bytes:
    """One message as bytes."""
    return _encoder.encode(message)


def decode_command(frame: bytes) -> AnyCommand:
    """A command, or a `ProtocolError` that says what was wrong with the frame."""
    return _decode(_command_decoder, frame)


def decode_report(frame: bytes) -> AnyReport:
    """A report, or a `ProtocolError` that says what was wrong with the frame."""
    return _decode(_report_decoder, frame)


def _decode(decoder: "msgspec.msgpack.Decoder[T]", frame: bytes) -> T:
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise ProtocolError(f"a frame of {len(frame)} bytes is not a valid message: {error}") from error
