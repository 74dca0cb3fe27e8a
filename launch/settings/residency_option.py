"""`--residency`: which layers lie where, by name, instead of by what fits. Text in, frozen setting out."""

import re
from dataclasses import dataclass

from ...coordinator.residency.residency import Kind, Residency
from ...proto.errors import InputError

AUTO = "auto"
RUN = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")


@dataclass(frozen=True, slots=True)
class ResidencyWish:
    """Runs [first, end) of layers by kind; end None: to the last layer. What no run names is held for both layouts."""

    flag: str
    runs: tuple[tuple[Kind, int, int | None], ...]

    def of(self, layers: int) -> Residency:
        """For a model of so many layers. Raises `InputError` where a run leaves it, or two name one layer."""
        kinds: dict[int, Kind] = {}
        for kind, first, end in self.runs:
            for layer in range(first, layers if end is None else end):
                if layer >= layers:
                    raise InputError(f"{self.flag} names layer {layer}: the model has layers 0 to {layers - 1}")
                if layer in kinds:
                    raise InputError(f"{self.flag} names layer {layer} twice")
                kinds[layer] = kind
        ordered = sorted(kinds)
        return Residency(
            tuple(layer for layer in ordered if kinds[layer] is Kind.MIGRATE),
            tuple(layer for layer in ordered if kinds[layer] is Kind.OWNER),
        )


def parse_residency(flag: str, text: str) -> ResidencyWish | None:
    """`auto` is None; else `both`, `migrate`, `owner` for all layers, or `migrate:0-11+14,owner:20-23`."""
    if text == AUTO:
        return None
    return ResidencyWish(flag, tuple(run for word in text.split(",") for run in _runs(flag, word.strip())))


def _runs(flag: str, word: str) -> list[tuple[Kind, int, int | None]]:
    name, colon, places = word.partition(":")
    if name not in tuple(Kind):
        raise InputError(
            f"{flag} takes auto, both, migrate or owner, or layers as in migrate:0-11,owner:20-23, not {word!r}"
        )
    if not colon:
        return [(Kind(name), 0, None)]
    found: list[tuple[Kind, int, int | None]] = []
    for place in places.split("+"):
        match = RUN.fullmatch(place)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise InputError(f"{flag} takes layers as 3 or 0-11, with + between them, not {place[:40]!r}")
        found.append((Kind(name), int(match[1]), int(match[2] or match[1]) + 1))
    return found
