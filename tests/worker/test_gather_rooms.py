"""Memory that a chunk's attention gathers into: one piece for all lengths."""

import torch

from gearshift.worker.model.gather_rooms import GatherRooms

CPU = torch.device("cpu")


def test_every_length_lies_in_the_memory_of_the_longest() -> None:
    rooms = GatherRooms(CPU, 4 * 64 * 8)
    short = rooms.take("keys", (1, 64, 8), torch.bfloat16)
    longest = rooms.take("keys", (4, 64, 8), torch.bfloat16)
    assert short.data_ptr() == longest.data_ptr()
    assert longest.shape == (4, 64, 8)
    assert longest.is_contiguous()


def test_names_and_types_have_memory_of_their_own() -> None:
    rooms = GatherRooms(CPU, 64)
    keys, values = (rooms.take(name, (64,), torch.float16).fill_(number) for number, name in enumerate("kv"))
    assert keys.sum() == 0
    assert values.sum() == 64
    assert rooms.take("k", (64,), torch.uint8).dtype is torch.uint8


def test_what_is_longer_than_was_said_has_room_too() -> None:
    """A part that came with a migrating layer may be wider than those that were there."""
    rooms = GatherRooms(CPU, 64)
    assert rooms.take("keys", (100,), torch.float32).shape == (100,)
    assert rooms.take("keys", (10, 3), torch.float32).shape == (10, 3)
