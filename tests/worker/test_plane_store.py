"""Migrating parts as a GPU keeps them, on the CPU: one address for life, bit for bit the file's, places shared."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.model.spec import build_spec
from gearshift.proto.commands import MigrateWeights, PrepareMigration
from gearshift.proto.errors import ProtocolError
from gearshift.proto.ids import Layout, Rank, WeightSource
from gearshift.proto.model import ModelSpec
from gearshift.proto.placement.cuts import place
from gearshift.proto.placement.device_rows import has_blocks
from gearshift.proto.placement.device_slack import ALIGNMENT_BYTES, packed_bytes
from gearshift.proto.placement.memory import Holding, held_bytes
from gearshift.proto.placement.migration import migration, transfers
from gearshift.proto.placement.plan import Placement
from gearshift.tests.helpers.gguf_builder import build_model
from gearshift.worker.kernels.block_types import blocks_from_gguf
from gearshift.worker.kernels.matrix import AnyMatrix
from gearshift.worker.kernels.quant_planes import from_gguf, has_planes
from gearshift.worker.links.kv_moves import KvMoves
from gearshift.worker.loaded_model import cut_behind
from gearshift.worker.memory import MemoryLedger
from gearshift.worker.moves import Lane
from gearshift.worker.weights import host_copies, load
from gearshift.worker.weights.layer import MATRIX_FIELDS, PartWeights
from gearshift.worker.weights.load import Cut, WeightLoader
from gearshift.worker.weights.mapped_file import MappedModel
from gearshift.worker.weights.moving import MovingParts
from gearshift.worker.weights.packed import PackedRun
from gearshift.worker.weights.plane_bytes import Piece, plan_part, stacked, tensors_of
from gearshift.worker.weights.plane_store import PlaneStore

CPU = torch.device("cpu")


@dataclass
class PieceMatrix:
    """A quantised matrix that is never multiplied by."""

    pieces: list[Piece]
    lead: int
    columns: int
    tail: int

    @property
    def byte_count(self) -> int:
        return sum(tensor.nbytes for piece in self.pieces for tensor in tensors_of(piece))

    def __call__(self, x_TC: Tensor) -> Tensor:
        raise AssertionError("not here")


class PlaneLoader(WeightLoader):
    """Matrices in planes and blocks, made as a GPU's loader makes them."""

    def _matrix(self, cuts: list[Cut], stays: bool) -> AnyMatrix:
        first = cuts[0][1]
        pieces: list[Piece] = []
        for tensor, cut in cuts:
            if not len(cut.rows) or not len(cut.held):
                continue
            raw = torch.from_numpy(self._files.raw_rows(tensor, cut.rows, cut.held).copy())
            if has_planes(tensor.type_name, len(cut.held)):
                piece: Piece = from_gguf(tensor.type_name, raw)
            elif has_blocks(tensor.type_name, len(cut.held)):
                piece = blocks_from_gguf(tensor.type_name, raw)
            else:
                piece = torch.empty((len(cut.rows), len(cut.held)), dtype=torch.bfloat16)
                for offset, values in self._files.rows(tensor, cut.rows, cut.held):
                    piece[offset : offset + len(values)] = torch.from_numpy(values)
            together = stacked(pieces[-1], piece) if pieces else None
            pieces = [*pieces[:-1], together] if together is not None else [*pieces, piece]
        lead, tail = first.owned.first - first.held.first, first.held.end - first.owned.end
        matrix = PieceMatrix(pieces, lead, len(first.owned), tail)
        self._ledger.track("weights", matrix.byte_count)
        return matrix


class OneRank:
    def __init__(self, spec: ModelSpec, placement: Placement, rank: int, host_room_bytes: int = 0) -> None:
        self.ledger = MemoryLedger()
        loader = PlaneLoader(
            spec, placement, rank, MappedModel(spec), torch.float32, CPU, self.ledger, lambda read: None
        )
        self.weights = loader.load()
        self.loaded_bytes = self.ledger.held_bytes["weights"]
        way = migration(spec, placement, Layout.TENSOR, Holding.PLANES)
        self.store = PlaneStore(
            spec, placement, rank, loader, self.weights, way, PieceMatrix, self.ledger, CPU, host_room_bytes
        )

    def part(self, layer: int, part: int) -> PartWeights:
        return next(one for one in self.weights.layers[layer].parts if one.part == part)


def tensors(part: PartWeights) -> Iterator[Tensor]:
    if part.qkv_bias is not None:
        yield part.qkv_bias
    for field in MATRIX_FIELDS:
        for piece in getattr(part, field).pieces:
            yield from tensors_of(piece)


