"""`gearshift bench`: every pair of layouts on this machine with this model, auto's choice beside them."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...proto.errors import DoesNotFitError, InputError
from ...proto.words import counted
from ..console import note, stdout_console, warn
from ..outputs import writable_output
from ..settings import flags
from ..settings.options import GROUP_FLAGS, Device, flags_named, group_settings, layout_settings

if TYPE_CHECKING:
    from ..bench.runs import TimedRun
    from ..settings.options import LayoutSettings
    from ..start.session_setup import RunningModel

EXAMPLES = """\
gearshift bench demo --workers 2

gearshift bench model.gguf --workers 2 -p 40000 -n 800

gearshift bench model.gguf --workers 2 -p 8000 -n 200 --repeats 5 --against ~/llama.cpp/build/bin/llama-bench

gearshift bench demo --workers 2 -p 512 -n 32 --csv runs.csv --trace bench.json.gz
"""

# (prompt, answer) where they are not given, as far as the model's context goes
USUAL_TOKENS_OF_CARDS = (40_000, 800)
USUAL_TOKENS_OF_CPU = (2_048, 64)
DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # Linux, WSL2
WARM_UP_ANSWER_TOKENS = 32

PromptTokens = Annotated[
    int | None,
    typer.Option(
        "-p", "--prompt-tokens", metavar="N", min=1,
        help="Length of the made-up prompts. Left out: 40000 on GPUs, 2048 on CPU, or what the context allows.",
    ),
]  # fmt: skip
AnswerTokens = Annotated[
    int | None,
    typer.Option(
        "-n", "--answer-tokens", metavar="N", min=1, help="Length of each answer. Left out: 800 on GPUs, 64 on CPU."
    ),
]
Repeats = Annotated[
    int, typer.Option("--repeats", metavar="N", min=1, max=1000, help="Rounds; in each every pair has a turn.")
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", min=0, help="Of the first prompt; the others follow. Left out: a fresh one."),
]
Against = Annotated[
    str | None,
    typer.Option("--against", metavar="PATH", help="A llama-bench program, for rows of its own; it runs afterwards."),
]
AgainstOptions = Annotated[
    str, typer.Option("--against-options", metavar="TEXT", help='Further arguments for it: "-fa 1 -ub 2048".')
]
AgainstTimeout = Annotated[
    float,
    typer.Option("--against-timeout", metavar="SECONDS", min=1, max=1e6, help="For each of its rows."),
]
CsvFile = Annotated[
    str | None,
    typer.Option("--csv", metavar="FILE", help="Also write every run as a row.", rich_help_panel=flags.OUTPUT),
]


def bench(
    model: flags.Model,
    prompt_tokens: PromptTokens = None,
    answer_tokens: AnswerTokens = None,
    repeats: Repeats = 3,
    seed: Seed = None,
    against: Against = None,
    against_options: AgainstOptions = "",
    against_timeout: AgainstTimeout = 1800.0,
    workers: flags.Workers = None,
    device: flags.DeviceFlag = None,
    threads: flags.Threads = None,
    chunk: flags.ChunkRule = None,
    max_chunk: flags.MaxChunk = None,
    layer_split: flags.LayerSplit = None,
    layer_share: flags.LayerShare = None,
    tensor_share: flags.TensorShare = None,
    compute_type: flags.ComputeTypeFlag = None,
    kv_type: flags.KvTypeFlag = None,
    exact_activations: flags.ExactActivations = None,
    reserve: flags.Reserve = None,
    memory_limit: flags.MemoryLimit = None,
    residency: flags.ResidencyFlag = None,
    no_peer: flags.NoPeer = None,
    throttle_link: flags.ThrottleLink = None,
    measure: flags.Measure = None,
    as_json: flags.Json = False,
    csv_file: CsvFile = None,
    trace: flags.TraceFile = None,
) -> None:
    """Time every pair of layouts (prompt, answer) and the automatic choice on one group, in turns.

    Prompts are made up, fresh for every run. Progress goes to stderr.
    """
    arguments = locals()
    from ..bench.llama_bench import find_peer, run_peer
    from ..bench.tables import (
        Bench,
        bench_csv,
        bench_facts,
        bench_table,
        told_texts,
    )
    from ..start.session_setup import open_model, open_session

    settings = group_settings(**flags_named(GROUP_FLAGS, arguments), measure=measure)
    layouts = layout_settings("auto", "auto", chunk)
    peer = None if against is None else find_peer(against, _words(against_options))
    opened = open_model(model)
    prompt, answer = choose_sizes(prompt_tokens, answer_tokens, opened.spec.trained_context, on_cpu(settings.device))
    csv_path = None if csv_file is None else writable_output("--csv", csv_file, "rows go")
    with open_session(opened, settings, layouts, prompt + answer, trace_path=trace) as session:
        runs = _timed(session, layouts, prompt, answer, repeats, _first_seed(seed))
        devices = tuple(hello.device for hello in session.cluster.hellos)
        versions = _versions(session)
    rows = () if peer is None else run_peer(
        peer, opened.files.facts[0].path, prompt, answer, repeats, against_timeout, note
    )  # fmt: skip
    for row in rows:
        if row.error:
            warn(f"llama-bench -sm {row.split_mode}: {row.error}")
    found = Bench(opened.spec.name, prompt, answer, devices, tuple(runs), rows, versions)
    if csv_path is not None:
        try:
            csv_path.write_text(bench_csv(found), encoding="utf-8")
        except OSError as error:
            warn(f"--csv: cannot write {csv_path}: {error.strerror or error}")
    if as_json:
        print(json.dumps(bench_facts(found)))
        return
    console = stdout_console()
    console.print(bench_table(found))
    for text in told_texts(found):
        console.print(text, soft_wrap=True, markup=False)


def choose_sizes(prompt: int | None, answer: int | None, context: int, on_cpu: bool) -> tuple[int, int]:
    """Tokens of prompt and answer; what was not asked for is what is usual, or less where `context` is short.

    `DoesNotFitError` where what was asked for does not fit.
    """
    usual_prompt, usual_answer = USUAL_TOKENS_OF_CPU if on_cpu else USUAL_TOKENS_OF_CARDS
    answered = answer if answer is not None else min(usual_answer, max(1, context // 8))
    asked = prompt if prompt is not None else max(1, min(usual_prompt, context - answered))
    if answer is None and prompt is not None:
        answered = max(1, min(answered, context - asked))
    if asked + answered > context:
        raise DoesNotFitError(
            f"-p {asked} and -n {answered} are {asked + answered} tokens, this model was trained for {context}"
            + (f": -p {context - answered} is the longest with that answer" if answered < context else "")
        )
    return asked, answered


def _timed(
    session: "RunningModel", layouts: "LayoutSettings", prompt: int, answer: int, repeats: int, seed: int
) -> "list[TimedRun]":
    from ..bench.runs import collect_stretches, combinations, interleaved

    driver = session.driver
    taken = combinations(session.placement.ranks, driver.settings.journeys, answer)
    collector = collect_stretches(driver, session.trace)
    note(f"warming up: each pair once with {prompt} + {min(answer, WARM_UP_ANSWER_TOKENS)} tokens, from seed {seed}")
    warm_up = interleaved(
        driver, taken[:-1], 1, prompt, min(answer, WARM_UP_ANSWER_TOKENS), seed, rule=layouts.chunk_rule
    )
    note(f"{counted(repeats, 'round')} of {counted(len(taken), 'run')}, prompts from seed {seed + len(warm_up)} on")
    return interleaved(
        driver, taken, repeats, prompt, answer, seed + len(warm_up), rule=layouts.chunk_rule, collector=collector,
        told=lambda run: note(f"round {run.round + 1} of {repeats}, {run.combination.name}: {run.wall_seconds:.3f} s"),
    )  # fmt: skip


def _versions(session: "RunningModel") -> dict[str, str]:
    from ... import __version__

    loaded, torch_versions = session.loaded, {hello.torch_version for hello in session.cluster.hellos}
    return {
        "gearshift": __version__,
        "torch": ", ".join(sorted(torch_versions)),
        "compute_type": str(loaded.compute_type),
        "kv_type": f"{loaded.kv_format.key},{loaded.kv_format.value}",
    }


def on_cpu(device: Device) -> bool:
    """What `auto` will most likely be is seen by the driver's files: workers are not asked yet."""
    if device is Device.AUTO:
        return not any(path.exists() for path in DRIVER_FILES)
    return device is Device.CPU


def _first_seed(seed: int | None) -> int:
    from secrets import randbelow

    return randbelow(10**9) if seed is None else seed


def _words(text: str) -> Sequence[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(f"--against-options: {error}") from None
