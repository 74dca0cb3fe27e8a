"""Where a prompt comes from: exactly one of a flag's text, a text file, a token file."""

from dataclasses import dataclass

from ..proto.errors import InputError
from .inputs import read_text, read_tokens


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt still to be tokenised."""

    text: str


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A prompt given as ids; `source` names where they came from, for errors."""

    tokens: tuple[int, ...]
    source: str


def read_prompt(text: str | None, file: str | None, tokens_file: str | None) -> PromptText | PromptTokens:
    """The prompt, from the one flag that was given."""
    given = [
        flag
        for flag, value in (("--prompt", text), ("--file", file), ("--tokens-file", tokens_file))
        if value is not None
    ]
    if len(given) != 1:
        have = f"not {' and '.join(given)} together" if given else "none was given"
        raise InputError(f"give the prompt by one of --prompt, --file and --tokens-file; {have}")
    if tokens_file is not None:
        return PromptTokens(read_tokens(tokens_file), tokens_file)
    return PromptText(read_prompt_text(text, file))


def read_prompt_text(text: str | None, file: str | None) -> str:
    """The text of `--prompt` or `--file`."""
    if (text is None) == (file is None):
        raise InputError("give the text by one of --prompt and --file")
    if file is not None:
        return read_text(file)
    assert text is not None
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        # Arguments that are not UTF-8 reach Python as lone surrogates.
        raise InputError(f"--prompt is not UTF-8 text at character {error.start}") from None
    return text
