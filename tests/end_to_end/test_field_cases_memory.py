"""F28: a worker pulls its own slices into private memory and nothing more, whatever happens to the file.

The base of a worker is what it holds with a tiny model: interpreter, torch, connections. Beyond that it may hold the
planned bytes, one tensor, and a few pieces on their way through dequantisation.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import pytest

from gearshift.coordinator.driver import Driver
from gearshift.coordinator.driver_settings import DriverSettings
from gearshift.coordinator.generation import GenerationRequest
from gearshift.coordinator.group.cluster import Cluster
from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.model.spec import build_spec
from gearshift.launch.processes.local import local_cluster
from gearshift.proto.errors import WorkerFailedError, WorkerLostError
from gearshift.proto.ids import ComputeType
from gearshift.proto.placement.cuts import place
from gearshift.tests.helpers.answers import answer
from gearshift.tests.helpers.gguf_builder import build_model
from gearshift.tests.helpers.layouts import some_ids

LOOK_SECONDS = 0.005
PIECES_BYTES = 16 << 20  # a few pieces of 4 MiB in several copies, and the allocator's slack
CONTEXT_TOKENS = 64


def driver_of(cluster: Cluster, path: Path) -> Driver:
    spec = build_spec(resolve_model(str(path)), CONTEXT_TOKENS)
    settings = DriverSettings(CONTEXT_TOKENS, CONTEXT_TOKENS, compute_type=ComputeType.F32, tick_timeout_seconds=60)
    return Driver(cluster, spec, place(spec, cluster.ranks), settings)


def anonymous_bytes(pid: int) -> int:
    """RssAnon: private memory that no file stands behind. 0 when the process has gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


@dataclass
class Peaks:
    """The largest anonymous memory seen of each process."""

    pids: Sequence[int]
    peaks: dict[int, int] = field(default_factory=dict)
    _over: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            self.look()

    def look(self) -> None:
        for pid in self.pids:
            self.peaks[pid] = max(self.peaks.get(pid, 0), anonymous_bytes(pid))

    def stop(self) -> None:
        self._over.set()


@contextmanager
def watched(pids: Sequence[int]) -> Iterator[Peaks]:
    peaks = Peaks(pids)
    thread = threading.Thread(target=peaks.watch)
    thread.start()
    try:
        yield peaks
    finally:
        peaks.stop()
        thread.join()


@pytest.mark.parametrize(
    ("workers", "shape"),
    [
        (2, {"layers": 4, "hidden": 512, "feed_forward": 1536, "vocab": 2048, "quant": "F32"}),
        pytest.param(
            4,
            {"layers": 7, "hidden": 768, "feed_forward": 3072, "vocab": 4096, "quant": "F32"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            4,
            {"layers": 12, "hidden": 1024, "feed_forward": 4096, "vocab": 8192, "quant": "Q8_0"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["2 workers, 51 MB", "4 workers, 220 MB in F32", "4 workers, 180 MB in Q8_0"],
)
def test_f28_private_memory_peaks_near_the_slice_and_one_tensor(
    workers: int, shape: dict[str, Any], tmp_path: Path
) -> None:
    tiny = build_model(tmp_path / "tiny.gguf", layers=1, vocab=64)
    path = build_model(tmp_path / "large.gguf", heads=shape["hidden"] // 16, kv_heads=4, **shape)
    path.chmod(0o444)  # read-only, as on a read-only mount
    ids = some_ids(64, count=20)
    with local_cluster(workers=workers, device="cpu", threads_per_worker=1) as cluster:
        base_driver = driver_of(cluster, tiny)
        base_driver.load()
        answer(base_driver, GenerationRequest(prompt=tuple(ids), max_tokens=2))
        base = {hello.pid: anonymous_bytes(hello.pid) for hello in cluster.hellos}
        driver = driver_of(cluster, path)
        with watched(list(base)) as peaks:
            driver.load()
            answer(driver, GenerationRequest(prompt=tuple(ids), max_tokens=4))
            peaks.look()
        memory = driver.memory()
        largest = max(4 * prod(tensor.shape) for tensor in driver.spec.tensors.values())
    whole = sum(4 * prod(tensor.shape) for tensor in driver.spec.tensors.values())
    for hello, report in zip(cluster.hellos, memory, strict=True):
        beyond = peaks.peaks[hello.pid] - base[hello.pid]
        assert beyond < report.planned_bytes + largest + PIECES_BYTES, (hello.rank, beyond, report.planned_bytes)
        assert report.planned_bytes < 0.85 * whole, "a rank plans for about its share"
        assert report.anonymous_bytes - base[hello.pid] < report.planned_bytes + PIECES_BYTES


def test_f28_a_file_that_shrinks_before_the_load_is_told_by_rank(tmp_path: Path) -> None:
    path = build_model(tmp_path / "model.gguf")
    with local_cluster(workers=2, device="cpu", threads_per_worker=1) as cluster:
        driver = driver_of(cluster, path)
        shrink(path, path.stat().st_size // 2)
        with pytest.raises(WorkerFailedError, match=r"rank \d failed: ModelFileError: .* bytes here, but \d+"):
            driver.load()


def test_f28_a_file_that_shrinks_while_mapped_is_a_rank_lost_by_sigbus(tmp_path: Path) -> None:
    """The embedding stays in the mapped file: the next token that is looked up finds no page."""
    path = build_model(tmp_path / "model.gguf")
    with local_cluster(workers=2, device="cpu", threads_per_worker=1) as cluster:
        driver = driver_of(cluster, path)
        driver.load()
        shrink(path, 4096)
        with pytest.raises(WorkerLostError, match=r"rank \d \(pid \d+\) was ended by SIGBUS"):
            answer(driver, GenerationRequest(prompt=tuple(some_ids(count=20)), max_tokens=4))


def shrink(path: Path, byte_count: int) -> None:
    with path.open("r+b") as file:
        file.truncate(byte_count)
