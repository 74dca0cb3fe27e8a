"""The command line's manners: exit codes, one line for each error, stdout for answers alone."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import typer

from gearshift.launch.command_line import run_command
from gearshift.launch.commands import application
from gearshift.proto.errors import WorkerLostError

NOBODY = "tcp://127.0.0.1:1"  # whoever connects waits some seconds, and is told of that
COMMANDS = ("run", "logits", "perplexity", "tokenize", "inspect", "plan", "calibrate", "config", "doctor")


def test_every_command_has_help_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        assert run_command([command, "--help"]) == 0
        assert f"gearshift {command} demo" in capsys.readouterr().out


def test_no_help_holds_what_rich_takes_for_markup(capsys: pytest.CaptureFixture[str]) -> None:
    group = typer.main.get_group(application.app)
    for name, command in group.commands.items():
        for parameter in command.params:
            assert "[" not in (getattr(parameter, "help", None) or ""), (name, parameter.name)
        assert run_command([name, "--help"]) == 0
        assert "[[" not in capsys.readouterr().out, name


def test_help_and_inspect_never_import_torch() -> None:
    code = (
        "import sys; from gearshift.launch.command_line import run_command;"
        "assert run_command(['--help']) == 0; assert run_command(['inspect', 'demo', '--json']) == 0;"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run", "demo", "-p", "a", "-n", "-1"], "'-n'"),
        (["run", "demo", "-p", "a", "-n", "1.5"], "'-n'"),  # F34
        (["run", "demo", "-p", "a", "--workers", "0"], "'--workers'"),
        (["run", "demo", "-p", "a", "--prefill", "pipeline"], "--prefill"),
        (["run", "demo", "-p", "a", "--chunk", "0"], "--chunk"),
        (["run", "demo", "-p", "a", "--temperature", "nan"], "temperature"),  # F37
        (["run", "demo", "-p", "a", "--temperature", "1e308"], "temperature"),
        (["run", "demo", "-p", "a", "--top-p", "inf"], "--top-p"),
        (["run", "demo", "-p", "a", "--top-k", "-5"], "top-k"),
        (["run", "demo", "-p", "a", "--logit-bias", "99999999=1"], "logit_bias"),
        (["run", "demo", "-p", "a", "--stop", ""], "stop string"),
        (["run", "demo", "-p", "a", "--workers", "2", "--layer-split", "20,10"], "--layer-split 20,10"),
        (["run", "demo", "-p", "a", "--workers", "2", "--layer-share", "1,1,1"], "layer"),
        (["run", "demo"], "--prompt"),
        (["run", "demo", "-p", "a", "-f", "b"], "--prompt and --file together"),
        (["run", "demo", "-f", "no-such-file"], "no-such-file"),
        (["run", "no-such-model.gguf", "-p", "a"], "no-such-model.gguf"),
        (["run", "demo", "-p", "a", "--unknown"], "--unknown"),
        (["unknown"], "unknown"),
        (["inspect", "demo", "--workers", "2", "--tensor-share", "1,x"], "--tensor-share"),
        (["tokenize", "demo"], "--prompt"),
        (["run", "--connect", NOBODY, "-p", "a", "--prefill", "tensr"], "--prefill takes one of auto, layer,"),
        (["run", "--connect", NOBODY, "-p", "a", "--chunk", "foo"], "--chunk takes auto, sqrt"),
        (["chat", "--connect", NOBODY, "--decode", "lyer"], "--decode takes one of auto, layer, tensor, not"),
        (["perplexity", "demo"], "give the text by one of --file and --tokens-file; none was given"),
    ],
)
def test_a_bad_word_ends_with_two_and_one_line_that_names_it(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(words) == 2
    output = capsys.readouterr()
    assert told in output.err
    assert output.err.count("\n") == 1
    assert output.out == ""


def test_a_named_error_ends_with_its_own_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(application, "app", _raising(WorkerLostError("the worker of rank 1 died")))
    assert run_command([]) == 3
    assert capsys.readouterr().err == "gearshift: the worker of rank 1 died\n"


def test_a_fault_of_ours_shows_its_place_only_when_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GEARSHIFT_DEBUG", raising=False)
    monkeypatch.setattr(application, "app", _raising(ZeroDivisionError("division by zero")))
    assert run_command([]) == 1
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv("GEARSHIFT_DEBUG", "0")
    assert run_command([]) == 1
    assert "Traceback" not in capsys.readouterr().err
    assert run_command(["--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_ends_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(**_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(application, "app", interrupted)
    assert run_command([]) == 130
    assert capsys.readouterr().err == "gearshift: interrupted\n"


def test_an_interrupt_while_modules_are_imported_ends_with_130_and_no_traceback() -> None:
    code = (
        "import os, signal, sys\n"
        "class Early:\n"
        "    def find_spec(name, *rest):\n"
        "        if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Early)\n"
        "from gearshift.launch.command_line import main; main(['--version'])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"gearshift: interrupted\n")


def test_a_reader_that_leaves_is_no_error_to_talk_about(smollm2_path: Path) -> None:
    command = [sys.executable, "-c", "from gearshift.launch.command_line import main; main()"]
    with subprocess.Popen(
        [*command, "inspect", str(smollm2_path), "--tensors"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=30) == 141


def test_inspect_tells_what_each_worker_would_hold(
    tiny_model: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["inspect", str(tiny_model("llama-gqa-oddvocab")), "--workers", "3", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    ends = [part["layers"] for part in facts["parts"]]
    assert ends[0][0] == 0
    assert all(before[1] == after[0] for before, after in pairwise(ends))
    assert ends[-1][1] == facts["metadata"]["llama.block_count"]
    assert sum(entry["tensors"] for entry in facts["tensor_types"].values()) == len(facts["tensors"])


def test_inspect_shows_a_person_arrays_by_length_and_first_elements(
    smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["inspect", str(smollm2_path)]) == 0
    told = capsys.readouterr().out
    assert "49,152 values: <|endoftext|>, <|im_start|>" in told
    assert "'first'" not in told


def test_tokenize_prints_ids(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["tokenize", str(smollm2_path), "-p", "Hello, world <|im_start|>", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ids": [19556, 28, 905, 216, 1]}
    assert run_command(["tokenize", str(smollm2_path), "-p", "<|im_start|>", "--no-special", "--json"]) == 0
    assert 1 not in json.loads(capsys.readouterr().out)["ids"]


def _raising(error: Exception) -> Callable[..., None]:
    def app(**_: object) -> None:
        raise error

    return app
