"""How many of NCCL's channels each way between GPUs has, and what they take of a card. Pure.

A channel is a block of threads at each end, and memory there: three small allocations of 2 MiB each, 2 MiB to send and
10 MiB to receive (src/channel.cc and src/transport/p2p.cc of NCCL 2.28: a piece of memory has whole 2 MiB, and what is
received has a buffer for each of three protocols, of 0.5, 4.7 and 4 MiB). Left alone NCCL takes up to 32 a way over
NVLink; without NVLink it takes fewer than these by itself, and much of it in the host's memory.

NCCL_MAX_CTAS in the workers' environment takes the place of all three numbers, NCCL_MAX_NCHANNELS only lowers them.
"""

MEBIBYTE = 1 << 20

# Sums of a prompt under tensor parallelism, two a layer, which the cards wait for. On two H200 16 MiB were added at
# 199 GB/s with 32 channels, at 128 with 8 (docs/lab_notes.md).
SUM_CHANNELS = 16
# Hidden rows to the next stage, 16 MiB for 1,024 rows of 4,096, once in some 10 ms of a stage's work.
EDGE_CHANNELS = 4
# Keys and values at a shift, beside the prompt's work, whose multiprocessors more would take; weights that migrate.
MOVE_CHANNELS = 8

CHANNEL_BYTES = 6 * MEBIBYTE
SENT_BYTES, RECEIVED_BYTES = 2 * MEBIBYTE, 10 * MEBIBYTE
COMMUNICATOR_BYTES = 6 * MEBIBYTE
# Once a process: NCCL's code, and what its kernels' threads keep for themselves, up to 1,968 bytes where the driver
# gives each of them 1,024 from the start (cuobjdump). Measured on an H200; less on a card of fewer multiprocessors.
KERNEL_BYTES = 426 * MEBIBYTE


def nccl_bytes(ranks: int) -> int:
    """Of one card in a group of so many over NVLink, at most: what two H200 took with 8 and 32 channels, within 2%."""
    if ranks == 1:
        return 0
    both, peers = SENT_BYTES + RECEIVED_BYTES, ranks - 1
    sums = SUM_CHANNELS * (CHANNEL_BYTES + both)
    moves = MOVE_CHANNELS * (CHANNEL_BYTES + peers * both)
    edges = EDGE_CHANNELS * (CHANNEL_BYTES + RECEIVED_BYTES)  # the last rank's; others send as well
    communicators = 3
    if ranks > 2:
        edges += EDGE_CHANNELS * (CHANNEL_BYTES + SENT_BYTES)
        communicators += 1
    return KERNEL_BYTES + sums + moves + edges + communicators * COMMUNICATOR_BYTES
