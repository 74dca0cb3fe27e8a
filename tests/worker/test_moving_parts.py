"""Parts of migrating layers on their way: bit for bit the file's, really freed, never more bytes held than planned."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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
from gearshift.proto.placement.memory import Holding, held_bytes
from gearshift.proto.placement.migration import migration, peak_bytes
from gearshift.proto.placement.plan import Placement
from gearshift.tests.helpers.gguf_builder import build_model
from gearshift.worker.kernels.matrix import AbsentMatrix, Matrix
from gearshift.worker.links.kv_moves import KvMoves
from gearshift.worker.memory import MemoryLedger
from gearshift.worker.moves import Lane
from gearshift.worker.weights import load, part_store
from gearshift.worker.weights.layer import MATRIX_FIELDS, PartWeights, Weights
from gearshift.worker.weights.load import WeightLoader
from gearshift.worker.weights.mapped_file import MappedModel
from gearshift.worker.weights.moving import MovingParts
from gearshift.worker.weights.part_store import DenseStore

CPU = torch.device("cpu")
HOLDINGS = {torch.float32: Holding.F32, torch.bfloat16: Holding.BF16}


class Post:
    """What ranks of one process have sent each other and not yet received."""

    def __init__(self) -> None:
        self.lying: dict[tuple[int, int], list[Tensor]] = {}
        self.waiting: list[tuple[int, int, Tensor]] = []

    def deliver(self) -> None:
        for source, target, into in self.waiting:
            into.copy_(self.lying[source, target].pop(0))
        self.waiting.clear()
        assert not any(self.lying.values()), "what is sent is received"


class PostedLinks:
    """One rank's end; to wait is to let the other ranks run as far."""

    def __init__(self, post: Post, rank: int, others: Callable[[], None]) -> None:
        self._post, self._rank, self._others = post, rank, others

    def start(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> "PostedLinks":
        for target, data in sends:
            self._post.lying.setdefault((self._rank, target), []).append(data.clone())
        self._post.waiting += [(source, self._rank, into) for source, into in receives]
        return self

    def wait(self) -> None:
        self._others()


class OneRank:
    """A loaded model's weights on one rank, and what moves them."""

    def __init__(self, spec: ModelSpec, placement: Placement, rank: int, dtype: torch.dtype) -> None:
        self.ledger = MemoryLedger()
        files = MappedModel(spec)
        loader = WeightLoader(spec, placement, rank, files, dtype, CPU, self.ledger, lambda read: None)
        self.weights: Weights = loader.load()
        self.store = DenseStore(spec, placement, loader, self.weights, dtype, CPU, self.ledger)

    def parts(self) -> dict[tuple[int, int], str]:
        """Digests of the parts that are here, by layer and part."""
        return {
            (number, part.part): digest(part)
            for number, layer in enumerate(self.weights.layers)
            for part in layer.parts
            if not isinstance(part.qkv, AbsentMatrix)
        }


def digest(part: PartWeights) -> str:
    found = hashlib.sha256()
    tensors = [] if part.qkv_bias is None else [part.qkv_bias]
    for field in MATRIX_FIELDS:
        matrix = getattr(part, field)
        assert isinstance(matrix, Matrix)
        tensors.append(matrix.dense())
    for tensor in tensors:
        found.update(str(tuple(tensor.shape)).encode())
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Ranks:
    """All ranks in one process: a command is run by each in turn, as far as the exchange, then to its end."""

    def __init__(self, spec: ModelSpec, placement: Placement, dtype: torch.dtype) -> None:
        self.placement, self.holding = placement, HOLDINGS[dtype]
        self.ways = {to: migration(spec, placement, to, self.holding) for to in Layout}
        self.ranks = [OneRank(spec, placement, rank, dtype) for rank in range(placement.ranks)]
        self._post = Post()
        self._command: MigrateWeights | None = None
        self.moving = [
            MovingParts(placement, Rank(rank), one.store, PostedLinks(self._post, rank, self._next(rank)), self.ways,  # type: ignore[arg-type]
                        lambda: 1 << 40, LANE)
            for rank, one in enumerate(self.ranks)
        ]  # fmt: skip

    def _next(self, rank: int) -> Callable[[], None]:
        def run() -> None:
            """Rank by rank into its exchange; the last one delivers, and all go on backwards."""
            if rank + 1 < self.placement.ranks:
                assert self._command is not None
                self.moving[rank + 1].migrate(self._command)
            else:
                self._post.deliver()

        return run

    def migrate(self, to: Layout, source: WeightSource) -> None:
        for group in self.ways[to].groups:
            self._command = MigrateWeights(to, group.layers, source)
            for moving in self.moving[: 1 if source is WeightSource.PEER else None]:
                moving.migrate(self._command)


LANE = Lane(CPU)
NO_LINKS = KvMoves(None, 0, 1, 1.0)
MODELS = {
    "float": {"layers": 6, "quant": "F32"},
    "quantised, biases, odd heads": {
        "arch": "qwen2", "layers": 5, "heads": 6, "kv_heads": 3, "quant": "Q8_0", "feed_forward": 192,
    },
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Packing small matrices by several threads waits longer for them than it works."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def keep_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Giving freed memory back takes milliseconds in a process as large as a test's; the ledgers count all the same."""
    for module in (load, part_store):
        monkeypatch.setattr(module, "return_freed_memory", lambda: None)


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSpec]:
    folder = tmp_path_factory.mktemp("moving")
    paths = {name: build_model(folder / f"{index}.gguf", **facts) for index, (name, facts) in enumerate(MODELS.items())}  # type: ignore[arg-type]
    return {name: build_spec(resolve_model(str(Path(path)))) for name, path in paths.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("source", [WeightSource.PEER, WeightSource.FILE])
@pytest.mark.parametrize(("name", "ranks"), [("float", 2), ("quantised, biases, odd heads", 2), ("float", 3)])
def test_parts_are_the_same_bit_for_bit_after_a_round_trip_and_no_more_is_held_than_planned(
    specs: dict[str, ModelSpec], name: str, ranks: int, source: WeightSource, dtype: torch.dtype
) -> None:
    spec = specs[name]
    layers = frozenset(range(len(spec.layers)))
    placement = place(spec, ranks, migrating_layers=layers - {1})
    both = [OneRank(spec, place(spec, ranks), rank, dtype).parts() for rank in range(ranks)]
    group = Ranks(spec, placement, dtype)
    start = [one.parts() for one in group.ranks]
    for to in (Layout.TENSOR, Layout.LAYER, Layout.TENSOR):
        group.migrate(to, source)
        for rank, one in enumerate(group.ranks):
            here = one.parts()
            assert here.keys() == {(layer, part) for layer in layers for part in placement.parts_held(layer, rank, to)}
            assert all(found == both[rank][place_] for place_, found in here.items())
            assert one.ledger.held_bytes["weights"] == held_bytes(spec, placement, rank, group.holding, to)
            assert one.ledger.held_bytes.get("migration", 0) == 0
        if to is Layout.LAYER:
            assert [one.parts() for one in group.ranks] == start
    for rank, one in enumerate(group.ranks):
        planned = peak_bytes(spec, placement, rank, group.holding)
        assert one.ledger.peak_bytes <= planned
        if source is WeightSource.PEER:
            assert one.ledger.peak_bytes == planned


def test_a_rank_without_room_declines_with_its_figures(specs: dict[str, ModelSpec]) -> None:
    spec = specs["float"]
    placement = place(spec, 2, migrating_layers=frozenset(range(6)))
    group = Ranks(spec, placement, torch.float32)
    needed = group.ways[Layout.TENSOR].extra_bytes(0)
    for free, accepted in ((needed, True), (needed - 1, False)):
        moving = MovingParts(placement, Rank(0), group.ranks[0].store, NO_LINKS, group.ways, partial(int, free), LANE)
        report = moving.prepare(PrepareMigration(Layout.TENSOR))
        assert report.accepted is accepted
        assert accepted or "MiB are needed on the way" in report.reason


def test_layers_that_are_there_already_or_never_migrate_are_a_fault(specs: dict[str, ModelSpec]) -> None:
    placement = place(specs["float"], 2, migrating_layers=frozenset({0, 1}))
    group = Ranks(specs["float"], placement, torch.float32)
    for layer, to in ((0, Layout.LAYER), (2, Layout.TENSOR)):
        with pytest.raises(ProtocolError, match=f"layer {layer} cannot migrate"):
            group.moving[0].migrate(MigrateWeights(to, (layer,), WeightSource.FILE))


def test_dense_parts_have_no_copies_in_host_memory(specs: dict[str, ModelSpec]) -> None:
    placement = place(specs["float"], 2, migrating_layers=frozenset(range(6)))
    group = Ranks(specs["float"], placement, torch.float32)
    assert not group.moving[1].prepare(PrepareMigration(Layout.TENSOR)).on_host
    with pytest.raises(ProtocolError, match="no copies in host memory"):
        group.moving[1].migrate(MigrateWeights(Layout.TENSOR, (0,), WeightSource.HOST))


def test_an_absent_part_cannot_be_run(specs: dict[str, ModelSpec]) -> None:
    placement = place(specs["float"], 2, migrating_layers=frozenset(range(6)))
    one = OneRank(specs["float"], placement, 1, torch.float32)
    with pytest.raises(ProtocolError, match="weights lie where the other layout needs them"):
        one.weights.layers[0].own.down(torch.zeros(1, 64))
