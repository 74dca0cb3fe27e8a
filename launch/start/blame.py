"""Why a request failed, where the model's file is to blame."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ...proto.errors import ModelFileError, RequestFailedError
from ...proto.model import ModelSpec
from ..console import note


@contextmanager
def file_is_blamed(spec: ModelSpec) -> Iterator[None]:
    """A request that fails in here raises ModelFileError instead where the file holds what is no number."""
    try:
        yield
    except RequestFailedError as error:
        from ...coordinator.model.no_numbers import what_is_no_number  # late: it brings NumPy

        note(f"{error}: looking whether the model's file is to blame")
        with suppress(OSError):
            if (found := what_is_no_number(spec)) is not None:
                raise ModelFileError(found) from error
        raise
