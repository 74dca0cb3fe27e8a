"""Unequal ranks are timed with some of a model's own layers, and those are given up again."""

from collections import deque

import pytest

from gearshift.coordinator.driver_settings import DriverSettings
from gearshift.coordinator.shares.sample_model import MOST_LAYERS, sample_model
from gearshift.coordinator.shares.speed_probe import alike, probe_shares
from gearshift.proto.commands import AnyCommand, LoadModel, MeasureCosts, ReadClock, UnloadModel
from gearshift.proto.ids import ComputeType, KvType, Rank
from gearshift.proto.kv import KvFormat
from gearshift.proto.placement.cuts import place
from gearshift.proto.reports import AnyReport, ClockRead, CostsMeasured, Hello, KindSeconds, ModelLoaded
from gearshift.tests.helpers.specs import layer_spec, model_spec

F32 = KvFormat(KvType.F32, KvType.F32)
SETTINGS = DriverSettings(context_tokens=2048, max_chunk_tokens=512)
PLAIN, WIDE = layer_spec(), layer_spec(feed_forward=384)


class TimedGroup:
    """Ranks of made-up speeds: a layer takes its columns' time, a part `fixed` and its share of that."""

    def __init__(self, speeds: tuple[float, ...], fixed: float = 0.0) -> None:
        self.ranks = len(speeds)
        self.log: list[AnyCommand] = []
        self._speeds, self._fixed = speeds, fixed
        self._reports: deque[AnyReport] = deque()
        self._loaded: LoadModel | None = None

    def broadcast(self, command: AnyCommand) -> None:
        self.log.append(command)
        match command:
            case LoadModel():
                self._loaded = command
                self._reports += [
                    ModelLoaded(Rank(rank), 0.1, ComputeType.F32, F32, 1, 1) for rank in range(self.ranks)
                ]
            case MeasureCosts():
                self._reports += [self._measured(Rank(rank), command) for rank in range(self.ranks)]
            case ReadClock():
                self._reports += [ClockRead(Rank(rank), 0.0) for rank in range(self.ranks)]
            case UnloadModel():
                self._loaded = None
            case _:
                raise AssertionError(f"unexpected {command}")

    def send(self, rank: Rank, command: AnyCommand) -> None:
        raise AssertionError(f"unexpected {command}")

    def receive(self, timeout_seconds: float) -> AnyReport | None:
        return self._reports.popleft() if self._reports else None

    def _measured(self, rank: Rank, command: MeasureCosts) -> CostsMeasured:
        assert self._loaded is not None
        spec, placement, speed = self._loaded.spec, self._loaded.placement, self._speeds[rank]
        kinds: dict[int, list[int]] = {}
        for layer, facts in enumerate(spec.layers):
            kinds.setdefault(facts.feed_forward, []).append(layer)
        found = []
        for columns, layers in kinds.items():
            assert any(layer in placement.stages[rank] for layer in layers), "every stage has every kind"
            part = len(placement.layers[layers[0]].parts[rank].feed_forward) / columns
            whole = tuple(columns * tokens / speed for _, tokens in command.chunks)
            steps = tuple(columns * (self._fixed + part) / speed for _ in command.steps)
            found.append(
                KindSeconds(tuple(layers), whole=whole, part=whole, whole_steps=steps, part_steps=steps)
            )
        nothing = (1e-9,) * len(command.steps)
        return CostsMeasured(rank, kinds=tuple(found), hops=nothing, tails=nothing, heads=nothing)


def hello(rank: int, device: str = "cpu", pace: str = "") -> Hello:
    return Hello(Rank(rank), 1, "", 2, rank, 100 + rank, "here", device, "2", pace=pace)


def test_stages_and_parts_follow_the_measured_speeds() -> None:
    group = TimedGroup((1.0, 0.5))
    found = probe_shares(group, model_spec([PLAIN] * 30), SETTINGS)
    assert found.shares.layers == (20, 10)
    assert found.shares.parts == (0.67, 0.33)
    assert found.reading == (1.0, 0.5)
    assert found.writing == pytest.approx((1.0, 0.5), abs=0.01)
    assert isinstance(group.log[-1], UnloadModel)


def test_parts_cut_no_kv_group_though_the_first_layer_has_other_heads_than_the_rest() -> None:
    spec = model_spec([layer_spec(8, 1), *[layer_spec(8, 4)] * 29])
    assert probe_shares(TimedGroup((1.0, 0.35)), spec, SETTINGS).shares.parts == (0.75, 0.25)


