"""Field cases of files over the command line: refused in one line with exit code 2 before a worker starts, or run."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gearshift.coordinator.evaluation import measure_perplexity
from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.model.gguf_header import read_header
from gearshift.coordinator.model.spec import build_spec
from gearshift.coordinator.tokenizer import build_tokenizer
from gearshift.launch.start.blame import file_is_blamed
from gearshift.proto.client import Client
from gearshift.proto.errors import ModelFileError
from gearshift.tests.helpers.commands import cost, tokens_file
from gearshift.tests.helpers.gguf_builder import build_model, key, raw_gguf, string, tensor
from gearshift.tests.helpers.layouts import assert_as_one_process, assert_layouts_give, one_process, some_ids
from gearshift.tests.helpers.running_groups import RunningGroups
from gearshift.tests.helpers.serving import service_of, serving

Refused = Callable[..., str]

U32, STRING, ARRAY = 4, 8, 9
LLAMA = key("general.architecture", STRING, string("llama"))


def number(name: str, value: int) -> bytes:
    return key(name, U32, struct.pack("<I", value))


def array(element_type: int, count: int) -> bytes:
    return struct.pack("<IQ", element_type, count)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "array length 2^63": (raw_gguf([key("a", ARRAY, array(U32, 2**63))]), "the array 'a'"),
    "string length 2^48": (raw_gguf([key("a", STRING, struct.pack("<Q", 2**48))]), "the value of 'a'"),
    "n_kv 2^63": (raw_gguf([LLAMA], key_count=2**63), "metadata keys, more than"),
    "n_tensors 2^63": (raw_gguf([LLAMA], tensor_count=2**63), "tensors, more than"),
    "tensor dim 0": (raw_gguf([LLAMA], [tensor("t", [32, 0])], data_bytes=32), "dimension of 0"),
    "dims wrap 64 bits": (raw_gguf([LLAMA], [tensor("t", [2**32, 2**32])], data_bytes=32), "more elements"),
    "nested arrays": (raw_gguf([key("a", ARRAY, array(ARRAY, 1) + array(U32, 0))]), "array of arrays"),
    "empty key": (raw_gguf([number("", 1)]), "length of 0 bytes"),
    "alignment 0": (raw_gguf([number("general.alignment", 0)]), "general.alignment is 0"),
    "alignment 2^30": (raw_gguf([number("general.alignment", 2**30)]), "general.alignment is 1073741824"),
    "alignment as text": (raw_gguf([key("general.alignment", STRING, string("32"))]), "value type 8"),
    "no facts at all": (raw_gguf([LLAMA]), "is missing"),
    "layers 2^32 - 1": (raw_gguf([LLAMA, number("llama.block_count", 2**32 - 1)]), "is '4294967295'"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "version 1": (b"GGUF" + struct.pack("<III", 1, 0, 0), "version 1"),
    "version 4": (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "version 4"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_f02_f04_a_hostile_file_is_refused_in_one_line(case: str, refused: Refused, tmp_path: Path) -> None:
    path, (data, cause) = tmp_path / "hostile.gguf", HOSTILE[case]
    path.write_bytes(data)
    line = refused("run", path, "-p", "a", "--workers", "4")
    assert str(path) in line
    assert cause in line


@pytest.mark.parametrize("case", ["array length 2^63", "n_tensors 2^63", "layers 2^32 - 1"])
@pytest.mark.parametrize("command", ["run", "inspect"])
def test_f02_a_hostile_file_costs_under_a_second_and_100_mb(case: str, command: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(HOSTILE[case][0])
    words = [command, path, *(["-p", "a"] if command == "run" else [])]
    spent = cost(*words, exit_code=2)
    assert spent.cpu_seconds < 1  # of the processor: the clock on the wall also counts the neighbours
    assert spent.peak_bytes < 100e6
    assert not spent.torch
    assert len(spent.error.splitlines()) == 1


def test_f01_a_download_that_lacks_its_last_byte_starts_no_worker(refused: Refused, tmp_path: Path) -> None:
    path = build_model(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[: read_header(path).data_end - 1])
    line = refused("run", path, "--tokens-file", tokens_file(tmp_path, [1]), "--workers", "2")
    assert "cut off: 1 byte missing" in line


@pytest.mark.parametrize("tail", ["not padded", "32 zero bytes"])
def test_f01_a_good_file_runs_whatever_comes_after_its_last_tensor(
    tail: str, groups: RunningGroups, tmp_path: Path
) -> None:
    # The last tensor is ffn_down: 33 x 127 values of 2 bytes do not fill whole 32-byte units.
    path = build_model(
        tmp_path / "model.gguf", layers=1, vocab=251, hidden=33, feed_forward=127, tied=True, types={"": "F16"}
    )
    header = read_header(path)
    assert header.data_end % header.alignment
    whole = path.read_bytes()[: header.data_end]
    path.write_bytes(whole if tail == "not padded" else whole + bytes(32))
    assert_as_one_process(groups, path, 2, some_ids(251))


def test_f01_an_alignment_of_64_is_the_files_own(groups: RunningGroups, tmp_path: Path) -> None:
    usual, wide = tmp_path / "usual.gguf", tmp_path / "wide.gguf"
    build_model(usual, seed=3)
    build_model(wide, seed=3, **{"general.alignment": 64})
    assert read_header(wide).alignment == 64
    wanted = one_process(groups, usual, some_ids())
    assert_layouts_give(groups.load(wide, 2), some_ids(), wanted)


def test_f03_a_split_model_runs_from_any_of_its_shards(groups: RunningGroups, tmp_path: Path) -> None:
    whole = build_model(tmp_path / "whole.gguf")
    first = build_model(tmp_path / "model.gguf", shards=3)
    wanted = one_process(groups, whole, some_ids())
    assert_layouts_give(groups.load(first, 2), some_ids(), wanted)
    second = first.with_name("model-00002-of-00003.gguf")
    assert_layouts_give(groups.load(second, 2), some_ids(), wanted)


def test_f03_what_is_wrong_with_a_shard_is_told_by_file_name(refused: Refused, tmp_path: Path) -> None:
    first = build_model(tmp_path / "model.gguf", shards=3)
    second, third = (first.with_name(f"model-0000{n}-of-00003.gguf") for n in (2, 3))
    ids = tokens_file(tmp_path, [1])
    joined = tmp_path / "joined.gguf"
    joined.write_bytes(b"".join(path.read_bytes() for path in (first, second, third)))
    assert "joined" in refused("run", joined, "--tokens-file", ids)
    good = second.read_bytes()
    second.write_bytes(first.read_bytes())
    assert second.name in refused("run", first, "--tokens-file", ids)
    second.write_bytes(good)
    third.unlink()
    assert third.name in refused("run", first, "--tokens-file", ids)


def test_f03_a_plain_file_that_is_named_like_a_shard_runs(groups: RunningGroups, tmp_path: Path) -> None:
    path = build_model(tmp_path / "x-00001-of-00003.gguf", layers=1)
    assert_as_one_process(groups, path, 2)


def test_f03_a_key_that_comes_twice_is_named(refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "twice.gguf"
    path.write_bytes(raw_gguf([LLAMA, LLAMA]))
    assert "'general.architecture' appears twice" in refused("inspect", path)


@pytest.mark.parametrize("type_id", [4, 31, 32, 33, 42])
def test_f05_loader_and_planner_refuse_an_unknown_type_alike(
    type_id: int, refused: Refused, tmp_path: Path
) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(raw_gguf([LLAMA], [tensor("blk.0.attn_q.weight", [32, 32], type_id)], data_bytes=4096))
    lines = [refused("inspect", path, "--workers", "2"), refused("run", path, "-p", "a", "--workers", "2")]
    assert lines[0] == lines[1]
    assert "'blk.0.attn_q.weight'" in lines[0]
    assert str(type_id) in lines[0]
    assert "Q4_K" in lines[0], "the supported types are told"


def test_f05_a_row_that_is_not_whole_blocks_is_refused(refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(raw_gguf([LLAMA], [tensor("blk.0.attn_q.weight", [320, 4], 12)], data_bytes=4096))
    line = refused("run", path, "-p", "a")
    assert "'blk.0.attn_q.weight'" in line
    assert "320" in line


def test_f05_mxfp4_in_one_tensor_runs_on_every_rank(groups: RunningGroups, tmp_path: Path) -> None:
    path = build_model(tmp_path / "model.gguf", types={"blk.1.ffn_up.weight": "MXFP4"}, quant="F16")
    assert_as_one_process(groups, path, 2)


@pytest.fixture
def damaged_model(tmp_path: Path) -> Path:
    """One scale of its keys is infinite."""
    path = build_model(tmp_path / "model.gguf", quant="Q8_0")
    wrong = build_spec(resolve_model(str(path)), 64).tensors["blk.1.attn_k.weight"]
    with open(path, "r+b") as file:
        file.seek(wrong.offset)
        file.write(np.array([np.inf], np.float16).tobytes())
    return path


def test_a_scale_that_is_no_number_is_named_once_no_answer_comes_of_it(
    groups: RunningGroups, damaged_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is input that cannot be taken, by its exit code too."""
    driver = groups.load(damaged_model, 2)
    named = pytest.raises(ModelFileError, match=r"row 0 of tensor 'blk.1.attn_k.weight' \(Q8_0\)")
    with named as caught, file_is_blamed(driver.spec):
        measure_perplexity(driver, some_ids(), 16, None)
    assert caught.value.exit_code == 2
    assert "looking whether" in capsys.readouterr().err


