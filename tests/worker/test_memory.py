"""What an unloaded model took is given back, by whatever name this torch has for it."""

from types import SimpleNamespace

import pytest
import torch

from gearshift.tests.helpers.noted_library import NotedLibrary
from gearshift.worker import memory
from gearshift.worker.cuda_driver import CudaDriver

CARD, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def given_back(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of a card's torch, in order; both names for the pinned memory are there."""
    asked: list[str] = []

    def note(text: str) -> object:
        return lambda *_: asked.append(text)

    monkeypatch.setattr(torch.cuda, "synchronize", note("waited"))
    monkeypatch.setattr(torch.cuda, "empty_cache", note("card"))
    monkeypatch.setattr(torch, "accelerator", SimpleNamespace(empty_host_cache=note("pinned")))
    monkeypatch.setattr(torch._C, "_host_emptyCache", note("pinned, by its private name"), raising=False)
    return asked


def test_pinned_memory_goes_back_once_the_card_is_done(
    given_back: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.return_unloaded(CARD)
    assert given_back == ["card", "waited", "pinned"]
    del given_back[:]
    monkeypatch.setattr(torch, "accelerator", SimpleNamespace())  # torch 2.11
    memory.return_unloaded(CARD)
    assert given_back == ["card", "waited", "pinned, by its private name"]
    del given_back[:]
    monkeypatch.delattr(torch._C, "_host_emptyCache")  # whatever comes: nothing is given back, and nothing fails
    memory.return_unloaded(CARD)
    assert given_back == ["card"]


def test_on_a_cpu_nothing_is_asked_of_cards(given_back: list[str]) -> None:
    memory.return_unloaded(CPU)
    assert given_back == []


def test_stacks_are_given_back_once_there_is_a_context(given_back: list[str]) -> None:
    library = NotedLibrary()
    memory.give_back_stacks(CARD, CudaDriver(library))
    assert given_back == ["waited"]
    assert library.notes == [("cuCtxSetLimit", [0, 0])], "no bytes a thread"
