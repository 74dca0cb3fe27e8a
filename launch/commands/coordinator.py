"""`gearshift coordinator`: a group of workers that serves many clients over zmq."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...proto.errors import InputError
from ..console import note, warn
from ..settings import flags
from ..settings.options import (
    GROUP_FLAGS,
    USUAL_RESTARTS,
    allowed_restarts,
    flags_named,
    group_settings,
    layout_settings,
)
from ..settings.user_folders import current_settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from ...coordinator.api.service import ChatPrompter, Service
    from ...coordinator.fit.choice import ContextWish
    from ...coordinator.group.cluster import Cluster
    from ...proto.channel import ClientListener
    from ..settings.options import GroupSettings, LayoutSettings
    from ..start.session_setup import Opened, RunningModel

EXAMPLES = """\
gearshift coordinator demo --workers 2 --listen tcp://127.0.0.1:5555

gearshift run --connect tcp://127.0.0.1:5555 -p "The capital of France is" -n 40

gearshift coordinator model.gguf --workers 2 --external --listen tcp://0.0.0.0:5555 --key-file group.key

torchrun --nnodes 2 --node-rank 1 --nproc-per-node 1 --master-addr HOST0 --master-port 29500 -m gearshift.worker
--coordinator tcp://HOST0:5555 --key-file group.key --model-path /models/model.gguf
"""

Listen = Annotated[
    str, typer.Option("--listen", metavar="tcp://HOST:PORT", help="For clients, and for workers; port 0: a free one.")
]
External = Annotated[
    bool,
    typer.Option("--external", help="Wait for workers started by hand (torchrun -m gearshift.worker).",
                 rich_help_panel=flags.GROUP),
]  # fmt: skip
WorkersListen = Annotated[
    str | None,
    typer.Option(
        "--workers-listen",
        metavar="tcp://HOST:PORT",
        help="Where external workers meet. Left out: a free port of --listen's host.",
        rich_help_panel=flags.GROUP,
    ),
]
JoinTimeout = Annotated[
    float,
    typer.Option("--join-timeout", metavar="SECONDS", min=1, help="How long to wait for external workers.",
                 rich_help_panel=flags.GROUP),
]  # fmt: skip
Parallel = Annotated[
    int,
    typer.Option("--parallel", metavar="N", min=1, max=64, help="Answers of full context whose memory is reserved.",
                 rich_help_panel=flags.GROUP),
]  # fmt: skip


def coordinator(
    model: flags.Model,
    listen: Listen = "tcp://127.0.0.1:5555",
    key_file: flags.KeyFile = None,
    external: External = False,
    workers_listen: WorkersListen = None,
    join_timeout: JoinTimeout = 120.0,
    parallel: Parallel = 2,
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
    max_token_gap: flags.MaxTokenGap = None,
    measure: flags.Measure = None,
    restarts: flags.Restarts = None,
    trace: flags.TraceFile = None,
) -> None:
    """Load a model and serve clients (`gearshift run --connect`, `gearshift.Client`) until interrupted.

    Calls queue first in, first out; up to 8 are answered at a time. Beyond this host it listens with keys alone
    (`gearshift keys`); what the workers send each other is never encrypted.
    """
    arguments = locals()
    from ...proto.channel import ClientListener
    from ...proto.keys import read_keys
    from ..processes.external import external_cluster
    from ..start.session_setup import chosen_context, open_model

    settings = group_settings(**flags_named(GROUP_FLAGS, arguments), measure=measure, max_token_gap=max_token_gap)
    again = allowed_restarts(restarts, USUAL_RESTARTS)
    layouts = layout_settings(prefill, decode, chunk)
    if workers_listen is not None and not external:
        raise InputError("--workers-listen is for workers started by hand: add --external")
    keys = None if key_file is None else read_keys(Path(key_file))
    opened = open_model(model)
    chosen = current_settings({"context": context})
    context_wish = chosen_context(chosen, 1, None, opened.spec.trained_context)
    # Before any worker is started: a port in use is the commonest mistake.
    with ClientListener.bind(listen, keys) as listener:
        gather = partial(
            external_cluster, listener, workers=settings.workers, workers_address=workers_listen, keys=keys,
            key_file=key_file, join_timeout_seconds=join_timeout, link_options=settings.link_options,
        )  # fmt: skip
        outside = gather if external else None
        _serve(opened, settings, layouts, context_wish, parallel, listener, outside, trace, again)


def _serve(
    opened: "Opened",
    settings: "GroupSettings",
    layouts: "LayoutSettings",
    context_wish: "ContextWish",
    parallel: int,
    listener: "ClientListener",
    gather: "Callable[..., AbstractContextManager[Cluster]] | None",
    trace: str | None,
    restarts: int,
) -> None:
    from ... import __version__
    from ...coordinator.api.loading import EarlyCalls, Reception
    from ...coordinator.api.remote import RemoteApi
    from ...coordinator.api.server import Server
    from ...coordinator.model.file_blame import FileBlame
    from ..start.blame import find_and_tell_blame
    from ..start.session_setup import open_session

    early = EarlyCalls(opened.spec.name, __version__, context_wish.tokens, (layouts.prefill, layouts.decode))
    with Reception(listener, early) as reception, ExitStack() as stack:
        if gather is None:
            reception.open(None)
            note(f"clients may come to {listener.address} while the model loads")
        chat = _chat(opened, stack)
        session = stack.enter_context(
            open_session(
                opened, settings, layouts, context_wish, parallel_requests=parallel, trace_path=trace,
                restarts=restarts, gather=None if gather is None else partial(gather, tell_port=reception.open),
            )
        )  # fmt: skip
        blame = FileBlame(partial(find_and_tell_blame, opened.spec))
        api = RemoteApi(session.driver, _service(opened, session, chat), blame=blame)
        reception.close()
        note(f"listening at {listener.address}")
        Server(listener, session.cluster, session.driver, api, reception.door, reception.outboxes).run(early)


def _chat(opened: "Opened", stack: ExitStack) -> "ChatPrompter | None":
    """The model's chat template; without one (or with a broken one) the group serves text and ids alone."""
    from ..chat.setup import open_format

    try:
        return stack.enter_context(open_format(opened, None))
    except InputError as error:
        warn(f"no chat: {error}")
        return None


def _service(opened: "Opened", session: "RunningModel", chat: "ChatPrompter | None") -> "Service":
    from ... import __version__
    from ...coordinator.api.service import Service
    from ..settings.sampling_settings import choose_sampling

    sampling = choose_sampling(opened.files.metadata, seed_is_told=False)
    for warning in sampling.warnings:
        warn(warning)
    note(sampling.told)
    return Service(
        model=opened.spec.name,
        version=__version__,
        tokenizer=opened.tokenizer,
        placement=session.placement,
        group=session.cluster,
        loaded=session.loaded,
        start_seconds=session.start_seconds,
        sampling=sampling.parameters,
        chat=chat,
    )