def test_what_a_part_takes_whatever_its_size_is_found_by_a_second_look() -> None:
    found = probe_shares(TimedGroup((1.0, 0.5), fixed=0.1), model_spec([PLAIN] * 30), SETTINGS)
    # 0.1 + x = 2 (0.1 + 1 - x), so x = 0.7; the feed-forward of 192 columns is cut in eights of it
    assert found.shares.parts == (pytest.approx(0.7, abs=0.02), pytest.approx(0.3, abs=0.02))


def test_ranks_that_turn_out_equal_keep_equal_shares() -> None:
    found = probe_shares(TimedGroup((1.0, 1.01, 0.99)), model_spec([PLAIN] * 30), SETTINGS)
    assert found.shares.layers is None
    assert found.shares.parts is None


def test_layers_of_each_kind_are_timed_and_count_as_often_as_they_are_there() -> None:
    spec = model_spec([WIDE] * 6 + [PLAIN] * 12)
    found = probe_shares(TimedGroup((1.0, 0.5)), spec, SETTINGS)
    # 24 units of work: 16 and 8, as 6 wide layers and 4 plain ones against 8 plain ones
    assert found.shares.layers == (10, 8)


def test_few_layers_of_the_model_are_loaded_and_their_tensors_lie_where_they_were() -> None:
    spec = model_spec([WIDE] * 2 + [PLAIN] * 30)
    sample = sample_model(spec, 3)
    assert len(sample.spec.layers) == 3 * sample.layers_per_stage == 3 * (2 + MOST_LAYERS)
    assert sample.kind_of_layer == (0,) * 2 + (1,) * 30
    for stage in range(3):
        assert sample.spec.layers[sample.layer(stage, 0)] == WIDE
        assert sample.spec.layers[sample.layer(stage, 1)] == PLAIN
    originals = set(spec.tensors.values())
    assert set(sample.spec.tensors.values()) <= originals
    assert sample.spec.layer_tensor(0, "attn_q.weight") == spec.layer_tensor(0, "attn_q.weight")


def test_layers_with_matrices_of_other_types_are_kinds_of_their_own() -> None:
    spec = model_spec([PLAIN] * 8, types=lambda layer, name: "Q8_0" if layer in (0, 7) else "F32")
    assert sample_model(spec, 2).kind_of_layer == (0, 1, 1, 1, 1, 1, 1, 0)


@pytest.mark.parametrize(
    ("hellos", "equal"),
    [
        ([hello(0), hello(1)], True),
        ([hello(0, pace="2 threads"), hello(1, pace="1 thread")], False),
        ([hello(0, "H (device 0, GPU-a)"), hello(1, "H (device 1, GPU-b)")], True),
        ([hello(0, "H (device 0, GPU-a)"), hello(1, "A (device 1, GPU-b)")], False),
    ],
)
def test_ranks_of_one_kind_are_equally_fast_by_definition(hellos: list[Hello], equal: bool) -> None:
    assert alike(hellos) is equal


@pytest.mark.parametrize("slowness", [1.25, 2.0, 3.0, 5.0])
@pytest.mark.parametrize("fixed", [0.0, 0.1, 0.4])
def test_automatic_shares_are_within_five_percent_of_the_best_of_a_sweep(
    slowness: float, fixed: float
) -> None:
    """Held against every split of the layers, and every share in hundredths as the placement rounds it."""
    layers, facts = 30, layer_spec(9, 3, 1536)
    spec = model_spec([facts] * layers, vocab=4096)
    found = probe_shares(TimedGroup((1.0, 1 / slowness), fixed), spec, SETTINGS)

    def stages(first: int) -> float:
        return max(first, (layers - first) * slowness)

    def step(share: float) -> float:
        cut = place(spec, 2, tensor_shares=(share, 1 - share)).layers[0].parts
        own = [len(part.feed_forward) / facts.feed_forward for part in cut]
        return max(fixed + own[0], (fixed + own[1]) * slowness)

    chosen_layers = found.shares.layers or (15, 15)
    assert stages(chosen_layers[0]) <= 1.05 * min(stages(first) for first in range(1, layers))
    chosen_parts = found.shares.parts or (0.5, 0.5)
    best = min(step(hundredth / 100) for hundredth in range(50, 100))
    assert step(chosen_parts[0]) <= 1.05 * best
