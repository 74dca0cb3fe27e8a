"""MessagePack on the wire: the only place that knows it. Every message is validated against its class."""

import re
from typing import TypeVar

import msgspec

from .client_messages import AnyReply, AnyRequest
from .commands import AnyCommand
from .errors import InputError, ProtocolError
from .reports import AnyReport

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 256 << 20
MAX_REQUEST_BYTES = 8 << 20  # a client's message; what is longer is answered by an error

MAX_CHAT_VALUES = 200_000  # of messages, tools and template options: empty maps of a byte become 64 bytes each

MAX_FIELDS = 64  # of a client's message: far more than any has

T = TypeVar("T")


class _CallOnly(msgspec.Struct):
    """Of a request that cannot be taken: whom to tell."""

    call: int


# What of a request may be nested as its sender likes.
_CHAT_FIELDS = ("messages", "tools", "template_options")

# Bytes behind a value's first one, by that: a number's, or those that tell a text's or a container's length.
_NUMBER_BYTES = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8} | {
    0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,
}  # fmt: skip
_TEXT_LENGTH_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_LIST_LENGTH_BYTES = {0xDC: 2, 0xDD: 4}
_MAP_LENGTH_BYTES = {0xDE: 2, 0xDF: 4}
_LONG_TEXTS = (0xD9, 0xDA, 0xDB)

# What msgspec calls types, for whoever calls from Python; and what it says of a field, in these words.
_PYTHON_TYPES = {"array": "list", "object": "dict", "null": "None"}
_WIRE_TYPE = re.compile(r"\b(?:array|object|null)\b")
_WIRE_PLACE = re.compile(r"\$\.(?:sampling\.)?")
_WRONG_FIELD = re.compile(r"Expected (?P<wanted>.+), got (?P<given>\w+) - at (?P<field>[^ ]+)")

_encoder = msgspec.msgpack.Encoder()
_command_decoder = msgspec.msgpack.Decoder(AnyCommand)
_report_decoder = msgspec.msgpack.Decoder(AnyReport)
_request_decoder = msgspec.msgpack.Decoder(AnyRequest)
_reply_decoder = msgspec.msgpack.Decoder(AnyReply)
_fields_decoder = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])  # not built
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
    if len(frame) <= MAX_REQUEST_BYTES:
        fields = _fields(frame)
        if sum(_count_values(fields[name]) for name in _CHAT_FIELDS if name in fields) > MAX_CHAT_VALUES:
            raise ProtocolError(
                f"a frame of {len(frame)} bytes holds more than {MAX_CHAT_VALUES} values in messages, tools and "
                "template_options"
            )
    return _decode(_request_decoder, frame, MAX_REQUEST_BYTES)


def refuse_wrong_fields(frame: bytes) -> None:
    """`InputError` for a request of one's own with a value of a wrong type, by the field's name and Python's types."""
    try:
        _request_decoder.decode(frame)
    except msgspec.ValidationError as error:
        told = _WIRE_PLACE.sub("", str(error)).translate({ord("`"): None}).replace(" | ", " or ")
        told = _WIRE_TYPE.sub(lambda kind: _PYTHON_TYPES[kind[0]], told)
        found = _WRONG_FIELD.fullmatch(told)
        raise InputError(f"{found['field']} takes {found['wanted']}, not {found['given']}" if found else told) from None


def call_of(frame: bytes) -> int | None:
    """The call number of a request that could not be decoded, where at least that can be read."""
    try:
        return _decode(_call_decoder, frame, MAX_REQUEST_BYTES).call
    except ProtocolError:
        return None


def decode_reply(frame: bytes) -> AnyReply:
    """A reply to a client, or a `ProtocolError` that says what was wrong with the frame."""
    return _decode(_reply_decoder, frame)


def _fields(frame: bytes) -> dict[str, msgspec.Raw]:
    """A request's fields, each as it lies in the frame, and none twice: only the last would be looked at here."""
    head, width = frame[0] if frame else 0, _MAP_LENGTH_BYTES.get(frame[0] if frame else 0, 0)
    count = int.from_bytes(frame[1 : 1 + width]) if width else head & 0x0F
    if count > MAX_FIELDS:
        raise ProtocolError(f"a frame of {len(frame)} bytes holds {count} fields; at most {MAX_FIELDS} can be")
    fields = _decode(_fields_decoder, frame)
    if len(fields) < count:
        raise ProtocolError(f"a frame of {len(frame)} bytes holds a field twice")
    return fields


def _count_values(raw: msgspec.Raw) -> int:
    """Values of whole MessagePack, counted before they are built; no further than one beyond `MAX_CHAT_VALUES`.

    Raises `ProtocolError` where a map's key is no text, as in JSON: lists of numbers as keys can be chosen so that all
    have one hash, and each then costs as much time as there are others.
    https://github.com/msgpack/msgpack/blob/master/spec.md
    """
    data, position, count = memoryview(raw), 0, 0
    left, is_map = 1, False  # of the container that is being read; a map's values count twice
    outer: list[tuple[int, bool]] = []
    while count <= MAX_CHAT_VALUES:
        if not left:
            if not outer:
                break
            left, is_map = outer.pop()
            continue
        head, position, count = data[position], position + 1, count + 1
        is_text = 0xA0 <= head <= 0xBF or head in _LONG_TEXTS
        if is_map and left % 2 == 0 and not is_text:
            raise ProtocolError("messages, tools and template_options: a map's keys must be texts")
        left -= 1
        inner, opens_map = 0, 0x80 <= head <= 0x8F or head in _MAP_LENGTH_BYTES
        if 0x80 <= head <= 0x9F:
            inner = head & 0x0F
        elif 0xA0 <= head <= 0xBF:
            position += head & 0x1F
        elif head in _NUMBER_BYTES:
            position += _NUMBER_BYTES[head]
        elif width := _TEXT_LENGTH_BYTES.get(head):
            extension = 0xC7 <= head <= 0xC9  # has a byte of its kind more
            position += width + int.from_bytes(data[position : position + width]) + extension
        elif width := _LIST_LENGTH_BYTES.get(head) or _MAP_LENGTH_BYTES.get(head):
            inner = int.from_bytes(data[position : position + width])
            position += width
        if inner:
            outer.append((left, is_map))
            left, is_map = inner * (1 + opens_map), opens_map
    return count


def _decode(decoder: "msgspec.msgpack.Decoder[T]", frame: bytes, limit_bytes: int = MAX_FRAME_BYTES) -> T:
    if len(frame) > limit_bytes:
        raise ProtocolError(f"a frame of {len(frame)} bytes is over the limit of {limit_bytes}")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise ProtocolError(f"a frame of {len(frame)} bytes is not a valid message: {error}") from error
