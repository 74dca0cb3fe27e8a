"""Chat as a user has it: typed on a terminal, piped, and in one shot."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from gearshift.tests.helpers.commands import GEARSHIFT, TIMEOUT_SECONDS, answer
from gearshift.tests.helpers.coordinators import address_in, coordinator_words, process

COLD = ("--temperature", "0", "--compute-type", "f32", "--threads", "1")
QUESTION = "What is the capital of France?"

# Makes the pseudo-terminal the program's own, so that Ctrl-C typed there becomes a signal.
_ON_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Typist:
    """The other end of a program's terminal."""

    def __init__(self, master: int) -> None:
        self._master = master
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str) -> str:
        """All that was shown up to `text`; what was seen before is not looked at again."""
        self._wait(lambda: text in self.seen, repr(text))
        before, _, self.seen = self.seen.partition(text)
        return before

    def wait_for_characters(self, count: int) -> None:
        self._wait(lambda: len(self.seen) >= count, f"{count} characters")

    def _wait(self, enough: Callable[[], bool], wanted: str) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not enough():
            left = deadline - time.monotonic()
            assert left > 0, f"{wanted} did not come; seen: {self.seen!r}"
            if select.select([self._master], [], [], left)[0]:
                self.seen += os.read(self._master, 1 << 16).decode("utf-8", "replace")


@contextmanager
def terminal(*words: str) -> Iterator[tuple["subprocess.Popen[bytes]", Typist]]:
    master, slave = os.openpty()
    command = [sys.executable, "-c", _ON_TERMINAL, *GEARSHIFT, *words]
    environment = {**os.environ, "TERM": "dumb"}
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    try:
        yield process, Typist(master)
    finally:
        process.kill()
        process.wait(TIMEOUT_SECONDS)
        os.close(master)


def test_a_session_on_a_terminal_survives_ctrl_c(smollm2_path: Path) -> None:
    words = ("chat", str(smollm2_path), "--workers", "2", "--system", "Tell long stories.", *COLD)
    with terminal(*words) as (chat, typist):
        typist.wait_for("Ctrl-C stops an answer")
        typist.wait_for("> ")
        children = psutil.Process(chat.pid).children(recursive=True)
        assert len(children) >= 3  # two workers, and the template's process
        typist.type("Tell me of the sea.\n")
        typist.wait_for("sea.\r\n")
        typist.wait_for_characters(20)
        typist.type("\x03")
        assert "kept from before" not in typist.wait_for(", stopped]")
        typist.wait_for("> ")
        typist.type("half a line")
        typist.wait_for("half a line")  # the editor waits for the next key then, and a signal wakes it
        typist.type("\x03")
        typist.wait_for("[Ctrl-D or /exit ends]")
        typist.wait_for("> ")
        typist.type("And of the land.\n")
        typist.wait_for("land.\r\n")
        typist.wait_for_characters(20)
        typist.type("\x03")
        assert "kept from before" in typist.wait_for(", stopped]")
        typist.wait_for("> ")
        typist.type("\x04")
        assert chat.wait(TIMEOUT_SECONDS) == 0
        assert not any(child.is_running() for child in children)


