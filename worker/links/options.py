"""What a group was started with that concerns its links: from the coordinator, and from this host's environment."""

import os

from ...proto.commands import LinkOptions
from ...proto.decode_sums_choice import DECODE_SUMS_VARIABLE, parse_decode_sums
from ...proto.errors import InputError
from ...proto.nccl_choice import NCCL_VARIABLE, NcclAsked, parse_nccl
from ...proto.switches import parse_switch

NO_PEER_VARIABLE = "GEARSHIFT_NO_PEER"
NCCL_NO_PEER_VARIABLE = "NCCL_P2P_DISABLE"


def no_peer_asked() -> bool:
    """Whether this host's environment says that GPUs must not reach into each other's memory."""
    return is_switched_on(NO_PEER_VARIABLE)


def is_switched_on(variable: str) -> bool:
    """0, false, no, off, an empty text and no variable mean that it is not. `InputError` for a word that is neither."""
    text = os.environ.get(variable, "")
    try:
        return parse_switch(text)
    except ValueError:
        raise InputError(f"{variable} takes true or false, not {text!r}") from None


def nccl_asked() -> NcclAsked:
    """What this host's environment says. `InputError` for a word that is none."""
    return parse_nccl(os.environ.get(NCCL_VARIABLE, ""))


def settle(options: LinkOptions) -> None:
    """Before any link is opened: where peer access is off, all that looks at the environment later finds it off.

    `InputError` for a word that a variable does not take.
    """
    parse_decode_sums(os.environ.get(DECODE_SUMS_VARIABLE, ""))  # only cards ask for it later
    if options.no_peer or no_peer_asked() or nccl_asked() is NcclAsked.OFF:
        switch_peer_access_off()


def switch_peer_access_off() -> None:
    """For this process."""
    os.environ[NO_PEER_VARIABLE] = os.environ[NCCL_NO_PEER_VARIABLE] = "1"
