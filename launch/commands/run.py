"""`gearshift run`: one prompt, one answer."""

import json
from typing import TYPE_CHECKING

from ...proto.errors import InputError, RequestFailedError
from ...proto.words import counted
from ..chat.setup import chat_prompt, parse_template_options
from ..console import busy, note, stderr_console, warn
from ..processes.waiting_agent import agent_ahead
from ..prompts import prompt_tokens, read_prompt
from ..settings import flags
from ..settings.options import (
    GROUP_FLAGS,
    SAMPLING_FLAGS,
    allowed_restarts,
    flags_named,
    group_settings,
    layout_settings,
)
from ..settings.sampling_settings import choose_sampling
from ..settings.user_folders import current_settings

if TYPE_CHECKING:
    from ...coordinator.chat.reasoning import ReasoningSplit
    from ...coordinator.generation import GenerationRequest
    from ...coordinator.tokenizer.text_stream import TextStream
    from ...proto.pieces import Piece
    from ..start.session_setup import RunningModel

EXAMPLES = """\
gearshift run demo --workers 2 -p "The capital of France is" -n 40

gearshift run model.gguf -f prompt.txt --temperature 0 --prefill layer --decode tensor

gearshift run model-00001-of-00003.gguf --tokens-file ids.json -n 16 --json

gearshift run demo --chat --system "Answer in one word." -p "What is the capital of France?"

gearshift run --connect tcp://127.0.0.1:5555 -p "The capital of France is" -n 40

gearshift run demo --workers 3 --chunk 64,64,32 --layer-split 8,20 --verify-shift -p "Once upon a time" -n 20
"""


