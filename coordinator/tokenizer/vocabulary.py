"""The token table of a GGUF file: a text, a kind and a score per id."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from ...proto.errors import ModelFileError
from ...proto.shown import shown
from ...proto.words import counted

TOKENS_KEY = "tokenizer.ggml.tokens"
KINDS_KEY = "tokenizer.ggml.token_type"
SCORES_KEY = "tokenizer.ggml.scores"


class TokenKind(IntEnum):
    """`tokenizer.ggml.token_type` of the GGUF format."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Ids run from 0 to `len(texts) - 1`; no text appears twice.

    A text whose bytes are not UTF-8 holds them as surrogates ("surrogateescape").
    """

    texts: Sequence[str]
    kinds: bytes  # a TokenKind per id
    scores: NDArray[np.float32]
    ids: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.texts)

    def raw_bytes(self, token_id: int) -> bytes:
        """The token's text as the file's bytes."""
        return self.texts[token_id].encode("utf-8", "surrogateescape")


EMPTY_VOCABULARY = Vocabulary((), b"", np.zeros(0, np.float32), {})


def read_vocabulary(metadata: Mapping[str, object]) -> Vocabulary:
    """Raises ModelFileError where the table is missing, of a wrong type, too short, or names a text twice."""
    texts = text_list(metadata, TOKENS_KEY)
    # The reference names empty tokens so too: an empty text would match everywhere.
    texts = [text or f"[EMPTY_{token_id}]" for token_id, text in enumerate(texts)] if "" in texts else texts
    if not texts:
        raise ModelFileError(f"{TOKENS_KEY} is empty: the tokenizer has no tokens")
    ids = {text: token_id for token_id, text in enumerate(texts)}
    if len(ids) != len(texts):
        raise ModelFileError(f"{TOKENS_KEY} holds the same text twice: {shown(_first_duplicate(texts))}")
    return Vocabulary(texts, _kinds(metadata, len(texts)), _scores(metadata, len(texts)), ids)


def text_list(metadata: Mapping[str, object], key: str) -> list[str]:
    """A metadata value that must be an array of strings."""
    value = metadata.get(key)
    if value is None:
        raise ModelFileError(f"{key} is missing, and this kind of tokenizer needs it")
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        raise ModelFileError(f"{key} is not an array of strings")
    return value if isinstance(value, list) else list(value)


def _first_duplicate(texts: Sequence[str]) -> str:
    seen = set[str]()
    for text in texts:
        if text in seen:
            return text
        seen.add(text)
    return ""


def _kinds(metadata: Mapping[str, object], count: int) -> bytes:
    values = _numbers(metadata, KINDS_KEY, count, "iu")
    if values is None:
        return bytes([TokenKind.NORMAL]) * count
    kinds = values.astype(np.int64)
    known = (kinds >= TokenKind.UNDEFINED) & (kinds <= TokenKind.BYTE)
    return np.where(known, kinds, TokenKind.UNDEFINED).astype(np.uint8).tobytes()


def _scores(metadata: Mapping[str, object], count: int) -> NDArray[np.float32]:
    values = _numbers(metadata, SCORES_KEY, count, "iuf")
    if values is None:
        return np.zeros(count, np.float32)
    with np.errstate(over="ignore"):
        scores = values.astype(np.float32)
    if np.isnan(scores).any():
        raise ModelFileError(f"{SCORES_KEY} holds a NaN: no order of merges follows from it")
    return scores


def _numbers(
    metadata: Mapping[str, object], key: str, count: int, dtype_kinds: str
) -> NDArray[np.generic] | None:
    """The first `count` numbers of an array, None where the key is absent."""
    value = metadata.get(key)
    if value is None:
        return None
    try:
        numbers = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise ModelFileError(f"{key} is not an array of numbers: {error}") from error
    if numbers.ndim != 1 or numbers.dtype.kind not in dtype_kinds:
        raise ModelFileError(f"{key} is not an array of numbers of its kind")
    if len(numbers) < count:
        raise ModelFileError(f"{key} holds {counted(len(numbers), 'value')} for {counted(count, 'token')}")
    return numbers[:count]
