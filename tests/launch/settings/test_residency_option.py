"""`--residency`: what each text means for a model, and what is refused."""

import pytest

from gearshift.coordinator.residency.residency import Residency
from gearshift.launch.settings.residency_option import parse_residency
from gearshift.proto.errors import InputError


@pytest.mark.parametrize(
    ("text", "migrating", "whole"),
    [
        ("both", (), ()),
        ("migrate", (0, 1, 2, 3, 4), ()),
        ("owner", (), (0, 1, 2, 3, 4)),
        ("migrate:0-1+4,owner:2", (0, 1, 4), (2,)),
        ("both:0-1, owner:3-3", (), (3,)),
    ],
)
def test_layers_are_named_by_kind(text: str, migrating: tuple[int, ...], whole: tuple[int, ...]) -> None:
    wish = parse_residency("--residency", text)
    assert wish is not None
    assert wish.of(5) == Residency(migrating, whole)


def test_auto_leaves_it_to_what_fits() -> None:
    assert parse_residency("--residency", "auto") is None


@pytest.mark.parametrize(
    "text",
    ["", "neither", "migrate:", "migrate:3-1", "owner:-1", "owner:1.5", "migrate:1,2", "owner:" + "9" * 5000],
)
def test_what_names_no_layers_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"^--residency takes "):
        parse_residency("--residency", text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("owner:3-5", "--residency names layer 5: the model has layers 0 to 4"),
        ("migrate:0-2,owner:2", "--residency names layer 2 twice"),
        ("migrate,owner:1", "--residency names layer 1 twice"),
    ],
)
def test_layers_that_the_model_has_not_or_that_are_named_twice_are_refused(text: str, reason: str) -> None:
    wish = parse_residency("--residency", text)
    assert wish is not None
    with pytest.raises(InputError, match=reason):
        wish.of(5)
