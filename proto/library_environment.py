"""What libraries read from the environment once, when they are loaded: to be set before torch is imported.

Workers that torchrun starts set it themselves. Those that the agent forks have its libraries: the agent sets it.
"""

from collections.abc import MutableMapping

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
ONEDNN_KEPT_SHAPES = "128"
BARRIER_SPINS = "3000"  # some 0.1 ms; GNU OpenMP's own are 300,000


def set_library_environment(environment: MutableMapping[str, str], threads: int | None) -> None:
    """`threads` None: as the environment says. What the user has set stays, the threads apart."""
    if threads is not None:
        environment.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    # oneDNN keeps a compiled product (about 0.6 MiB) for every shape it has met: 1,024 of them by default.
    environment.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", ONEDNN_KEPT_SHAPES)
    # Threads that wait for one whose core has other work burn the time it needs: a step of 300 products takes seconds.
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", BARRIER_SPINS)
