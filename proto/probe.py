"""What torch finds on a machine: the one JSON document that `python -m gearshift.worker.probe` prints."""

from msgspec import Struct

OLDEST_CAPABILITY = (8, 0)  # of a card that computes as the file asks: bf16 products and dp4a
NEEDS_CAPABILITY = f"needs compute capability {'.'.join(map(str, OLDEST_CAPABILITY))} or more"


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
