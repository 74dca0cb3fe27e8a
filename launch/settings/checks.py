"""Every setting tried by itself, by the code that commands read it with: for whoever only lists them."""

from ...proto.placement.cuts import refuse_unordered
from ...proto.placement.shares import normalise
from .options import parse_group, parse_layouts
from .sampling_settings import sampling_parameters
from .settings import Settings


def refuse_impossible(chosen: Settings) -> None:
    """`InputError` by key and file, variable or flag for a value that is wrong for any model and any workers.

    How many values there are is left to the commands: their --workers says how many there must be.
    """
    group = parse_group(chosen)
    parse_layouts(chosen)
    sampling_parameters(chosen)
    for kind, shares in (("layer", group.layer_shares), ("tensor", group.tensor_shares)):
        if shares is not None:
            normalise(shares, len(shares), kind)
    if group.layer_split is not None:
        refuse_unordered(group.layer_split)
