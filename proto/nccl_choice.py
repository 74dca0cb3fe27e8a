"""Whether workers on GPUs go without NCCL. Pure.

Without it all is staged in host memory (worker/links/without_nccl.py). Between two cards of a host that do not reach
into each other's memory that was as fast on two H200, and left 700 MiB more of each card; three and more were not
measured, and where cards do reach each other NCCL is faster.
"""

from dataclasses import dataclass
from enum import StrEnum

from .asked_words import parse_word
from .errors import InputError

NCCL_VARIABLE = "GEARSHIFT_NCCL"
MEASURED_RANKS = 2


class NcclAsked(StrEnum):
    """What an environment says."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


def parse_nccl(text: str) -> NcclAsked:
    """Of the variable's text; an empty one and none are AUTO. `InputError` for another word."""
    return parse_word(NCCL_VARIABLE, text, NcclAsked.AUTO)


@dataclass(frozen=True, slots=True)
class NcclCase:
    """What the choice depends on; alike on all ranks.

    `no_peer`: peer access is switched off, for whatever reason. `reach`: as far as is known each card reaches into the
    memory of each other.
    """

    on_cards: bool
    one_host: bool
    ranks: int
    asked: NcclAsked = NcclAsked.AUTO
    no_peer: bool = False
    reach: bool = True

    @property
    def without(self) -> bool:
        """Whether the group goes without NCCL. `InputError` where that is asked for and cannot be."""
        if not self.on_cards or self.ranks == 1:
            return False
        match self.asked:
            case NcclAsked.ON:
                return False
            case NcclAsked.OFF:
                if not self.one_host:
                    raise InputError(f"{NCCL_VARIABLE}=off is for workers of one host")
                return True
            case NcclAsked.AUTO:
                return self.one_host and self.ranks == MEASURED_RANKS and (self.no_peer or not self.reach)

    @property
    def why(self) -> str:
        """What decided it, for messages."""
        if self.asked is not NcclAsked.AUTO:
            return f"{NCCL_VARIABLE}={self.asked}"
        if not self.one_host:
            return "workers of several hosts"
        if self.ranks != MEASURED_RANKS:
            return f"{self.ranks} workers"
        if self.no_peer:
            return "peer access is switched off"
        return f"the cards {'' if self.reach else 'do not '}reach into each other's memory"
