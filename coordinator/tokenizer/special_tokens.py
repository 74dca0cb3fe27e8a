"""BOS, EOS, the ends of an answer, and token kinds that files are known to get wrong.

The rules, by text too, are the reference's (llama.cpp, src/llama-vocab.cpp, `llama_vocab::impl::load`): a converter
that marked `<|im_end|>` a normal token would else print it and never stop.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ...proto.errors import ModelFileError
from .vocabulary import TokenKind, Vocabulary

PREFIX = "tokenizer.ggml."

# Tokens with these texts end an answer and are control tokens, whatever the file calls them.
_ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
)
_ALWAYS_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


@dataclass(frozen=True, slots=True)
class _FillInToken:
    """A token of fill-in-the-middle prompts: the keys that may name it, else its texts, the first that is there."""

    keys: tuple[str, ...]
    texts: tuple[str, ...]
    ends_answer: bool


_FILL_IN = (
    _FillInToken(
        ("fim_pre_token_id", "prefix_token_id"),
        (
            *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
            *("<|code_prefix|>", "<|prefix|>"),
        ),
        False,
    ),
    _FillInToken(
        ("fim_suf_token_id", "suffix_token_id"),
        (
            *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
            *("<|code_suffix|>", "<|suffix|>"),
        ),
        False,
    ),
    _FillInToken(
        ("fim_mid_token_id", "middle_token_id"),
        (
            *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
            *("<|code_middle|>", "<|middle|>"),
        ),
        False,
    ),
    _FillInToken(("fim_pad_token_id",), ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"), True),
    _FillInToken(
        ("fim_rep_token_id",), ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"), True
    ),
    _FillInToken(("fim_sep_token_id",), ("<|file_sep|>",), True),
)


@dataclass(frozen=True, slots=True)
class Defaults:
    """What holds where the file is silent; it depends on the tokenizer's model."""

    bos: int | None = None
    eos: int | None = None
    unknown: int | None = None
    add_bos: bool = False
    space_prefix: bool = False


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Ids with a meaning; `bos` and `eos` may be absent, and then nothing is added in their place."""

    bos: int | None
    eos: int | None
    unknown: int | None
    add_bos: bool
    add_eos: bool
    end_of_generation: frozenset[int]
    kinds: bytes  # the vocabulary's, corrected
    warnings: tuple[str, ...]


def read_special_tokens(
    metadata: Mapping[str, object], vocabulary: Vocabulary, vocab_size: int, defaults: Defaults
) -> SpecialTokens:
    """`vocab_size` bounds the ids; it is larger than the vocabulary where the file has no tokenizer."""
    return _Reading(metadata, vocabulary, vocab_size).special_tokens(defaults)


def flag(metadata: Mapping[str, object], name: str, default: bool) -> bool:
    """A yes-or-no key of the tokenizer."""
    value = metadata.get(PREFIX + name, default)
    if not isinstance(value, bool):
        raise ModelFileError(f"{PREFIX}{name} is not a bool")
    return value


class _Reading:
    """Collects kinds and warnings while the keys are read."""

    def __init__(self, metadata: Mapping[str, object], vocabulary: Vocabulary, vocab_size: int) -> None:
        self.metadata = metadata
        self.ids = vocabulary.ids
        self.vocab_size = vocab_size
        self.kinds = bytearray(vocabulary.kinds)
        self.warnings: list[str] = []

    def special_tokens(self, defaults: Defaults) -> SpecialTokens:
        bos = self.token("bos_token_id", defaults.bos)
        eos = self.token("eos_token_id", defaults.eos)
        unknown = self.token("unknown_token_id", defaults.unknown)
        ends = self.ends_by_text() | self.fill_in_ends()
        for text in _ALWAYS_SHOWN:
            self.mark(self.ids.get(text), TokenKind.USER_DEFINED)
        for token_id in (eos, self.token("eot_token_id"), self.token("eom_token_id")):
            if token_id is not None:
                ends.add(token_id)
        self.take_back_false_ends(ends)
        return SpecialTokens(
            bos=bos,
            eos=eos,
            unknown=unknown,
            add_bos=self.adds("add_bos_token", defaults.add_bos, bos, "BOS"),
            add_eos=self.adds("add_eos_token", False, eos, "EOS"),
            end_of_generation=frozenset(ends),
            kinds=bytes(self.kinds),
            warnings=tuple(self.warnings),
        )

    def token(self, name: str, default: int | None = None) -> int | None:
        if default is not None and default >= self.vocab_size:
            default = None
        value = self.metadata.get(PREFIX + name)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelFileError(f"{PREFIX}{name} is not a token id")
        if not 0 <= value < self.vocab_size:
            instead = "none" if default is None else str(default)
            self.warnings.append(
                f"{PREFIX}{name} is {value}, but ids end at {self.vocab_size - 1}: {instead} is used instead"
            )
            return default
        return value

    def adds(self, name: str, default: bool, token_id: int | None, what: str) -> bool:
        wanted = flag(self.metadata, name, default)
        if wanted and token_id is None:
            self.warnings.append(
                f"the tokenizer asks for a {what} token to be added, but the file names none"
            )
            return False
        return wanted

    def mark(self, token_id: int | None, kind: TokenKind) -> None:
        if token_id is not None:
            self.kinds[token_id] = kind

    def ends_by_text(self) -> set[int]:
        ends = {self.ids[text] for text in _ENDS if text in self.ids}
        for token_id in ends:
            self.mark(token_id, TokenKind.CONTROL)
        return ends

    def fill_in_ends(self) -> set[int]:
        ends = set[int]()
        for entry in _FILL_IN:
            token_id = next((found for key in entry.keys if (found := self.token(key)) is not None), None)
            if token_id is None:
                token_id = next((self.ids[text] for text in entry.texts if text in self.ids), None)
                self.mark(token_id, TokenKind.CONTROL)
            if entry.ends_answer and token_id is not None:
                ends.add(token_id)
        return ends

    def take_back_false_ends(self, ends: set[int]) -> None:
        """Formats with channels use `<|end|>` inside an answer, and files with `<|tool_response>` know no `</s>`."""

        def ended_by(text: str) -> bool:
            return self.ids.get(text) in ends

        calls = ended_by("<|call|>") or ended_by("<|calls|>")
        if ended_by("<|end|>") and calls and (ended_by("<|return|>") or ended_by("<|flush|>")):
            ends.discard(self.ids["<|end|>"])
            self.mark(self.ids["<|end|>"], TokenKind.USER_DEFINED)
        if ended_by("<|tool_response>") and ended_by("</s>"):
            ends.discard(self.ids["</s>"])
            self.mark(self.ids["</s>"], TokenKind.NORMAL)
