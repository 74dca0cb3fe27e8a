"""Why a request failed, where the model's file is to blame."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ...proto.errors import ModelFileError, RequestFailedError
from ...proto.model import ModelSpec
from ..console import note


@contextmanager
def file_is_blamed(spec: ModelSpec) -> Iterator[None]:
    """A request that fails in here raises ModelFileError instead where the file holds what is no number.

    Looked for only where logits were not numbers: it reads all of the file.
    """
    try:
        yield
    except RequestFailedError as error:
        if "not numbers" not in str(error):  # as whoever chooses or scores by logits says it
            raise
        from ...coordinator.model.non_finite import first_non_finite  # late: it brings NumPy

        note(f"{error}: looking whether the model's file is to blame")
        with suppress(OSError):
            if (found := first_non_finite(spec)) is not None:
                raise ModelFileError(found) from error
        raise
