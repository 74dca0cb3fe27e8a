"""`gearshift run`: one prompt, one answer."""

import json
from typing import TYPE_CHECKING

from ...proto.errors import RequestFailedError
from ...proto.sampling import SamplingParameters
from .. import flags
from ..console import busy, stderr_console, warn
from ..options import Device, group_settings, layout_settings, parse_logit_bias, parse_seed
from ..prompts import prompt_tokens, read_prompt

if TYPE_CHECKING:
    from ...coordinator.generation import GenerationRequest
    from ...coordinator.text_stream import TextStream
    from ..session_setup import Session

EXAMPLES = """\
gearshift run demo --workers 2 -p "The capital of France is" -n 40

gearshift run model.gguf -f prompt.txt --temperature 0 --prefill layer --decode tensor

gearshift run model-00001-of-00003.gguf --tokens-file ids.json -n 16 --json

gearshift run demo --workers 3 --chunk 64,64,32 --layer-split 8,20 --verify-shift -p "Once upon a time" -n 20
"""


def run(
    model: flags.Model,
    prompt: flags.Prompt = None,
    file: flags.PromptFile = None,
    tokens_file: flags.TokensFile = None,
    max_tokens: flags.MaxTokens = None,
    stop: flags.Stop = None,
    ignore_eos: flags.IgnoreEos = False,
    workers: flags.Workers = 1,
    device: flags.DeviceFlag = Device.AUTO,
    threads: flags.Threads = None,
    prefill: flags.Prefill = "auto",
    decode: flags.Decode = "auto",
    chunk: flags.ChunkRule = "auto",
    max_chunk: flags.MaxChunk = None,
    context: flags.Context = None,
    layer_split: flags.LayerSplit = None,
    layer_share: flags.LayerShare = None,
    tensor_share: flags.TensorShare = None,
    compute_type: flags.ComputeTypeFlag = "auto",
    kv_type: flags.KvTypeFlag = "auto",
    verify_shift: flags.VerifyShift = False,
    temperature: flags.Temperature = flags.DEFAULTS.temperature,
    top_k: flags.TopK = flags.DEFAULTS.top_k,
    top_p: flags.TopP = flags.DEFAULTS.top_p,
    min_p: flags.MinP = flags.DEFAULTS.min_p,
    repeat_penalty: flags.RepeatPenalty = flags.DEFAULTS.repetition_penalty,
    repeat_last_n: flags.RepeatLastN = flags.DEFAULTS.penalty_window,
    presence_penalty: flags.PresencePenalty = flags.DEFAULTS.presence_penalty,
    frequency_penalty: flags.FrequencyPenalty = flags.DEFAULTS.frequency_penalty,
    logit_bias: flags.LogitBias = None,
    seed: flags.Seed = flags.DEFAULTS.seed,
    logprobs: flags.Logprobs = flags.DEFAULTS.logprobs,
    as_json: flags.Json = False,
) -> None:
    """Answer a prompt: it is read in one layout, the answer written in another, with a shift between.

    The answer goes to stdout as it comes, all else to stderr.
    """
    from ...coordinator.generation import GenerationRequest
    from ...coordinator.text_stream import TextStream, parse_stops
    from ...proto.sampling import validate
    from ..session_setup import choose_context, open_model, open_session

    settings = group_settings(
        workers=workers,
        device=device,
        threads=threads,
        max_chunk=max_chunk,
        layer_split=layer_split,
        layer_share=layer_share,
        tensor_share=tensor_share,
        compute_type=compute_type,
        kv_type=kv_type,
    )
    layouts = layout_settings(prefill, decode, chunk)
    stops = parse_stops(stop)
    sampling = SamplingParameters(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repeat_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        penalty_window=repeat_last_n,
        logit_bias=parse_logit_bias("--logit-bias", logit_bias or ()),
        seed=parse_seed("--seed", seed),
        logprobs=logprobs,
    )
    source = read_prompt(prompt, file, tokens_file)
    opened = open_model(model)
    validate(sampling, opened.spec.vocab)
    tokens = prompt_tokens(source, opened.tokenizer, opened.spec.vocab)
    context_tokens = choose_context(context, len(tokens), max_tokens, opened.spec.trained_context)
    request = GenerationRequest(
        prompt=tokens,
        max_tokens=max_tokens,
        sampling=sampling,
        stop_tokens=frozenset() if ignore_eos else opened.tokenizer.end_of_generation,
        prefill=layouts.prefill,
        decode=layouts.decode,
        chunk_rule=layouts.chunk_rule,
        verify_shift=verify_shift,
    )
    stream = TextStream(opened.tokenizer.token_bytes, stops)
    with open_session(opened, settings, layouts, context_tokens) as session:
        _answer(session, request, stream, as_json)


def _answer(session: "Session", request: "GenerationRequest", stream: "TextStream", as_json: bool) -> None:
    from ..answer import follow
    from ..report import memory_table, phase_table, run_facts

    with busy(f"reading {len(request.prompt)} tokens") as prompt_is_read:

        def show(piece: str) -> None:
            prompt_is_read()
            if not as_json:
                print(piece, end="", flush=True)

        text, result = follow(session.driver, request, stream, show)
    memory = session.driver.memory()
    if as_json:
        facts = run_facts(
            text, result, session.placement, session.start_seconds, session.loaded.seconds, memory
        )
        print(json.dumps(facts, ensure_ascii=False))
    else:
        print(flush=True)
    if result.warning is not None:
        warn(result.warning)
    stderr_console().print(phase_table(result))
    stderr_console().print(memory_table(session.placement, memory, result))
    if result.error is not None:
        raise RequestFailedError(result.error)
