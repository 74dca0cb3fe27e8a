"""Where the ranks of a launch find each other: a store, in which they can agree before any group is made."""

from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from .errors import CollectiveTimeoutError, LinkFailedError
from .waiting import named_errors


class MeetingPlace:
    """`store` holds nothing of an earlier launch."""

    def __init__(self, store: Store, rank: int, size: int, timeout_seconds: float) -> None:
        self.rank, self.size, self.timeout_seconds = rank, size, timeout_seconds
        self._store, self._groups = store, 0

    def tell(self, what: str, word: str) -> Sequence[str]:
        """What all ranks say about `what`, by rank; collective, once for each `what`.

        Raises CollectiveTimeoutError where one says nothing, LinkFailedError where the store is gone.
        """
        keys = [f"gearshift/{what}/{rank}" for rank in range(self.size)]
        with named_errors(f"rank {self.rank} of {self.size}, {what}"):
            self._store.set(keys[self.rank], word)
            self._store.wait(keys, timedelta(seconds=self.timeout_seconds))
            return [self._store.get(key).decode() for key in keys]

    def store_of_next_group(self) -> Store:
        """For one default group of torch.distributed; alike on all ranks that make as many."""
        self._groups += 1
        return PrefixStore(f"group {self._groups}", self._store)


def meet(rank: int, size: int, timeout_seconds: float) -> MeetingPlace:
    """By the environment that torchrun's agent sets. Raises CollectiveTimeoutError or LinkFailedError."""
    try:
        # As `init_process_group` does for env://.
        store, _, _ = next(rendezvous("env://", rank, size, timeout=timedelta(seconds=timeout_seconds)))
        store.set_timeout(timedelta(seconds=timeout_seconds))
    except (RuntimeError, ValueError) as error:
        raise could_not_join(rank, size, error) from error
    return MeetingPlace(store, rank, size, timeout_seconds)


def could_not_join(rank: int, size: int, error: Exception) -> CollectiveTimeoutError | LinkFailedError:
    words = str(error)
    kind = CollectiveTimeoutError if "timed out" in words.lower() else LinkFailedError
    return kind(f"rank {rank} of {size} could not join the others: {words}")