def addresses(one: OneRank) -> dict[tuple[int, int], list[int]]:
    """Of all tensors of each part that this rank ever holds."""
    return {
        (number, part.part): [tensor.data_ptr() for tensor in tensors(part)]
        for number, layer in enumerate(one.weights.layers)
        for part in layer.parts
    }


def equal(one: PartWeights, other: PartWeights) -> bool:
    pairs = list(zip(tensors(one), tensors(other), strict=True))
    shapes = all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
    return shapes and all(torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)) for a, b in pairs)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def keep_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "return_freed_memory", lambda: None)


MODELS = {
    "mixed": {
        "layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "feed_forward": 512,
        "types": {
            "attn_q.weight": "Q4_K", "attn_k.weight": "Q4_K", "attn_v.weight": "Q6_K", "attn_output.weight": "Q8_0",
            "ffn_gate.weight": "Q5_K", "ffn_up.weight": "Q5_K", "ffn_down.weight": "F16",
        },
    },
    "blocks": {
        "layers": 4, "hidden": 256, "heads": 8, "kv_heads": 2, "head_width": 64, "feed_forward": 512,
        "types": {
            "attn_q.weight": "IQ2_S", "attn_k.weight": "IQ2_S", "attn_v.weight": "Q2_K",
            "attn_output.weight": "IQ3_XXS",
            "ffn_gate.weight": "MXFP4", "ffn_up.weight": "MXFP4", "ffn_down.weight": "IQ4_XS", "output.weight": "Q5_0",
        },
    },
    "biases": {"arch": "qwen2", "layers": 4, "hidden": 128, "quant": "Q5_0"},
    "blocks cut at an edge": {"layers": 4, "hidden": 64, "heads": 6, "kv_heads": 6, "quant": "Q8_0"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "ranks", "shares"),
    [
        ("mixed", 2, None), ("blocks", 2, None), ("biases", 2, None), ("blocks cut at an edge", 2, None),
        ("mixed", 3, None),
        ("mixed", 2, (3.0, 1.0)),
    ],
)  # fmt: skip
def test_parts_keep_their_address_and_their_bits_through_round_trips(
    tmp_path: Path, name: str, ranks: int, shares: tuple[float, ...] | None
) -> None:
    spec = build_spec(resolve_model(str(build_model(tmp_path / "model.gguf", **MODELS[name]))))  # type: ignore[arg-type]
    layers = range(len(spec.layers))
    placement = place(spec, ranks, layer_shares=shares, migrating_layers=frozenset(layers))
    both = [OneRank(spec, place(spec, ranks, layer_shares=shares), rank) for rank in range(ranks)]
    group = [OneRank(spec, placement, rank) for rank in range(ranks)]
    at_first = [addresses(one) for one in group]
    for to in (Layout.TENSOR, Layout.LAYER, Layout.TENSOR):
        exchange(spec, placement, group, to)
        for rank, one in enumerate(group):
            for layer in layers:
                for part in placement.parts_held(layer, rank, to):
                    assert equal(one.part(layer, part), both[rank].part(layer, part)), (rank, layer, part)
            assert addresses(one) == at_first[rank]


@pytest.mark.parametrize("name", MODELS)
def test_matrices_that_stay_fill_their_run_to_the_last_byte_and_keep_their_bits(tmp_path: Path, name: str) -> None:
    spec = build_spec(resolve_model(str(build_model(tmp_path / "model.gguf", **MODELS[name]))))  # type: ignore[arg-type]
    for migrating in (frozenset[int](), frozenset({1, 2})):
        placement = place(spec, 2, migrating_layers=migrating)
        for rank in range(2):
            weights = OneRank(spec, placement, rank).weights
            pieces = list(weights.head.pieces)  # type: ignore[attr-defined]
            for layer in {0, 1, 2, 3} - migrating:
                held = placement.parts_held(layer, rank)
                parts = [part for part in weights.layers[layer].parts if part.part in held]
                pieces += [piece for part in parts for field in MATRIX_FIELDS for piece in getattr(part, field).pieces]
            run = PackedRun(packed_bytes(spec, placement, rank), CPU)
            for piece in pieces:
                packed = run.take_in(piece)
                for before, after in zip(tensors_of(piece), tensors_of(packed), strict=True):
                    assert before.dtype == after.dtype
                    assert torch.equal(before, after)
                    assert not before.numel() or before.data_ptr() != after.data_ptr()
            assert run.free_bytes == 0
            assert run.take_in(pieces[0]) is pieces[0], "what has no room stays where it is"


