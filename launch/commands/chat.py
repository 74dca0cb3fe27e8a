"""`gearshift chat`: a conversation in the terminal."""

from collections.abc import Mapping, Sequence

from ...proto.errors import InputError
from ...proto.words import counted
from ..chat.setup import first_messages, open_format, parse_template_options
from ..console import note, warn
from ..processes.waiting_agent import agent_ahead
from ..settings import flags
from ..settings.options import (
    GROUP_FLAGS,
    SAMPLING_FLAGS,
    USUAL_RESTARTS,
    allowed_restarts,
    flags_named,
    group_settings,
    layout_settings,
    parse_logit_bias,
)
from ..settings.sampling_settings import choose_sampling
from ..settings.user_folders import current_settings

EXAMPLES = """\
gearshift chat demo --workers 2

gearshift chat model.gguf --system "Answer in one sentence." --temperature 0

gearshift chat model.gguf --template-option enable_thinking=false

gearshift chat --connect tcp://127.0.0.1:5555

gearshift chat model.gguf --messages talk.json < questions.txt > answers.txt
"""


def chat(
    model: flags.OptionalModel = None,
    system: flags.System = None,
    messages: flags.MessagesFile = None,
    template: flags.ChatTemplate = None,
    template_option: flags.TemplateOption = None,
    max_tokens: flags.MaxTokens = None,
    stop: flags.Stop = None,
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
    trace: flags.TraceFile = None,
    connect: flags.Connect = None,
    key_file: flags.KeyFile = None,
) -> None:
    """Talk with a model: a line is a message, and a turn reads only what is new of the conversation.

    Ctrl-C stops an answer, Ctrl-D or /exit ends. Where standard input is no terminal, its lines are the messages.
    """
    arguments = locals()
    from ...coordinator.tokenizer.text_stream import parse_stops
    from ...proto.sampling import validate
    from ..chat.backend import LocalChat
    from ..chat.loop import HELP, converse
    from ..chat.terminal import ChatTerminal

    stops, options = parse_stops(stop), parse_template_options(template_option or ())
    first = first_messages(system, messages)
    sampling_flags = flags_named(SAMPLING_FLAGS, arguments)
    if connect is not None:
        from ..connect import refuse_flags_of_the_group

        refuse_flags_of_the_group(arguments)
        limits: dict[str, object] = {
            "max_tokens": max_tokens,
            "stop": stops,
            "template_options": options,
            "logit_bias": parse_logit_bias("--logit-bias", logit_bias or ()),
        }
        chosen = sampling_flags | {"prefill": prefill, "decode": decode, "chunk": chunk}
        _chat_remotely(connect, key_file, first, chosen, limits)
        return
    if model is None or key_file is not None:
        raise InputError("give a MODEL, or the address of a running group by --connect (and its --key-file)")
    settings = group_settings(**flags_named(GROUP_FLAGS, arguments), measure=measure)
    with agent_ahead(settings.workers, settings.threads, settings.device) as ahead:
        from ..start.session_setup import (  # late: while the agent imports torch
            chosen_context,
            open_model,
            open_session,
        )

        again = allowed_restarts(restarts, USUAL_RESTARTS)
        layouts = layout_settings(prefill, decode, chunk)
        opened = open_model(model)
        sampling = choose_sampling(
            opened.files.metadata,
            sampling_flags,
            logit_bias=logit_bias or (),
        )
        validate(sampling.parameters, opened.spec.vocab)
        with open_format(opened, template) as chat_format:
            first_tokens = len(chat_format.prompt(first, options=options).ids) if first else 0
            asked = current_settings({"context": context})
            context_wish = chosen_context(asked, first_tokens, max_tokens, opened.spec.trained_context)
            with open_session(
                opened, settings, layouts, context_wish, trace_path=trace, restarts=again, ahead=ahead
            ) as session:
                for warning in sampling.warnings:
                    warn(warning)
                note(sampling.told)
                backend = LocalChat(
                    driver=session.driver,
                    format=chat_format,
                    options=options,
                    sampling=sampling.parameters,
                    layouts=layouts,
                    stops=stops,
                    max_tokens=max_tokens,
                    stop_tokens=opened.tokenizer.end_of_generation,
                    context_tokens=session.driver.settings.context_tokens,
                )
                terminal = ChatTerminal()
                terminal.tell(HELP)
                converse(backend, terminal, first)


def _chat_remotely(
    address: str,
    key_file: str | None,
    first: Sequence[dict[str, object]],
    chosen: Mapping[str, object],
    limits: Mapping[str, object],
) -> None:
    """Talk with a group that runs already. `chosen` by setting name."""
    from ..chat.loop import HELP, converse
    from ..chat.remote import RemoteChat
    from ..chat.terminal import ChatTerminal
    from ..connect import STILL_LOADING, open_client, settings_options

    options = {**limits, **settings_options(current_settings(chosen), ("prefill", "decode", "chunk"))}
    with open_client(address, key_file) as client:
        note(
            f"connected to {address}: {client.model}, {counted(client.context_tokens, 'token')} of context"
            + (STILL_LOADING if client.was_loading else "")
        )
        terminal = ChatTerminal()
        terminal.tell(HELP)
        converse(RemoteChat(client, options), terminal, first)
