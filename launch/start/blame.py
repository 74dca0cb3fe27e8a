"""Why a request failed, where the model's file is to blame."""

from collections.abc import Iterator
from contextlib import contextmanager

from ...coordinator.model.file_blame import find_blame, tells_no_numbers
from ...proto.errors import ModelFileError, RequestFailedError
from ...proto.model import ModelSpec
from ..console import note, warn

LOOKING = "looking whether the model's file is to blame"


@contextmanager
def file_is_blamed(spec: ModelSpec) -> Iterator[None]:
    """A request that fails in here raises ModelFileError instead where the file holds what is no number.

    Looked for only where logits were not numbers: it reads all of the file.
    """
    try:
        yield
    except RequestFailedError as error:
        if not tells_no_numbers(str(error)):
            raise
        note(f"{error}: {LOOKING}")
        if (found := find_blame(spec)) is not None:
            raise ModelFileError(found) from error
        raise


def find_and_tell_blame(spec: ModelSpec) -> str | None:
    """As `find_blame`, told to whoever runs a server of many clients, too."""
    note(f"the logits of a request are not numbers: {LOOKING}")
    if (found := find_blame(spec)) is not None:
        warn(found)
    return found
