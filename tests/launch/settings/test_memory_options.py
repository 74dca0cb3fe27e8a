"""`--reserve` and `--memory-limit`: sizes with units, from flag, environment and config file alike."""

import pytest

from gearshift.launch.settings.options import group_settings, parse_size, parse_sizes
from gearshift.proto.errors import InputError


@pytest.mark.parametrize(
    ("text", "byte_count"),
    [
        ("0", 0),
        ("64K", 64 << 10),
        ("256M", 256 << 20),
        ("256MiB", 256 << 20),
        ("1.5g", 3 << 29),
        ("7.5 GB", 15 << 29),
        ("2T", 2 << 40),
    ],
)
def test_a_size_is_a_number_and_a_unit_of_powers_of_1024(text: str, byte_count: int) -> None:
    assert parse_size("--reserve", text) == byte_count


@pytest.mark.parametrize(
    "text", ["", "8", "G", "-1G", "1,5G", "8 gigabytes", "nan", "1e3M", "inf", "9" * 400 + "G", "2000000T"]
)
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(InputError, match="--reserve"):
        parse_size("--reserve", text)


def test_limits_are_one_for_all_workers_or_one_for_each() -> None:
    assert parse_sizes("--memory-limit", "8G,512M") == (8 << 30, 512 << 20)
    assert parse_sizes("--memory-limit", None) is None
    with pytest.raises(InputError, match="--memory-limit"):
        parse_sizes("--memory-limit", "8G,")
    with pytest.raises(InputError, match="--memory-limit: 3 values for 2 workers"):
        group_settings(workers=2, memory_limit="8G,6G,4G")


def test_sizes_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEARSHIFT_MEMORY_LIMIT", "6G,4G")
    monkeypatch.setenv("GEARSHIFT_RESERVE", "1G")
    settings = group_settings(workers=2)
    assert settings.memory_limits == (6 << 30, 4 << 30)
    assert settings.reserve_bytes == 1 << 30
    assert group_settings(workers=2, reserve="0").reserve_bytes == 0
    monkeypatch.setenv("GEARSHIFT_RESERVE", "8")
    with pytest.raises(InputError, match="GEARSHIFT_RESERVE 8: which unit"):
        group_settings(workers=2)
