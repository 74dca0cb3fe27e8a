"""docs/protocol.md tells every message with its fields, and no other."""

import re
import typing
from pathlib import Path

import pytest

from gearshift.proto.client_messages import AnyReply, AnyRequest
from gearshift.proto.commands import AnyCommand
from gearshift.proto.reports import AnyReport

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
UNIONS = {"Commands": AnyCommand, "Reports": AnyReport, "Requests": AnyRequest, "Replies": AnyReply}


def table(heading: str) -> dict[str, str]:
    """Message -> fields, of the table under a heading."""
    section = PAGE.read_text().split(f"### {heading}:")[1].split("\n#")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \| ([^|]+) \|$", section, re.MULTILINE)
    assert all(meaning.strip() for _, _, meaning in rows)
    return {name: fields for name, fields, _ in rows}


@pytest.mark.parametrize("heading", UNIONS)
def test_the_page_tells_every_message_with_its_fields(heading: str) -> None:
    classes = typing.get_args(UNIONS[heading])
    assert table(heading) == {one.__name__: ", ".join(one.__struct_fields__) or "none" for one in classes}
