"""What a chunk frees on a CPU is kept for the next one, and given back when asked."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import torch
from gearshift.worker.memory import keep_freed_memory, return_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def held_bytes():
    return 4096 * int(open("/proc/self/statm").read().split()[1])

keep_freed_memory()
def layer():
    scores = torch.ones(12 << 20)  # 48 MiB
    weights = scores + 1.0
    return float((weights + scores)[0])

for _ in range(5):
    layer()
before, held = faults(), held_bytes()
for _ in range(10):
    layer()
print(faults() - before, held_bytes() - held)
return_freed_memory()
print(held - held_bytes())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's way")
def test_layer_after_layer_takes_the_same_memory_and_gives_it_back_when_asked() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    cleared_pages, grown_bytes, returned_bytes = map(int, done.stdout.split())
    assert cleared_pages < 40_000, "ten layers without it: 370,000"
    assert grown_bytes < 100 << 20
    assert returned_bytes > 96 << 20
