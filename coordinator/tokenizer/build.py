"""From a file's metadata to its tokenizer."""

from collections.abc import Mapping

from ...proto.errors import ModelFileError, UnsupportedModelError
from ...proto.shown import shown
from .byte_level import build_byte_level, read_pre_tokenizing
from .partition import Partition
from .scored_merges import ScoredMergeModel, byte_of_text
from .special_tokens import Defaults, SpecialTokens, flag, read_special_tokens
from .tokenizer import TextModel, Tokenizer
from .vocabulary import EMPTY_VOCABULARY, TOKENS_KEY, TokenKind, Vocabulary, read_vocabulary

MODEL_KEY = "tokenizer.ggml.model"
KNOWN_MODELS = ("llama", "gpt2")
_NO_MODEL = (None, "none", "no_vocab")

# Ids 0, 1 and 2 where a file names none: Llama's, as in the reference. For "gpt2" that has 11, right for one old model
# family only: here such a file has no BOS and no EOS, and a warning says so where it matters.
_SCORED_DEFAULTS = Defaults(bos=1, eos=2, unknown=0, add_bos=True, space_prefix=True)


def build_tokenizer(metadata: Mapping[str, object]) -> Tokenizer:
    """The tokenizer a GGUF file's metadata describes.

    Raises UnsupportedModelError for a kind or pre-tokenizer not known here, by name, and ModelFileError for tables that
    are missing or make no sense. What is odd but usable is told in `Tokenizer.warnings`.
    """
    model = metadata.get(MODEL_KEY)
    if model is not None and not isinstance(model, str):
        raise ModelFileError(f"{MODEL_KEY} is not a string")
    if model in _NO_MODEL:
        return _without_text(metadata)
    if model == "llama":
        return _scored(metadata)
    if model == "gpt2":
        return _byte_level(metadata)
    known = ", ".join(KNOWN_MODELS)
    raise UnsupportedModelError(
        f"tokenizers of kind {shown(model)} ({MODEL_KEY}) are not known here; known are {known}"
    )


def _scored(metadata: Mapping[str, object]) -> Tokenizer:
    vocabulary = read_vocabulary(metadata)
    special = read_special_tokens(metadata, vocabulary, len(vocabulary), _SCORED_DEFAULTS)
    _check_byte_tokens(vocabulary, special.kinds)
    model = ScoredMergeModel(vocabulary, special.unknown)
    space_prefix = flag(metadata, "add_space_prefix", _SCORED_DEFAULTS.space_prefix)
    return _tokenizer(metadata, vocabulary, special, model, space_prefix=space_prefix)


def _byte_level(metadata: Mapping[str, object]) -> Tokenizer:
    pre, warning = read_pre_tokenizing(metadata)
    vocabulary = read_vocabulary(metadata)
    special = read_special_tokens(metadata, vocabulary, len(vocabulary), Defaults(add_bos=pre.add_bos))
    model = build_byte_level(metadata, vocabulary, pre)
    return _tokenizer(metadata, vocabulary, special, model, warning=warning)


def _without_text(metadata: Mapping[str, object]) -> Tokenizer:
    architecture = metadata.get("general.architecture")
    size = metadata.get(f"{architecture}.vocab_size", 0)
    vocab_size = size if isinstance(size, int) else 0
    special = read_special_tokens(metadata, EMPTY_VOCABULARY, vocab_size or 2**31, Defaults())
    return _tokenizer(metadata, EMPTY_VOCABULARY, special, None, vocab_size=vocab_size)


def _tokenizer(
    metadata: Mapping[str, object],
    vocabulary: Vocabulary,
    special: SpecialTokens,
    model: TextModel | None,
    *,
    space_prefix: bool = False,
    vocab_size: int | None = None,
    warning: str | None = None,
) -> Tokenizer:
    warnings = [*special.warnings] if warning is None else [warning, *special.warnings]
    return Tokenizer(
        vocabulary=vocabulary,
        special=special,
        text_model=model,
        partition=Partition(vocabulary, special.kinds),
        space_prefix=space_prefix,
        vocab_size=len(vocabulary) if vocab_size is None else vocab_size,
        warnings=tuple(warnings),
    )


def _check_byte_tokens(vocabulary: Vocabulary, kinds: bytes) -> None:
    token_id = kinds.find(TokenKind.BYTE)
    while token_id != -1:
        if byte_of_text(vocabulary.texts[token_id]) is None:
            raise ModelFileError(
                f"{TOKENS_KEY}: token {token_id} is a byte token and reads {shown(vocabulary.texts[token_id])}; such a "
                "token names its byte in two digits, as in <0x0A>"
            )
        token_id = kinds.find(TokenKind.BYTE, token_id + 1)