def test_a_client_of_a_group_whose_model_is_damaged_is_told_which_tensor(
    groups: RunningGroups, damaged_model: Path
) -> None:
    driver = groups.load(damaged_model, 2)
    service = service_of(driver, driver.placement, build_tokenizer(resolve_model(str(damaged_model)).metadata))
    with serving(driver, service, groups.cluster(2)) as running, Client(running.address) as client:
        for _ in range(2):
            result = client.generate(ids=some_ids(), max_tokens=4).result()
            assert result.finish_reason == "error"
            assert "not numbers" in str(result.facts.error)
            assert f"{damaged_model}: row 0 of tensor 'blk.1.attn_k.weight' (Q8_0)" in str(result.facts.error)


@pytest.mark.parametrize("kv_heads", [2, [2, 2, 2, 2]], ids=["scalar", "array"])
def test_f06_kv_heads_for_all_layers_or_one_by_one_are_the_same(
    kv_heads: Any, groups: RunningGroups, tmp_path: Path
) -> None:
    path = build_model(
        tmp_path / "model.gguf", layers=4, **{"attention.head_count_kv": kv_heads, "feed_forward_length": [128] * 4}
    )
    plain = build_model(tmp_path / "plain.gguf", layers=4, **{"general.name": "model"})
    wanted = one_process(groups, plain, some_ids())
    driver = groups.load(path, 2)
    assert_layouts_give(driver, some_ids(), wanted)
    assert all(rank.planned_bytes == rank.peak_bytes for rank in driver.memory())


