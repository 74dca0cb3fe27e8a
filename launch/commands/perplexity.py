"""`gearshift perplexity`: how well a model predicts a text."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from ...proto.errors import InputError
from ...proto.words import counted
from ..console import note
from ..prompts import PromptTokens, prompt_tokens, read_text_or_tokens
from ..settings import flags
from ..settings.options import GROUP_FLAGS, flags_named, group_settings, layout_settings

EXAMPLES = """\
gearshift perplexity demo -f text.txt -c 512

gearshift perplexity demo -f text.txt -c 512 --workers 2 --prefill tensor --compute-type f32 --json
"""

USUAL_WINDOW_TOKENS = 512

Window = Annotated[
    int,
    typer.Option(
        "--context", "-c", metavar="N", min=3, help="Tokens of a window; its second half is scored."
    ),
]


def perplexity(
    model: flags.Model,
    file: flags.PromptFile = None,
    tokens_file: flags.TokensFile = None,
    context: Window = USUAL_WINDOW_TOKENS,
    workers: flags.Workers = None,
    device: flags.DeviceFlag = None,
    threads: flags.Threads = None,
    prefill: flags.Prefill = None,
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
    trace: flags.TraceFile = None,
    as_json: flags.Json = False,
) -> None:
    """Perplexity of a text, window by window, the second half of each scored (as llama.cpp defines it)."""
    arguments = locals()
    from ...coordinator.evaluation import measure_perplexity
    from ..start.session_setup import open_model, open_session

    settings = group_settings(**flags_named(GROUP_FLAGS, arguments))
    layouts = layout_settings(prefill, prefill, chunk)
    source = read_text_or_tokens(file, tokens_file)
    opened = open_model(model)
    tokens = prompt_tokens(source, opened.tokenizer, opened.spec.vocab)
    if len(tokens) < context:
        raise InputError(
            f"the text has {counted(len(tokens), 'token')}, too few for one window of {context} (--context)"
        )
    special = opened.tokenizer.special
    begin = special.bos if special.add_bos and not isinstance(source, PromptTokens) else None
    with open_session(opened, settings, layouts, context, trace_path=trace) as session:
        found = measure_perplexity(
            session.driver, tokens, context, begin, layouts.prefill, layouts.chunk_rule, _tell_window
        )
    if as_json:
        print(json.dumps(asdict(found)))
    else:
        windows = counted(found.windows, "window")
        print(
            f"perplexity {found.value:.4f} +/- {found.standard_error:.4f} "
            f"({windows} of {context} tokens, {counted(found.scored_tokens, 'token')} scored)"
        )


def _tell_window(done: int, count: int, value: float) -> None:
    note(f"window {done} of {count}: perplexity so far {value:.4f}")
