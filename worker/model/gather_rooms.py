"""Where a chunk's attention gathers what is cached: memory that stays.

Every chunk looks at more than the one before. Asked for anew each time, the allocator would keep a piece for each
length, none large enough for the next: 450 MiB of an H200 after a prompt of 30,000 tokens in chunks of 2,048.
"""

from math import prod

import torch
from torch import Tensor


class GatherRooms:
    """Flat memory by name, made when it is first asked for. All is used on one stream."""

    def __init__(self, device: torch.device, most_elements: int = 0) -> None:
        """`most_elements`: that one of them is asked for; each is made so large at once."""
        self._device, self._most = device, most_elements
        self._rooms: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised, until it is taken again."""
        elements = prod(shape)
        room = self._rooms.get(name)
        if room is None or room.numel() < elements or room.dtype is not dtype:
            self._rooms.pop(name, None)
            del room
            self._rooms[name] = torch.empty(max(elements, self._most), dtype=dtype, device=self._device)
        return self._rooms[name][:elements].view(shape)
