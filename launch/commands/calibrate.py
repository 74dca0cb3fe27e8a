"""`gearshift calibrate`: what a model's work costs on these devices, measured with care."""

import json
from pathlib import Path
from time import monotonic
from typing import Annotated

import typer

from ...proto.errors import InputError
from ..console import note, stdout_console, warn
from ..outputs import writable_output
from ..settings import flags
from ..settings.options import GROUP_FLAGS, flags_named, group_settings, layout_settings
from ..settings.user_folders import current_settings

EXAMPLES = """\
gearshift calibrate demo --workers 2

gearshift calibrate model.gguf --workers 2 --context 40000 --out costs.json

gearshift calibrate demo --workers 2 --json
"""

Out = Annotated[
    str | None,
    typer.Option("--out", metavar="FILE.json", help="Write the costs there too (docs/costs.md has the form)."),
]


def calibrate(
    model: flags.Model,
    out: Out = None,
    workers: flags.Workers = None,
    device: flags.DeviceFlag = None,
    threads: flags.Threads = None,
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
    as_json: flags.Json = False,
) -> None:
    """Time chunks, decode steps and links at more points than a start does, and show how well the costs fit them.

    The costs are kept: later starts of such a group take them instead of measuring. Where they fit badly, costs that
    were kept before and fit better stay.
    """
    arguments = locals()
    from ...coordinator.costs.files import write_costs
    from ...coordinator.costs.residuals import WORST_FIT, told_fit, worst_fit
    from ..bench.calibration import calibration_facts, calibration_tables
    from ..start.cost_cache import cost_facts, cost_path, is_better_kept, keep_costs
    from ..start.session_setup import chosen_context, open_model, open_session

    settings = group_settings(**flags_named(GROUP_FLAGS, arguments))
    target = None if out is None else _checked_target(out)
    opened = open_model(model)
    chosen = current_settings({"context": context})
    wish = chosen_context(chosen, 1, None, opened.spec.trained_context)
    with open_session(opened, settings, layout_settings(), wish, measure=False) as session:
        driver, started = session.driver, monotonic()
        found = driver.measure_costs(driver.measuring_plan(thorough=True), lambda part: note(f"timing {part}"))
        seconds = monotonic() - started
        points = driver.measuring_plan()  # a start's: it is a start that looks for them
        facts = cost_facts(driver.spec, session.cluster, session.placement, session.loaded, settings, points)
    path, off = cost_path(facts), worst_fit(found)
    if told := told_fit(off):
        warn(told)
    if is_better_kept(path, off):
        note(f"measured in {seconds:.1f} s; not kept: those in {path} fit better (--measure at a start replaces them)")
    elif keep_costs(path, found.costs, facts | {WORST_FIT: off}):
        note(f"measured in {seconds:.1f} s; kept in {path}")
    if target is not None:
        write_costs(target, found.costs, facts)
        note(f"written to {target}")
    if as_json:
        print(json.dumps(calibration_facts(found, facts, seconds), ensure_ascii=False))
        return
    for table in calibration_tables(found):
        stdout_console().print(table)


def _checked_target(out: str) -> Path:
    """The path, refused before any work where nothing could be written there."""
    target = Path(out)
    if target.exists() and not target.is_file():  # another file takes its place
        raise InputError(f"--out: cannot write {out}: it is no file")
    return writable_output("--out", out, "costs go")
