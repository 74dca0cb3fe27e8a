"""`gearshift doctor`: what it says of machines it is told of, and of the one it runs on."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gearshift.coordinator.fit.device_memory import told_bytes
from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.model.spec import build_spec
from gearshift.launch import command_line
from gearshift.launch.command_line import run_command
from gearshift.launch.commands import doctor
from gearshift.launch.doctor.diagnosis import Check, Verdict, diagnose
from gearshift.launch.doctor.fit_check import CPU_PROCESS_BYTES
from gearshift.launch.doctor.host_facts import Failure, HostFacts, run_probe
from gearshift.launch.settings.options import group_settings, layout_settings
from gearshift.launch.start.fitting import GroupPlan
from gearshift.proto.device_table import CardRow
from gearshift.proto.ids import ComputeType
from gearshift.proto.probe import PeerTest, ProbedDevice, ProbeReport
from gearshift.proto.visible_devices import DeviceRow

GIBIBYTE = 2**30
CARDS = tuple(
    CardRow(DeviceRow(index, "Card", f"GPU-{index}", f"00000000:0{index}:00.0"), "570.86.10", None, 1, 5, 16, 16)
    for index in range(2)
)
DEVICES = tuple(
    ProbedDevice(index, "Card", f"GPU-{index}", "", (8, 0), 80 * GIBIBYTE, 60 * GIBIBYTE) for index in range(2)
)
PEERS = (PeerTest(0, 1, claimed=True, equal=True), PeerTest(1, 0, claimed=True, equal=True))
CPU_PROBE = ProbeReport("3.12.1", "2.13.0+cpu", None, None, None, "AVX512")
GPU_PROBE = ProbeReport("3.12.1", "2.13.0+cu128", "12.8", None, "2.27.3", "AVX512", DEVICES, PEERS)

CPU_MACHINE = HostFacts(
    python="3.12.1",
    cores=8,
    cpu_flags=("avx2", "avx512f"),
    free_memory_bytes=16 * GIBIBYTE,
    shared_memory_bytes=8 * GIBIBYTE,
    compiler="/usr/bin/gcc",
    ports=16,
    driver_loaded=False,
    cards=(),
    visible=(),
    probe=CPU_PROBE,
    logs=Path("/home/u/.local/state/gearshift/logs"),
)
GPU_MACHINE = replace(
    CPU_MACHINE, driver_loaded=True, cards=CARDS, visible=tuple(card.device for card in CARDS), probe=GPU_PROBE
)


def check(facts: HostFacts, name: str) -> Check:
    (found,) = (one for one in diagnose(facts) if one.name == name)
    return found


def gpu_machine(**probe: Any) -> HostFacts:
    """The GPU machine, with these fields of its probe."""
    return replace(GPU_MACHINE, probe=msgspec.structs.replace(GPU_PROBE, **probe))


def test_a_sound_machine_with_cards_is_ok_in_every_line() -> None:
    checks = diagnose(GPU_MACHINE)
    assert {one.verdict for one in checks} == {Verdict.OK}
    assert [one.name for one in checks] == [
        "python", "torch", "cpu", "driver", "visible devices", "cuda:0", "cuda:1", "peer access", "staged copies",
        "nccl", "/dev/shm", "C compiler", "loopback ports", "logs",
    ]  # fmt: skip


def test_a_card_is_told_with_its_place_capability_memory_and_link() -> None:
    assert check(GPU_MACHINE, "cuda:1").found == (
        "Card at 00000000:01:00.0, compute capability 8.0, 60.0 of 80.0 GiB free, PCIe 5 x16"
    )


def test_a_machine_without_cards_has_a_note_and_no_problem() -> None:
    checks = diagnose(CPU_MACHINE)
    assert check(CPU_MACHINE, "gpu").verdict is Verdict.NOTE
    assert Verdict.PROBLEM not in {one.verdict for one in checks}


@pytest.mark.parametrize(
    ("driver", "cuda", "verdict"),
    [
        ("570.86.10", "12.8", Verdict.OK),
        ("525.60.13", "12.8", Verdict.OK),
        ("470.82.01", "12.8", Verdict.PROBLEM),
        ("570.86.10", "13.0", Verdict.PROBLEM),
        ("580.65.06", "13.0", Verdict.OK),
        ("580.65.06", "99.0", Verdict.OK),  # what is not known is not a problem
    ],
)
def test_the_driver_must_be_new_enough_for_torchs_cuda(driver: str, cuda: str, verdict: Verdict) -> None:
    cards = tuple(msgspec.structs.replace(card, driver=driver) for card in CARDS)
    found = check(replace(gpu_machine(torch_cuda=cuda), cards=cards), "driver")
    assert found.verdict is verdict
    assert driver in found.found
    assert cuda in found.found


def test_cards_with_a_torch_that_has_no_cuda_are_a_problem() -> None:
    found = check(replace(GPU_MACHINE, probe=CPU_PROBE), "driver")
    assert found.verdict is Verdict.PROBLEM
    assert "install a PyTorch with CUDA" in found.advice


def test_an_error_of_cuda_is_told() -> None:
    found = check(gpu_machine(cuda_error="no CUDA-capable device is detected", devices=(), peers=()), "driver")
    assert found.verdict is Verdict.PROBLEM
    assert "no CUDA-capable device is detected" in found.found


def test_a_copy_that_arrives_changed_is_told_by_pair() -> None:  # F22
    found = check(gpu_machine(peers=(PEERS[0], PeerTest(1, 0, claimed=True, equal=False))), "peer access")
    assert found.verdict is Verdict.PROBLEM
    assert found.found == "copies arrive changed: cuda:1 to cuda:0"
    assert "NCCL_P2P_DISABLE=1" in found.advice


def test_copies_through_host_memory_are_a_note() -> None:
    found = check(gpu_machine(peers=(PEERS[0], PeerTest(1, 0, claimed=False, equal=True))), "peer access")
    assert found.verdict is Verdict.NOTE
    assert "cuda:1 to cuda:0" in found.found


def test_cards_out_of_each_others_reach_are_told_to_go_without_nccl() -> None:
    assert "used where they are faster than NCCL" in check(GPU_MACHINE, "staged copies").found
    for peer in (PeerTest(1, 0, claimed=False, equal=True), PeerTest(1, 0, claimed=True, equal=False)):
        found = check(gpu_machine(peers=(PEERS[0], peer)), "staged copies")
        assert found.verdict is Verdict.OK
        assert "two workers have these alone, without NCCL (GEARSHIFT_NCCL=on: both)" in found.found


def test_why_copies_cannot_be_staged_in_host_memory_is_a_note() -> None:
    cause = "a stream that waits for its own word does not go on: the word is 0x0"
    found = check(gpu_machine(staged_fault=cause), "staged copies")
    assert found.verdict is Verdict.NOTE
    assert cause in found.found


def test_a_card_that_is_too_old_or_busy_or_in_a_narrow_slot_is_told() -> None:
    old = msgspec.structs.replace(DEVICES[0], capability=(7, 0))
    busy = msgspec.structs.replace(DEVICES[1], free_bytes=GIBIBYTE)
    facts = gpu_machine(devices=(old, busy))
    assert check(facts, "cuda:0").verdict is Verdict.PROBLEM
    assert check(facts, "cuda:0").advice.startswith("needs compute capability 7.5 or more")
    assert check(facts, "cuda:1").verdict is Verdict.NOTE
    older = check(gpu_machine(devices=(msgspec.structs.replace(DEVICES[0], capability=(7, 5)),)), "cuda:0")
    assert older.verdict is Verdict.NOTE
    assert "f16" in older.advice
    narrow = (msgspec.structs.replace(CARDS[0], link_width=4), CARDS[1])
    found = check(replace(GPU_MACHINE, cards=narrow), "cuda:0")
    assert found.verdict is Verdict.NOTE
    assert "PCIe 5 x4" in found.found


def test_a_bad_list_of_visible_devices_is_a_problem() -> None:
    facts = replace(GPU_MACHINE, visible=Failure("CUDA_VISIBLE_DEVICES=0,0 names device 0 (Card) twice"))
    assert check(facts, "visible devices").verdict is Verdict.PROBLEM
    assert check(replace(GPU_MACHINE, visible=()), "visible devices").verdict is Verdict.NOTE
    turned = replace(GPU_MACHINE, visible=(CARDS[1].device, CARDS[0].device))
    assert check(turned, "visible devices").found == "rank 0: device 1, rank 1: device 0"


@pytest.mark.parametrize(
    ("changed", "name", "verdict"),
    [
        ({"shared_memory_bytes": Failure("Read-only file system")}, "/dev/shm", Verdict.PROBLEM),
        ({"shared_memory_bytes": 1 << 20}, "/dev/shm", Verdict.PROBLEM),
        ({"compiler": None}, "C compiler", Verdict.NOTE),
        ({"compiler": None, "probe": GPU_PROBE}, "C compiler", Verdict.PROBLEM),
        ({"ports": Failure("Cannot assign requested address")}, "loopback ports", Verdict.PROBLEM),
        ({"logs": Failure("Permission denied")}, "logs", Verdict.NOTE),
        ({"cpu_flags": ()}, "cpu", Verdict.NOTE),
        ({"probe": Failure("libcudart.so: cannot open (exit code 1)")}, "torch", Verdict.PROBLEM),
    ],
)
def test_what_is_missing_is_told_with_what_to_do(changed: dict[str, Any], name: str, verdict: Verdict) -> None:
    found = check(replace(CPU_MACHINE, **changed), name)
    assert found.verdict is verdict
    assert found.advice


def test_the_probe_tells_of_the_torch_that_is_here() -> None:
    found = run_probe()
    assert isinstance(found, ProbeReport)
    assert found.python == sys.version.split()[0]


def test_a_probe_that_fails_or_hangs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone_wrong.py").write_text("raise ImportError('libtorch is broken')")
    (tmp_path / "chatty.py").write_text("print('hello')")
    (tmp_path / "hanging.py").write_text("import threading; threading.Event().wait(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_probe("gone_wrong") == Failure("ImportError: libtorch is broken (exit code 1)")
    chatty = run_probe("chatty")
    assert isinstance(chatty, Failure)
    assert "something else" in chatty.reason
    assert run_probe("hanging", timeout_seconds=0.5) == Failure("torch did not answer within 0.5 s")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[Check]]]:
    """Runs `doctor --json` with these words, on a machine of these facts."""

    def run(facts: HostFacts, *words: str) -> tuple[int, list[Check]]:
        monkeypatch.setattr(doctor, "gather", lambda environment, logs: facts)
        exit_code = run_command(["doctor", *words, "--json"])
        checks = json.loads(capsys.readouterr().out)["checks"]
        return exit_code, [Check(**one) for one in checks]

    return run


def test_the_exit_code_is_one_only_with_a_problem(told: Callable[..., tuple[int, list[Check]]]) -> None:
    assert told(CPU_MACHINE)[0] == 0
    exit_code, checks = told(replace(CPU_MACHINE, ports=Failure("no ports")))
    assert exit_code == 1
    assert [one.name for one in checks if one.verdict == "problem"] == ["loopback ports"]


def test_what_copies_are_staged_for_is_told_as_the_workers_will_choose(
    told: Callable[..., tuple[int, list[Check]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def staged(facts: HostFacts, nccl: str, no_peer: str = "0") -> Check:
        monkeypatch.setenv("GEARSHIFT_NCCL", nccl)
        monkeypatch.setenv("GEARSHIFT_NO_PEER", no_peer)
        (found,) = (one for one in told(facts)[1] if one.name == "staged copies")
        return found

    apart = gpu_machine(peers=(PEERS[0], PeerTest(1, 0, claimed=False, equal=True)))
    assert staged(apart, "on").found.endswith("used where they are faster than NCCL (GEARSHIFT_NCCL=on)")
    assert staged(apart, "auto").found.endswith("two workers have these alone, without NCCL (GEARSHIFT_NCCL=on: both)")
    assert staged(GPU_MACHINE, "").found.endswith("used where they are faster than NCCL")
    assert staged(GPU_MACHINE, "off").found.endswith("two workers have these alone, without NCCL (GEARSHIFT_NCCL=off)")
    assert "without NCCL" in staged(GPU_MACHINE, "auto", no_peer="1").found
    fault = gpu_machine(staged_fault="no words")
    assert [staged(fault, nccl).verdict for nccl in ("auto", "off")] == ["note", "problem"]


def test_a_model_that_fits_in_memory(
    told: Callable[..., tuple[int, list[Check]]], tiny_model: Callable[[str], Path]
) -> None:
    exit_code, checks = told(CPU_MACHINE, str(tiny_model("llama-yarn")), "--workers", "2")
    assert exit_code == 0
    assert checks[-1].name == "model"
    assert "fits in f32" in checks[-1].found
    assert "(16.00 GiB free, 256 MiB kept in reserve, 320 MiB for the processes)" in checks[-1].found
    assert "largest context 512 of 512" in checks[-1].found


def test_on_cards_the_weights_stay_in_the_files_types(
    told: Callable[..., tuple[int, list[Check]]], smollm2_path: Path
) -> None:
    _, checks = told(GPU_MACHINE, str(smollm2_path), "--workers", "2")
    assert "fits in the file's types" in checks[-1].found
    assert "1.52 GiB for the process" in checks[-1].found
    assert "620 MiB CUDA's context (measured on an H200) and 940 MiB NCCL over NVLink" in checks[-1].found
    apart = gpu_machine(peers=(PEERS[0], PeerTest(1, 0, claimed=False, equal=True)))
    _, checks = told(apart, str(smollm2_path), "--workers", "2")
    assert "620 MiB for the process" in checks[-1].found
    assert checks[-1].found.endswith("CUDA's context (measured on an H200); without NCCL")
    small = tuple(msgspec.structs.replace(one, free_bytes=GIBIBYTE // 2) for one in DEVICES)
    exit_code, checks = told(gpu_machine(devices=small), str(smollm2_path), "--workers", "2")
    assert exit_code == 1
    assert checks[-1].verdict == "problem"
    _, checks = told(GPU_MACHINE, str(smollm2_path), "--workers", "2", "--device", "cpu")
    assert "fits in f32" in checks[-1].found
    older = gpu_machine(devices=(msgspec.structs.replace(DEVICES[0], capability=(7, 5)), DEVICES[1]))
    _, checks = told(older, str(smollm2_path), "--workers", "2")
    assert "fits in the file's types" in checks[-1].found
    exit_code, checks = told(GPU_MACHINE, str(smollm2_path), "--workers", "3", "--device", "cuda")
    assert (exit_code, checks[-1].found) == (1, "3 workers, 2 CUDA devices")


def test_a_model_that_fits_only_in_bf16_or_with_less_context(
    told: Callable[..., tuple[int, list[Check]]], smollm2_path: Path
) -> None:
    def fits(free_bytes: int, *words: str) -> Check:
        machine = replace(CPU_MACHINE, free_memory_bytes=free_bytes + CPU_PROCESS_BYTES)
        return told(machine, str(smollm2_path), "--reserve", "0", "--max-chunk", "256", *words)[1][-1]

    spec = build_spec(resolve_model(str(smollm2_path)))
    plan = GroupPlan(spec, group_settings(workers=1, max_chunk=256), layout_settings())
    case = plan.case(plan.placement(), "cpu", ComputeType.F32)
    needed = {context: case.memory(context)[0].peak_bytes for context in (640, 4096)}

    tight = fits(needed[4096])
    assert (tight.verdict, tight.advice) == ("ok", "")
    assert "513 MiB of it weights, 180 MiB KV" in tight.found
    smaller = plan.case(plan.placement(), "cpu", ComputeType.BF16).memory(4096)[0].peak_bytes
    assert f"; in bf16 {told_bytes(smaller)} on this host: the faster of the two is taken" in tight.found
    assert "largest context 4096 of 8192" in tight.found
    less = fits(needed[640], "--compute-type", "f32")
    assert less.verdict == "note"
    assert less.advice.startswith("it runs so: context: 640 tokens, the most that fits")
    less = fits(needed[640], "--compute-type", "f32", "--context", "4096")
    assert less.verdict == "problem"
    assert less.advice.split("; or ")[0] == "--context 640 or less"
    assert "--compute-type bf16" in less.advice
    assert fits(needed[640]).advice == "it is run in bf16"
    assert fits(300 << 20).advice.startswith("more --workers")
    limited = fits(needed[4096], "--memory-limit", "512M", "--compute-type", "f32", "--context", "4096")
    assert limited.verdict == "problem"
    assert "on rank 0 for 4096 tokens" in limited.found
    assert "(--memory-limit 512 MiB, of which the process takes 160 MiB without a model)" in limited.found
    enough = limited.advice.split("; or ")[-1]
    assert enough.startswith("--memory-limit")
    assert enough.endswith("M or more")
    words = ("--memory-limit", enough.split()[1], "--compute-type", "f32", "--context", "4096")
    assert fits(needed[4096], *words).verdict == "ok"


def test_a_card_with_a_display_keeps_a_larger_reserve(
    told: Callable[..., tuple[int, list[Check]]], smollm2_path: Path
) -> None:
    displayed = replace(GPU_MACHINE, cards=(msgspec.structs.replace(CARDS[0], display=True), CARDS[1]))
    _, checks = told(displayed, str(smollm2_path), "--workers", "2")
    assert "768 MiB kept in reserve as it drives a display" in checks[-1].found


def test_doctor_leaves_torch_to_the_probe() -> None:
    code = (
        "import sys; from gearshift.launch.command_line import run_command; run_command(['doctor', 'demo', '--json']);"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, stdout=subprocess.DEVNULL)


def test_doctor_reads_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    exit_code = command_line.run_command(["doctor", "demo", "--device", "cpu"])
    lines = capsys.readouterr().out.splitlines()
    names = ("python", "torch", "cpu", "/dev/shm", "loopback ports", "model")
    assert all(any(f"│ {name} " in line for line in lines) for name in names)
    assert (exit_code == 1) == any("PROBLEM" in line for line in lines)
