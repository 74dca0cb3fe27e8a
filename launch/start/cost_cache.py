"""Costs that were measured before, in the user's cache folder: one file for each model, group and version."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec

from ... import __version__
from ...coordinator.costs.correction import corrected
from ...coordinator.costs.cost_model import Costs
from ...coordinator.costs.files import CostFile, read_cost_file, write_costs
from ...coordinator.costs.measuring import Measurement, times_as_long
from ...coordinator.costs.measuring_plan import MeasuringPlan
from ...coordinator.costs.residuals import MOST_OFF_FIT, WORST_FIT, told_fit, worst_fit
from ...coordinator.driver import Driver
from ...coordinator.group.load_result import LoadResult
from ...proto.codec import PROTOCOL_VERSION
from ...proto.errors import InputError
from ...proto.model import ModelSpec
from ...proto.placement.plan import Placement
from ...proto.reports import Hello
from ...proto.words import counted
from ..console import note, warn
from ..settings.options import GroupSettings
from ..settings.user_folders import costs_folder

SPEED_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "GEARSHIFT_NO_PEER", "GEARSHIFT_NCCL", "GEARSHIFT_DECODE_SUMS", "OMP_NUM_THREADS",
)  # fmt: skip
SPEED_PREFIXES = ("NCCL_", "GLOO_")

# Counts up where what is timed or learnt changes: costs of other versions are measured anew.
MEASURED = 3  # with what the runs of a past cost, and depths that tell them from attention

ENOUGH_OBSERVATIONS = 64  # chunks and steps timed in real work, before their costs are kept

MOST_OFF = 1.25  # times as quick that work may be before costs known from before are corrected, or count no more
MOST_OVERHEAD = 10.0  # times what a chunk is found to take beside its work
LEAST_TOLD_OVERHEAD = 5e-3  # seconds that no stall is needed for
MOST_BUSY = 100.0  # times as slow, or as quick: no other work does that, the costs are wrong


Facts = dict[str, object]


class Gathered(Protocol):
    """A group whose workers have all joined."""

    @property
    def hellos(self) -> tuple[Hello, ...]: ...


@dataclass(frozen=True, slots=True)
class CostPlace:
    """Where the costs of one group are kept."""

    path: Path
    facts: Facts
    at_start: Costs
    measured: bool = False  # now, and not taken from an earlier start

    def learn(self, driver: Driver) -> None:
        """Keep what real work has taught, where it was enough: the next start begins with it.

        But for shifts: what they took beside other work would keep answers from being shifted, and no start times one.
        """
        if driver.work_observed >= ENOUGH_OBSERVATIONS and driver.costs is not None:
            start = self.at_start
            overhead = replace(driver.costs.overhead, shift_seconds=start.overhead.shift_seconds)
            learnt = replace(driver.costs, to_tensor=start.to_tensor, to_layer=start.to_layer, overhead=overhead)
            keep_costs(self.path, learnt, self.facts)


def settle_costs(
    driver: Driver, cluster: Gathered, placement: Placement, loaded: LoadResult, settings: GroupSettings
) -> CostPlace:
    """Let the driver plan with the costs of this group: those kept from before that hold, else measured now and kept.

    With `settings.measure` now in any case. A folder or file that is not as it should be is told, and no more.
    """
    facts = cost_facts(driver.spec, cluster, placement, loaded, settings, driver.measuring_plan())
    path = cost_path(facts)
    file = None if settings.measure else _read_kept_file(path, facts)
    kept = None if file is None else what_holds(file, driver)
    if kept is not None and file is not None:
        note("costs of this group are known from before (--measure times them anew)")
        driver.use_costs(kept)
        if kept != file.costs:
            keep_costs(path, kept, facts)
        return CostPlace(path, facts, kept)
    note("measuring what this group's work costs (later starts take it from this one)")
    found = driver.measure_costs()
    off = worst_fit(found)
    if told := told_fit(off):
        warn(f"{told} with --measure")
    keep_costs(path, found.costs, facts | {WORST_FIT: off})
    return CostPlace(path, facts, found.costs, measured=True)


def what_holds(file: CostFile, driver: Driver) -> Costs | None:
    """What of kept costs still holds, by a chunk and a step of each kind. None: nothing, which is told, and why.

    Other work can only add to what is timed: where something is much quicker now, the costs were measured, or learnt,
    beside some. They would stay, as a layout that seems slow is not chosen and nothing is learnt of it. Such measured
    ones are measured anew; of learnt ones, of which real work has taught the rest, only what is quicker is corrected.
    What is slower is learnt, but for what no machine is; work whose cost they do not know is that, too.
    """
    kept, found = file.costs, driver.measure(driver.measuring_plan().first_points())
    if told := _untenable(kept, found):
        note(f"measuring anew: {told}")
        return None
    ratios = times_as_long(found, kept)
    least, most = min(ratios, default=1.0), max(ratios, default=1.0)
    if least < 1 / MOST_OFF:
        said = f"work takes {least:.2f} times as long as the costs known from before say"
        learnt = WORST_FIT not in file.facts
        if not learnt or least < 1 / MOST_BUSY or most < 1 / MOST_OFF:
            note(f"measuring anew: {said}")
            return None
        note(f"{said}: they are corrected where they are too slow")
    if most > MOST_OFF:
        note(f"work takes up to {most:.1f} times as long as the costs known from before say: is this machine busy?")
    return corrected(kept, found, MOST_OFF)


def _untenable(kept: Costs, found: Measurement) -> str:
    """Why the costs are no running group's like this one; empty: they may be."""
    if len(kept.stages) != len(found.costs.stages):
        return f"the costs known from before are of {counted(len(kept.stages), 'worker')}"
    known, now = kept.overhead.chunk_seconds, found.costs.overhead.chunk_seconds
    if known > max(MOST_OVERHEAD * now, LEAST_TOLD_OVERHEAD):
        # Prompts would be read in one chunk each, of which nothing is learnt.
        return f"the costs known from before say {known * 1e3:.3g} ms beside a chunk, now it is {now * 1e3:.3g}"
    if max(times_as_long(found, kept), default=1.0) > MOST_BUSY:
        return "the costs known from before are nothing, or far too low, for some work"
    return ""


