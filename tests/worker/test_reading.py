"""Rows of a file as a GPU worker reads them: side by side, into memory that is there already."""

import errno
import os
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

from gearshift.proto.errors import ModelFileError
from gearshift.proto.model import FileFacts, TensorInfo
from gearshift.proto.ranges import ColumnRange
from gearshift.tests.helpers.specs import layer_spec, model_spec
from gearshift.worker.weights.mapped_file import SCRATCH_BYTES, MappedModel
from gearshift.worker.weights.readers import LEAST_READ_BYTES, Readers

ROWS, BLOCKS, BLOCK_BYTES, OFFSET = 300, 50, 144, 96
TENSOR = TensorInfo("m", "Q4_K", (ROWS, BLOCKS * 256), 0, OFFSET, ROWS * BLOCKS * BLOCK_BYTES)


@pytest.fixture
def files(tmp_path: Path) -> MappedModel:
    path = tmp_path / "model.gguf"
    content = np.random.default_rng(5).integers(0, 256, OFFSET + TENSOR.byte_count, dtype=np.uint8)
    path.write_bytes(content.tobytes())
    facts = FileFacts(str(path), content.nbytes, "0" * 64)
    return MappedModel(replace(model_spec([layer_spec()]), files=(facts,)))


@pytest.mark.parametrize("rows", [(0, ROWS), (7, 8), (3, 291), (5, 5)])
@pytest.mark.parametrize("blocks", [(0, BLOCKS), (0, 25), (25, BLOCKS), (49, 50)])
def test_rows_that_are_read_are_those_that_are_mapped(
    files: MappedModel, rows: tuple[int, int], blocks: tuple[int, int]
) -> None:
    assert ROWS * BLOCKS * BLOCK_BYTES > 2 * SCRATCH_BYTES, "some columns are read in more than one piece"
    cut = ColumnRange(*rows), ColumnRange(256 * blocks[0], 256 * blocks[1])
    wanted = files.raw_rows(TENSOR, *cut)
    found = np.zeros(wanted.shape, dtype=np.uint8)
    files.read_rows(TENSOR, *cut, found)
    assert np.array_equal(found, wanted)


def test_a_file_that_was_cut_off_meanwhile_is_named(files: MappedModel, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with path.open("r+b") as file:
        file.truncate(OFFSET + 1000)
    into = np.zeros((ROWS, BLOCKS * BLOCK_BYTES), dtype=np.uint8)
    with pytest.raises(ModelFileError, match=r"model\.gguf ends at byte 1096"):
        files.read_rows(TENSOR, ColumnRange(0, ROWS), ColumnRange(0, BLOCKS * 256), into)


def test_short_reads_go_on_and_what_the_disk_says_is_told_with_the_file(
    files: MappedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def some(descriptor: int, buffers: list[memoryview], place: int) -> int:
        return real(descriptor, [buffers[0][:1000]], place)

    def fails(descriptor: int, buffers: list[memoryview], place: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    rows, columns = ColumnRange(0, 20), ColumnRange(0, BLOCKS * 256)
    wanted = files.raw_rows(TENSOR, rows, columns)
    into = np.zeros(wanted.shape, dtype=np.uint8)
    monkeypatch.setattr(os, "preadv", some)
    files.read_rows(TENSOR, rows, columns, into)
    assert np.array_equal(into, wanted)
    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(ModelFileError, match=r"model\.gguf cannot be read: Input/output error"):
        files.read_rows(TENSOR, ColumnRange(1, 2), columns, into[:1])


def test_a_closed_model_holds_no_file(files: MappedModel) -> None:
    files.close()
    files.close()
    with pytest.raises(ModelFileError, match="closed"):
        files.read_rows(TENSOR, ColumnRange(0, 1), ColumnRange(0, 256), np.zeros((1, 144), dtype=np.uint8))


@pytest.mark.parametrize("threads", [1, 3, 4])
@pytest.mark.parametrize("rows", [0, 1, 2, 7])
def test_every_row_is_read_once_whatever_the_threads(threads: int, rows: int) -> None:
    into = np.zeros((rows, LEAST_READ_BYTES), dtype=np.uint8)
    seen: list[tuple[int, int]] = []

    def read(first: int, end: int, part: npt.NDArray[np.uint8]) -> None:
        seen.append((first, end))
        part[:] = np.arange(first, end, dtype=np.uint8)[:, None]

    Readers(threads).fill(10, into, read)
    assert np.array_equal(into[:, 0], np.arange(10, 10 + rows, dtype=np.uint8))
    assert sum(end - first for first, end in seen) == rows
    assert len(seen) == max(1, min(threads, rows))


def test_little_is_read_by_who_asks_alone() -> None:
    callers: list[threading.Thread] = []
    Readers(4).fill(0, np.zeros((100, 64), dtype=np.uint8), lambda *_: callers.append(threading.current_thread()))
    assert callers == [threading.current_thread()]


def test_nobody_reads_any_more_when_an_error_is_raised() -> None:
    failed, ended = threading.Event(), threading.Event()

    def read(first: int, end: int, part: npt.NDArray[np.uint8]) -> None:
        if not first:
            failed.set()
            raise ModelFileError("cut off")
        assert failed.wait(10)
        part[:] = 1
        ended.set()

    into = np.zeros((2, LEAST_READ_BYTES), dtype=np.uint8)
    with pytest.raises(ModelFileError, match="cut off"):
        Readers(2).fill(0, into, read)
    assert ended.is_set()
    assert into[1].all()


def test_what_a_reader_meets_is_raised() -> None:
    def read(first: int, end: int, part: npt.NDArray[np.uint8]) -> None:
        if first:
            raise ModelFileError("cut off")

    with pytest.raises(ModelFileError, match="cut off"):
        Readers(2).fill(0, np.zeros((2, LEAST_READ_BYTES), dtype=np.uint8), read)
