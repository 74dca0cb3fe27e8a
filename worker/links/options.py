"""What a group was started with that concerns its links: from the coordinator, and from this host's environment."""

import os

import torch

from ...proto.commands import LinkOptions
from ...proto.errors import InputError
from ...proto.switches import parse_switch

NO_PEER_VARIABLE = "GEARSHIFT_NO_PEER"
NCCL_NO_PEER_VARIABLE = "NCCL_P2P_DISABLE"
NO_NCCL_VARIABLE = "GEARSHIFT_NO_NCCL"


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


def goes_without_nccl(device: torch.device, local: bool) -> bool:
    """Whether this host's environment says so. `InputError` where ranks are on several hosts."""
    if device.type != "cuda" or not is_switched_on(NO_NCCL_VARIABLE):
        return False
    if not local:
        raise InputError(f"{NO_NCCL_VARIABLE} is for workers of one host")
    return True


def settle(options: LinkOptions) -> None:
    """Before any link is opened: where peer access is off, all that looks at the environment later finds it off."""
    if options.no_peer or no_peer_asked() or is_switched_on(NO_NCCL_VARIABLE):
        os.environ[NO_PEER_VARIABLE] = os.environ[NCCL_NO_PEER_VARIABLE] = "1"
