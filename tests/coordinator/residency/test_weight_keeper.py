"""Weights that migrate: work waits for them, they wait for work, nobody is starved, and they go home when idle."""

from collections.abc import Sequence
from itertools import groupby
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gearshift.coordinator.residency.weight_keeper import BACKGROUND_GROUPS, WeightKeeper
from gearshift.proto.commands import CommitShift, MigrateWeights, OpenRequest, PrepareMigration, RunTick
from gearshift.proto.errors import ProtocolError
from gearshift.proto.generation_result import FinishReason, ShiftFailureKind
from gearshift.proto.ids import Layout, Rank, RequestId, WeightSource
from gearshift.proto.reports import MigrationPrepared, WeightsMigrated
from gearshift.tests.helpers.fake_model import expected_answer
from gearshift.tests.helpers.migrating_run import (
    SECONDS,
    MigratingGroup,
    MigratingRun,
    new_migrating_run,
    ways_of,
)
from gearshift.tests.helpers.scheduler_run import LAYER, TENSOR, VOCAB, asked, plan, prompt_of


def group_of(run: MigratingRun) -> MigratingGroup:
    return cast(MigratingGroup, run.group)


def answers_are_right(run: MigratingRun, requests: list[tuple[int, int]]) -> None:
    for index, (length, count) in enumerate(requests):
        session = run.sessions()[index]
        assert session.finish_reason is FinishReason.LENGTH, session.error
        assert run.tokens(index) == expected_answer(prompt_of(length), count, VOCAB)
    run.settle()
    assert run.group.clean
    assert run.scheduler.weights.at is run.scheduler.weights.home


