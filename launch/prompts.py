"""Where a prompt comes from: exactly one of a flag's text, a text file, a token file; and how it becomes ids."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..proto.errors import InputError
from .console import note
from .inputs import read_text, read_token_list

if TYPE_CHECKING:
    from ..coordinator.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt still to be tokenised."""

    text: str


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A prompt given as ids, not checked yet; `source` names where they came from."""

    values: tuple[object, ...]
    source: str


def read_prompt(text: str | None, file: str | None, tokens_file: str | None) -> PromptText | PromptTokens:
    """The prompt, from the one flag that was given."""
    _refuse_all_but_one("prompt", {"--prompt": text, "--file": file, "--tokens-file": tokens_file})
    if tokens_file is not None:
        return PromptTokens(tuple(read_token_list(tokens_file)), tokens_file)
    return PromptText(read_prompt_text(text, file))


def read_text_or_tokens(file: str | None, tokens_file: str | None) -> PromptText | PromptTokens:
    """The text of a command that takes none on its command line."""
    _refuse_all_but_one("text", {"--file": file, "--tokens-file": tokens_file})
    return read_prompt(None, file, tokens_file)


def read_prompt_text(text: str | None, file: str | None) -> str:
    """The text of `--prompt` or `--file`."""
    _refuse_all_but_one("text", {"--prompt": text, "--file": file})
    if file is not None:
        return read_text(file)
    return text or ""


def _refuse_all_but_one(what: str, by_flag: Mapping[str, str | None]) -> None:
    """`InputError` that names the flags, unless exactly one was given."""
    given = [flag for flag, value in by_flag.items() if value is not None]
    if len(given) != 1:
        *others, last = by_flag
        have = f"not {' and '.join(given)} together" if given else "none was given"
        raise InputError(f"give the {what} by one of {', '.join(others)} and {last}; {have}")


def prompt_tokens(prompt: PromptText | PromptTokens, tokenizer: "Tokenizer", vocab: int) -> tuple[int, ...]:
    """The prompt's ids, all of them below `vocab`. Nothing at all becomes BOS alone, where the model has one."""
    from ..coordinator.tokenizer import check_token_ids

    match prompt:
        case PromptText(text=text):
            ids, source = tokenizer.encode(text), "the prompt"
        case PromptTokens(values=values, source=source):
            ids = []
            try:
                ids = check_token_ids(values, vocab)
            except InputError as error:
                raise InputError(f"{source}: {error}") from None
    if not ids and tokenizer.bos is not None:
        note("empty prompt: the answer starts from the begin-of-text token alone")
        ids = [tokenizer.bos]
    if not ids:
        raise InputError(f"{source} is empty, and this model has no begin-of-text token to start from")
    if max(ids) >= vocab:
        raise InputError(f"{source}: token {max(ids)} is beyond the model's {vocab} embedded tokens")
    return tuple(ids)
