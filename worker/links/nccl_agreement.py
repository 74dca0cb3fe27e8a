"""How the ranks come to one answer whether they go without NCCL: before any group is made, by the store they meet by.

Each may have another environment, and see other cards.
"""

from collections.abc import Sequence

import msgspec
import torch
from msgspec import Struct

from ...proto.errors import InputError
from ...proto.nccl_choice import NCCL_VARIABLE, NcclAsked, NcclCase
from .meeting_place import MeetingPlace
from .options import nccl_asked, no_peer_asked


class RankFacts(Struct, frozen=True):
    """What one rank knows. `out_of_reach`: cards that this rank sees, whose memory its own card does not reach."""

    asked: NcclAsked
    no_peer: bool
    card: str
    out_of_reach: tuple[str, ...] = ()


def agreed_case(place: MeetingPlace, device: torch.device, local: bool) -> NcclCase:
    """What the choice depends on. Collective among the cards of one host; elsewhere there is nothing to agree on.

    Raises CollectiveTimeoutError or LinkFailedError; `InputError`, on all ranks alike, where they ask for both.
    """
    if device.type != "cuda" or not local:
        asked = nccl_asked() if device.type == "cuda" else NcclAsked.AUTO
        return NcclCase(device.type == "cuda", local, place.size, asked, no_peer_asked())
    return agree(place, facts_here(device))


def agree(place: MeetingPlace, mine: RankFacts) -> NcclCase:
    """Of cards of one host; collective."""
    told = place.tell("whether to go without NCCL", msgspec.json.encode(mine).decode())
    return case_of([msgspec.json.decode(word, type=RankFacts) for word in told])


def case_of(ranks: Sequence[RankFacts]) -> NcclCase:
    """Of cards of one host, by what all their ranks know. What one rank asks for all do; so with peer access."""
    asked = [rank.asked for rank in ranks]
    if NcclAsked.ON in asked and NcclAsked.OFF in asked:
        one, other = asked.index(NcclAsked.ON), asked.index(NcclAsked.OFF)
        raise InputError(f"{NCCL_VARIABLE} is on for rank {one} and off for rank {other}")
    named = next((one for one in asked if one is not NcclAsked.AUTO), NcclAsked.AUTO)
    out_of_reach = any(other.card in one.out_of_reach for one in ranks for other in ranks)
    return NcclCase(True, True, len(ranks), named, any(rank.no_peer for rank in ranks), not out_of_reach)


def facts_here(device: torch.device) -> RankFacts:
    """Of this rank. A card that it does not see (CUDA_VISIBLE_DEVICES) is not known to be out of reach."""
    cards = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    own = torch.cuda.current_device() if device.index is None else device.index
    out_of_reach = [
        card
        for index, card in enumerate(cards)
        if card != cards[own] and not torch.cuda.can_device_access_peer(own, index)
    ]
    return RankFacts(nccl_asked(), no_peer_asked(), cards[own], tuple(out_of_reach))