def directions(moves: list[MigrateWeights]) -> list[Layout]:
    """Where to, each turn once."""
    return [to for to, _ in groupby(command.to for command in moves)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_weights_go_there_before_the_first_step_and_home_when_nothing_is_asked(ranks: int) -> None:
    run = new_migrating_run(ranks)
    run.scheduler.submit(plan(0, asked(100, 9, LAYER, TENSOR), ranks))
    run.finish()
    answers_are_right(run, [(100, 9)])
    groups = ways_of(ranks)[TENSOR].groups
    assert [command.to for command in group_of(run).migrations] == [TENSOR] * len(groups) + [LAYER] * len(groups)
    assert [command.request for command in group_of(run).migrations] == [0] * len(groups) + [None] * len(groups)
    there, back = run.scheduler.weights.stories
    assert (there.to, there.background, there.groups) == (TENSOR, False, len(groups))
    assert (back.to, back.background, back.groups) == (LAYER, True, len(groups))
    assert there.received_bytes == back.received_bytes == 1000 * ranks * len(groups)


def test_a_shift_is_committed_behind_its_weights_so_that_their_time_counts_as_exposed() -> None:
    run = new_migrating_run(2)
    run.scheduler.submit(plan(0, asked(100, 9, LAYER, TENSOR), 2))
    run.finish()
    log = run.group.log
    moves = [place for place, command in enumerate(log) if isinstance(command, MigrateWeights) and command.to is TENSOR]
    commit = next(place for place, command in enumerate(log) if isinstance(command, CommitShift))
    step = next(place for place, command in enumerate(log) if isinstance(command, RunTick) and command.decode)
    assert moves[-1] < commit < step


def test_stages_are_vacated_as_the_last_chunk_passes_them_once_host_memory_is_the_fastest_source() -> None:
    run = new_migrating_run(3, on_host=True)
    run.scheduler.weights.source = None
    for index in range(2):
        run.scheduler.submit(plan(index, asked(300, 9, LAYER, TENSOR), 3))
        run.finish()
    answers_are_right(run, [(300, 9), (300, 9)])
    log = run.group.log
    again = next(place for place, one in enumerate(log) if isinstance(one, OpenRequest) and one.request == 1)
    assert not any(isinstance(one, RunTick) and one.vacated for one in log[:again]), "not before it is known"
    later = log[again:]
    told = [place for place, one in enumerate(later) if isinstance(one, RunTick) and one.vacated]
    assert [later[place].vacated for place in told] == [(0,), (1,), (2,)]  # type: ignore[union-attr]
    behind = later[told[-1] + 1 :][: len(ways_of(3)[TENSOR].groups)]
    assert {(one.to, one.source) for one in behind if isinstance(one, MigrateWeights)} == {(TENSOR, WeightSource.HOST)}
    assert all(isinstance(one, MigrateWeights) for one in behind)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("length", [8, 20, 40])
def test_a_short_prompt_vacates_all_stages_too_once_all_ranks_have_agreed(length: int, seed: int) -> None:
    run = new_migrating_run(3, seed=seed, on_host=True)
    run.scheduler.submit(plan(0, asked(length, 9, LAYER, TENSOR), 3))
    run.finish()
    answers_are_right(run, [(length, 9)])
    assert [stage for one in run.group.log if isinstance(one, RunTick) for stage in one.vacated] == [0, 1, 2]


def test_a_prompt_whose_shift_a_rank_declines_vacates_nothing() -> None:
    run = new_migrating_run(3, on_host=True)
    run.group._shifts._declining = frozenset({0})
    run.scheduler.submit(plan(0, asked(8, 9, LAYER, TENSOR), 3))
    run.finish()
    answers_are_right(run, [(8, 9)])
    assert not group_of(run).migrations
    assert not any(isinstance(one, RunTick) and one.vacated for one in run.group.log)


@pytest.mark.parametrize("count", range(1, 26))
def test_nothing_is_vacated_while_another_request_still_works_in_the_layer_layout(count: int) -> None:
    """Whichever of its steps falls on the last chunk of the one that leaves: the last one, too."""
    run = new_migrating_run(2, on_host=True)
    run.scheduler.submit(plan(0, asked(20, count, LAYER, LAYER), 2))
    run.scheduler.submit(plan(1, asked(100, 9, LAYER, TENSOR), 2))
    run.finish()
    answers_are_right(run, [(20, count), (100, 9)])
    assert directions(group_of(run).migrations) == [TENSOR, LAYER]
    assert list(run.sessions()) == [0, 1]


def test_nothing_is_vacated_behind_a_chunk_whose_request_has_its_answer_to_write_there() -> None:
    run = new_migrating_run(3, on_host=True)
    run.scheduler.submit(plan(0, asked(20, 5, LAYER, LAYER), 3))
    run.scheduler.submit(plan(1, asked(8, 9, LAYER, TENSOR), 3))
    run.finish()
    answers_are_right(run, [(20, 5), (8, 9)])
    assert directions(group_of(run).migrations) == [TENSOR, LAYER]
    assert list(run.sessions()) == [0, 1]


@pytest.mark.parametrize("cancel_after", range(12, 60))
def test_a_request_cancelled_behind_the_promise_takes_it_not_back_and_leaves_nothing_behind(cancel_after: int) -> None:
    """Its chunk goes on to the last stage, and so do the weights."""
    run = new_migrating_run(3, seed=cancel_after, on_host=True)
    run.scheduler.submit(plan(0, asked(60, 9, LAYER, TENSOR), 3))
    for _ in range(cancel_after):
        run.send()
        if any(run.group._reports):
            run.report()
    run.scheduler.cancel(RequestId(0))
    run.scheduler.submit(plan(1, asked(60, 20, LAYER, TENSOR), 3))
    run.finish()
    run.settle()
    assert run.tokens(1) == expected_answer(prompt_of(60), 20, VOCAB)
    assert run.group.clean
    assert run.scheduler.weights.at is LAYER


def test_ranks_are_asked_when_the_request_opens_not_when_its_prompt_is_read() -> None:
    run = new_migrating_run(2)
    run.scheduler.submit(plan(0, asked(100, 9, LAYER, TENSOR), 2))
    run.send()
    assert isinstance(run.group.log[2], PrepareMigration)  # behind OpenRequest and PrepareShift
    run.finish()
    assert sum(isinstance(command, PrepareMigration) for command in run.group.log) == 2  # there; home


def test_without_a_change_of_layout_nothing_moves() -> None:
    run = new_migrating_run(2)
    for index in range(3):
        run.scheduler.submit(plan(index, asked(60, 5, LAYER, LAYER), 2))
    run.finish()
    run.settle()
    assert not group_of(run).migrations


@given(
    st.integers(2, 4),
    st.integers(0, 10**6),
    st.lists(
        st.tuples(st.integers(1, 300), st.integers(1, 9), st.sampled_from(Layout), st.sampled_from(Layout)),
        min_size=1, max_size=7,
    ),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_any_mix_of_requests_is_answered_and_each_moves_the_weights_twice_at_most(
    ranks: int, seed: int, requests: list[tuple[int, int, Layout, Layout]], together: bool, in_place: bool,
    on_host: bool,
) -> None:
    run = new_migrating_run(ranks, seed=seed, in_place=in_place, on_host=on_host)
    for index, (length, count, prefill, decode) in enumerate(requests):
        run.scheduler.submit(plan(index, asked(length, count, prefill, decode), ranks))
        if not together:
            for _ in range(seed % 17):
                run.send()
                if any(run.group._reports):
                    run.report()
    run.finish()
    answers_are_right(run, [(length, count) for length, count, _, _ in requests])
    moves = group_of(run).migrations
    assert len(directions(moves)) <= 2 * len(requests) + 1


@given(
    st.integers(2, 3),
    st.integers(0, 10**6),
    st.lists(
        st.tuples(st.integers(1, 300), st.integers(1, 9), st.sampled_from(Layout), st.sampled_from(Layout)),
        min_size=1, max_size=4,
    ),
    st.dictionaries(st.integers(0, 3), st.integers(1, 2), min_size=1),
    st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_shifts_that_arrive_damaged_are_mended_or_given_up_and_the_weights_come_back_for_them(
    ranks: int, seed: int, requests: list[tuple[int, int, Layout, Layout]], damaging: dict[int, int], on_host: bool,
) -> None:
    run = new_migrating_run(ranks, seed=seed, on_host=on_host)
    run.group._damaging.update(damaging)
    for index, (length, count, prefill, decode) in enumerate(requests):
        run.scheduler.submit(plan(index, asked(length, count, prefill, decode), ranks))
    run.finish()
    answers_are_right(run, [(length, count) for length, count, _, _ in requests])


def test_requests_of_both_layouts_do_not_thrash_and_none_starves() -> None:
    """Long answers in the tensor layout keep coming; one prompt for the layer layout is read all the same."""
    run = new_migrating_run(2)
    for index in range(3):
        run.scheduler.submit(plan(index, asked(20, 40, TENSOR, TENSOR), 2))
    run.scheduler.submit(plan(3, asked(20, 3, LAYER, LAYER), 2))
    for index in range(4, 8):
        run.scheduler.submit(plan(index, asked(20, 40, TENSOR, TENSOR), 2))
    run.finish()
    answers_are_right(run, [(20, 3 if index == 3 else 40) for index in range(8)])
    assert directions(group_of(run).migrations)[:3] == [TENSOR, LAYER, TENSOR]
    ended = list(run.sessions())
    assert ended.index(3) < ended.index(4), "those that came later do not push in"


def test_a_request_that_comes_turns_the_way_home_round_between_two_groups() -> None:
    run = new_migrating_run(2)
    run.scheduler.submit(plan(0, asked(20, 5, LAYER, TENSOR), 2))
    run.finish()
    moves, groups = group_of(run).migrations, len(ways_of(2)[TENSOR].groups)
    while len(moves) == groups:  # until the way home has begun
        run.report()
        run.send()
    assert len(moves) == groups + BACKGROUND_GROUPS < 2 * groups
    run.scheduler.submit(plan(1, asked(20, 5, TENSOR, TENSOR), 2))
    run.finish()
    answers_are_right(run, [(20, 5), (20, 5)])
    home, again = moves[groups:][:BACKGROUND_GROUPS], moves[groups + BACKGROUND_GROUPS :][:BACKGROUND_GROUPS]
    assert [command.to for command in (*home, *again)] == [LAYER] * len(home) + [TENSOR] * len(again)
    assert [command.layers for command in again] == [command.layers for command in home]


def test_home_is_where_most_of_the_last_requests_began() -> None:
    """Prompts read under tensor parallelism find their weights there; long ones make it the layer layout again."""
    run = new_migrating_run(2)
    for index in range(5):
        run.scheduler.submit(plan(index, asked(20, 5, TENSOR, TENSOR), 2))
        run.finish()
        run.settle()
        assert run.scheduler.weights.at is TENSOR
    assert directions(group_of(run).migrations) == [TENSOR]
    for index in range(5, 12):
        run.scheduler.submit(plan(index, asked(20, 5, LAYER, TENSOR), 2))
        run.finish()
        run.settle()
    assert run.scheduler.weights.at is LAYER
    assert group_of(run).migrations[-1].request is None


def test_a_request_whose_weights_cannot_come_stays_in_its_layout_and_is_answered() -> None:
    run = new_migrating_run(2, declined=frozenset({TENSOR}))
    run.scheduler.submit(plan(0, asked(100, 9, LAYER, TENSOR), 2))
    run.finish()
    answers_are_right(run, [(100, 9)])
    session = run.sessions()[0]
    assert session.layout is LAYER
    assert session.shift_failure is not None
    assert session.shift_failure.kind is ShiftFailureKind.DECLINED
    assert "rank 0 declined to migrate weights: no room" in (session.warning or "")
    assert not group_of(run).migrations


def test_a_request_that_cannot_begin_without_its_weights_ends_with_the_reason_and_harms_nobody() -> None:
    run = new_migrating_run(2, declined=frozenset({TENSOR}))
    run.scheduler.submit(plan(0, asked(30, 5, LAYER, LAYER), 2))
    run.scheduler.submit(plan(1, asked(30, 5, TENSOR, TENSOR), 2))
    run.scheduler.submit(plan(2, asked(30, 5, LAYER, LAYER), 2))
    run.finish()
    ended = run.sessions()
    assert ended[1].finish_reason is FinishReason.ERROR
    assert ended[1].error == "the tensor layout cannot be run: rank 0 declined to migrate weights: no room"
    assert [ended[index].finish_reason for index in (0, 2)] == [FinishReason.LENGTH] * 2


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("cancel_after", range(0, 40, 3))
def test_a_request_cancelled_at_any_time_leaves_nothing_behind(cancel_after: int, on_host: bool) -> None:
    run = new_migrating_run(3, seed=cancel_after, on_host=on_host)
    run.scheduler.submit(plan(0, asked(60, 20, LAYER, TENSOR), 3))
    run.scheduler.submit(plan(1, asked(60, 20, LAYER, TENSOR), 3))
    for _ in range(cancel_after):
        run.send()
        if any(run.group._reports):
            run.report()
    run.scheduler.cancel(RequestId(0))
    run.finish()
    run.settle()
    assert run.tokens(1) == expected_answer(prompt_of(60), 20, VOCAB)
    assert run.group.clean
    assert run.scheduler.weights.at is LAYER


# The keeper alone


def accept(keeper: WeightKeeper, to: Layout, on_host: Sequence[bool] = (False, False)) -> None:
    for rank in range(keeper.ranks):
        keeper.prepared(MigrationPrepared(Rank(rank), to, accepted=True, on_host=on_host[rank]))


def done(keeper: WeightKeeper, command: MigrateWeights, seconds: tuple[float, ...], received: int = 1000) -> None:
    for rank, took in enumerate(seconds):
        keeper.migrated(WeightsMigrated(Rank(rank), command.to, command.layers, took, received))


def migrate(
    keeper: WeightKeeper, to: Layout, seconds: dict[WeightSource, float], on_host: Sequence[bool] = (False, False)
) -> list[MigrateWeights]:
    if keeper.move(to):
        accept(keeper, to, on_host)
    commands = [command for command in keeper.move(to) if isinstance(command, MigrateWeights)]
    for command in commands:
        done(keeper, command, (seconds[command.source],) * keeper.ranks)
    return commands


def test_each_source_is_tried_once_and_the_faster_one_is_kept() -> None:
    keeper = WeightKeeper(2, ways_of(2))
    took = SECONDS
    first = migrate(keeper, TENSOR, took)
    assert [command.source for command in first[:2]] == [WeightSource.PEER, WeightSource.FILE]
    assert {command.source for command in migrate(keeper, LAYER, took)} == {WeightSource.PEER}
    faster_file = WeightKeeper(2, ways_of(2))
    migrate(faster_file, TENSOR, {WeightSource.PEER: 2.0, WeightSource.FILE: 0.5})
    assert {c.source for c in migrate(faster_file, LAYER, took)} == {WeightSource.FILE}


def test_copies_in_host_memory_are_a_source_only_where_every_rank_has_what_comes_to_it() -> None:
    keeper = WeightKeeper(2, ways_of(2))
    took = {WeightSource.PEER: 1.0, WeightSource.HOST: 0.5, WeightSource.FILE: 2.0}
    ways = ((TENSOR, (True, False)), (LAYER, (True, True)), (TENSOR, (True, True)), (LAYER, (False, True)))
    sources = [[command.source for command in migrate(keeper, to, took, on_host)] for to, on_host in ways]
    assert sources[0][:2] == [WeightSource.PEER, WeightSource.FILE]
    assert sources[1][0] is WeightSource.HOST, "tried once"
    assert set(sources[2]) == {WeightSource.HOST}
    assert set(sources[3]) == {WeightSource.PEER}
    keeper.source = WeightSource.HOST  # where there is one
    assert {command.source for command in migrate(keeper, TENSOR, took, (False, True))} == {WeightSource.PEER}
    assert {command.source for command in migrate(keeper, LAYER, took, (True, True))} == {WeightSource.HOST}


def test_what_is_left_to_move_and_the_speed_measured_make_the_price() -> None:
    ways = ways_of(2)
    keeper = WeightKeeper(2, ways)
    assert keeper.bytes_per_second == 0.0
    assert keeper.bytes_to(TENSOR) == ways[TENSOR].rank_bytes
    assert keeper.bytes_to(LAYER) == (0, 0)
    migrate(keeper, TENSOR, {WeightSource.PEER: 0.5, WeightSource.FILE: 2.0})
    assert keeper.bytes_to(TENSOR) == (0, 0)
    assert keeper.bytes_to(LAYER) == ways[LAYER].rank_bytes
    assert keeper.bytes_per_second == pytest.approx(1000 / 0.5)
    assert WeightKeeper(2).bytes_to(TENSOR) == (0, 0)


def test_a_migration_takes_as_long_as_the_slowest_rank() -> None:
    keeper = WeightKeeper(2, ways_of(2))
    keeper.move(TENSOR)
    accept(keeper, TENSOR)
    commands = [command for command in keeper.move(TENSOR) if isinstance(command, MigrateWeights)]
    for command in commands:
        done(keeper, command, (0.25, 0.5))
    assert [(story.to, story.seconds) for story in keeper.stories] == [(TENSOR, 0.5 * len(commands))]


def test_answers_that_nobody_asked_for_are_a_fault() -> None:
    keeper = WeightKeeper(2, ways_of(2))
    with pytest.raises(ProtocolError, match="rank 1 prepared a migration that was not asked for"):
        keeper.prepared(MigrationPrepared(Rank(1), TENSOR, accepted=True))
    with pytest.raises(ProtocolError, match="rank 0 migrated layers"):
        keeper.migrated(WeightsMigrated(Rank(0), TENSOR, (1,), 0.1, 10))
    keeper.move(TENSOR)
    assert keeper.late_ranks == {Rank(0), Rank(1)}
    accept(keeper, TENSOR)
    with pytest.raises(ProtocolError, match="rank 1 prepared"):
        keeper.prepared(MigrationPrepared(Rank(1), TENSOR, accepted=True))
