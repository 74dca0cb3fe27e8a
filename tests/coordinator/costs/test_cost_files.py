"""Costs written and read back; files that are no costs."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gearshift.coordinator.costs.cost_model import (
    ChunkCost,
    Costs,
    LayerKindCost,
    LayerSeconds,
    LinkCost,
    OverheadCost,
    ShiftCost,
    StepCost,
)
from gearshift.coordinator.costs.files import (
    MAX_FILE_BYTES,
    costs_from_json,
    costs_to_json,
    read_cost_file,
    read_costs,
    write_costs,
)
from gearshift.proto.errors import InputError

STAGE = ChunkCost(1e-3, 2e-5, 3e-10)
COSTS = Costs(
    stages=(STAGE, ChunkCost(2e-3, 1e-5)),
    tensor_prefill=STAGE,
    decode_layer=StepCost(((1, 0.02), (4, 0.03)), 1e-7),
    decode_tensor=StepCost(((1, 0.01),)),
    to_tensor=ShiftCost(1e-4, 1e-6, 5e-4),
    to_layer=ShiftCost(2e-4, 1e-6),
    link=LinkCost(1e-5, 5e9),
    host_link=LinkCost(1e-5, 2e10),
    layer_seconds=LayerSeconds(
        (LayerKindCost((0, 1), (STAGE, STAGE), (STAGE, STAGE), (1e-4, 2e-4)),), (0.5, 0.5), (1e-4, 1e-4)
    ),
    all_reduces=((4096, 1e-5), (65536, 2e-5)),
    overhead=OverheadCost(3e-3, 1e-3, 2e-4, 1e-4),
)


def test_costs_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    write_costs(path, COSTS, {"devices": ["cpu", "cpu"]})
    found = read_cost_file(path)
    assert found.costs == read_costs(path) == COSTS
    assert found.facts == {"devices": ["cpu", "cpu"]}
    assert [one.name for one in tmp_path.iterdir()] == ["costs.json"], "nothing unfinished is left"


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6), st.floats(1e-3, 1e15))
def test_no_digit_is_lost_on_the_way(b: float, a: float, q: float, speed: float) -> None:
    costs = Costs(stages=(ChunkCost(b + 1e-9, a, q),), link=LinkCost(a, speed))
    assert costs_from_json(json.loads(json.dumps(costs_to_json(costs)))) == costs


def test_what_is_optional_may_be_left_out() -> None:
    given_by_hand = {"stages": [{"per_chunk": 1e-3, "per_token": 1e-5}, {"per_chunk": 1, "per_token": 2}]}
    assert costs_from_json(given_by_hand) == Costs(stages=(ChunkCost(1e-3, 1e-5), ChunkCost(1.0, 2.0)))


def changed(change: Callable[[Any], object]) -> Any:
    table = json.loads(json.dumps(costs_to_json(COSTS)))
    change(table)
    return table


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("stages"), "costs: object missing required field `stages`"),
        (lambda t: t.update(stages=[]), "costs.stages must have an entry"),
        (lambda t: t.update(stages=[{"per_chunk": 0, "per_token": 0}] * 2), "stages: a chunk must take some time"),
        (lambda t: t.update(tensor_prefill={"per_chunk": 0, "per_token": 0}), "tensor_prefill: a chunk must take"),
        (lambda t: t.update(stages="\ud800"), "costs: a text in it is not Unicode"),
        (lambda t: t["stages"][1].update(per_chunk="x"), r"costs.stages\[1\].per_chunk: expected `float`, got `str`"),
        (lambda t: t["stages"][1].update(per_chunk=-1), r"costs.stages\[1\].per_chunk must be a number from 0 to 1e"),
        (lambda t: t["stages"][0].update(per_tokn=1), r"no field costs.stages\[0\].per_tokn"),
        (lambda t: t["stages"][0].update(per_chunk=float("inf")), r"costs.stages\[0\].per_chunk must be a number"),
        (lambda t: t["stages"][0].update(per_chunk=10**400), r"costs.stages\[0\].per_chunk: number out of range"),
        (lambda t: t.update(speed=1), "no field costs.speed"),
        (lambda t: t["overhead"].update(chunk_seconds=1e7), r"costs.overhead.chunk_seconds must be .* to 1e\+06"),
        (lambda t: t["link"].update(bytes_per_second=0), "costs.link.bytes_per_second must be .* from 0.001"),
        (lambda t: t["stages"][0].update(per_token=1e308), r"stages\[0\].per_token must be a number .* to 1e\+15"),
        (lambda t: t["decode_layer"].update(seconds_of_batch=[[1, 1], [10**400, 1]]), "seconds_of_batch.* to 1e"),
        (lambda t: t.update(stages=t["stages"][:1] * 65), "1 to 64 of them, not 65"),
        (lambda t: t["decode_layer"].update(seconds_of_batch=[]), "costs.decode_layer: .* ascending batches"),
        (lambda t: t["decode_layer"].update(seconds_of_batch=[[4, 1], [1, 1]]), "costs.decode_layer: .* ascending"),
        (lambda t: t["layer_seconds"].update(tensor_shares=[1]), "costs.layer_seconds.tensor_shares must have"),
        (lambda t: t["layer_seconds"]["kinds"][0].update(whole=[]), r"layer_seconds.kinds\[0\].whole must have"),
    ],
)
def test_a_wrong_field_is_named(change: Callable[[Any], object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        costs_from_json(changed(change))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[1]", "must be a JSON object"),
        (b"{}", "must be 1, not None"),
        (b'{"gearshift_costs": true}', "must be 1, not True"),
        (b'{"gearshift_costs": 2, "costs": {}}', "must be 1, not 2"),
        (b'{"gearshift_costs": 1}', "there is no field costs"),
        (b'{"gearshift_costs": 1, "costs": null}', "costs: expected `object`, got `null`"),
        (b'{"gearshift_costs": 1, "facts": [], "costs": {}}', "facts must be an object"),
        (b'{"gearshift_costs": 1, "extra": 1, "costs": {}}', "no field extra"),
        (b'{"gearshift_costs": 1, "costs": {"stages": [{"per_chunk": NaN, "per_token": 1}]}}', "NaN is no number"),
        (b'{"gearshift_costs": 1, "facts": {"a": 1e999}, "costs": {}}', "is not JSON: 1e999 is beyond all floats"),
        (b"[" * 100_000, "is not JSON"),
        (b" " * (MAX_FILE_BYTES + 1), "longer than 4 MiB"),
    ],
)
def test_a_file_without_costs_is_refused_by_name(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(text)
    with pytest.raises(InputError, match=said) as caught:
        read_costs(path)
    assert str(path) in str(caught.value)


def test_costs_come_into_the_place_of_plain_files_alone(tmp_path: Path) -> None:
    """As root a device would be replaced by a file: `--out /dev/null`."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("")
    for name in ("pipe", ".", "file/below", "x" * 300, "nowhere/costs.json"):
        with pytest.raises(InputError, match="cannot write"):
            write_costs(tmp_path / name, COSTS, {})
    (tmp_path / "link").symlink_to("file")
    write_costs(tmp_path / "link", COSTS, {})
    assert (tmp_path / "link").is_symlink()
    assert read_costs(tmp_path / "file") == COSTS
    assert sorted(os.listdir(tmp_path)) == ["file", "link", "pipe"]


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*nothing.json: No such file"):
        read_costs(tmp_path / "nothing.json")
    with pytest.raises(InputError, match=r"cannot write .*: No such file"):
        write_costs(tmp_path / "no folder" / "costs.json", COSTS, {})


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "costs.json")
    with pytest.raises(InputError, match="no plain file"):
        read_costs(tmp_path / "costs.json")


@pytest.mark.parametrize(
    "table",
    [
        {"gearshift_costs": 1, "x" * 3_000_000: 1},
        {"gearshift_costs": "x" * 3_000_000},
        {"gearshift_costs": 1, "costs": {"stages": [{"per_chunk": 1, "per_token": 1, "y" * 3_000_000: 2}]}},
        {
            "gearshift_costs": 1,
            "costs": {
                "stages": [{"per_chunk": 1, "per_token": 1}],
                "decode_layer": {"seconds_of_batch": [[batch, 1] for batch in range(200_000)]},
            },
        },
    ],
    ids=["key", "format", "inner key", "batches"],
)
def test_what_is_wrong_is_told_in_few_words(table: object, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(table, separators=(",", ":")))
    assert path.stat().st_size < MAX_FILE_BYTES
    with pytest.raises(InputError) as refused:
        read_costs(path)
    assert len(str(refused.value)) < 400
