"""Where `gearshift plan` has its costs from: a file, an earlier measurement, or workers started for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..coordinator.chunk_plan import Limits
from ..coordinator.cost_files import read_cost_file
from ..coordinator.cost_model import Costs
from ..proto.errors import InputError
from .options import GroupSettings, LayoutSettings
from .plan_report import PhaseBytes
from .session_setup import USUAL_MAX_CHUNK_TOKENS, choose_context, open_model, open_session

CPU = "cpu"


@dataclass(frozen=True, slots=True)
class FoundCosts:
    """Costs and what else a plan needs to know of the group. `told`: where they are from, in words."""

    costs: Costs
    told: str
    facts: Mapping[str, object]
    limits: Limits
    model: str | None = None
    memory: Sequence[PhaseBytes] | None = None
    context_tokens: int | None = None


def costs_of_file(path: Path, workers: int | None, max_chunk_tokens: int | None) -> FoundCosts:
    """Without a model: a file of costs carries all that is needed.

    Of its facts `devices` tells the chunk grid (all "cpu", or cards) and `max_chunk_tokens` what the buffers take.
    """
    file = read_cost_file(path)
    ranks = len(file.costs.stages)
    if workers is not None and workers != ranks:
        raise InputError(f"--workers {workers}: the costs in {path} are of {ranks}")
    named = file.facts.get("max_chunk_tokens")
    buffers = (
        named
        if isinstance(named, int) and not isinstance(named, bool) and named > 0
        else USUAL_MAX_CHUNK_TOKENS
    )
    limits = Limits.for_device(device_kind(file.facts), max_chunk_tokens or buffers)
    return FoundCosts(file.costs, str(path), file.facts, limits)


def costs_of_model(
    model: str,
    settings: GroupSettings,
    layouts: LayoutSettings,
    prompt_tokens: int,
    output_tokens: int,
    context_tokens: int | None,
    costs_file: Path | None,
) -> FoundCosts:
    """For a model on this machine, or with a file of costs instead of a measurement."""
    opened = open_model(model)
    context = choose_context(context_tokens, prompt_tokens, output_tokens, opened.spec.trained_context)
    longest = min(context, settings.max_chunk_tokens or USUAL_MAX_CHUNK_TOKENS)
    if costs_file is not None:
        file = read_cost_file(costs_file)
        limits = Limits.for_device(device_kind(file.facts), longest)
        return FoundCosts(file.costs, str(costs_file), file.facts, limits, opened.spec.name, None, context)
    with open_session(opened, settings, layouts, context) as session:
        driver = session.driver
        costs = driver.costs or driver.measure_costs().costs
        devices: list[str] = [hello.device for hello in session.cluster.hellos]
    facts = {"devices": devices}
    limits = Limits.for_device(device_kind(facts), longest)
    return FoundCosts(costs, "measured now", facts, limits, opened.spec.name, None, context)


def device_kind(facts: Mapping[str, object]) -> str:
    """`cpu` where all named devices are, else cards."""
    devices = facts.get("devices")
    return CPU if isinstance(devices, list) and devices and set(map(str, devices)) == {CPU} else "cuda"
