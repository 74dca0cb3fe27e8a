"""Numbers of things in messages."""

import re
from pathlib import Path

import pytest

import gearshift
from gearshift.proto.words import counted, plural


@pytest.mark.parametrize(("number", "told"), [(0, "0 tokens"), (1, "1 token"), (2, "2 tokens"), (1000, "1000 tokens")])
def test_one_thing_is_no_plural(number: int, told: str) -> None:
    assert counted(number, "token") == told
    assert f"{number} {plural(number, 'token')}" == told


def test_no_message_makes_its_plurals_by_itself() -> None:
    """They are made in one place."""
    own = re.compile(r"""\{["']s["'] if |\{["']{2} if [^{}"']*== 1 else ["']s["']|plural = ["']""")
    root = Path(gearshift.__file__).parent
    found = [
        f"{path.relative_to(root)}:{number}"
        for folder in ("coordinator", "launch", "proto", "worker")
        for path in (root / folder).rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if own.search(line) and path.name != "words.py"
    ]
    assert found == []
