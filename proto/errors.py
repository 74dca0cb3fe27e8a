"""Errors by name, each with the exit code the command line ends with.

Exit codes: 1 a fault of ours, 2 the user's input (a file, a flag, a value), 3 a worker or the group was lost,
130 interrupted. Everything raised on purpose is a `GearshiftError`; one place in `launch` catches it.
"""

LOGITS_ARE_NO_NUMBERS = "the logits are not numbers"
"""Part of the error of a request whose logits cannot be chosen or scored by."""


class GearshiftError(Exception):
    """Base of all named errors; the message says what was wrong, where, and what to do."""

    exit_code = 1


class InputError(GearshiftError):
    """A value, flag or request the user gave cannot be taken."""

    exit_code = 2


class ModelFileError(InputError):
    """A model file is damaged, cut off, of a wrong kind, or holds what is not supported."""


class UnsupportedModelError(InputError):
    """The file is sound, but its architecture, tensor type or tokenizer is not known here."""


class DoesNotFitError(InputError):
    """What was asked for does not fit in memory or in the context."""


class ProtocolError(GearshiftError):
    """A message was malformed, out of order, or from another protocol version."""


class WorkerLostError(GearshiftError):
    """A worker died, never joined, or stopped answering. The message names rank and cause."""

    exit_code = 3


class WorkerFailedError(GearshiftError):
    """A worker raised; the message carries its rank and its own error."""

    exit_code = 3


class PairDamagedError(WorkerFailedError):
    """What one rank sends another arrives changed: found at start, raised by all ranks alike. It names the pairs."""


class ServerLostError(GearshiftError):
    """To a client: the coordinator is gone, or never answered."""

    exit_code = 3


class BusyError(GearshiftError):
    """The queue is full; the same request may be taken later."""


class StaleError(InputError):
    """What the request relies on (a plan, a request id) is not valid any more."""


class LayoutRefusedError(InputError):
    """The group cannot work in the layouts asked for; nothing was changed."""


class RequestFailedError(GearshiftError):
    """One request ended by an error (NaN logits, say); the group lives on."""
