"""Staged copies between two processes: they carry all that goes by them, and a peer that is gone is named."""

import json
from pathlib import Path

import pytest
import torch

from gearshift.tests.worker.staged_program import run_ranks


def need_cards() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


@pytest.mark.parametrize(
    "device", [pytest.param("cuda", marks=pytest.mark.cuda), pytest.param("cpu", marks=pytest.mark.slow)]
)
def test_two_processes_carry_everything_staged(tmp_path: Path, device: str) -> None:
    """Bytes, rows and sums of many sizes, in both directions, more than the rings hold."""
    if device == "cuda":
        need_cards()
    outcomes = [json.loads(text) for text in run_ranks(tmp_path, device)]
    for outcome in outcomes:
        assert not outcome["without NCCL"]
        assert outcome["moves"] == "all arrived"
        assert outcome["rows"] == outcome["late rows"] == "all arrived"
        assert outcome["sums"] == "all right"
        assert outcome["chosen"] == outcomes[0]["chosen"]
        assert outcome["late elsewhere"] == "nothing"
    assert outcomes[0]["digest"] == outcomes[1]["digest"]
    assert outcomes[0]["late"].startswith("CollectiveTimeoutError: waited 1."), outcomes[0]["late"]
    assert "rank 1" in outcomes[0]["late"]


@pytest.mark.cuda
def test_two_cards_without_peer_access_have_links_of_staged_copies_alone(tmp_path: Path) -> None:
    """By no more than the options that a group is started with: nothing asks for it."""
    need_cards()
    outcomes = [json.loads(text) for text in run_ranks(tmp_path, "cuda", "auto")]
    for outcome in outcomes:
        assert outcome["without NCCL"]
        assert outcome["moves"] == outcome["rows"] == "all arrived"
        assert outcome["sums"] == "all right"
    assert outcomes[0]["digest"] == outcomes[1]["digest"]
