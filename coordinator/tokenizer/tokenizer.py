"""The tokenizer of one model file: special tokens, prefix and order here, merging in the text models."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...proto.errors import InputError
from ...proto.shown import shown
from .partition import Partition
from .scored_merges import byte_of_text
from .special_tokens import SpecialTokens
from .vocabulary import TokenKind, Vocabulary

_NO_TOKENIZER = "this model file holds no tokenizer: give token ids instead of text, and ask for ids back"


class TextModel(Protocol):
    """Merging: plain text to ids, and a normal token's text to bytes."""

    def encode(self, text: str) -> list[int]: ...

    def spelled_bytes(self, text: str) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Text to ids and back. Frozen; safe to share.

    A file without a tokenizer gives one with `has_text` false: what needs text raises InputError, ids still work.
    """

    vocabulary: Vocabulary
    special: SpecialTokens
    text_model: TextModel | None
    partition: Partition
    space_prefix: bool
    vocab_size: int
    warnings: tuple[str, ...]

    @property
    def has_text(self) -> bool:
        return self.text_model is not None

    @property
    def bos(self) -> int | None:
        return self.special.bos

    @property
    def eos(self) -> int | None:
        return self.special.eos

    @property
    def end_of_generation(self) -> frozenset[int]:
        """Any of these ends an answer and is no part of it."""
        return self.special.end_of_generation

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of a text.

        `add_special`: BOS and EOS as the file asks. `parse_special`: control tokens spelled out in the text become
        those tokens; else they stay text. User-defined tokens are always found. Raises InputError for lone surrogates.
        """
        ids = list[int]()
        if add_special and self.special.add_bos and self.special.bos is not None:
            ids.append(self.special.bos)
        ids += self._encode_pieces(text, parse_special, ())
        if add_special and self.special.add_eos and self.special.eos is not None:
            ids.append(self.special.eos)
        return ids

    def encode_chat(self, text: str, literal: Collection[int] = ()) -> list[int]:
        """Ids of what a chat template wrote; no control token covers a character at the places `literal`.

        BOS comes first where the file asks for it and the text does not begin with it. No EOS: an answer follows.
        """
        ids = self._encode_pieces(text, True, literal)
        if self.special.add_bos and self.special.bos is not None and ids[:1] != [self.special.bos]:
            ids.insert(0, self.special.bos)
        return ids

    def _encode_pieces(self, text: str, parse_special: bool, literal: Collection[int]) -> list[int]:
        model = self._require_text()
        _check_unicode(text)
        ids = list[int]()
        # The prefix belongs to raw text's very start: never a space behind a special token that the user did not type.
        prefix = " " if self.space_prefix else ""
        for piece in self.partition.split(text, parse_special=parse_special, literal=literal):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += model.encode(prefix + piece)
            prefix = ""
        return ids

    def token_bytes(self, token_id: int, *, render_special: bool = False) -> bytes:
        """What a token adds to the output: often no whole character. Control tokens add nothing unless rendered.

        An answer is the plain sequence of these; with no tokenizer in the file every token adds nothing.
        """
        if self.text_model is None:
            return b""
        text = self.token_text(token_id)
        match self.special.kinds[token_id]:
            case TokenKind.NORMAL:
                return self.text_model.spelled_bytes(text)
            case TokenKind.USER_DEFINED:
                return self.vocabulary.raw_bytes(token_id)
            case TokenKind.CONTROL | TokenKind.UNKNOWN:
                return self.vocabulary.raw_bytes(token_id) if render_special else b""
            case TokenKind.BYTE:
                byte = byte_of_text(text)
                return self.vocabulary.raw_bytes(token_id) if byte is None else bytes([byte])
            case _:
                return b""

    def token_text(self, token_id: int) -> str:
        """The token's text as the file spells it. Raises InputError for an id that is none."""
        self._require_text()
        if not 0 <= token_id < self.vocab_size:
            raise InputError(
                f"{token_id} is no token id of this model: ids go from 0 to {self.vocab_size - 1}"
            )
        return self.vocabulary.texts[token_id]

    def decode(self, ids: Iterable[int], *, render_special: bool = True) -> str:
        """The text that `encode` was given, for ids without BOS: one prefixed space is taken off again.

        Invalid UTF-8 becomes U+FFFD. An answer continues a prompt and goes through TextStream instead.
        """
        self._require_text()
        parts = [self.token_bytes(token_id, render_special=render_special) for token_id in ids]
        if self.space_prefix and parts:
            parts[0] = parts[0].removeprefix(b" ")
        return b"".join(parts).decode("utf-8", "replace")

    def _require_text(self) -> TextModel:
        if self.text_model is None:
            raise InputError(_NO_TOKENIZER)
        return self.text_model


def check_token_ids(ids: Sequence[object], vocab_size: int) -> list[int]:
    """A user's token ids, each a whole number in [0, vocab_size). Raises InputError naming the first bad one."""
    checked = list[int]()
    for position, token_id in enumerate(ids):
        # bool is an int in Python, but True is no token.
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise InputError(f"token {position} of the prompt is {shown(token_id)}, not a whole number")
        if not 0 <= token_id < vocab_size:
            raise InputError(
                f"token {position} of the prompt is {shown(token_id)}; ids go from 0 to {vocab_size - 1}"
            )
        checked.append(token_id)
    return checked


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text is not Unicode: character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}"
        ) from error
