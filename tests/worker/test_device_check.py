"""Which cards a worker takes: those that `gearshift doctor` passes."""

import pytest
import torch

from gearshift.proto.errors import InputError
from gearshift.worker.device_check import check_device


def test_a_card_without_what_the_kernels_need_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old card")
    with pytest.raises(InputError, match=r"Old card .* 7\.5.*needs compute capability 8\.0 or more"):
        check_device(torch.device("cuda:0"))
