"""What `gearshift doctor` says of a machine: facts in, one check a line out. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from ...proto.device_table import CardRow
from ...proto.nccl_choice import MEASURED_RANKS, NCCL_VARIABLE, NcclAsked, NcclCase
from ...proto.probe import (
    BF16_CAPABILITY,
    NEEDS_CAPABILITY,
    OLDEST_CAPABILITY,
    PeerTest,
    ProbedDevice,
    ProbeReport,
)
from ...proto.words import counted
from .host_facts import Failure, HostFacts

GIBIBYTE = 2**30
MIN_SHARED_MEMORY_BYTES = 64 << 20  # the links' rings of 64 ranks, with room
# NVIDIA's rule of minor version compatibility: from this driver on, every CUDA of that major version runs.
MIN_DRIVER_OF_CUDA = {11: 450, 12: 525, 13: 580}

TWO_WORKERS = NcclCase(on_cards=True, one_host=True, ranks=MEASURED_RANKS)  # where nothing is asked


class Verdict(StrEnum):
    """A note is nothing to mend; a problem is."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Check:
    """`found` is what there is, `advice` what to do about it; empty where nothing is to be done."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


def diagnose(facts: HostFacts, two_workers: NcclCase = TWO_WORKERS) -> tuple[Check, ...]:
    """All checks of the machine, in the order they are read. `two_workers`: what is asked of two on its cards."""
    return (
        *_software(facts),
        _cpu(facts),
        *_cuda(facts, two_workers),
        _shared_memory(facts.shared_memory_bytes),
        _compiler(facts),
        _ports(facts.ports),
        _logs(facts),
    )


def _software(facts: HostFacts) -> Iterator[Check]:
    yield Check("python", Verdict.OK, facts.python)
    if isinstance(facts.probe, Failure):
        advice = "mend or reinstall PyTorch; `python -m gearshift.worker.probe` shows the whole error"
        yield Check("torch", Verdict.PROBLEM, f"does not start: {facts.probe.reason}", advice)
    else:
        cuda = f"with CUDA {facts.probe.torch_cuda}" if facts.probe.torch_cuda else "without CUDA"
        yield Check("torch", Verdict.OK, f"{facts.probe.torch} {cuda}")


def _cpu(facts: HostFacts) -> Check:
    flags = ", ".join(facts.cpu_flags) or "none of AVX2, AVX-512, bf16"
    found = f"{counted(facts.cores, 'core')}, {flags}; {facts.free_memory_bytes / GIBIBYTE:.1f} GiB of memory free"
    if "avx2" not in facts.cpu_flags:
        return Check("cpu", Verdict.NOTE, found, "without AVX2 CPU workers are slow")
    if not {"avx512_bf16", "amx_bf16"} & set(facts.cpu_flags):
        return Check("cpu", Verdict.OK, f"{found}; no bf16 arithmetic, so f32 is likely faster")
    return Check("cpu", Verdict.OK, found)


def _cuda(facts: HostFacts, two_workers: NcclCase) -> Iterator[Check]:
    if isinstance(facts.probe, Failure):
        return
    if not facts.cards and not facts.driver_loaded and not facts.probe.devices:
        yield Check("gpu", Verdict.NOTE, "no NVIDIA driver and no card: workers compute on the CPU")
        return
    yield _driver(facts, facts.probe)
    yield _visible(facts)
    for device in facts.probe.devices:
        yield _device(device, facts.cards)
    if len(facts.probe.devices) > 1:
        yield _peers(facts.probe.peers)
        yield _staged(facts.probe, two_workers)
    if facts.probe.torch_cuda is not None:
        yield _nccl(facts.probe)


def _driver(facts: HostFacts, probe: ProbeReport) -> Check:
    driver = facts.cards[0].driver if facts.cards else "of unknown version"
    if probe.torch_cuda is None:
        advice = "install a PyTorch with CUDA; workers compute on the CPU until then"
        return Check("driver", Verdict.PROBLEM, f"NVIDIA {driver}, but torch {probe.torch} has no CUDA", advice)
    found = f"NVIDIA {driver}, torch wants CUDA {probe.torch_cuda}"
    least = MIN_DRIVER_OF_CUDA.get(int(probe.torch_cuda.split(".")[0]))
    number = driver.split(".")[0]
    if least is not None and number.isdigit() and int(number) < least:
        advice = f"install driver {least} or newer, or a PyTorch for an older CUDA"
        return Check("driver", Verdict.PROBLEM, found, advice)
    if probe.cuda_error is not None:
        advice = "see that `nvidia-smi` runs as this user"
        return Check("driver", Verdict.PROBLEM, f"{found}: {probe.cuda_error}", advice)
    return Check("driver", Verdict.OK, found)


def _visible(facts: HostFacts) -> Check:
    if isinstance(facts.visible, Failure):
        return Check("visible devices", Verdict.PROBLEM, facts.visible.reason, "correct CUDA_VISIBLE_DEVICES")
    if not facts.visible:
        return Check("visible devices", Verdict.NOTE, "none: workers compute on the CPU", "see CUDA_VISIBLE_DEVICES")
    ranks = ", ".join(f"rank {rank}: device {row.index}" for rank, row in enumerate(facts.visible))
    return Check("visible devices", Verdict.OK, ranks)


def _device(device: ProbedDevice, cards: Sequence[CardRow]) -> Check:
    name = f"cuda:{device.index}"
    sizes = f"{device.free_bytes / GIBIBYTE:.1f} of {device.total_bytes / GIBIBYTE:.1f} GiB free"
    capability = ".".join(map(str, device.capability))
    card = next((card for card in cards if card.device.uuid == device.uuid), None)
    pci = device.pci if card is None else card.device.pci
    found = f"{device.name} at {pci}, compute capability {capability}, {sizes}{_link(card)}"
    if device.capability < OLDEST_CAPABILITY:
        return Check(name, Verdict.PROBLEM, found, f"{NEEDS_CAPABILITY}; leave this card out")
    if device.capability < BF16_CAPABILITY:
        return Check(name, Verdict.NOTE, found, "computes in f16, as does a group with it; never run on such a card")
    if device.free_bytes < device.total_bytes // 2:
        return Check(name, Verdict.NOTE, found, "other programs hold more than half of its memory")
    if card is not None and _is_narrow(card):
        return Check(name, Verdict.NOTE, found, "the card sits in a slot with fewer lanes than it has")
    return Check(name, Verdict.OK, found)


def _link(card: CardRow | None) -> str:
    if card is None or card.link_width is None:
        return ""
    # An idle card lowers its generation to save power; its width stays.
    return f", PCIe {card.link_generation_most or '?'} x{card.link_width}"


def _is_narrow(card: CardRow) -> bool:
    return card.link_width is not None and card.link_width_most is not None and card.link_width < card.link_width_most


def _peers(peers: Sequence[PeerTest]) -> Check:
    name = "peer access"
    wrong = [peer for peer in peers if not peer.equal]
    if wrong:
        found = f"copies arrive changed: {_pairs(wrong)}"
        advice = "switch off IOMMU / ACS for these cards; until then run with NCCL_P2P_DISABLE=1"
        return Check(name, Verdict.PROBLEM, found, advice)
    indirect = [peer for peer in peers if not peer.claimed]
    if indirect:
        return Check(name, Verdict.NOTE, f"data arrives as sent; through host memory: {_pairs(indirect)}")
    return Check(name, Verdict.OK, f"direct between all {len(peers)} ordered pairs, data arrives as sent")


def _staged(probe: ProbeReport, two_workers: NcclCase) -> Check:
    name = "staged copies"
    case = replace(two_workers, reach=cards_reach(probe.devices[:MEASURED_RANKS], probe.peers))
    if probe.staged_fault:
        found = f"not to be had: {probe.staged_fault}"
        if case.asked is NcclAsked.OFF:
            return Check(name, Verdict.PROBLEM, found, f"workers do not start without them and NCCL: unset {case.why}")
        return Check(name, Verdict.NOTE, found, "without peer access NCCL moves all")
    return Check(name, Verdict.OK, f"streams wait for words in host memory; {_told_use(case)}")


def _told_use(case: NcclCase) -> str:
    """What they are used for between two workers."""
    asked = case.asked is not NcclAsked.AUTO
    if not case.without:
        return f"used where they are faster than NCCL{f' ({case.why})' if asked else ''}"
    return f"two workers have these alone, without NCCL ({case.why if asked else f'{NCCL_VARIABLE}=on: both'})"


def cards_reach(devices: Sequence[ProbedDevice], peers: Sequence[PeerTest]) -> bool:
    """Whether each of these reaches into the memory of each other: copies that arrive changed switch that off."""
    taken = {device.index for device in devices}
    return all(peer.claimed and peer.equal for peer in peers if {peer.source, peer.target} <= taken)


def _pairs(peers: Sequence[PeerTest]) -> str:
    return ", ".join(f"cuda:{peer.source} to cuda:{peer.target}" for peer in peers)


def _nccl(probe: ProbeReport) -> Check:
    if probe.nccl is None:
        return Check("nccl", Verdict.PROBLEM, "this torch has none", "install a PyTorch with NCCL")
    return Check("nccl", Verdict.OK, probe.nccl)


def _shared_memory(free: int | Failure) -> Check:
    name = "/dev/shm"
    advice = "mount it larger (docker run --shm-size=1g); small exchanges go through it"
    if isinstance(free, Failure):
        return Check(name, Verdict.PROBLEM, f"cannot be written: {free.reason}", advice)
    found = f"writable, {free / GIBIBYTE:.1f} GiB free"
    if free < MIN_SHARED_MEMORY_BYTES:
        return Check(name, Verdict.PROBLEM, found, advice)
    return Check(name, Verdict.OK, found)


def _compiler(facts: HostFacts) -> Check:
    name = "C compiler"
    if facts.compiler is not None:
        return Check(name, Verdict.OK, facts.compiler)
    has_device = isinstance(facts.probe, ProbeReport) and bool(facts.probe.devices)
    verdict = Verdict.PROBLEM if has_device else Verdict.NOTE
    return Check(name, verdict, "none", "install gcc or clang: on a GPU Triton needs one at its first launch")


def _ports(ports: int | Failure) -> Check:
    if isinstance(ports, Failure):
        advice = "see that the loopback interface is up and ports are left"
        return Check("loopback ports", Verdict.PROBLEM, ports.reason, advice)
    return Check("loopback ports", Verdict.OK, f"{ports} at once on 127.0.0.1")


def _logs(facts: HostFacts) -> Check:
    if isinstance(facts.logs, Failure):
        advice = "set XDG_STATE_HOME to a folder that can be written"
        return Check("logs", Verdict.NOTE, f"no logs are kept: {facts.logs.reason}", advice)
    return Check("logs", Verdict.OK, str(facts.logs))
