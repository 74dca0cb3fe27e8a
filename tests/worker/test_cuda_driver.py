"""Calls of the CUDA driver, against a library of C functions that notes them."""

import pytest

from gearshift.tests.helpers.noted_library import NotedLibrary
from gearshift.worker import cuda_driver
from gearshift.worker.cuda_driver import CudaDriver
from gearshift.worker.links import driver_words
from gearshift.worker.links.driver_words import DriverWords

HOST = 0x7F00_1234_5000  # more than 32 bits


def words_of(library: NotedLibrary, monkeypatch: pytest.MonkeyPatch) -> DriverWords:
    monkeypatch.setattr(driver_words, "cuda_driver", lambda: CudaDriver(library))
    return DriverWords()


def test_addresses_and_sizes_are_handed_over_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    library = NotedLibrary()
    words = words_of(library, monkeypatch)
    assert words.register(HOST, 5 << 32) == HOST + 1
    queue = words.queue(77)
    queue.wait(HOST, 0xFFFF_FFFE)
    queue.write(HOST + 64, 3)
    queue.copy_out(HOST, HOST + 4096, 6 << 32)
    queue.copy_in(HOST + 4096, HOST, 12)
    words.release(HOST)
    assert library.notes == [
        ("cuMemHostRegister_v2", [HOST, 5 << 32, 3]),
        ("cuStreamWaitValue32_v2", [77, HOST, 0xFFFF_FFFE, 0]),
        ("cuStreamWriteValue32_v2", [77, HOST + 64, 3, 0]),
        ("cuMemcpyDtoHAsync_v2", [HOST, HOST + 4096, 6 << 32, 77]),
        ("cuMemcpyHtoDAsync_v2", [HOST + 4096, HOST, 12, 77]),
        ("cuMemHostUnregister", [HOST]),
    ]


def test_a_call_that_fails_is_told_in_the_drivers_words(monkeypatch: pytest.MonkeyPatch) -> None:
    words = words_of(NotedLibrary(refused="cuStreamWriteValue32_v2"), monkeypatch)
    told = r"^cuStreamWriteValue32 of the CUDA driver failed: CUDA_ERROR_INVALID_VALUE, invalid argument \(1\)$"
    with pytest.raises(RuntimeError, match=told):
        words.queue(0).write(HOST, 1)


def test_an_error_that_the_driver_has_no_name_for_keeps_its_number() -> None:
    with pytest.raises(RuntimeError, match=r"cuThis of the CUDA driver failed: an unknown error \(12345\)"):
        CudaDriver(NotedLibrary()).check("cuThis", 12345)


def test_memory_without_an_address_for_streams_is_not_left_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    library = NotedLibrary(refused="cuMemHostGetDevicePointer_v2")
    with pytest.raises(RuntimeError, match="cuMemHostGetDevicePointer"):
        words_of(library, monkeypatch).register(HOST, 4096)
    assert [name for name, _ in library.notes] == ["cuMemHostRegister_v2", "cuMemHostUnregister"]


def test_a_driver_too_old_for_a_call_and_one_that_is_missing_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttributeError, match="cuStreamWaitValue32_v2"):
        words_of(NotedLibrary(missing="cuStreamWaitValue32_v2"), monkeypatch)
    monkeypatch.setattr(cuda_driver, "LIBRARY", "libcuda-that-is-not-there.so.1")
    with pytest.raises(OSError, match="libcuda-that-is-not-there"):
        CudaDriver()
