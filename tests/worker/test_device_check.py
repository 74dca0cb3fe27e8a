"""Which cards a worker takes: those that `gearshift doctor` passes."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from gearshift.proto.commands import LoadModel
from gearshift.proto.errors import InputError
from gearshift.proto.ids import ComputeType, Rank
from gearshift.worker.device_check import check_device
from gearshift.worker.links.open import Links
from gearshift.worker.loading import _compute_type

CARD = torch.device("cuda:0")


def see_a_card(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old card")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("shutil.which", lambda name: name)


def test_a_card_without_what_the_kernels_need_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    see_a_card(monkeypatch, (7, 0))
    with pytest.raises(InputError, match=r"Old card .* 7\.0.*needs compute capability 7\.5 or more"):
        check_device(CARD, ComputeType.F16)


def test_a_card_without_bf16_is_taken_in_f16_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    see_a_card(monkeypatch, (7, 5))
    check_device(CARD, ComputeType.F16)
    with pytest.raises(InputError, match=r"Old card .* 7\.5.*no bf16.*--compute-type f16"):
        check_device(CARD, ComputeType.BF16)


def test_newer_cards_are_taken_in_both(monkeypatch: pytest.MonkeyPatch) -> None:
    see_a_card(monkeypatch, (8, 0))
    check_device(CARD, ComputeType.F16)
    check_device(CARD, ComputeType.BF16)


def test_a_machine_without_a_c_compiler_or_triton_is_told_which_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    see_a_card(monkeypatch, (8, 0))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(InputError, match=r"C compiler.*install gcc or clang, or set CC"):
        check_device(CARD, ComputeType.BF16)
    monkeypatch.setenv("CC", "/opt/own/cc")
    monkeypatch.setattr("shutil.which", lambda name: name if name == "/opt/own/cc" else None)
    check_device(CARD, ComputeType.BF16)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="package triton"):
        check_device(CARD, ComputeType.BF16)


class Ranks:
    """A tensor group of three whose other two cards are newer, or not."""

    def __init__(self, others: float) -> None:
        self._others = others

    def all_reduce(self, own: torch.Tensor) -> torch.Tensor:
        return own + self._others


@pytest.mark.parametrize(
    ("capability", "older_others", "wanted"),
    [((7, 5), 0.0, ComputeType.F16), ((9, 0), 1.0, ComputeType.F16), ((8, 0), 0.0, ComputeType.BF16)],
)
def test_the_oldest_card_of_a_group_decides_in_which_type_all_compute(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], older_others: float, wanted: ComputeType
) -> None:
    see_a_card(monkeypatch, capability)
    monkeypatch.setattr(torch, "tensor", lambda values, device: torch.Tensor(values))
    links, command = SimpleNamespace(tensor=Ranks(older_others)), SimpleNamespace(compute_type=None)
    assert _compute_type(cast(LoadModel, command), Rank(0), cast(Links, links), CARD) is wanted
