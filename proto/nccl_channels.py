"""What is asked of NCCL for each way between GPUs, and what that takes of a card. Pure.

A channel is a block of threads at each end, and memory there: three small allocations of 2 MiB each, 2 MiB to send and
10 MiB to receive (src/channel.cc and src/transport/p2p.cc of NCCL 2.28: a piece of memory has whole 2 MiB, and what is
received has a buffer for each of three protocols, of 0.5, 4.7 and 4 MiB). Collectives have connections of their own,
and sends and receives others, made when either first comes: so each communicator is used for one of the two alone.
Left alone NCCL takes up to 32 channels a way over NVLink; without NVLink it takes fewer than these by itself, and its
buffers lie in the host's memory.

NCCL_MAX_CTAS in the workers' environment takes the place of all three numbers, NCCL_MAX_NCHANNELS only lowers them;
NCCL_BUFFSIZE and NCCL_LL128_BUFFSIZE take the place of the buffers'.
"""

from dataclasses import dataclass, replace

MEBIBYTE = 1 << 20

PIECE_BYTES = 2 * MEBIBYTE  # in which a card's driver hands out memory
CHANNEL_BYTES = 3 * PIECE_BYTES
SENT_BYTES = PIECE_BYTES
COMMUNICATOR_BYTES = 6 * MEBIBYTE
LL_BUFFER_BYTES = 512 << 10
# Once a process: NCCL's code, and what its kernels' threads keep for themselves, up to 1,968 bytes where the driver
# gives each of them 1,024 from the start (cuobjdump). Workers give those back (worker/memory.py): context and NCCL
# together take what they took. Measured on an H200; less on a card of fewer multiprocessors.
KERNEL_BYTES = 426 * MEBIBYTE


@dataclass(frozen=True, slots=True)
class NcclUse:
    """Channels of each way, and how large the process's buffers are; None: as NCCL has them."""

    sums: int
    """Of a prompt under tensor parallelism, two a layer, which the cards wait for. On two H200 16 MiB were added at
    199 GB/s with 32 channels, at 128 with 8 (docs/lab_notes.md)."""
    edges: int
    """Hidden rows to the next stage, 16 MiB for 1,024 rows of 4,096, once in some 10 ms of a stage's work."""
    moves: int
    """Keys and values at a shift, beside the prompt's work, whose multiprocessors more would take; and weights."""
    buffer_bytes: int | None = None
    ll128_buffer_bytes: int | None = None

    @property
    def received_bytes(self) -> int:
        """Of each channel and peer that sends."""
        buffers = (self.buffer_bytes or 4 * MEBIBYTE) + (self.ll128_buffer_bytes or 4_915_200) + LL_BUFFER_BYTES
        return -(-buffers // PIECE_BYTES) * PIECE_BYTES

    @property
    def environment(self) -> dict[str, str]:
        """For the worker's process, before NCCL is first used; what the user set stays."""
        sizes = {"NCCL_BUFFSIZE": self.buffer_bytes, "NCCL_LL128_BUFFSIZE": self.ll128_buffer_bytes}
        return {name: str(size) for name, size in sizes.items() if size is not None}


USUAL = NcclUse(sums=16, edges=4, moves=8)
# On two H200 144 to 168 MiB less by themselves, and some times quicker, some slower (docs/lab_notes.md); no whole run.
SMALL_BUFFERS = replace(USUAL, buffer_bytes=MEBIBYTE, ll128_buffer_bytes=4_915_200 // 4)

NCCL_USE = USUAL
"""Of all workers."""


def nccl_bytes(ranks: int, use: NcclUse = NCCL_USE) -> int:
    """Of one card in a group of so many over NVLink, at most: what two H200 took with 8 and 32 channels, within 2%."""
    if ranks == 1:
        return 0
    both, peers = SENT_BYTES + use.received_bytes, ranks - 1
    sums = use.sums * (CHANNEL_BYTES + both)
    moves = use.moves * (CHANNEL_BYTES + peers * both)
    edges = use.edges * (CHANNEL_BYTES + use.received_bytes)  # the last rank's; others send as well
    communicators = 3
    if ranks > 2:
        edges += use.edges * (CHANNEL_BYTES + SENT_BYTES)
        communicators += 1
    return KERNEL_BYTES + sums + moves + edges + communicators * COMMUNICATOR_BYTES
