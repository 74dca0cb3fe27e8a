"""`gearshift doctor`: is this machine ready, and would a model fit on it. Starts no worker."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from ...proto.nccl_choice import MEASURED_RANKS
from ..console import busy, stdout_console
from ..doctor.card_process import nccl_case
from ..doctor.diagnosis import Check, Verdict, diagnose
from ..doctor.host_facts import HostFacts, gather
from ..settings import flags
from ..settings.options import GroupSettings, LayoutSettings, group_settings, layout_settings
from ..settings.user_folders import current_settings, logs_folder

if TYPE_CHECKING:
    from rich.table import Table

    from ...coordinator.model.files import ModelFiles

EXAMPLES = """\
gearshift doctor

gearshift doctor demo --workers 2

gearshift doctor model.gguf --workers 2 --context 32768 --json
"""
COLOURS = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.PROBLEM: "red"}

OptionalModel = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="Also say whether this model would fit.", show_default=False),
]


def doctor(
    model: OptionalModel = None,
    workers: flags.Workers = None,
    device: flags.DeviceFlag = None,
    prefill: flags.Prefill = None,
    decode: flags.Decode = None,
    max_chunk: flags.MaxChunk = None,
    context: flags.Context = None,
    layer_split: flags.LayerSplit = None,
    layer_share: flags.LayerShare = None,
    tensor_share: flags.TensorShare = None,
    compute_type: flags.ComputeTypeFlag = None,
    kv_type: flags.KvTypeFlag = None,
    reserve: flags.Reserve = None,
    memory_limit: flags.MemoryLimit = None,
    residency: flags.ResidencyFlag = None,
    as_json: flags.Json = False,
) -> None:
    """Check this machine: each line is OK or says what to do. Ends with 1 where there is a problem."""
    from ..start.models import open_files

    settings = group_settings(
        workers=workers,
        device=device,
        max_chunk=max_chunk,
        layer_split=layer_split,
        layer_share=layer_share,
        tensor_share=tensor_share,
        compute_type=compute_type,
        kv_type=kv_type,
        reserve=reserve,
        memory_limit=memory_limit,
        residency=residency,
    )
    layouts = layout_settings(prefill, decode)
    context_tokens = current_settings({"context": context}).whole_number_or_none("context")
    files = None if model is None else open_files(model)
    with busy("looking at this machine"):
        facts = gather(os.environ, logs_folder())
    checks = list(diagnose(facts, nccl_case(replace(settings, workers=MEASURED_RANKS))))
    if files is not None:
        checks.append(_fit(files, settings, layouts, context_tokens, facts))
    _show(checks, as_json)
    if any(check.verdict is Verdict.PROBLEM for check in checks):
        raise typer.Exit(1)


def _fit(
    files: "ModelFiles",
    settings: GroupSettings,
    layouts: LayoutSettings,
    context_tokens: int | None,
    facts: HostFacts,
) -> Check:
    from ...coordinator.model.spec import build_spec
    from ...proto.probe import ProbeReport
    from ..doctor.fit_check import fit_check
    from ..start.session_setup import check_kv_format

    spec = build_spec(files, context_tokens)
    check_kv_format(spec, settings.kv_format)
    devices, peers = (facts.probe.devices, facts.probe.peers) if isinstance(facts.probe, ProbeReport) else ((), ())
    displays = frozenset(card.device.uuid for card in facts.cards if card.display)
    return fit_check(spec, settings, layouts, context_tokens, facts.free_memory_bytes, devices, displays, peers)


def _show(checks: Sequence[Check], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"checks": [asdict(check) for check in checks]}))
    else:
        stdout_console().print(_table(checks))


def _table(checks: Sequence[Check]) -> "Table":
    from rich.markup import escape
    from rich.table import Table

    table = Table("check", "", "found", "what to do")
    for check in checks:
        verdict = f"[{COLOURS[check.verdict]}]{check.verdict.upper()}[/]"
        table.add_row(escape(check.name), verdict, escape(check.found), escape(check.advice))
    return table
