"""Whether a model fits: the arithmetic, what is chosen from it, and that workers allocate what it says."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gearshift.coordinator.fit.choice import (
    IN_PLACE,
    Candidate,
    ContextWish,
    Fit,
    candidates,
    choose_fit,
    layer_only,
    ways_to_fit,
    with_usual_chunk,
)
from gearshift.coordinator.fit.device_memory import DeviceMemory, MemoryWish, pools, rank_budgets
from gearshift.coordinator.fit.memory import OTHER_BYTES, FitCase, Pool, largest_context, shortfalls
from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.model.spec import build_spec
from gearshift.coordinator.policy.policy import journeys
from gearshift.proto.errors import DoesNotFitError, InputError
from gearshift.proto.ids import ComputeType, KvType, Layout
from gearshift.proto.kv import KvFormat
from gearshift.proto.placement.cuts import place
from gearshift.proto.placement.memory import Holding
from gearshift.proto.placement.plan import Placement
from gearshift.tests.helpers.running_groups import RunningGroups
from gearshift.tests.helpers.specs import layer_spec, model_spec

MEBIBYTE = 1 << 20
F16 = KvFormat(KvType.F16, KvType.F16)
SPEC = model_spec([layer_spec(8, 8, 1024, key_width=64)] * 6, hidden=512, vocab=2000, types="Q8_0")


def remake(
    *,
    shares: tuple[float, ...] | None = None,
    whole_layers: frozenset[int] = frozenset(),
    migrating_layers: frozenset[int] = frozenset(),
) -> Placement:
    return place(
        SPEC, 2, layer_shares=shares, tensor_shares=shares, whole_layers=whole_layers, migrating_layers=migrating_layers
    )


def chosen(
    case: FitCase, budgets: tuple[Pool, ...], context: int, *, asked: bool, needed: int = 1,
    chunks: tuple[int, ...] = (),
) -> Fit:
    wish = ContextWish(context, asked, needed)
    return choose_fit(candidates(case, budgets, wish, remake, chunks), budgets, wish, remake)


def case_of(ranks: int = 2, holding: Holding = Holding.F32, kv_format: KvFormat = F16) -> FitCase:
    return FitCase(SPEC, place(SPEC, ranks), holding, kv_format, journeys(ranks, None, None), 32)


def pool_of(rank: int, budget_bytes: int) -> Pool:
    return Pool((rank,), budget_bytes, f"rank {rank}", "free")


def tight_pools(case: FitCase, context_tokens: int) -> tuple[Pool, ...]:
    """Exactly what this context takes, on each rank."""
    return tuple(pool_of(rank, one.peak_bytes) for rank, one in enumerate(case.memory(context_tokens)))


CASE = case_of()


def test_the_largest_context_is_what_the_tightest_rank_holds_in_whole_blocks() -> None:
    ample, tight = CASE.memory(100_000)[0].peak_bytes, CASE.memory(1024)[1].peak_bytes
    assert largest_context(CASE, (pool_of(0, ample), pool_of(1, tight)), 100_000) == 1024
    assert largest_context(CASE, (pool_of(0, ample), pool_of(1, tight - 1)), 100_000) == 960
    assert largest_context(CASE, (pool_of(0, ample), pool_of(1, tight)), 1000) == 1000
    weights = CASE.memory(64)[1].weight_bytes
    assert largest_context(CASE, (pool_of(0, ample), pool_of(1, weights)), 1000) == 0


def test_a_larger_context_never_takes_less() -> None:
    for holding in (Holding.F32, Holding.PLANES):
        case = case_of(holding=holding)
        peaks = [case.memory(context)[0].peak_bytes for context in range(64, 8192, 64)]
        assert peaks == sorted(peaks)


def test_a_limit_or_a_reserve_in_the_way_is_named_with_what_would_do() -> None:
    needed, base = max(one.peak_bytes for one in CASE.memory(1024)), 100 * MEBIBYTE
    wish = ContextWish(1024, asked=True)

    def ways(*found: Pool) -> list[str]:
        return [way for way in ways_to_fit(CASE, found, wish) if way.startswith(("--memory-limit", "--reserve"))]

    limited = Pool((0,), 0, "rank 0", "limited", limit_base_bytes=base)
    (told,) = ways(limited)
    spare = int(told.split()[1].removesuffix("M")) * MEBIBYTE - needed - base
    assert 16 * MEBIBYTE <= spare < 32 * MEBIBYTE
    kept = Pool((1,), 0, "a card", "kept", most_bytes=needed + base)
    assert ways(kept) in (["--reserve 100M or less"], ["--reserve 101M or less"])
    assert ways(limited, kept) == []  # neither would do alone
    assert ways(replace(kept, most_bytes=MEBIBYTE)) == []


def test_ranks_of_one_host_share_its_memory() -> None:
    memory = CASE.memory(256)
    both = sum(one.peak_bytes for one in memory)
    assert not shortfalls(memory, (Pool((0, 1), both, "host", "free"),))
    (short,) = shortfalls(memory, (Pool((0, 1), both - 1, "host", "free"),))
    assert short.needed_bytes == both


def test_phases_share_what_stays_and_the_union_of_keys_and_values() -> None:
    """Two workers: a shift holds three quarters of the whole cache where one layout holds half."""
    whole = sum(one.kv_bytes for one in replace(CASE, journeys=((Layout.LAYER, Layout.LAYER),)).memory(640))
    (first, _) = CASE.memory(640)
    assert first.kv_bytes * 4 == whole * 3
    staying = replace(CASE, journeys=((Layout.LAYER, Layout.LAYER), (Layout.TENSOR, Layout.TENSOR)))
    assert staying.memory(640)[0].kv_bytes * 2 == whole
    assert first.shift_bytes > first.prefill_bytes > first.decode_bytes
    assert first.peak_bytes == first.shift_bytes == first.weight_bytes + first.kv_bytes + first.other_bytes


def test_kept_requests_multiply_the_cache_alone() -> None:
    one, four = CASE.memory(640)[1], replace(CASE, parallel_requests=4).memory(640)[1]
    assert four.kv_bytes == 4 * one.kv_bytes
    assert (four.weight_bytes, four.working) == (one.weight_bytes, one.working)


# What is free


def device(place: str, free: int, process: int = 0, *, display: bool = False) -> DeviceMemory:
    return DeviceMemory(place, f"card {place}", free * MEBIBYTE, process * MEBIBYTE, display)


def test_a_reserve_is_left_once_a_place_and_is_larger_beside_a_display() -> None:
    host = (device("host", 1000), device("host", 990))
    assert [one.budget_bytes // MEBIBYTE for one in pools(host, MemoryWish())] == [990 - 256]
    cards = (device("a", 1000), device("b", 1000, display=True))
    assert [one.budget_bytes // MEBIBYTE for one in pools(cards, MemoryWish())] == [744, 232]
    assert [one.budget_bytes // MEBIBYTE for one in pools(cards, MemoryWish(reserve_bytes=0))] == [1000, 1000]
    assert pools((device("a", 100),), MemoryWish())[0].budget_bytes == 0


def test_a_limit_counts_what_the_process_holds_already() -> None:
    cards = (device("a", 8000, 500), device("b", 8000, 300))
    found = pools(cards, MemoryWish(limits=(6000 * MEBIBYTE, 1000 * MEBIBYTE)))
    assert [budget // MEBIBYTE for budget in rank_budgets(found, 2)] == [5500, 700]
    one_for_all = pools(cards, MemoryWish(limits=(1000 * MEBIBYTE,)))
    assert [budget // MEBIBYTE for budget in rank_budgets(one_for_all, 2)] == [500, 700]
    with pytest.raises(InputError, match=r"3 values for 2 workers"):
        pools(cards, MemoryWish(limits=(1, 2, 3)))


def test_ranks_that_share_a_place_get_as_much_each() -> None:
    found = pools((device("host", 1256), device("host", 1256)), MemoryWish())
    assert [budget // MEBIBYTE for budget in rank_budgets(found, 2)] == [500, 500]


# What is chosen


def test_what_fits_is_taken_and_told() -> None:
    fit = chosen(CASE, tight_pools(CASE, 4096), 4096, asked=False)
    assert (fit.context_tokens, fit.case, fit.warnings) == (4096, CASE, ())
    assert fit.notes == ("context: 4096 tokens (--context names another)",)
    asked = chosen(CASE, tight_pools(CASE, 4096), 4096, asked=True)
    assert (asked.context_tokens, asked.notes) == (4096, ())


def test_the_largest_context_that_would_fit_is_announced() -> None:
    room = tight_pools(CASE, 1_536)
    assert largest_context(CASE, room, CASE.spec.trained_context) == 1_536
    fit = chosen(CASE, room, 1024, asked=False)
    assert fit.notes == ("context: 1024 tokens (--context names another; up to 1536 fit)",)


def test_a_context_that_was_not_asked_for_becomes_the_largest_that_fits_and_is_told() -> None:
    fit = chosen(CASE, tight_pools(CASE, 3072), 4096, asked=False)
    assert (fit.context_tokens, fit.case) == (3072, CASE)
    assert fit.notes[0].startswith("context: 3072 tokens, the most that fits")
    assert "rank" in fit.notes[0]
    assert "4096 would need" in fit.notes[0]


def test_keys_and_values_are_held_once_before_weights_migrate() -> None:
    fit = chosen(CASE, tight_pools(CASE, 3584), 4096, asked=True)
    assert (fit.case.journeys, fit.case.placement, fit.case.in_place) == (CASE.journeys, CASE.placement, True)
    assert fit.notes == (IN_PLACE,)
    bundles_held = [one.kv_bytes for one in fit.memory]
    assert bundles_held == [one.kv_bytes * 2 // 3 for one in CASE.memory(4096)]  # 2 of 3 bundles a block


def test_layers_migrate_or_stay_whole_before_a_layout_is_given_up() -> None:
    budgets = tight_pools(replace(CASE, in_place=True), 3072)
    fit = chosen(CASE, budgets, 4096, asked=True)
    assert fit.case.journeys == CASE.journeys
    assert fit.notes[0].startswith(f"{IN_PLACE}; weights: ")
    assert "for both layouts" in fit.notes[0]
    assert not shortfalls(fit.memory, budgets)
    assert max(one.weight_bytes for one in fit.memory) < CASE.memory(64)[0].weight_bytes
    # On its way a layer's parts are held beside what is there: the plan's shift counts them.
    migrating = replace(CASE, placement=remake(migrating_layers=frozenset(range(6))))
    for one in migrating.memory(64):
        assert one.moving_bytes > 0
        assert one.shift_bytes >= one.prefill_bytes - one.working.prefill + one.moving_bytes


def test_layouts_are_given_up_with_a_warning_before_a_context_becomes_of_no_use() -> None:
    context = 32_768  # the cache is most of what is needed
    staying = replace(CASE, journeys=((Layout.LAYER, Layout.LAYER), (Layout.TENSOR, Layout.TENSOR)))
    budgets = tight_pools(staying, context)
    assert chosen(CASE, budgets, context, asked=True).case.in_place, "a shift in place needs no more"
    tried = candidates(CASE, budgets, ContextWish(context, asked=True), remake)
    without_shift = choose_fit([one for one in tried if one.warning], budgets, ContextWish(context, asked=True))
    assert without_shift.case.journeys == staying.journeys
    assert "no request is shifted" in without_shift.warnings[0]
    layers = layer_only(CASE, remake)
    budgets, wish = tight_pools(layers, 4096), ContextWish(4096, asked=True)
    layer_layout = choose_fit([one for one in candidates(CASE, budgets, wish, remake) if one.warning], budgets, wish)
    assert layer_layout.case.journeys == ((Layout.LAYER, Layout.LAYER),)
    assert "only the layer layout" in layer_layout.warnings[0]
    # Each layer is held once: about two thirds of the weights with residency `both`.
    assert layers.memory(64)[0].weight_bytes < 0.7 * CASE.memory(64)[0].weight_bytes


def test_chunks_are_shortened_before_layouts_where_the_user_named_none() -> None:
    long = CASE.with_max_chunk(2048)
    budgets = tight_pools(CASE.with_max_chunk(256), 4096)
    fit = chosen(long, budgets, 4096, asked=True, chunks=(512, 256))
    assert (fit.context_tokens, fit.case.max_chunk_tokens, len(fit.case.journeys)) == (4096, 256, 4)
    assert "chunks of at most 256 tokens" in fit.notes[0]
    with pytest.raises(DoesNotFitError, match="--max-chunk 256"):
        choose_fit((Candidate(long),), budgets, ContextWish(4096, asked=True), remake)


def test_the_layer_layout_alone_holds_layers_whole_where_they_do_not_fit_in_parts() -> None:
    named = replace(CASE, journeys=((Layout.LAYER, Layout.LAYER),))
    fit = chosen(named, tight_pools(layer_only(CASE, remake), 4096), 4096, asked=True)
    assert (fit.case.placement, fit.warnings) == (remake(whole_layers=frozenset(range(6))), ())


def test_layouts_that_the_user_named_are_not_given_up() -> None:
    named = replace(CASE, journeys=((Layout.LAYER, Layout.TENSOR),))
    context = 32_768
    with pytest.raises(DoesNotFitError):
        chosen(named, tight_pools(layer_only(CASE, remake), context // 2), context, asked=True)


def test_a_prompt_that_does_not_fit_is_refused_though_no_context_was_asked_for() -> None:
    roomy = tight_pools(layer_only(CASE, remake), 8192)
    fit = chosen(CASE, roomy, 32_768, asked=False, needed=8000)
    assert 8000 <= fit.context_tokens < 16_384
    with pytest.raises(DoesNotFitError, match="32768 tokens of context does not fit"):
        chosen(CASE, roomy, 32_768, asked=False, needed=16_000)


def test_f29_an_asked_context_is_refused_by_device_with_the_largest_that_fits() -> None:
    budgets = tight_pools(CASE, 2048)
    with pytest.raises(DoesNotFitError) as refused:
        choose_fit((Candidate(CASE),), budgets, ContextWish(8192, asked=True))
    told = str(refused.value)
    assert refused.value.exit_code == 2
    assert "rank 0 needs" in told
    assert "rank 1 needs" in told
    assert "of weights" in told
    assert "--context 2048 or less" in told


def test_every_way_to_fit_that_is_told_does_fit() -> None:
    big = replace(CASE, parallel_requests=3, max_chunk_tokens=2048, kv_format=KvFormat(KvType.F32, KvType.F32))
    wish = ContextWish(4096, asked=True)
    room = [one.peak_bytes for one in replace(big, parallel_requests=2).memory(4096)]
    found = list(ways_to_fit(big, tuple(pool_of(rank, budget) for rank, budget in enumerate(room)), wish, remake))
    assert found[0].startswith("--context ")
    assert "--parallel 2" in found
    assert "--kv-type f16" in found
    assert any(one.startswith("--prefill layer --decode layer") for one in found)


def test_a_way_counts_what_a_start_would_give_up_by_itself() -> None:
    """bf16 alone does not do, but with keys and values for one layout at a time, which nobody has to ask for."""
    smaller = replace(CASE, holding=Holding.BF16)
    budgets = tight_pools(replace(smaller, in_place=True), 4096)
    assert shortfalls(smaller.memory(4096), budgets)
    assert shortfalls(replace(CASE, in_place=True).memory(4096), budgets)
    assert "--compute-type bf16" in list(ways_to_fit(CASE, budgets, ContextWish(4096, asked=True), remake))


def test_uneven_room_is_answered_by_shares() -> None:
    equal = CASE.memory(1024)
    room = (pool_of(0, round(equal[0].peak_bytes * 1.35)), pool_of(1, round(equal[1].peak_bytes * 0.85)))
    found = list(ways_to_fit(CASE, room, ContextWish(1024, asked=True), remake))
    assert any(one.startswith("--layer-share ") and " --tensor-share " in one for one in found), found


def test_shares_that_nobody_named_become_like_the_room_where_equal_ones_do_not_fit() -> None:
    by_room = remake(shares=(85.0, 15.0))
    room = replace(CASE, placement=by_room).memory(4096)
    budgets = tuple(pool_of(rank, round(1.05 * one.peak_bytes)) for rank, one in enumerate(room))
    wish = ContextWish(4096, asked=True)
    fit = choose_fit(candidates(CASE, budgets, wish, remake, shares_open=True), budgets, wish, remake)
    assert "as the room on the devices" in fit.notes[0]
    assert len(fit.case.journeys) == 4
    assert len(fit.case.placement.stages[0]) > len(fit.case.placement.stages[1])
    with pytest.raises(DoesNotFitError):
        choose_fit(candidates(CASE, budgets, wish, remake), budgets, wish, remake)


def test_nothing_is_promised_where_nothing_helps() -> None:
    with pytest.raises(DoesNotFitError, match="more or larger devices, or a smaller quantisation"):
        choose_fit((Candidate(CASE),), (pool_of(0, 1000), pool_of(1, 1000)), ContextWish(64, asked=True))


# On a card, all else stays small

LLAMA_8B = model_spec(
    [layer_spec(32, 8, 14336, key_width=128)] * 32, hidden=4096, vocab=128_256, types="Q4_K"
)


def test_the_longest_chunk_is_chosen_so_that_all_else_stays_below_700_mib_a_card() -> None:
    case = FitCase(
        LLAMA_8B, place(LLAMA_8B, 2), Holding.PLANES, F16, journeys(2, None, None), max_chunk_tokens=2048
    )
    chosen = with_usual_chunk(case, 4096, (0, 0))
    assert chosen.max_chunk_tokens in (512, 1024)
    assert all(one.other_bytes <= OTHER_BYTES for one in chosen.memory(4096))
    assert any(
        one.other_bytes > OTHER_BYTES for one in chosen.with_max_chunk(2 * chosen.max_chunk_tokens).memory(4096)
    )
    # What the process holds already (its context and communicators) counts.
    assert with_usual_chunk(case, 4096, (300 * MEBIBYTE, 0)).max_chunk_tokens <= chosen.max_chunk_tokens


def test_on_large_cards_chunks_are_longer_as_far_as_all_else_is_a_small_part_of_them() -> None:
    case = FitCase(LLAMA_8B, place(LLAMA_8B, 2), Holding.PLANES, F16, journeys(2, None, None), max_chunk_tokens=2048)
    process = (1560 * MEBIBYTE,) * 2

    def longest(*gibibytes: int) -> int:
        return with_usual_chunk(case, 4096, process, [size << 30 for size in gibibytes]).max_chunk_tokens

    assert longest(24, 24) == longest(140, 24) == 512
    assert longest(140, 140) == 2048
    chosen = case.with_max_chunk(2048)
    assert all(one.other_bytes + process[0] <= (140 << 30) // 48 for one in chosen.memory(4096))


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_allocate_what_was_planned(
    groups: RunningGroups, tiny_model: Callable[[str], Path], workers: int
) -> None:
    path = tiny_model("llama-gqa-oddvocab")
    driver = groups.load(path, workers, compute_type=ComputeType.F32, kv_type=KvType.F16, context_tokens=200)
    spec = build_spec(resolve_model(str(path)), 200)
    case = FitCase(spec, place(spec, workers), Holding.F32, F16, journeys(workers, None, None), 256)
    planned = [(one.weight_bytes, one.kv_bytes) for one in case.memory(200)]
    loaded = groups.loaded[workers]
    assert planned == list(zip(loaded.weight_bytes, loaded.kv_bytes, strict=True))
    told = [report.planned_bytes for report in sorted(driver.memory(), key=lambda one: one.rank)]
    assert told == [sum(one) for one in planned]