def exchange(spec: ModelSpec, placement: Placement, group: list[OneRank], to: Layout) -> None:
    """As `MovingParts` does it, all ranks in step."""
    for layers in migration(spec, placement, to, Holding.PLANES).groups:
        moves = transfers(placement, layers.layers, to)
        sent = [group[move.source].store.take(move.layer, move.part) for move in moves]
        for move, data in zip(moves, sent, strict=True):
            store = group[move.target].store
            into = store.landing(move.layer, move.part)
            assert into.numel() == data.numel(), "every rank lays a part out alike"
            into.copy_(data)
            store.put(move.layer, move.part, into)
            group[move.source].store.sent(data.numel())


def test_a_part_read_from_the_file_is_the_one_that_a_peer_sends(tmp_path: Path) -> None:
    spec = build_spec(resolve_model(str(build_model(tmp_path / "model.gguf", **MODELS["mixed"]))))  # type: ignore[arg-type]
    placement = place(spec, 2, migrating_layers=frozenset(range(4)))
    whole, one = OneRank(spec, place(spec, 2), 1), OneRank(spec, placement, 1)
    read = one.store.read(0, 1)
    assert equal(one.part(0, 1), whole.part(0, 1))
    assert read == plan_part(None, PlaneLoader.cuts(one.store._loader, 0, 1)).byte_count


@pytest.mark.parametrize(("name", "shares"), [("mixed", None), ("mixed", (2.0, 1.0)), ("blocks", None)])
def test_places_take_what_one_layout_needs_and_the_staging_is_what_is_sent(
    tmp_path: Path, name: str, shares: tuple[float, ...] | None
) -> None:
    spec = build_spec(resolve_model(str(build_model(tmp_path / "model.gguf", **MODELS[name]))))  # type: ignore[arg-type]
    placement = place(spec, 2, layer_shares=shares, migrating_layers=frozenset(range(4)))
    group = [OneRank(spec, placement, rank) for rank in range(2)]
    padding = ALIGNMENT_BYTES * 6 * 2 * 24
    for rank, one in enumerate(group):
        needed = max(held_bytes(spec, placement, rank, Holding.PLANES, layout) for layout in Layout)
        assert needed <= one.ledger.held_bytes["weights"] <= needed + padding
    held = [one.ledger.held_bytes["weights"] for one in group]
    exchange(spec, placement, group, Layout.TENSOR)
    assert [one.ledger.held_bytes["weights"] for one in group] == held
    assert all(one.ledger.held_bytes["migration"] == 0 for one in group)


@pytest.mark.parametrize("name", ["blocks", "mixed"])
def test_a_rank_holds_the_bytes_that_its_plan_counts_and_little_more_than_they_take_in_the_file(
    tmp_path: Path, name: str
) -> None:
    spec = build_spec(resolve_model(str(build_model(tmp_path / "model.gguf", **MODELS[name]))))  # type: ignore[arg-type]
    placement = place(spec, 2)
    for rank in range(2):
        loader = PlaneLoader(
            spec, placement, rank, MappedModel(spec), torch.float32, CPU, MemoryLedger(), lambda read: None
        )
        loader.load()
        held = held_bytes(spec, placement, rank, Holding.PLANES)
        assert loader._ledger.held_bytes["weights"] == held
        assert held <= 1.03 * held_bytes(spec, placement, rank, Holding.FILE)


ROOM = 1 << 30


class LaneBeside(Lane):
    """As on a card, but that what is issued is over at once."""

    @property
    def is_beside(self) -> bool:
        return True


def moving_parts(spec: ModelSpec, placement: Placement, rank: int, one: OneRank) -> MovingParts:
    ways = {to: migration(spec, placement, to, Holding.PLANES) for to in Layout}
    links = KvMoves(None, 0, 1, 1.0)
    return MovingParts(placement, Rank(rank), one.store, links, ways, lambda: 1 << 40, LaneBeside(CPU))


def migrate(moving: MovingParts, to: Layout, source: WeightSource) -> None:
    for group in moving._ways[to].groups:
        moving.migrate(MigrateWeights(to, group.layers, source))


