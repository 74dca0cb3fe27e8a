"""Compiled kernels that are kept on disk, with a compiler that only counts."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
import torch

from gearshift.tests.helpers.noted_library import FUNCTION, NotedLibrary
from gearshift.worker.cuda_driver import CudaDriver
from gearshift.worker.kernels import cuda_source
from gearshift.worker.kernels.batch_kernels import Images, compile_ahead, variants_of
from gearshift.worker.kernels.cuda_source import CompileError, CudaKernel
from gearshift.worker.kernels.kept_images import KeptImages, image_key
from gearshift.worker.kernels.multiprocessors import Multiprocessors


class Counting:
    """A compiler whose images tell the source; it waits for `may_go` where there is one."""

    def __init__(self, *facts: str, may_go: Event | None = None) -> None:
        self.facts, self.compiled, self.may_go = facts, list[str](), may_go
        self.two_began = Event()

    def image(self, source: str) -> bytes:
        self.compiled.append(source)
        if len(self.compiled) == 2:
            self.two_began.set()
        if self.may_go is not None:
            assert self.may_go.wait(10)
        if source == "bad":
            raise CompileError("bad")
        return b"image of " + source.encode()


def test_what_one_process_compiled_the_next_one_reads(tmp_path: Path) -> None:
    first, second = Counting("sm_90"), Counting("sm_90")
    assert Images(first, KeptImages(tmp_path)).image("a") == b"image of a"
    assert Images(second, KeptImages(tmp_path)).image("a") == b"image of a"
    assert (first.compiled, second.compiled) == (["a"], [])


def test_another_card_compiler_or_source_has_an_image_of_its_own(tmp_path: Path) -> None:
    for facts, source in ((("sm_90", "13.0"), "a"), (("sm_80", "13.0"), "a"), (("sm_90", "12.8"), "a")):
        compiler = Counting(*facts)
        Images(compiler, KeptImages(tmp_path)).image(source)
        assert compiler.compiled == [source]
    assert image_key(("ab", "c")) != image_key(("a", "bc"))


@pytest.mark.parametrize("damage", ["cut", "changed", "foreign", "empty", "renamed"])
def test_a_damaged_or_foreign_file_is_made_anew(tmp_path: Path, damage: str) -> None:
    kept = KeptImages(tmp_path)
    Images(Counting(), kept).image("a")
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    changed = {"cut": whole[:-1], "changed": whole[:-1] + b"?", "foreign": b"\x7fELF" + whole, "empty": b""}
    if damage == "renamed":
        path.unlink()
        Images(Counting(), kept).image("b")
        next(tmp_path.iterdir()).rename(path)
    else:
        path.write_bytes(changed[damage])
    compiler = Counting()
    assert Images(compiler, kept).image("a") == b"image of a"
    assert compiler.compiled == ["a"]
    assert kept.read(image_key(("a",))) == b"image of a"


def test_what_others_own_or_may_write_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptImages(tmp_path)
    before = os.umask(0)
    try:
        assert kept.write("k", b"x")
    finally:
        os.umask(before)
    assert kept.read("k") == b"x"
    (path,) = tmp_path.iterdir()
    path.chmod(0o620)
    assert kept.read("k") is None
    path.chmod(0o600)
    others = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: others)
    assert kept.read("k") is None


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_plain_file_is_none(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "k.image")
    assert KeptImages(tmp_path).read("k") is None


def test_without_a_folder_that_can_be_written_kernels_are_compiled(tmp_path: Path) -> None:
    a_file = tmp_path / "file"
    a_file.write_bytes(b"")
    for folder in (None, a_file, a_file / "below"):
        compiler = Counting()
        assert Images(compiler, KeptImages(folder)).image("a") == b"image of a"
        assert compiler.compiled == ["a"]
    assert not KeptImages(a_file).write("k", b"x")


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    kept = KeptImages(tmp_path, most_bytes=500)
    for number, key in enumerate(("old", "older", "left behind")):
        kept.write(key, bytes(100))
        os.utime(tmp_path / f"{key}.image", (1000 - number, 1000 - number))
    (tmp_path / "left behind.image").rename(tmp_path / "left behind.1.part")
    assert kept.read("older") is not None  # used: now the newest
    kept.write("new", bytes(100))
    kept.write("newer", bytes(100))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.image", "newer.image", "older.image"]


def test_ranks_that_write_at_once_leave_whole_files_and_nothing_else(tmp_path: Path) -> None:
    kept, image = KeptImages(tmp_path), os.urandom(100_000)
    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(lambda _: (kept.write("a", image), kept.read("a")), range(40)))
    assert set(seen) == {(True, image)}
    assert [path.name for path in tmp_path.iterdir()] == ["a.image"]


def test_what_is_made_ahead_is_not_made_again_and_errors_come_to_who_asks(tmp_path: Path) -> None:
    compiler = Counting()
    images = Images(compiler, KeptImages(tmp_path))
    images.make_ahead(["a", "b", "bad"], first=1, threads=1)
    assert images.image("a") == b"image of a"
    assert images.image("b") == b"image of b"
    with pytest.raises(CompileError):
        images.image("bad")
    assert sorted(set(compiler.compiled)) == ["a", "b", "bad"]


def test_who_asks_does_not_wait_behind_what_others_want(tmp_path: Path) -> None:
    compiler = Counting(may_go=(may_go := Event()))
    images = Images(compiler, KeptImages(None))
    images.make_ahead(["slow", "wanted"], first=0, threads=1)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(images.image, "wanted")
        assert compiler.two_began.wait(10)  # the thread with "slow", and who asks with its own
        may_go.set()
        assert asked.result(10) == b"image of wanted"
    assert sorted(compiler.compiled) == ["slow", "wanted"]


def test_the_kernels_of_a_model_are_named_once_those_for_few_requests_first() -> None:
    q_k_v = (("Q4_K", 2560, 4096), ("Q6_K", 512, 4096))
    single = [("Q4_K", 4096, 2048), ("Q4_K", 2560, 4096), ("Q4_K", 14336, 4096), ("Q8_0", 512, 64)]
    variants = variants_of([q_k_v, q_k_v[::-1], *((piece,) for piece in single)], Multiprocessors(132, 228 << 10))
    assert len(variants) == len(set(variants)) == 8
    assert [variant.rows_of_eight for variant in variants] == [1] * 4 + [2] * 4
    assert [variant.whole for variant in variants[:4]] == [True, True, True, False]
    assert len({variant.source for variant in variants}) == 8


def test_a_model_that_takes_no_such_kernel_asks_for_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact steps over planes alone, or floats: there may be no NVRTC."""
    asked: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", asked.append)
    compile_ahead([], 0, 2, torch.device("cuda"))
    assert asked == []


def test_a_launch_hands_over_addresses_and_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    library, rows = NotedLibrary(), torch.zeros(8)
    monkeypatch.setattr(cuda_source, "cuda_driver", lambda: CudaDriver(library))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    CudaKernel(b"good", "k")(3, 64, (rows, -5))
    assert library.launches == [([FUNCTION, 3, 1, 1, 64, 1, 1, 0, 7], [rows.data_ptr(), -5])]
    with pytest.raises(RuntimeError, match="image is invalid"):
        CudaKernel(b"bad", "k")
