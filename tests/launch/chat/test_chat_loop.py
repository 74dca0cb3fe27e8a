"""The conversation's loop over a backend and a terminal of the test's own."""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import StringIO

import pytest

from gearshift.coordinator.chat.messages import Message
from gearshift.launch.chat.backend import ChatAnswer
from gearshift.launch.chat.loop import HELP, converse
from gearshift.launch.chat.setup import first_messages, parse_template_options
from gearshift.launch.chat.terminal import ChatTerminal
from gearshift.launch.processes.signals import exit_on_signals, interrupts_noted
from gearshift.proto.errors import InputError
from gearshift.proto.pieces import Piece, PieceKind


@dataclass
class FakeBackend:
    """Answers with the number of messages; refuses what says so."""

    asked: list[list[Message]] = field(default_factory=list)
    reasoning: str = ""
    drawn_seed: int | None = None

    def answer(
        self, messages: Sequence[Message], show: Callable[[Piece], None], interrupted: Callable[[], bool]
    ) -> ChatAnswer:
        if messages[-1]["content"] == "refuse":
            raise InputError("not this")
        self.asked.append([dict(message) for message in messages])
        if self.reasoning:
            show(Piece(PieceKind.REASONING, self.reasoning))
        text = str(len(messages))
        show(Piece(PieceKind.ANSWER, text))
        return ChatAnswer(
            text, self.reasoning, 10, 4, 1, 0.5, 2.0, stopped=interrupted(), at_limit=False, drawn_seed=self.drawn_seed
        )


class FakeTerminal(ChatTerminal):
    """Lines from a list; what is told goes into another."""

    def __init__(self, *lines: str) -> None:
        super().__init__()
        self.lines = list(lines)
        self.told: list[str] = []

    def read_line(self) -> str | None:
        return self.lines.pop(0) if self.lines else None

    def tell(self, text: str) -> None:
        self.told.append(text)

    def complain(self, text: str) -> None:
        self.told.append(f"error: {text}")


def talk(backend: FakeBackend, *lines: str, first: Sequence[Message] = ()) -> FakeTerminal:
    terminal = FakeTerminal(*lines)
    converse(backend, terminal, first)
    return terminal


def roles(messages: Sequence[Message]) -> list[object]:
    return [message["role"] for message in messages]


def test_every_turn_sends_the_whole_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    backend = FakeBackend()
    talk(backend, "a", "", "  ", "b")
    assert [roles(asked) for asked in backend.asked] == [["user"], ["user", "assistant", "user"]]
    assert backend.asked[1][1] == {"role": "assistant", "content": "1"}
    assert capsys.readouterr().out == "1\n3\n"


def test_a_turn_that_was_refused_is_forgotten() -> None:
    backend = FakeBackend()
    terminal = talk(backend, "a", "refuse", "b")
    assert "error: not this" in terminal.told
    assert [message["content"] for message in backend.asked[1]] == ["a", "1", "b"]


def test_messages_given_first_are_answered_where_one_waits() -> None:
    backend = FakeBackend()
    talk(backend, first=[{"role": "user", "content": "a"}])
    assert len(backend.asked) == 1
    backend = FakeBackend()
    talk(backend, first=[{"role": "system", "content": "a"}])
    assert backend.asked == []


def test_clear_keeps_the_system_message_alone() -> None:
    backend = FakeBackend()
    talk(backend, "a", "/clear", "b", "/exit", "c", first=[{"role": "system", "content": "s"}])
    assert roles(backend.asked[1]) == ["system", "user"]
    assert len(backend.asked) == 2


def test_help_names_every_word_that_is_not_sent() -> None:
    backend = FakeBackend()
    terminal = talk(backend, "/help", "/clear", "/exit")
    assert backend.asked == []
    assert terminal.told[0] == HELP
    assert all(word in HELP for word in ("/help", "/clear", "/exit"))


def test_a_seed_that_was_drawn_is_told_behind_the_answer() -> None:
    assert talk(FakeBackend(drawn_seed=123), "a").told[0].endswith(" tok/s, seed 123")
    assert "seed" not in talk(FakeBackend(), "a").told[0]


def test_other_words_with_a_slash_are_sent_as_they_stand() -> None:
    backend = FakeBackend()
    talk(backend, "/etc/passwd is a file")
    assert backend.asked[0][0]["content"] == "/etc/passwd is a file"


def test_reasoning_is_given_back_apart_from_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    backend = FakeBackend(reasoning="hm")
    talk(backend, "a", "b")
    assert backend.asked[1][1] == {"role": "assistant", "content": "1", "reasoning_content": "hm"}
    shown = capsys.readouterr()
    assert shown.out == "1\n3\n"  # not on a terminal: reasoning is beside the answers
    assert shown.err.count("hm") == 2


class FakeScreen(StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_reasoning_is_dimmed_and_nothing_steers_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = FakeScreen()
    monkeypatch.setattr("sys.stdout", screen)
    terminal = ChatTerminal()
    terminal.show(Piece(PieceKind.REASONING, "hm"))
    terminal.show(Piece(PieceKind.ANSWER, "a\tb\x1b[2J\x9b"))
    terminal.end_answer()
    assert screen.getvalue() == "\x1b[2mhm\x1b[0m\n\na\tb\ufffd[2J\ufffd\n"


def test_a_first_ctrl_c_is_noted_and_a_second_one_ends() -> None:
    with exit_on_signals():
        with interrupts_noted() as noted:
            assert not noted()
            signal.raise_signal(signal.SIGINT)
            assert noted()
            with pytest.raises(SystemExit) as ended:
                signal.raise_signal(signal.SIGINT)
        assert ended.value.code == 130
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGINT)


def test_template_options_are_json_or_text() -> None:
    words = ["enable_thinking=false", "level=3", "mode=deep", "empty=", 'quoted="3"']
    assert parse_template_options(words) == {
        "enable_thinking": False, "level": 3, "mode": "deep", "empty": "", "quoted": "3",
    }  # fmt: skip


def test_a_second_system_message_is_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "talk.json"
    file.write_text('[{"role": "system", "content": "a"}]')
    with pytest.raises(InputError, match="begins with a system message too"):
        first_messages("b", str(file))
    assert first_messages(None, str(file)) == [{"role": "system", "content": "a"}]
