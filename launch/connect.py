"""`gearshift run --connect`: the same prompt, answer and tables, by a group that runs already."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..proto.errors import InputError, RequestFailedError
from ..proto.ranges import LayerRange
from .console import busy, note, stderr_console, warn
from .prompts import PromptText, PromptTokens
from .settings.options import GROUP_FLAGS, flags_named, parse_layouts, parse_logit_bias
from .settings.settings import SAMPLING_SETTINGS, Settings, Source
from .settings.user_folders import current_settings

if TYPE_CHECKING:
    from ..proto.client import Client
    from ..proto.client_answer import AnswerResult

_FIELD_OF_SETTING = {"repeat_penalty": "repetition_penalty", "repeat_last_n": "penalty_window"}


STILL_LOADING = " (it is still being loaded: the answer comes after that)"


@dataclass(frozen=True, slots=True)
class RemoteRun:
    """What was asked for; sampling and layouts apart, for they may come from the user's settings."""

    address: str
    key_file: str | None
    prompt: PromptText | PromptTokens
    max_tokens: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    chat: bool
    system: str | None
    template_options: Mapping[str, object]
    logit_bias: tuple[str, ...]
    logprobs: int
    as_json: bool


def refuse_flags_of_the_group(arguments: Mapping[str, Any]) -> None:
    """A command's arguments by name: those that only a coordinator takes cannot go with --connect."""
    names = ("model", "template", *GROUP_FLAGS, "context", "trace", "measure", "restarts")
    given = [name for name, value in flags_named(names, arguments).items() if value is not None]
    if given:
        flags = ", ".join("MODEL" if name == "model" else f"--{name.replace('_', '-')}" for name in given)
        raise InputError(f"{flags} cannot be given with --connect: the coordinator was started with its own")


def open_client(address: str, key_file: str | None) -> "Client":
    """Connect. What keeps it waiting is told at once, and `ServerLostError` raised where nobody is there."""
    from ..proto.channel import split_address
    from ..proto.client import Client

    split_address(address)  # before the terminal is told of it
    with busy(f"looking for a coordinator at {address}"):
        return Client(address, key_file=key_file, tell=note)


def run_remotely(run: RemoteRun, flags: Mapping[str, object]) -> None:
    """Answer the prompt. `flags` by setting name."""
    if not run.chat and (run.system is not None or run.template_options):
        raise InputError("--system and --template-option belong to --chat")
    options = _options(run, current_settings(flags))
    with open_client(run.address, run.key_file) as client:
        note(f"connected to {run.address}: {client.model}" + (STILL_LOADING if client.was_loading else ""))
        _answer(client, run, options)


def _options(run: RemoteRun, chosen: Settings) -> dict[str, Any]:
    """The client's options: what the user set somewhere; all else is left to the coordinator."""
    options: dict[str, Any] = {
        "max_tokens": run.max_tokens,
        "stop": run.stop,
        "ignore_eos": run.ignore_eos,
        "logit_bias": parse_logit_bias("--logit-bias", run.logit_bias),
        "logprobs": run.logprobs,
        "template_options": dict(run.template_options),
    }
    options |= settings_options(chosen, ("prefill", "decode", "chunk", "verify_shift"))
    return options


def settings_options(chosen: Settings, further: Sequence[str]) -> dict[str, Any]:
    """Sampling and `further` settings as the client takes them, where the user set them; all else is the group's.

    `InputError` names the flag, variable or key of layouts and chunks that cannot be.
    """
    parse_layouts(chosen)
    options: dict[str, Any] = {}
    for name in (*(setting.name for setting in SAMPLING_SETTINGS), *further):
        value = chosen.values[name]
        if value.source is not Source.BUILT_IN:
            options[_FIELD_OF_SETTING.get(name, name)] = value.value
    if options.get("seed") == -1:
        del options["seed"]  # the coordinator draws one
    return options


def _prompt(run: RemoteRun) -> dict[str, Any]:
    match run.prompt:
        case PromptTokens(values=values, source=source):
            if run.chat:
                raise InputError("--chat takes text, by --prompt or --file: token ids are a prompt as it stands")
            if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
                raise InputError(f"{source} must hold whole numbers alone")
            return {"ids": values}
        case PromptText(text=text) if run.chat:
            system = [] if run.system is None else [{"role": "system", "content": run.system}]
            return {"messages": [*system, {"role": "user", "content": text}]}
        case PromptText(text=text):
            return {"text": text}


def _answer(client: "Client", run: RemoteRun, options: Mapping[str, Any]) -> None:
    from .answer import PlainText
    from .chat.terminal import ChatTerminal

    output = ChatTerminal() if run.chat else PlainText()
    with busy("waiting for the answer") as prompt_is_read, client.generate(**_prompt(run), **options) as answer:
        for piece in answer.pieces():
            prompt_is_read()
            if not run.as_json:
                output.show(piece)
        result = answer.result()
    if not run.as_json:
        output.end_answer()
    _tell(client, run, result, seed_is_drawn="seed" not in options)


def _tell(client: "Client", run: RemoteRun, told: "AnswerResult", seed_is_drawn: bool) -> None:
    from ..proto.ids import Rank
    from ..proto.reports import MemoryReported
    from .report import memory_table, phase_table, reason_lines, run_facts

    result = told.facts
    ranks = client.status().ranks
    placement = _Stages(tuple(LayerRange(rank.first_layer, rank.end_layer) for rank in ranks))
    memory = [
        MemoryReported(Rank(rank.rank), rank.planned_bytes, rank.peak_bytes, rank.anonymous_bytes) for rank in ranks
    ]
    if run.as_json:
        facts = run_facts(
            told.text, result, placement, told.start_seconds, told.load_seconds, memory, told.reasoning, seed=told.seed
        )
        print(json.dumps(facts, ensure_ascii=False))
    if result.warning is not None:
        warn(result.warning)
    if seed_is_drawn:
        note(f"seed {told.seed} (drawn by the coordinator)")
    for line in reason_lines(result):
        note(line)
    stderr_console().print(phase_table(result))
    stderr_console().print(memory_table(placement, memory, result))
    if result.error is not None:
        raise RequestFailedError(result.error)


@dataclass(frozen=True, slots=True)
class _Stages:
    stages: tuple[LayerRange, ...]
