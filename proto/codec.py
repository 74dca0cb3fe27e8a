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

MAX_CHAT_VALUES = 200_000  # of messages, tools and template options: empty maps of a byte become 64 bytes each

T = TypeVar("T")


class _CallOnly(msgspec.Struct):
    """Of a request that cannot be taken: whom to tell."""

    call: int


class _Chat(msgspec.Struct):
    """What of a request may be nested as its sender likes, not built."""

    messages: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    template_options: msgspec.Raw = msgspec.Raw()


# Bytes behind a value's first one, by that: a number's, or those that tell a text's or a container's length.
_NUMBER_BYTES = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8} | {
    0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,
}  # fmt: skip
_TEXT_LENGTH_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_LIST_LENGTH_BYTES = {0xDC: 2, 0xDD: 4}
_MAP_LENGTH_BYTES = {0xDE: 2, 0xDF: 4}

_encoder = msgspec.msgpack.Encoder()
_command_decoder = msgspec.msgpack.Decoder(AnyCommand)
_report_decoder = msgspec.msgpack.Decoder(AnyReport)
_request_decoder = msgspec.msgpack.Decoder(AnyRequest)
_reply_decoder = msgspec.msgpack.Decoder(AnyReply)
_chat_decoder = msgspec.msgpack.Decoder(_Chat)
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
    if MAX_CHAT_VALUES < len(frame) <= MAX_REQUEST_BYTES:
        chat = _decode(_chat_decoder, frame)
        if sum(_count_values(one) for one in (chat.messages, chat.tools, chat.template_options)) > MAX_CHAT_VALUES:
            raise ProtocolError(
                f"a frame of {len(frame)} bytes holds more than {MAX_CHAT_VALUES} values in messages, tools and "
                "template_options"
            )
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


def _count_values(raw: msgspec.Raw) -> int:
    """Values of whole MessagePack, counted before they are built; no further than one beyond `MAX_CHAT_VALUES`.

    https://github.com/msgpack/msgpack/blob/master/spec.md
    """
    data = memoryview(raw)
    position, left, count = 0, 1 if len(data) else 0, 0
    while left and count <= MAX_CHAT_VALUES:
        head, position, left, count = data[position], position + 1, left - 1, count + 1
        if 0x80 <= head <= 0x8F:
            left += 2 * (head & 0x0F)
        elif 0x90 <= head <= 0x9F:
            left += head & 0x0F
        elif 0xA0 <= head <= 0xBF:
            position += head & 0x1F
        elif head in _NUMBER_BYTES:
            position += _NUMBER_BYTES[head]
        elif width := _TEXT_LENGTH_BYTES.get(head):
            extension = 0xC7 <= head <= 0xC9  # has a byte of its kind more
            position += width + int.from_bytes(data[position : position + width]) + extension
        elif width := _LIST_LENGTH_BYTES.get(head):
            left += int.from_bytes(data[position : position + width])
            position += width
        elif width := _MAP_LENGTH_BYTES.get(head):
            left += 2 * int.from_bytes(data[position : position + width])
            position += width
    return count


def _decode(decoder: "msgspec.msgpack.Decoder[T]", frame: bytes, limit_bytes: int = MAX_FRAME_BYTES) -> T:
    if len(frame) > limit_bytes:
        raise ProtocolError(f"a frame of {len(frame)} bytes is over the limit of {limit_bytes}")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise ProtocolError(f"a frame of {len(frame)} bytes is not a valid message: {error}") from error