def cost_facts(
    spec: ModelSpec,
    cluster: Gathered,
    placement: Placement,
    loaded: LoadResult,
    settings: GroupSettings,
    points: MeasuringPlan,
    environment: Mapping[str, str] = os.environ,
) -> Facts:
    """All that costs depend on: where any of it differs they are measured anew."""
    hellos = cluster.hellos
    facts = {
        "model": spec.name,
        "files": [file.fingerprint for file in spec.files],
        "devices": [hello.device for hello in hellos],
        "hosts": [hello.host for hello in hellos],
        "cores": len(os.sched_getaffinity(0)),
        "threads": settings.threads,
        "paces": [hello.pace for hello in hellos],
        "links": msgspec.to_builtins(settings.link_options),
        "torch": sorted({hello.torch_version for hello in hellos}),
        "gearshift": __version__,
        "protocol": PROTOCOL_VERSION,
        "measured": MEASURED,
        "compute_type": loaded.compute_type,
        "kv_type": [loaded.kv_format.key, loaded.kv_format.value],
        "placement": placement_digest(placement),
        "environment": speed_variables(environment),
        "points": msgspec.to_builtins(points),
    }
    if loaded.without_nccl:
        facts["without_nccl"] = True
    if settings.exact_activations:
        facts["exact_activations"] = True
    plain: Facts = json.loads(json.dumps(facts))  # as they come back from a file
    return plain


def speed_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Those of the environment that change how fast ranks compute or reach each other."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name in SPEED_VARIABLES or name.startswith(SPEED_PREFIXES)
    }


def placement_digest(placement: Placement) -> str:
    """Equal for equal placements alone."""
    return _digest(msgspec.to_builtins(placement))


def cost_path(facts: Facts) -> Path:
    """Where the costs of a group with these facts are kept."""
    return costs_folder() / f"{_digest(facts)}.json"


def read_kept(path: Path, facts: Facts) -> Costs | None:
    """The costs that are kept there, None where none are that can be used; why not is told."""
    file = _read_kept_file(path, facts)
    return None if file is None else file.costs


def _read_kept_file(path: Path, facts: Facts) -> CostFile | None:
    try:
        if not path.exists():
            return None
        kept = read_cost_file(path)
    except OSError as error:  # a folder on the way that may not be looked into
        note(f"measuring anew: {path.parent}: {error.strerror or error}")
        return None
    except InputError as error:
        note(f"measuring anew: {error}")
        return None
    if {name: fact for name, fact in kept.facts.items() if name != WORST_FIT} != facts:
        note(f"measuring anew: {path} was written for another group")
        return None
    return kept


def keep_costs(path: Path, costs: Costs, facts: Facts) -> bool:
    """Whether they could be kept; why not is told."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_costs(path, costs, facts)
    except OSError as error:
        note(f"measured costs are not kept: {path.parent}: {error.strerror or error}")
        return False
    except InputError as error:
        note(f"measured costs are not kept: {error}")
        return False
    return True


def is_better_kept(path: Path, off: float) -> bool:
    """Whether what is kept there goes before costs that are off by so much: those fit badly, and it is not known worse.

    Of learnt costs no fit is known: they held in real work.
    """
    if off <= MOST_OFF_FIT:
        return False
    try:
        if not path.exists():
            return False
        kept = read_cost_file(path).facts.get(WORST_FIT)
    except (InputError, OSError):
        return False
    return not isinstance(kept, float) or kept <= off


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
