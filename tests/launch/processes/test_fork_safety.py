"""What the agent imports leaves it fit to be forked, with whichever torch is installed."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, warnings
from importlib import import_module
from gearshift.launch.processes import elastic
from gearshift.launch.processes.waiting_agent import IMPORTED_AHEAD
for module in IMPORTED_AHEAD:
    import_module(module)
import torch
assert not torch.cuda.is_initialized()
warnings.simplefilter("error")  # Python 3.12 and later warn of threads
pid = os.fork()
if pid == 0:
    computed = float((torch.ones(500, 500) @ torch.ones(500, 500)).sum())
    os._exit(0 if computed == 500.0**3 and torch.get_num_threads() == 2 else 1)
assert len(os.listdir("/proc/self/task")) == 1, os.listdir("/proc/self/task")
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


@pytest.mark.slow
def test_the_agent_has_one_thread_and_no_card_when_it_forks_and_a_worker_can_compute() -> None:
    threads = {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
    command = [sys.executable, "-P", "-c", PROGRAM]
    done = subprocess.run(
        command, env=os.environ | threads, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
