"""F43: the list of visible devices, applied once, in its order; and who gets which card."""

from pathlib import Path

import pytest

from gearshift.proto.device_table import CARDS_VARIABLE, CardQuery, cards_as_text, cards_told, parse_cards
from gearshift.proto.errors import InputError
from gearshift.proto.visible_devices import DeviceRow, device_of_rank, visible_devices
from gearshift.worker.devices import ChosenDevice, cards_asked_for, choose_device

TABLE = tuple(
    DeviceRow(index, f"Card {index}", uuid, f"00000000:{index:02X}:00.0")
    for index, uuid in enumerate(("GPU-abc1-0000", "GPU-abd2-1111", "GPU-ffff-2222"))
)


def seen(text: str | None) -> list[int]:
    environment = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    return [row.index for row in visible_devices(environment, TABLE)]


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        (None, [0, 1, 2]),
        ("1", [1]),
        ("2,0", [2, 0]),
        (" 2 , 0 ", [2, 0]),
        ("", []),
        (" ", []),
        ("-1", []),
        ("1,-1,0", [1]),
        ("GPU-abc", [0]),
        ("GPU-ffff-2222,GPU-abd2", [2, 1]),
        ("GPU-ffff,0", [2, 0]),
    ],
)
def test_the_list_is_read_as_cuda_reads_it(text: str | None, indices: list[int]) -> None:
    assert seen(text) == indices


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0,0", r"CUDA_VISIBLE_DEVICES=0,0 names device 0 \(Card 0\) twice"),
        ("1,GPU-abd2", r"names device 1 \(Card 1\) twice, the second time by 'GPU-abd2'"),
        ("3", r"'3' is no device of this machine, which has 0 \(GPU-abc1-0000\), 1"),
        ("0,7,1", "'7' is no device"),
        ("GPU-ab", "'GPU-ab' could be several devices"),
        ("GPU-", "'GPU-' is no device"),
        ("GPU-zzz", "'GPU-zzz' is no device"),
        ("0,,1", "'' is no device"),
        ("all", "'all' is no device"),
        ("MIG-1234", r"'MIG-1234' is a part of a card \(MIG\)"),
    ],
)
def test_an_entry_that_cuda_would_drop_in_silence_is_refused_by_name(text: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        seen(text)


def test_rank_i_gets_the_ith_visible_card() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "2,0"}
    visible = visible_devices(environment, TABLE)
    assert [device_of_rank(environment, visible, rank, 2).index for rank in range(2)] == [2, 0]


def test_a_list_shorter_than_the_ranks_is_refused() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "2,0"}
    with pytest.raises(InputError, match="3 workers need as many CUDA devices, but CUDA_VISIBLE_DEVICES=2,0 has 2"):
        device_of_rank(environment, visible_devices(environment, TABLE), 0, 3)
    with pytest.raises(InputError, match="4 workers need as many CUDA devices, but this machine has 3"):
        device_of_rank({}, TABLE, 0, 4)


def chosen(wanted: str, rank: int, ranks: int, text: str | None, table: tuple[DeviceRow, ...] = TABLE) -> ChosenDevice:
    """As a worker chooses, with a torch that sees what CUDA shows it."""
    environment = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    shown = visible_devices(environment, table)
    renumbered = [DeviceRow(index, row.name, row.uuid, row.pci) for index, row in enumerate(shown)]
    return choose_device(wanted, rank, ranks, environment, table, lambda: renumbered)


def test_a_worker_takes_torchs_number_and_names_the_card_behind_it() -> None:
    assert chosen("auto", 0, 2, "2,0") == ChosenDevice("cuda:0", "Card 2 (device 2, GPU-ffff-2222)")
    assert chosen("auto", 1, 2, "2,0") == ChosenDevice("cuda:1", "Card 0 (device 0, GPU-abc1-0000)")
    assert chosen("cuda", 0, 1, "GPU-abd2").name == "cuda:0"


@pytest.mark.parametrize("text", ["", "-1"])
def test_no_visible_card_means_the_cpu_unless_cuda_was_asked_for(text: str) -> None:
    assert chosen("auto", 0, 2, text).name == "cpu"
    with pytest.raises(InputError, match="no CUDA device that torch can use"):
        chosen("cuda", 0, 2, text)


def test_too_few_cards_mean_the_cpu_only_where_the_user_has_not_chosen_any() -> None:
    assert chosen("auto", 0, 4, None).name == "cpu"
    with pytest.raises(InputError, match="CUDA_VISIBLE_DEVICES=0 has 1"):
        chosen("auto", 0, 2, "0")
    with pytest.raises(InputError, match="this machine has 3"):
        chosen("cuda", 0, 4, None)


def test_a_card_that_torch_cannot_use_is_named() -> None:
    with pytest.raises(InputError, match=r"device 1 \(Card 1\) is listed, but torch sees only 1"):
        choose_device("cuda", 1, 2, {}, TABLE, lambda: TABLE[:1])


def test_without_a_table_torchs_own_list_is_taken() -> None:
    assert choose_device("auto", 1, 2, {"CUDA_VISIBLE_DEVICES": "5,6"}, (), lambda: TABLE[:2]).name == "cuda:1"


def test_the_table_is_read_from_nvidia_smi() -> None:
    lines = [
        "0, NVIDIA H200, GPU-aa, 00000000:1B:00.0, 570.86.10, 143156, 5, 5, 16, 16, Disabled, 143771",
        "1, NVIDIA H200, GPU-bb, 00000000:2B:00.0, 570.86.10, [N/A], [N/A], 5, 8, 16, Enabled, [N/A]",
        "No devices were found",
    ]
    first, second = parse_cards(lines)
    assert first.device == DeviceRow(0, "NVIDIA H200", "GPU-aa", "00000000:1B:00.0")
    assert (first.driver, first.free_bytes) == ("570.86.10", 143156 << 20)
    assert (first.link_width, first.link_width_most) == (16, 16)
    assert (second.free_bytes, second.link_generation, second.link_width) == (None, None, 8)
    assert (first.display, second.display) == (False, True)


TOLD_LINE = "0, NVIDIA H200, GPU-aa, 00000000:1B:00.0, 570.86.10, 143156, 5, 5, 16, 16, Disabled, 143771"


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A program of that name that is found before any other."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_cards_are_asked_for_beside_other_things(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, f"read unused; echo '{TOLD_LINE}'")
    assert CardQuery().result() == parse_cards([TOLD_LINE])
    nvidia_smi(tmp_path, monkeypatch, f"echo '{TOLD_LINE}'; exit 9")
    assert CardQuery().result() == ()


def test_a_forked_worker_is_told_the_cards_and_does_not_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, f"touch {tmp_path}/asked")
    cards = parse_cards([TOLD_LINE])
    for told in (cards, ()):
        monkeypatch.setenv(CARDS_VARIABLE, cards_as_text(told))
        with cards_asked_for("auto") as asked:
            assert asked() == told
    with cards_asked_for("cpu") as asked:
        assert asked() == ()
    assert not (tmp_path / "asked").exists()
    assert cards_told({}) is None


@pytest.mark.parametrize("table", ["", "garbage", "[1]", "{}", '[{"device": null}]', "\udcff", "[" * 5000])
def test_a_table_that_is_none_counts_as_not_told(table: str) -> None:
    assert cards_told({CARDS_VARIABLE: table}) is None
