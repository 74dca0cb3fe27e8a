"""What is measured, and what comes of it."""

from itertools import pairwise

import pytest
from msgspec.structs import replace

from gearshift.coordinator.costs.measuring import PLANNING_SECONDS, Measurement, best, joined, times_as_long
from gearshift.coordinator.costs.measuring_plan import MIB, layer_values, measuring_plan
from gearshift.proto.ids import Rank
from gearshift.proto.reports import CostsMeasured, KindSeconds
from gearshift.tests.helpers import measured as made_up
from gearshift.tests.helpers.specs import layer_spec

SPEC, PLAN, measured = made_up.SPEC, made_up.PLAN, made_up.measured


@pytest.mark.parametrize("context", [1, 2, 3, 8, 16, 64, 255, 576, 4096, 200_000])
@pytest.mark.parametrize("max_chunk", [1, 100, 4096])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("thorough", [False, True])
def test_points_stay_within_the_context_and_the_chunk_buffers(
    device: str, max_chunk: int, context: int, thorough: bool
) -> None:
    plan = measuring_plan(device, 2, context, max_chunk, 8, thorough)
    assert all(1 <= tokens <= max_chunk and cached + tokens <= max(2, context) for cached, tokens in plan.chunks)
    assert all(0 <= cached < max(1, context) for cached, _ in plan.steps)
    assert len(set(plan.chunks)) == len(plan.chunks)
    assert len(set(plan.steps)) == len(plan.steps)
    assert plan.steps[0][1] == 1, "one request alone comes first"


def test_batches_follow_the_limit_of_open_requests() -> None:
    def batches(limit: int) -> list[int]:
        return sorted({batch for _, batch in measuring_plan("cpu", 2, 4096, 512, limit).steps})

    assert [batches(limit) for limit in (1, 8, 100)] == [[1], [1, 4, 8], [1, 4, 8, 16]]


def test_chunks_through_large_layers_are_short_on_a_cpu_alone() -> None:
    values = layer_values(layer_spec(64, 8, 28_672, key_width=128, value_width=128), 8192)
    assert values == 8192 * (2 * 64 * 128 + 2 * 8 * 128 + 3 * 28_672)

    def longest(device: str, size: int) -> int:
        return max(tokens for _, tokens in measuring_plan(device, 2, 65_536, 2048, 1, layer_values=size).chunks)

    assert longest("cpu", 3_500_000) == 256
    assert 32 <= longest("cpu", values) < 128
    assert longest("cuda", values) == 2048


def test_the_first_stage_and_every_rank_of_the_tensor_layout_look_tokens_up() -> None:
    plain = measured()
    looked_up = [replace(one, embeds=(1e-3, 4e-3, 4e-3)) for one in plain.ranks]
    assert [tokens for _, tokens in PLAN.chunks] == [64, 256, 256]
    found = Measurement(PLAN, plain.placement, tuple(looked_up))
    for seconds, before in (
        (found.stage_seconds(0), plain.stage_seconds(0)),
        (found.tensor_seconds(), plain.tensor_seconds()),
    ):
        assert [now - then for now, then in zip(seconds, before, strict=True)] == pytest.approx([1e-3, 4e-3, 4e-3])
    assert found.stage_seconds(1) == plain.stage_seconds(1)
    assert found.costs.stages[0].per_token == pytest.approx(plain.costs.stages[0].per_token + 1e-3 / 64)


def test_what_requests_take_beside_their_work_follows_messages_and_the_head() -> None:
    plain = measured()
    found = Measurement(PLAN, plain.placement, plain.ranks, message_seconds=4e-4, steps_a_tick=4).costs.overhead
    assert found.request_seconds == pytest.approx(PLANNING_SECONDS + 2 * 4e-4 + made_up.TAIL_SECONDS)
    assert (found.shift_seconds, found.chunk_seconds, found.step_seconds) == pytest.approx((4e-4, 4e-4, 1e-4))
    by_itself = [replace(one, device_steps=(1e-3,) * len(PLAN.steps)) for one in plain.ranks]
    paced = Measurement(PLAN, plain.placement, tuple(by_itself), message_seconds=4e-4, steps_a_tick=8).costs.overhead
    assert paced.step_seconds == 0.0, "the device finds its next steps waiting"


def test_one_rank_measures_nothing_that_takes_two() -> None:
    plan = measuring_plan("cpu", 1, 4096, 512, 8)
    assert [words for words, _ in plan.commands()] == ["chunks on each rank", "decode steps"]
    found = measured((1.0,), plan, cuts=())
    assert found.costs.tensor_prefill is found.costs.decode_tensor is found.costs.link is None
    assert found.costs.decode_layer is not None


def test_a_stage_costs_its_layers_and_the_slowest_rank_counts_under_tensor() -> None:
    costs = measured((1.0, 0.5), cuts=(3,)).costs
    b, a, q = made_up.LAYER
    fast, slow = costs.stages
    assert (fast.per_chunk, fast.per_token, fast.per_pair) == pytest.approx((3 * b, 3 * a, 3 * q), rel=1e-6)
    assert (slow.per_chunk, slow.per_token, slow.per_pair) == pytest.approx((2 * b, 2 * a, 2 * q), rel=1e-6)
    assert costs.tensor_prefill is not None
    assert costs.tensor_prefill.per_token == pytest.approx(4 * a)  # half of each of 4 layers, at half the speed
    assert costs.tensor_prefill.per_chunk == pytest.approx(4 * (b + 2 * made_up.REDUCE_SECONDS))


