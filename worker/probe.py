"""`python -m gearshift.worker.probe`: what torch finds on this machine, as one JSON document on stdout.

A process of its own, because `gearshift doctor` must not import torch, and because a broken driver may end it.
"""

import platform
import sys
from itertools import permutations

import msgspec
import torch

from ..proto.probe import PeerTest, ProbedDevice, ProbeReport
from .devices import ask_for_all_queues
from .links.staged_check import staged_fault

PATTERN_ELEMENTS = 1 << 20  # int32: 4 MiB
PATTERN_SEEDS = (1, 2, 3)  # a copy that does nothing must not pass because the data was there already


def probe() -> ProbeReport:
    """Everything that needs torch. Touches each visible device and copies a pattern between each pair."""
    error = _cuda_error()
    count = torch.cuda.device_count() if error is None and torch.version.cuda is not None else 0
    return ProbeReport(
        python=platform.python_version(),
        torch=str(torch.__version__),
        torch_cuda=torch.version.cuda,
        cuda_error=error,
        nccl=_nccl_version(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        devices=tuple(_device(index) for index in range(count)),
        peers=tuple(_copy(source, target) for source, target in permutations(range(count), 2)),
        staged_fault=next(filter(None, (staged_fault(torch.device("cuda", index)) for index in range(count))), ""),
    )


def _cuda_error() -> str | None:
    if torch.version.cuda is None:
        return None
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return None


def _nccl_version() -> str | None:
    if torch.version.cuda is None:
        return None
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except RuntimeError:  # built without
        return None


def _device(index: int) -> ProbedDevice:
    facts = torch.cuda.get_device_properties(index)
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    # Not in torch's type stubs.
    domain, bus, slot = (getattr(facts, f"pci_{part}_id", 0) for part in ("domain", "bus", "device"))
    pci = f"{domain:08x}:{bus:02x}:{slot:02x}.0"
    capability = (facts.major, facts.minor)
    return ProbedDevice(index, facts.name, f"GPU-{facts.uuid}", pci, capability, total_bytes, free_bytes)


def _copy(source: int, target: int) -> PeerTest:
    """Patterns copied from one device to the other and compared on the host."""
    claimed = torch.cuda.can_device_access_peer(source, target)
    received = torch.zeros(PATTERN_ELEMENTS, dtype=torch.int32, device=f"cuda:{target}")
    equal = True
    for seed in PATTERN_SEEDS:
        pattern = torch.randint(1, 2**31 - 1, (PATTERN_ELEMENTS,), generator=torch.Generator().manual_seed(seed))
        pattern = pattern.to(torch.int32)
        received.copy_(pattern.to(f"cuda:{source}"))
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
        equal = equal and torch.equal(received.cpu(), pattern)
    return PeerTest(source, target, claimed, equal)


def main() -> int:
    ask_for_all_queues()  # in time: CUDA reads it when it is first used
    sys.stdout.buffer.write(msgspec.json.encode(probe()) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
