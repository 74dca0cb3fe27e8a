"""The other end of a pair of rings, in a process of its own: sends everything back that it fetches.

usage: staged_peer_program.py RING_FROM RING_TO SIZE...   (paths of the rings' memory, bytes of each transfer)
"""

import ctypes
import os
import sys
import time

from gearshift.tests.worker.test_ring import SHAPE, RecordedQueue
from gearshift.worker.links.host_memory import mapped
from gearshift.worker.links.host_rings import placed, ring_bytes
from gearshift.worker.links.ring import FetchingEnd, SendingEnd, in_turn

SECONDS = 20.0


def work_off(*queues: RecordedQueue) -> None:
    """Until all is done; raises TimeoutError."""
    end = time.monotonic() + SECONDS
    while any(queue.steps for queue in queues):
        if not any(queue.step() for queue in queues):
            if time.monotonic() > end:
                raise TimeoutError("the other process did not go on")
            os.sched_yield()


def main(path_from: str, path_to: str, sizes: list[int]) -> None:
    rings = [mapped(path, ring_bytes(SHAPE)) for path in (path_from, path_to)]
    into, out = RecordedQueue(), RecordedQueue()
    fetching = FetchingEnd(SHAPE, placed(rings[0], SHAPE, rings[0].address), [into])
    sending = SendingEnd(SHAPE, placed(rings[1], SHAPE, rings[1].address), [out])
    for size in sizes:
        data = ctypes.create_string_buffer(size)
        in_turn([], [fetching.issue(ctypes.addressof(data), size)])
        work_off(into)
        in_turn([sending.issue(ctypes.addressof(data), size)], [])
        work_off(out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], [int(size) for size in sys.argv[3:]])
