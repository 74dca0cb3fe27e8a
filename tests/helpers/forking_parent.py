"""A process with a single thread that forks workers for tests: forking_parent.py FOLDER COUNT.

It writes what it tells of them to stdout, until one has failed or all have ended; then it ends the rest.
"""

import os
import sys
from pathlib import Path

from gearshift.launch.processes import forked_workers
from gearshift.launch.processes.forked_workers import ForkedWorkers

if __name__ == "__main__":
    forked_workers.KILL_AFTER_SECONDS = 0.3
    report = os.dup(1)
    workers = ForkedWorkers(report, Path(sys.argv[1]))
    foreign = os.open(os.devnull, os.O_RDONLY)
    for rank in range(int(sys.argv[2])):
        place = {"RANK": str(rank), "ADDED": "yes"}
        workers.fork(rank, "gearshift.tests.helpers.forked_program", ("--one", "two"), place, (foreign,))
    workers.tell_started()
    while workers.running and not workers.failed:
        workers.wait(20)
    workers.wait(0.1)
    workers.end()
