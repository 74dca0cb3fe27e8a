"""MessagePack on the wire: the only place that knows it. Every message is validated against its class."""

from typing import TypeVar

import msgspec

from .client_messages import AnyReply, AnyRequest
from .commands import AnyCommand
from .errors import ProtocolError
from .reports import AnyReport

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 256 << 20
MAX_REQUEST_BYTES = 8 << 20  # a client's message; what is longer is answered by an error

T = TypeVar("T")


class _CallOnly(msgspec.Struct):
    """Of a request that cannot be taken: whom to tell."""

    call: int


_encoder = msgspec.msgpack.Encoder()
_command_decoder = msgspec.msgpack.Decoder(AnyCommand)
_report_decoder = msgspec.msgpack.Decoder(AnyReport)
_request_decoder = msgspec.msgpack.Decoder(AnyRequest)
_reply_decoder = msgspec.msgpack.Decoder(AnyReply)
_call_decoder = msgspec.msgpack.Decoder(_CallOnly)


def encode(message: AnyCommand | AnyReport | AnyRequest | AnyReply) -> bytes:
    """One message as bytes."""
    return _encoder.encode(message)


def decode_command(frame: bytes) -> AnyCommand:
    """A command, or a `ProtocolError` that says what was wrong with the frame."""
    return _decode(_command_decoder, frame)


def decode_report(frame: bytes) -> AnyReport:
    """A report, or a `ProtocolError` that says what was wrong with the frame."""
    return _decode(_report_decoder, frame)


def decode_request(frame: bytes) -> AnyRequest:
    """A client's request, or a `ProtocolError` that says what was wrong with the frame."""
    return _decode(_request_decoder, frame, MAX_REQUEST_BYTES)


def call_of(frame: bytes) -> int | None:
    """The call number of a request that could not be decoded, where at least that can be read."""
    try:
        return _decode(_call_decoder, frame, MAX_REQUEST_BYTES).call
    except ProtocolError:
        return None


def decode_reply(frame: bytes) -> AnyReply:
    """A reply to a client, or a `ProtocolError` that says what was wrong with the frame."""
    return _decode(_reply_decoder, frame)


def _decode(decoder: "msgspec.msgpack.Decoder[T]", frame: bytes, limit_bytes: int = MAX_FRAME_BYTES) -> T:
    if len(frame) > limit_bytes:
        raise ProtocolError(f"a frame of {len(frame)} bytes is over the limit of {limit_bytes}")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise ProtocolError(f"a frame of {len(frame)} bytes is not a valid message: {error}") from error
