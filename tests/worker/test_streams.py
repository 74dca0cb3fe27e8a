"""Streams come one by one from the driver, and go round once there are enough."""

from itertools import count

import pytest

from gearshift.tests.helpers.noted_library import NotedLibrary
from gearshift.worker.cuda_driver import CudaDriver
from gearshift.worker.streams import MOST_STREAMS, StreamPool, stream_handle


def test_each_is_another_until_there_are_enough_and_none_is_made_ahead() -> None:
    numbers = count()
    pool = StreamPool(lambda: next(numbers))
    assert [pool.next() for _ in range(3)] == [0, 1, 2]
    assert next(numbers) == 3, "none was made ahead"
    rest = [pool.next() for _ in range(MOST_STREAMS - 3)]
    assert rest[-1] == MOST_STREAMS
    assert [pool.next() for _ in range(MOST_STREAMS + 1)] == [0, 1, 2, *rest, 0]


def test_the_driver_makes_a_stream_beside_the_default_one_with_its_priority() -> None:
    library = NotedLibrary()
    assert stream_handle(CudaDriver(library), -1) == NotedLibrary.STREAM
    assert library.notes == [("cuStreamCreateWithPriority", [1, -1])]
    with pytest.raises(RuntimeError, match=r"^cuStreamCreateWithPriority of the CUDA driver failed: CUDA_ERROR_INV"):
        stream_handle(CudaDriver(NotedLibrary(refused="cuStreamCreateWithPriority")), 0)
