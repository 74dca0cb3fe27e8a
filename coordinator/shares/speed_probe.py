"""Measures how fast unequal ranks are with some of a model's own layers, and shares the model out by it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ...proto.commands import UnloadModel
from ...proto.model import ModelSpec
from ...proto.placement.cuts import place
from ...proto.reports import CostsMeasured, Hello, KindSeconds
from ..costs.measuring_plan import MeasuringPlan
from ..driver import Driver
from ..driver_settings import DriverSettings
from ..group.cluster import Group
from .auto_shares import (
    AutoShares,
    Look,
    choose_layers,
    choose_parts,
    heads_shared_out,
    next_shares,
    whole_groups,
)
from .sample_model import SampleModel, sample_model

CHUNK_TOKENS = {"cpu": 256, "cuda": 2048}
STEP_DEPTH = 64  # cached tokens of the decode step that is timed
STEP_ROOM = 64
FURTHER_LOOKS = 2  # at other shares of the parts
NEAR = 0.015  # shares that differ by less are not tried apart
REPEATS = 5  # the least of them counts: what else runs on a machine only ever adds time


@dataclass(frozen=True, slots=True)
class ProbedShares:
    """What was chosen. `reading` and `writing`: each rank's speed, that of the fastest being 1."""

    shares: AutoShares
    reading: tuple[float, ...]
    writing: tuple[float, ...]


def alike(hellos: Sequence[Hello]) -> bool:
    """Whether all ranks have one kind of device at one pace: they are then equally fast by definition.

    What would be measured between them is noise, and it would change where the model is cut from run to run.
    """
    return len({(_kind_of(hello.device), hello.pace) for hello in hellos}) == 1


def _kind_of(device: str) -> str:
    """Without the number and the UUID of this one."""
    return device.partition(" (device ")[0]


def probe_shares(group: Group, spec: ModelSpec, settings: DriverSettings) -> ProbedShares:
    """Load some layers of the model on all ranks, time them, and give them up again. With no model loaded.

    Parts are timed at equal shares, at those that suit the speeds, and once more: some of a part's time does not depend
    on its size. Then at the nearest ones that cut no KV group. `settings`: device and types as the model will be loaded
    with.
    """
    sample = sample_model(spec, group.ranks)
    chunk = min(CHUNK_TOKENS["cpu" if settings.device == "cpu" else "cuda"], settings.max_chunk_tokens)
    small = replace(settings, context_tokens=max(chunk, STEP_DEPTH) + STEP_ROOM, max_chunk_tokens=chunk)
    steps = ((STEP_DEPTH, 1),)
    equal = (1 / group.ranks,) * group.ranks
    first = _timed(group, sample, small, equal, MeasuringPlan(((0, chunk),), steps=steps))
    layer_seconds = [one.layer_seconds() for one in first]
    looks = [Look(equal, tuple(one.step_seconds() for one in first))]

    def look(shares: tuple[float, ...]) -> Look:
        timed = _timed(group, sample, small, shares, MeasuringPlan((), steps=steps))
        return Look(shares, tuple(one.step_seconds() for one in timed))

    for _ in range(FURTHER_LOOKS):
        shares = next_shares(looks)
        if any(_are_near(shares, one.shares) for one in looks):
            break
        looks.append(look(shares))
    heads = heads_shared_out((layer.kv_heads for layer in spec.layers), group.ranks)
    best = min(looks, key=lambda one: one.slowest).shares
    uncut = whole_groups(best, heads) if best != equal else None
    whole = None
    if uncut is not None:
        near = next((one for one in looks if _are_near(uncut, one.shares)), None)
        whole = look(uncut) if near is None else Look(uncut, near.seconds)
    return ProbedShares(
        shares=AutoShares(choose_layers(layer_seconds), choose_parts(looks, whole)),
        reading=_speeds([sum(seconds) for seconds in layer_seconds]),
        writing=_speeds(looks[0].seconds),
    )


def _are_near(one: Sequence[float], other: Sequence[float]) -> bool:
    return max(abs(mine - theirs) for mine, theirs in zip(one, other, strict=True)) < NEAR


def _speeds(seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(min(seconds) / one, 3) for one in seconds)


@dataclass(frozen=True, slots=True)
class _TimedRank:
    """One rank's answers over the small model, for the layers of the large one."""

    sample: SampleModel
    answers: tuple[CostsMeasured, ...]

    def layer_seconds(self) -> tuple[float, ...]:
        """Of each layer, a chunk through the whole of it."""
        by_kind = self._by_kind(lambda kind: kind.whole[0])
        return tuple(by_kind[kind] for kind in self.sample.kind_of_layer)

    def step_seconds(self) -> float:
        """A decode step through the rank's own parts of all layers, and of the head."""
        by_kind = self._by_kind(lambda kind: kind.part_steps[0])
        head = min(one.heads[0] for one in self.answers)
        return sum(by_kind[kind] for kind in self.sample.kind_of_layer) + head

    def _by_kind(self, seconds: Callable[[KindSeconds], float]) -> list[float]:
        rank = self.answers[0].rank
        layers = [self.sample.layer(rank, kind) for kind in range(len(self.sample.layer_of_kind))]
        return [min(seconds(_kind_with(one, layer)) for one in self.answers) for layer in layers]


def _timed(
    group: Group,
    sample: SampleModel,
    settings: DriverSettings,
    shares: tuple[float, ...],
    plan: MeasuringPlan,
) -> list[_TimedRank]:
    cuts = tuple(accumulate([sample.layers_per_stage] * (group.ranks - 1)))
    placement = place(sample.spec, group.ranks, layer_cuts=cuts, tensor_shares=shares)
    driver = Driver(group, sample.spec, placement, settings)
    driver.load()
    rounds = [driver.measure_costs(plan).ranks for _ in range(REPEATS)]
    group.broadcast(UnloadModel())
    return [_TimedRank(sample, answers) for answers in zip(*rounds, strict=True)]


def _kind_with(found: CostsMeasured, layer: int) -> KindSeconds:
    return next(kind for kind in found.kinds if layer in kind.layers)
