"""What torch finds on a machine: the one JSON document that `python -m gearshift.worker.probe` prints."""

from msgspec import Struct

from .ids import ComputeType

OLDEST_CAPABILITY = (7, 5)  # of a card that computes in the file's types: matrix units for int8, and a CUDA 13 for it
NEEDS_CAPABILITY = f"needs compute capability {'.'.join(map(str, OLDEST_CAPABILITY))} or more"
BF16_CAPABILITY = (8, 0)  # below there are no bf16 products: such cards compute in f16


def usual_compute_type(capability: tuple[int, int]) -> ComputeType:
    """Of a card where none is asked for."""
    return ComputeType.F16 if capability < BF16_CAPABILITY else ComputeType.BF16


class ProbedDevice(Struct, frozen=True):
    """A CUDA device under torch's number."""

    index: int
    name: str
    uuid: str
    pci: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int


class PeerTest(Struct, frozen=True):
    """A copy between two devices. `claimed`: it goes directly, the driver says; `equal`: the data arrived as sent."""

    source: int
    target: int
    claimed: bool
    equal: bool


class ProbeReport(Struct, frozen=True):
    """`torch_cuda` None: a torch without CUDA. `cuda_error`: why torch has CUDA but no device."""

    python: str
    torch: str
    torch_cuda: str | None
    cuda_error: str | None
    nccl: str | None
    cpu_capability: str
    devices: tuple[ProbedDevice, ...] = ()
    peers: tuple[PeerTest, ...] = ()
    staged_fault: str = ""  # why copies staged in host memory cannot be used here