def run(
    model: flags.OptionalModel = None,
    prompt: flags.Prompt = None,
    file: flags.PromptFile = None,
    tokens_file: flags.TokensFile = None,
    max_tokens: flags.MaxTokens = None,
    stop: flags.Stop = None,
    ignore_eos: flags.IgnoreEos = False,
    chat: flags.Chat = False,
    system: flags.System = None,
    template: flags.ChatTemplate = None,
    template_option: flags.TemplateOption = None,
    workers: flags.Workers = None,
    device: flags.DeviceFlag = None,
    threads: flags.Threads = None,
    prefill: flags.Prefill = None,
    decode: flags.Decode = None,
    chunk: flags.ChunkRule = None,
    max_chunk: flags.MaxChunk = None,
    context: flags.Context = None,
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
    restarts: flags.Restarts = None,
    verify_shift: flags.VerifyShift = None,
    temperature: flags.Temperature = None,
    top_k: flags.TopK = None,
    top_p: flags.TopP = None,
    min_p: flags.MinP = None,
    repeat_penalty: flags.RepeatPenalty = None,
    repeat_last_n: flags.RepeatLastN = None,
    presence_penalty: flags.PresencePenalty = None,
    frequency_penalty: flags.FrequencyPenalty = None,
    logit_bias: flags.LogitBias = None,
    seed: flags.Seed = None,
    logprobs: flags.Logprobs = flags.DEFAULTS.logprobs,
    as_json: flags.Json = False,
    trace: flags.TraceFile = None,
    connect: flags.Connect = None,
    key_file: flags.KeyFile = None,
) -> None:
    """Answer a prompt: it is read in one layout, the answer written in another, with a shift between.

    The answer goes to stdout as it comes, all else to stderr.
    """
    arguments = locals()
    sampling_flags = flags_named(SAMPLING_FLAGS, arguments)
    if connect is not None:
        from ..connect import RemoteRun, refuse_flags_of_the_group, run_remotely

        refuse_flags_of_the_group(arguments)
        remote = RemoteRun(
            connect, key_file, read_prompt(prompt, file, tokens_file), max_tokens, tuple(stop or ()), ignore_eos,
            chat, system, parse_template_options(template_option or ()), tuple(logit_bias or ()), logprobs, as_json,
        )  # fmt: skip
        layout_flags = {"prefill": prefill, "decode": decode, "chunk": chunk, "verify_shift": verify_shift}
        run_remotely(remote, {**sampling_flags, **layout_flags})
        return
    if model is None or key_file is not None:
        raise InputError("give a MODEL, or the address of a running group by --connect (and its --key-file)")
    settings = group_settings(**flags_named(GROUP_FLAGS, arguments), measure=measure)
    with agent_ahead(settings.workers, settings.threads, settings.device) as ahead:
        # Late: what is behind these, and the model's own files, is read while the agent imports torch.
        from ...coordinator.chat.reasoning import ReasoningSplit, bytes_with_marks
        from ...coordinator.generation import GenerationRequest
        from ...coordinator.tokenizer.text_stream import TextStream, parse_stops
        from ...proto.sampling import validate
        from ..start.session_setup import chosen_context, open_model, open_session

        again = allowed_restarts(restarts, usual=0)  # a script sees a loss at once
        layouts = layout_settings(prefill, decode, chunk)
        stops = parse_stops(stop)
        source = read_prompt(prompt, file, tokens_file)
        options = parse_template_options(template_option or ())
        if not chat and (system is not None or template is not None or options):
            raise InputError("--system, --template and --template-option belong to --chat")
        opened = open_model(model)
        sampling = choose_sampling(
            opened.files.metadata,
            sampling_flags,
            logit_bias=logit_bias or (),
            logprobs=logprobs,
        )
        validate(sampling.parameters, opened.spec.vocab)
        split: ReasoningSplit | None = None
        if chat:
            rendered = chat_prompt(source, opened, system, template, options)
            tokens, split = rendered.ids, ReasoningSplit(reasons=rendered.reasons)
        else:
            tokens = prompt_tokens(source, opened.tokenizer, opened.spec.vocab)
        chosen = current_settings({"context": context, "verify_shift": verify_shift})
        context_wish = chosen_context(chosen, len(tokens), max_tokens, opened.spec.trained_context)
        request = GenerationRequest(
            prompt=tokens,
            max_tokens=max_tokens,
            sampling=sampling.parameters,
            stop_tokens=frozenset() if ignore_eos else opened.tokenizer.end_of_generation,
            prefill=layouts.prefill,
            decode=layouts.decode,
            chunk_rule=layouts.chunk_rule,
            verify_shift=chosen.switch("verify_shift"),
        )
        stream = TextStream(bytes_with_marks(opened.tokenizer) if chat else opened.tokenizer.token_bytes, stops)
        with open_session(
            opened, settings, layouts, context_wish, trace_path=trace, restarts=again, ahead=ahead
        ) as session:
            for warning in sampling.warnings:
                warn(warning)
            note(sampling.told)
            _answer(session, request, stream, split, as_json, context_wish.cut)


def _answer(
    session: "RunningModel",
    request: "GenerationRequest",
    stream: "TextStream",
    split: "ReasoningSplit | None",
    as_json: bool,
    told_cut: str | None,
) -> None:
    """`told_cut`: what was told of the answer's length already."""
    from ..answer import PlainText, SplitText, follow
    from ..chat.terminal import ChatTerminal
    from ..report import memory_table, phase_table, reason_lines, run_facts

    output = PlainText() if split is None else ChatTerminal()
    with busy(f"reading {counted(len(request.prompt), 'token')}") as prompt_is_read:

        def show(piece: "Piece") -> None:
            prompt_is_read()
            if not as_json:
                output.show(piece)

        told = SplitText(split, show)
        _, result = follow(session.driver, request, stream, told.take)
        told.finish()
    memory = session.driver.memory()
    uses = session.device_uses(memory)
    if as_json:
        facts = run_facts(
            told.text, result, session.placement, session.start_seconds, session.loaded.seconds, memory,
            told.reasoning, uses, request.sampling.seed,
        )  # fmt: skip
        print(json.dumps(facts, ensure_ascii=False))
    else:
        output.end_answer()
    for text in (result.warning or "").splitlines():
        if text != told_cut:
            warn(text)
    for line in reason_lines(result):
        note(line)
    stderr_console().print(phase_table(result))
    stderr_console().print(memory_table(session.placement, memory, result, uses))
    if result.error is not None:
        raise RequestFailedError(result.error)
