"""Where a request stands."""

from enum import StrEnum


class Phase(StrEnum):
    """Of `session.Session`, in the order that a request goes through them; some are left out."""

    QUEUED = "queued"
    RETURN = "return"  # a kept start of the prompt moves to the layout that the rest is read in
    PREFILL = "prefill"  # from `OpenRequest` until the last chunk has left the last stage
    SHIFT = "shift"  # the prompt is read; moves or acknowledgements are missing
    DECODE = "decode"
    ENDED = "ended"  # its fate is known; chunks may still be in the pipeline, and its slots are still held
