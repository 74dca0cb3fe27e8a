"""Byte-level BPE (GPT-2 and after), on the `tokenizers` library.

Patterns, names and defaults are those of the reference (llama.cpp, src/llama-vocab.cpp, `llm_tokenizer_bpe`). A text
is cut by each pattern in turn: what matches and what lies between are pieces, and the next pattern cuts those.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from tokenizers import Regex
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split

from ...proto.errors import ModelFileError, UnsupportedModelError
from ...proto.shown import shown
from .vocabulary import Vocabulary, text_list

PRE_KEY = "tokenizer.ggml.pre"
MERGES_KEY = "tokenizer.ggml.merges"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class PreTokenizing:
    """How a text is cut before merges, and what else the name of a pre-tokenizer decides."""

    patterns: tuple[str, ...]
    whole_tokens_first: bool = False  # a piece that is a token is taken as it is, without merges
    add_bos: bool = False  # where the file does not say


_LLAMA3 = PreTokenizing(
    (rf"(?:{_CONTRACTIONS})|{_WORDS}|\p{{N}}{{1,3}}|{_MARKS_AND_SPACES}",),
    whole_tokens_first=True,
    add_bos=True,
)
_QWEN2 = PreTokenizing((rf"(?:{_CONTRACTIONS})|{_WORDS}|\p{{N}}|{_MARKS_AND_SPACES}",))

PRE_TOKENIZERS: Mapping[str, PreTokenizing] = {
    "default": PreTokenizing((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizing((_GPT2,)),
    "smollm": PreTokenizing((r"\p{N}", _GPT2)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
KNOWN_PRE_TOKENIZERS = tuple(PRE_TOKENIZERS)


def read_pre_tokenizing(metadata: Mapping[str, object]) -> tuple[PreTokenizing, str | None]:
    """The pre-tokenizer the file names, and a warning where it names none. An unknown name is refused."""
    name = metadata.get(PRE_KEY)
    if name is not None and not isinstance(name, str):
        raise ModelFileError(f"{PRE_KEY} is not a string")
    if not name:
        return PRE_TOKENIZERS["default"], (
            f"{PRE_KEY} IS MISSING: 'default' is used, and answers may be worse for it; "
            "convert the model again with a newer converter"
        )
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"the pre-tokenizer {shown(name)} ({PRE_KEY}) is not known here; known are "
            f"{', '.join(KNOWN_PRE_TOKENIZERS)}"
        )
    return PRE_TOKENIZERS[name], None


class ByteLevelModel:
    """Merges of byte-level BPE; token texts spell each byte as one character."""

    def __init__(self, vocabulary: Vocabulary, merges: list[tuple[str, str]], pre: PreTokenizing) -> None:
        model = BPE(vocab=_library_vocab(vocabulary), merges=merges, ignore_merges=pre.whole_tokens_first)
        self._library = LibraryTokenizer(model)
        self._library.pre_tokenizer = library_pre_tokenizer(pre)

    def encode(self, text: str) -> list[int]:
        """Ids of a text without special tokens; bytes that the vocabulary lacks are left out, as in the reference."""
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids

    def spelled_bytes(self, text: str) -> bytes:
        """The bytes a normal token stands for; characters outside the byte alphabet stand for themselves."""
        bytes_of = _bytes_of_characters()
        parts = (
            bytes_of.get(character) or character.encode("utf-8", "surrogateescape") for character in text
        )
        return b"".join(parts)


def build_byte_level(
    metadata: Mapping[str, object], vocabulary: Vocabulary, pre: PreTokenizing
) -> ByteLevelModel:
    """Raises ModelFileError where the merges are missing or the library refuses them."""
    merges = _merges(text_list(metadata, MERGES_KEY), vocabulary)
    try:
        return ByteLevelModel(vocabulary, merges, pre)
    except (ValueError, TypeError, OverflowError) as error:
        raise ModelFileError(f"the tokenizer's vocabulary or merges cannot be used: {error}") from error


def library_pre_tokenizer(pre: PreTokenizing) -> PreTokenizer:
    """The cuts, and last the spelling of bytes as characters."""
    cuts: list[PreTokenizer] = [Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
    return Sequence([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])


def _merges(lines: list[str], vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Pairs by falling rank; the first of equal pairs counts. A merge into what is no token can never be used."""
    ids = vocabulary.ids
    pairs: dict[tuple[str, str], None] = {}
    for line in lines:
        left, space, right = line[1:].partition(" ")  # the first character may itself be a space
        left = line[:1] + left
        if space and left in ids and right in ids and left + right in ids:
            pairs[left, right] = None
    return list(pairs)


def _library_vocab(vocabulary: Vocabulary) -> dict[str, int]:
    """The library takes Unicode only; texts that are not UTF-8 spell no bytes and cannot be reached by merges."""
    try:
        "".join(vocabulary.texts).encode()
    except UnicodeEncodeError:
        return {text: token_id for text, token_id in vocabulary.ids.items() if not _has_surrogates(text)}
    return dict(vocabulary.ids)


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


@cache
def _bytes_of_characters() -> Mapping[str, bytes]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    codes = [*plain, *range(256, 256 + len(others))]
    return {chr(code): bytes([byte]) for code, byte in zip(codes, plain + others, strict=True)}
