"""How decode steps are to sum over the cards of a host, as an environment says it. Pure."""

from enum import StrEnum

from .errors import InputError
from .shown import shown

DECODE_SUMS_VARIABLE = "GEARSHIFT_DECODE_SUMS"


class DecodeSumsAsked(StrEnum):
    """AUTO: what is quickest, measured by the workers."""

    AUTO = "auto"
    NCCL = "nccl"
    ONE_SHOT = "one-shot"


def parse_decode_sums(text: str) -> DecodeSumsAsked:
    """Of the variable's text; an empty one and none are AUTO. `InputError` for another word."""
    word = text.strip().lower()
    if word not in ("", *DecodeSumsAsked):
        raise InputError(f"{DECODE_SUMS_VARIABLE} takes nccl, one-shot or auto, not {shown(text)}")
    return DecodeSumsAsked(word or DecodeSumsAsked.AUTO)
