"""What is asked of torch for each way between ranks; NCCL itself is not there on the CPU."""

import os
import re
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gearshift.proto.nccl_channels import SMALL_BUFFERS
from gearshift.worker.links import communicators as links_communicators
from gearshift.worker.links.communicators import Communicators

CARD = torch.device("cuda", 1)
COLLECTIVE = re.compile(r"dist\.(all_reduce|all_gather|broadcast|barrier|reduce|gather|isend|irecv)\((.*)")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int] | None, dict[str, Any]]]:
    calls: list[tuple[list[int] | None, dict[str, Any]]] = []
    nccl = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace(max_ctas=None), _timeout=None))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(dist, "new_group", lambda ranks, **named: calls.append((ranks, named)))
    return calls


def test_each_group_on_cards_has_channels_and_options_of_its_own(
    asked: list[tuple[list[int] | None, dict[str, Any]]],
) -> None:
    communicators = Communicators(CARD, 40.0)
    communicators.make(16)
    communicators.make(4, (0, 1))
    (everyone, first), (edge, second) = asked
    assert (everyone, edge) == (None, [0, 1])
    options = first["pg_options"], second["pg_options"]
    assert [one.config.max_ctas for one in options] == [16, 4]
    assert options[0] is not options[1]
    assert {one._timeout for one in options} == {timedelta(seconds=40)} == {first["timeout"], second["timeout"]}
    assert first["device_id"] == second["device_id"] == CARD


def test_groups_on_the_cpu_have_none(asked: list[tuple[list[int] | None, dict[str, Any]]]) -> None:
    Communicators(torch.device("cpu"), 40.0).make(16, (1, 2))
    assert asked == [([1, 2], {"timeout": timedelta(seconds=40)})]


def test_sizes_of_nccls_buffers_are_told_before_it_is_used_unless_the_user_has(
    asked: list[tuple[list[int] | None, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SMALL_BUFFERS.environment:
        monkeypatch.setenv(name, "77")
    monkeypatch.delenv("NCCL_LL128_BUFFSIZE")
    monkeypatch.setattr(links_communicators, "NCCL_USE", SMALL_BUFFERS)
    Communicators(torch.device("cpu"), 40.0)
    assert "NCCL_LL128_BUFFSIZE" not in os.environ
    Communicators(CARD, 40.0)
    assert (os.environ["NCCL_BUFFSIZE"], os.environ["NCCL_LL128_BUFFSIZE"]) == ("77", "1228800")


def test_nothing_goes_through_the_default_group() -> None:
    """Its communicator would be made at the first use, with all of NCCL's channels: hundreds of MiB of each card."""
    found = [
        call
        for file in sorted(Path(links_communicators.__file__).parent.glob("*.py"))
        for call in COLLECTIVE.findall(file.read_text())
    ]
    assert len(found) >= 6
    assert [call for call in found if "group=" not in call[1]] == []