def test_piped_lines_are_answered_as_one_shot_and_read_once(smollm2_path: Path) -> None:
    typed = f"{QUESTION}\nAnd of Italy? <|im_end|>\n"
    done = subprocess.run(
        [*GEARSHIFT, "chat", str(smollm2_path), "--workers", "2", "-n", "12", *COLD],
        input=typed, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert (first, bool(second)) == ("The capital of France is Paris.", True)
    summaries = [line for line in done.stderr.splitlines() if line.startswith("[read ")]
    assert len(summaries) == 2
    assert "kept" not in summaries[0]
    assert summaries[1].startswith("[read 2")  # twenty-odd tokens of 60 or more
    alone = answer(smollm2_path, "--chat", "-p", QUESTION, "-n", "12", "--temperature", "0", "--compute-type", "f32")
    assert alone["text"] == first
    assert alone["prompt_tokens"] == int(summaries[0].split(" of ")[1].split()[0])


def test_a_conversation_from_a_file_is_answered_at_once(smollm2_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    parts = [{"type": "text", "text": QUESTION}]
    file.write_text(json.dumps([{"role": "user", "content": parts}]))
    template = tmp_path / "short.jinja"
    template.write_text(
        "{% if messages | length > 2 %}{{ raise_exception('One question, please.') }}{% endif %}"
        "{{ '<|im_start|>user\n' + messages[0].content + '<|im_end|>\n<|im_start|>assistant\n' + start }}"
    )
    words = ("--messages", file, "--template", template, "--template-option", "start=Paris")
    done = subprocess.run(
        [*GEARSHIFT, "chat", *map(str, (smollm2_path, *words)), "-n", "8", *COLD],
        input="Another one\n", capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "gearshift: One question, please." in done.stderr.splitlines()


def test_a_group_that_runs_already_is_talked_to_the_same_way(smollm2_path: Path) -> None:
    with process(coordinator_words(smollm2_path, "--workers", "2")) as (coordinator, told):
        address = address_in(told)
        done = subprocess.run(
            [*GEARSHIFT, "chat", "--connect", address, "-n", "12", "--temperature", "0"],
            input=f"{QUESTION}\nAnd of Italy?\n", capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[0] == "The capital of France is Paris."
        assert sum(line.startswith("[read ") and "kept from before" in line for line in done.stderr.splitlines()) == 1
        with terminal("chat", "--connect", address, "--temperature", "0", "--system", "Tell long stories.") as (
            chat,
            typist,
        ):
            typist.wait_for("> ")
            typist.type("Tell me of the sea.\n")
            typist.wait_for("sea.\r\n")
            typist.wait_for_characters(20)
            typist.type("\x03")
            typist.wait_for(", stopped]")
            typist.wait_for("> ")
            typist.type("/exit\n")
            assert chat.wait(TIMEOUT_SECONDS) == 0
        assert coordinator.poll() is None


def test_what_a_running_group_was_started_with_cannot_be_given(refused: Callable[..., str]) -> None:
    line = refused("chat", "--connect", "tcp://127.0.0.1:1", "--workers", "2", "--context", "64")
    assert "--workers, --context cannot be given with --connect" in line
    assert "give a MODEL" in refused("chat")


def test_f14_a_model_without_a_template_refuses_chat_and_takes_raw_prompts(
    refused: Callable[..., str], tiny_model: Callable[[str], Path]
) -> None:
    path = tiny_model("llama-yarn")
    assert "holds no chat template" in refused("chat", path)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--template-option", "3x"), "--template-option takes NAME=VALUE"),
        (("--template-option", "a=1", "--template-option", "a=2"), "names a twice"),
        (("--template-option", "messages=[]", "--system", "x"), "variable messages cannot be set"),
        (("--template", "/nowhere/at/all"), "the model file has no chat template '/nowhere/at/all'; it has default"),
        (("--messages", "/nowhere/at/all"), "cannot read /nowhere/at/all"),
    ],
)
def test_bad_words_are_refused_before_a_worker_starts(
    refused: Callable[..., str], smollm2_path: Path, words: tuple[str, ...], complaint: str
) -> None:
    assert complaint in refused("chat", smollm2_path, *words)


@pytest.mark.parametrize("depth", [3_000, 100_000])
def test_f38_deep_json_in_a_file_of_messages_is_refused(
    refused: Callable[..., str], smollm2_path: Path, tmp_path: Path, depth: int
) -> None:
    file = tmp_path / "deep.json"
    file.write_text('[{"role": "user", "content": ' + "[" * depth + "]" * depth + "}]")
    line = refused("chat", smollm2_path, "--messages", file)
    assert "nested deeper than" in line or "is not JSON" in line


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"\xff[]", "is not UTF-8 text"),
        (b"{}", "must be a list of messages, not an object"),
        (b"[]", "is empty"),
        (b'[{"role": "user", "content": "\\ud800"}]', "lone surrogate"),
        (b'[{"role": "user", "content": NaN}]', "content must be text"),
    ],
)
def test_a_bad_file_of_messages_is_refused_by_place(
    refused: Callable[..., str], smollm2_path: Path, tmp_path: Path, text: bytes, complaint: str
) -> None:
    file = tmp_path / "talk.json"
    file.write_bytes(text)
    assert complaint in refused("chat", smollm2_path, "--messages", file)


def test_chat_flags_without_chat_are_refused(refused: Callable[..., str], smollm2_path: Path) -> None:
    assert "belong to --chat" in refused("run", smollm2_path, "-p", "x", "--system", "y")
