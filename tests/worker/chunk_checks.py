"""Chunks in graphs against the layers kernel by kernel, and what is prepared for them while nobody asks.

Run as `quant_kernel_checks` is, with TRITON_INTERPRET=1; on a device see tests/parity/test_on_cuda.py. Here a graph is
the work itself, run anew each time.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.model.spec import build_spec
from gearshift.proto.ids import Layout
from gearshift.proto.placement.cuts import place
from gearshift.tests.helpers.gguf_builder import build_model
from gearshift.tests.helpers.interpreted_steps import CPU, SHAPE, Found, run_checks
from gearshift.tests.helpers.kernel_checks import relative_error
from gearshift.tests.helpers.layer_stages import CONTEXT, Stage
from gearshift.worker.model.captured import CaptureError, Graphs
from gearshift.worker.model.chunk_pass import ChunkPass, GraphKey
from gearshift.worker.model.decoder import Segment
from gearshift.worker.model.steps import Work

ROWS, START, MOST_ROWS = 40, 30, 64
PIECES = {Layout.LAYER: 2, Layout.TENSOR: 4}  # of a layer, and one before the first


class Place:
    """Where graphs would be captured."""

    def launch(self, work: Work) -> None:
        work()

    def capture(self, work: Work, what: str) -> Work:
        return work


def check_chunks(folder: Path, whole: frozenset[int] = frozenset()) -> Found:
    """A stage of two, in both layouts: before, among and behind what is prepared. `whole`: layers that are not cut."""
    path = build_model(folder / f"chunks{len(whole)}.gguf", "llama", quant="Q8_0", seed=3, **SHAPE)
    spec = build_spec(resolve_model(str(path)), CONTEXT)
    placement = place(spec, 2, whole_layers=whole)
    stage = Stage.of(path, placement, 0, CPU)
    decoder, segment = stage.decoder, Segment(stage.states[0], 0, ROWS, START)
    passes = ChunkPass(decoder, placement, 0, MOST_ROWS, CONTEXT)
    graphs: Graphs[GraphKey] = Graphs(Place(), 1000)
    passes._graphs = graphs
    layers, rows = list(placement.stages[0]), decoder.embed(list(range(20, 20 + ROWS)))
    arena = stage.kv.arena.clone()
    wanted = decoder.layers(rows, layers, Layout.LAYER, [segment])
    written = stage.kv.arena.clone()

    def run() -> torch.Tensor:
        stage.kv.arena.copy_(arena)
        return passes.run(rows, layers, Layout.LAYER, segment, lambda partial: None)

    preparing = passes.preparations()
    for _ in range(3):
        next(preparing)
    yield "prepared, nothing written", float(not torch.equal(stage.kv.arena, written)), 0.5
    first = run()
    yield "chunks among what is prepared", relative_error(first, wanted), 5e-3
    keys_and_values = (each.view(torch.float16) for each in (stage.kv.arena, written))
    yield "their keys and values", relative_error(*keys_and_values), 5e-3
    kept = stage.kv.arena.clone()
    turns = 3 + sum(1 for _ in preparing)
    yield "behind a chunk, nothing written", float(not torch.equal(stage.kv.arena, kept)), 0.5
    pieces = {Layout.LAYER: len(layers), Layout.TENSOR: len(spec.layers)}
    absent = len(whole - set(layers))  # layers whose heads the other rank has
    wanted_graphs = sum(1 + count * PIECES[layout] for layout, count in pieces.items()) - absent
    yield "graphs", abs(len(graphs) - wanted_graphs), 0.5
    yield "turns", float(not wanted_graphs <= turns <= 2 * wanted_graphs), 0.5
    yield "chunks behind what is prepared", float(not torch.equal(run(), first)), 0.5
    yield "graphs then", abs(len(graphs) - wanted_graphs), 0.5


class Broken:
    """Chunks whose preparing fails after a first piece."""

    def preparations(self) -> Iterator[None]:
        yield
        raise CaptureError("a piece could not be captured: out of memory")


def check_a_failure(folder: Path) -> Found:
    """Nobody has asked for it: it ends what is prepared, and nothing else."""
    path = build_model(folder / "broken.gguf", "llama", quant="Q8_0", seed=3, **SHAPE)
    spec = build_spec(resolve_model(str(path)), CONTEXT)
    decoder = Stage.of(path, place(spec, 1), 0, CPU).decoder
    decoder.chunks = Broken()  # type: ignore[assignment]
    told = [decoder.prepare_next() for _ in range(3)]
    yield "a failure ends it", float(told != [True, False, False]), 0.5


def checks(folder: Path) -> list[Found]:
    cut_or_whole = [frozenset[int](), frozenset({1}), frozenset({0, 1})]
    return [*(check_chunks(folder, whole) for whole in cut_or_whole), check_a_failure(folder)]


if __name__ == "__main__":
    sys.exit(run_checks(checks))
