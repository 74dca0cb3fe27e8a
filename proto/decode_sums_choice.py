"""How decode steps are to sum over the cards of a host, as an environment says it. Pure."""

from enum import StrEnum

from .asked_words import parse_word

DECODE_SUMS_VARIABLE = "GEARSHIFT_DECODE_SUMS"


class DecodeSumsAsked(StrEnum):
    """AUTO: what is quickest, measured by the workers."""

    NCCL = "nccl"
    ONE_SHOT = "one-shot"
    AUTO = "auto"


def parse_decode_sums(text: str) -> DecodeSumsAsked:
    """Of the variable's text; an empty one and none are AUTO. `InputError` for another word."""
    return parse_word(DECODE_SUMS_VARIABLE, text, DecodeSumsAsked.AUTO)
