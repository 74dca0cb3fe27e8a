"""What can go wrong between ranks. All end the group: a lost message cannot be made up for."""

from ...proto.errors import WorkerLostError


class CollectiveTimeoutError(WorkerLostError):
    """A peer did not arrive in time. The message names the ranks that were missing, where that is known."""


class LinkFailedError(WorkerLostError):
    """The transport itself failed: a peer closed its connection, or sent what was not agreed."""