@pytest.mark.parametrize("name", ["mixed", "biases"])
def test_parts_come_from_their_copies_in_host_memory_bit_for_bit_once_they_have_been_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(host_copies, "SLAB_BYTES", 10_000)  # parts lie across slabs
    spec = build_spec(resolve_model(str(build_model(tmp_path / "model.gguf", **MODELS[name]))))  # type: ignore[arg-type]
    placement = place(spec, 2, migrating_layers=frozenset(range(4)))
    for rank in range(2):
        one, both = OneRank(spec, placement, rank, ROOM), OneRank(spec, place(spec, 2), rank)
        moving = moving_parts(spec, placement, rank, one)
        assert not moving.prepare(PrepareMigration(Layout.TENSOR)).on_host, "what comes has not been here yet"
        assert moving.prepare(PrepareMigration(Layout.LAYER)).on_host
        held = one.ledger.held_bytes["weights"]
        migrate(moving, Layout.TENSOR, WeightSource.FILE)
        for to in (Layout.LAYER, Layout.TENSOR, Layout.LAYER):
            assert moving.prepare(PrepareMigration(to)).on_host
            migrate(moving, to, WeightSource.HOST)
            for layer in range(4):
                for part in placement.parts_held(layer, rank, to):
                    assert equal(one.part(layer, part), both.part(layer, part)), (rank, layer, part)
            assert one.ledger.held_bytes["weights"] == held


def test_without_room_for_all_copies_none_is_kept_and_none_can_be_asked_for(tmp_path: Path) -> None:
    spec = build_spec(resolve_model(str(build_model(tmp_path / "model.gguf", **MODELS["biases"]))))  # type: ignore[arg-type]
    placement = place(spec, 2, migrating_layers=frozenset(range(4)))
    one = OneRank(spec, placement, 1, host_room_bytes=100_000)
    moving = moving_parts(spec, placement, 1, one)
    assert not moving.prepare(PrepareMigration(Layout.LAYER)).on_host
    with pytest.raises(ProtocolError, match="no copy in this rank's host memory"):
        migrate(moving, Layout.TENSOR, WeightSource.HOST)


@pytest.mark.parametrize(("ranks", "shares"), [(2, None), (3, None), (2, (3.0, 1.0))])
def test_parts_come_behind_the_layers_that_a_chunk_has_left_and_the_commands_find_them_there(
    tmp_path: Path, ranks: int, shares: tuple[float, ...] | None
) -> None:
    spec = build_spec(resolve_model(str(build_model(tmp_path / "model.gguf", layers=8, hidden=128, quant="Q5_0"))))
    placement = place(spec, ranks, layer_shares=shares, migrating_layers=frozenset(range(8)) - {1})
    for rank in range(ranks):
        one, both = OneRank(spec, placement, rank, ROOM), OneRank(spec, place(spec, ranks, layer_shares=shares), rank)
        moving = moving_parts(spec, placement, rank, one)
        migrate(moving, Layout.TENSOR, WeightSource.FILE)
        for _ in range(2):
            migrate(moving, Layout.LAYER, WeightSource.HOST)
            stage = list(placement.stages[rank])
            assert moving.vacated_behind() <= set(stage)
            for number, layer in enumerate(stage):
                left = stage[number:]  # the chunk has not passed these yet: their parts are as they were
                for still in left:
                    for part in placement.parts_held(still, rank, Layout.LAYER):
                        assert equal(one.part(still, part), both.part(still, part)), (rank, still, part)
                moving.vacate([layer])
            with pytest.raises(ProtocolError, match="a stage that was vacated"):
                moving.check_stage()
            migrate(moving, Layout.TENSOR, WeightSource.HOST)
            moving.check_stage()
            for layer in range(8):
                for part in placement.parts_held(layer, rank, Layout.TENSOR):
                    assert equal(one.part(layer, part), both.part(layer, part)), (rank, layer, part)


def test_what_came_early_from_host_memory_cannot_be_told_to_come_from_elsewhere(tmp_path: Path) -> None:
    spec = build_spec(resolve_model(str(build_model(tmp_path / "model.gguf", **MODELS["biases"]))))  # type: ignore[arg-type]
    placement = place(spec, 2, migrating_layers=frozenset(range(4)))
    moving = moving_parts(spec, placement, 0, OneRank(spec, placement, 0, ROOM))
    migrate(moving, Layout.TENSOR, WeightSource.FILE)
    migrate(moving, Layout.LAYER, WeightSource.HOST)
    moving.vacate(placement.stages[0])
    with pytest.raises(ProtocolError, match="were to come from host memory, not from file"):
        migrate(moving, Layout.TENSOR, WeightSource.FILE)


def test_layers_are_cut_behind_moves_of_keys_and_values_and_behind_groups_of_weights() -> None:
    groups = [[0, 1, 2], [3, 4, 5]]
    assert cut_behind(groups, frozenset()) == [([0, 1, 2], True), ([3, 4, 5], True)]
    assert cut_behind(groups, frozenset({1, 5})) == [([0, 1], False), ([2], True), ([3, 4, 5], True)]
    assert cut_behind(groups, frozenset({2, 3})) == [([0, 1, 2], True), ([3], False), ([4, 5], True)]
    assert cut_behind([[]], frozenset({1})) == [([], True)]