def test_f06_layers_may_differ(groups: RunningGroups, tmp_path: Path) -> None:
    path = build_model(
        tmp_path / "model.gguf", layers=3, heads=[4, 8, 6], kv_heads=[2, 1, 3], feed_forward=[128, 64, 192]
    )
    assert_as_one_process(groups, path, 2)


def test_f06_a_layer_without_kv_heads_is_refused_by_number(refused: Refused, tmp_path: Path) -> None:
    path = build_model(tmp_path / "model.gguf", layers=4, **{"attention.head_count_kv": [2, 0, 2, 2]})
    line = refused("run", path, "--tokens-file", tokens_file(tmp_path, [1]), "--workers", "2")
    assert "layer 1 has 4 query heads and 0 KV heads" in line


def test_f06_a_block_that_predicts_further_tokens_is_no_stage_and_has_no_kv(
    groups: RunningGroups, tmp_path: Path
) -> None:
    plain = build_model(tmp_path / "plain.gguf", layers=4)
    extra = {f"blk.4.nextn.{name}.weight": np.ones((64, 64), np.float32) for name in ("eh_proj", "shared_head_head")}
    path = build_model(
        tmp_path / "model.gguf",
        layers=4,
        tensors=extra,
        **{"block_count": 5, "attention.head_count_kv": [2, 2, 2, 2, 0], "general.name": "plain"},
    )
    ids = some_ids()
    wanted = one_process(groups, plain, ids)
    plans = [rank.planned_bytes for rank in groups.load(plain, 2).memory()]
    driver = groups.load(path, 2)
    assert len(driver.spec.layers) == 4
    assert_layouts_give(driver, ids, wanted)
    assert [rank.planned_bytes for rank in driver.memory()] == plans