@pytest.mark.parametrize(("speeds", "cuts"), [((1.0, 1.0), (2,)), ((1.0, 0.5), (3,)), ((1.0, 1.0), (4,))])
def test_the_first_points_alone_take_as_long_as_among_all(
    speeds: tuple[float, ...], cuts: tuple[int, ...]
) -> None:
    known = measured(speeds, PLAN, cuts).costs
    first = PLAN.first_points()
    assert not any(command.transfer_bytes for _, command in first.commands())
    ratios = times_as_long(measured(speeds, first, cuts), known)
    assert ratios == pytest.approx([1.0] * len(ratios))
    assert len(ratios) == (4 if 4 in cuts else 5), "a stage without layers says nothing"
    slower = times_as_long(measured(tuple(speed / 2 for speed in speeds), first, cuts), known)
    assert min(slower) > 1.8
    assert max(slower) == pytest.approx(2.0)


def test_a_step_in_the_layer_layout_is_its_stages_hops_and_tail() -> None:
    costs = measured().costs
    single = 4 * (made_up.STEP_SECONDS + made_up.STEP_A_REQUEST) + 2 * made_up.HOP_SECONDS + made_up.TAIL_SECONDS
    assert costs.decode_layer is not None
    assert costs.decode_layer.seconds(1, 0) == pytest.approx(single)
    assert costs.decode_layer.seconds(6, 0) == pytest.approx(single + 4 * 5 * made_up.STEP_A_REQUEST)
    assert costs.decode_layer.per_cached_token == pytest.approx(4 * made_up.STEP_A_CACHED_TOKEN)
    assert costs.decode_tensor is not None
    assert costs.decode_tensor.seconds(1, 0) < single


def test_steps_that_the_device_runs_by_itself_are_taken_as_they_are() -> None:
    found = measured()
    ranks = [
        CostsMeasured(
            one.rank, one.kinds, one.hops, one.tails, one.heads, tuple(0.25 for _ in PLAN.steps), one.reduces,
            one.transfers,
        )
        for one in found.ranks
    ]  # fmt: skip
    costs = Measurement(PLAN, found.placement, tuple(ranks)).costs
    assert costs.decode_tensor is not None
    assert costs.decode_tensor.seconds(8, 1000) == 0.25
    assert costs.decode_layer == found.costs.decode_layer


def test_a_larger_batch_never_takes_less_though_noise_says_so() -> None:
    noisy = iter([3.0, 2.0, 4.0, 3.5])
    found = measured()
    ranks = [
        CostsMeasured(one.rank, one.kinds, one.hops, one.tails, one.heads, tuple(times), one.reduces, one.transfers)
        for one, times in zip(found.ranks, [list(noisy)] * 2, strict=True)
    ]
    step = Measurement(PLAN, found.placement, tuple(ranks)).costs.decode_tensor
    assert step is not None
    assert all(before <= after for (_, before), (_, after) in pairwise(step.seconds_of_batch))


def test_links_and_shifts_come_of_transfers() -> None:
    costs = measured().costs
    assert costs.link is not None
    assert (costs.link.seconds_per_transfer, costs.link.bytes_per_second) == pytest.approx(made_up.LINK)
    token_bytes = sum(layer.kv_heads * 2 * (layer.key_width + layer.value_width) for layer in SPEC.layers)
    assert costs.to_tensor.per_token_seconds == pytest.approx(token_bytes / 4 / made_up.LINK[1])  # (S - 1) / S²
    assert costs.to_layer == costs.to_tensor
    assert costs.all_reduces[-1] == (MIB, pytest.approx(made_up.REDUCE_SECONDS + MIB / made_up.LINK[1]))


def test_a_rank_without_layers_is_judged_by_its_own_parts() -> None:
    costs = measured((1.0, 0.5), cuts=(4,)).costs
    assert costs.stages[1].seconds(100, 100) == 0.0
    assert costs.layer_seconds is not None
    (kind,) = costs.layer_seconds.kinds
    assert kind.layers == (0, 1, 2, 3)
    assert kind.whole[1].seconds(512, 64) == pytest.approx(2 * kind.whole[0].seconds(512, 64))
    assert kind.part_step_seconds[1] == pytest.approx(2 * kind.part_step_seconds[0])
    assert costs.layer_seconds.tensor_shares == (0.5, 0.5)
    assert costs.layer_seconds.head_step_seconds[1] == pytest.approx(2 * made_up.HEAD_SECONDS)


def test_parts_that_are_not_at_hand_are_judged_by_their_share() -> None:
    found = measured((1.0, 0.5))
    alone = [
        replace(one, kinds=tuple(KindSeconds(k.layers, k.whole, whole_steps=k.whole_steps) for k in one.kinds))
        for one in found.ranks
    ]
    judged = Measurement(PLAN, found.placement, tuple(alone), found.shift_bytes, hidden=32).costs
    assert judged.stages == found.costs.stages
    known = found.costs
    assert judged.tensor_prefill is not None
    assert known.tensor_prefill is not None
    assert judged.tensor_prefill.seconds(512, 64) == pytest.approx(known.tensor_prefill.seconds(512, 64), rel=0.05)
    assert judged.decode_tensor is not None
    assert known.decode_tensor is not None
    assert judged.decode_tensor.seconds(4, 100) == pytest.approx(known.decode_tensor.seconds(4, 100), rel=0.05)


def test_of_several_rounds_the_least_figure_counts() -> None:
    (_, command), *_ = PLAN.commands()
    rounds = [made_up.measured_costs(Rank(1), 2, 4, command, speed) for speed in (1.0, 5.0, 0.1)]
    assert best(rounds) == rounds[1]
    assert best(rounds[:1]) is rounds[0]
    assert joined([best(rounds)]) == rounds[1]
