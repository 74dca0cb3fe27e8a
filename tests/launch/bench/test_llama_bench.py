"""The peer's own benchmark as rows beside ours: its modes by its help, its JSON, its errors by name."""

import json
import os
import select
from contextlib import suppress
from pathlib import Path

import pytest

from gearshift.launch.bench.llama_bench import PeerRow, find_peer, read_row, run_peer
from gearshift.proto.errors import InputError
from gearshift.tests.helpers import fake_llama_bench

TEST = {"n_prompt": 4, "n_gen": 2, "avg_ns": 9}


def program(folder: Path, text: str) -> str:
    path = folder / "program"
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def test_a_program_that_floods_its_output_is_ended(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="wrote more than 16 MiB and was ended"):
        find_peer(program(tmp_path, "exec cat /dev/zero"))


def test_what_a_program_has_started_ends_with_it(tmp_path: Path) -> None:
    path = program(tmp_path, f"sleep 300 >/dev/null 2>&1 & echo $! > {tmp_path}/child; echo -pg")
    with pytest.raises(InputError, match="no llama-bench"):
        find_peer(path)
    with suppress(ProcessLookupError):  # it is gone already
        child = os.pidfd_open(int((tmp_path / "child").read_text()))
        ended, _, _ = select.select([child], [], [], 10)
        os.close(child)
        assert ended


def test_what_is_nested_without_end_is_told() -> None:
    with pytest.raises(ValueError, match="nested too deep"):
        read_row("layer", "[" * 100_000, 4, 2)


def test_both_ways_over_several_devices_are_measured_with_the_answer_behind_the_prompt(tmp_path: Path) -> None:
    peer = find_peer(str(fake_llama_bench.write(tmp_path)), ("-fa", "1"))
    rows = run_peer(peer, "model.gguf", 4000, 100, 3, timeout_seconds=30)
    assert [row.split_mode for row in rows] == ["layer", "tensor"]
    tensor = rows[1]
    assert (tensor.wall_seconds, tensor.low_seconds, tensor.high_seconds) == (3.0, 2.9, 3.1)
    assert (tensor.prompt_tokens_per_second, tensor.answer_tokens_per_second) == (4000.0, 50.0)
    assert tensor.build == "abc123 (7)"
    asked = (tmp_path / "calls").read_text().splitlines()[0]
    assert asked == "-m model.gguf -p 4000 -n 0 -pg 4000,100 -r 3 -ngl 99 -sm layer -o json -fa 1"


def test_a_build_without_tensor_splits_is_measured_by_rows(tmp_path: Path) -> None:
    assert find_peer(str(fake_llama_bench.write(tmp_path, "none|layer|row"))).split_modes == ("layer", "row")


def test_a_mode_that_fails_is_told_and_the_other_still_measured(tmp_path: Path) -> None:
    peer = find_peer(str(fake_llama_bench.write(tmp_path, failing=("layer",))))
    failed, good = run_peer(peer, "model.gguf", 40, 10, 1, timeout_seconds=30)
    assert failed == PeerRow("layer", error="ended with exit code 1: CUDA error: out of memory")
    assert not good.error


def test_a_mode_that_hangs_is_ended(tmp_path: Path) -> None:
    peer = find_peer(str(fake_llama_bench.write(tmp_path, "layer", hanging=("layer",))))
    (row,) = run_peer(peer, "model.gguf", 40, 10, 1, timeout_seconds=0.5)
    assert row.error == "took longer than 0.5 s and was ended"


def test_what_is_no_json_is_told(tmp_path: Path) -> None:
    peer = find_peer(str(fake_llama_bench.write(tmp_path, "layer", babbling=("layer",))))
    (row,) = run_peer(peer, "model.gguf", 40, 10, 1, timeout_seconds=30)
    assert row.error.startswith("wrote what cannot be read")


def test_what_is_no_program_or_none_of_the_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no program that can be run"):
        find_peer(str(tmp_path / "nothing"))
    with pytest.raises(InputError, match="no llama-bench with --split-mode and -pg"):
        find_peer(str(fake_llama_bench.write(tmp_path, help_text="usage: something else")))


def test_an_answer_that_took_no_time_beside_a_busy_prompt_has_no_rate() -> None:
    tests = [TEST | {"n_gen": 0, "samples_ns": [900_000_000, 4_000_000_000]}, TEST | {"samples_ns": [1_300_000_000]}]
    row = read_row("row", json.dumps(tests), 4, 2)
    assert (row.wall_seconds, row.answer_tokens_per_second) == (1.3, None)


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ({"n_prompt": 4}, "no list of tests"),
        ([{"n_prompt": 4, "n_gen": 0, "avg_ns": 5}], "no test of 4 prompt and 2 answer tokens"),
        ([TEST | {"n_gen": 0}, TEST | {"samples_ns": 5}], "samples_ns is '5'"),
        ([TEST | {"n_gen": 0}, TEST | {"samples_ns": [None]}], "samples_ns is 'None'"),
        ([TEST | {"n_gen": 0}, TEST | {"avg_ns": float("nan")}], "avg_ns is nan"),
        ([TEST | {"n_gen": 0}, TEST | {"samples_ns": [True]}], "samples_ns is 'True'"),
        ([{"n_prompt": 4, "n_gen": 0, "avg_ns": 0}, {"n_prompt": 4, "n_gen": 2, "avg_ns": 9}], "avg_ns is 0"),
    ],
)
def test_missing_figures_are_named(tests: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_row("layer", json.dumps(tests), 4, 2)
