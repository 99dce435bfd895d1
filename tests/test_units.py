"""Sizes, durations, the life of a drive, and text."""

import math

import pytest
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.errors import ConfigError
from tierstore.units import DAY_S, drive_life_s, format_bytes, format_seconds, parse_size

# tierstore.units: sizes and durations -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("512MiB", 512 * 2**20),
        ("4GB", 4 * 10**9),
        (" 1.5 GiB ", 3 * 2**29),
        ("1kib", 1024),
        ("2TiB", 2**41),
        ("4096", 4096),
        ("10b", 10),
        (4096, 4096),
        (0, 0),
    ],
)
def test_sizes(text: str | int, count: int) -> None:
    assert parse_size(text) == count


def test_fractions_of_a_whole() -> None:
    assert parse_size("25%", whole=1000) == 250
    assert parse_size("0.25", whole=1000) == 250
    assert parse_size("1.0", whole=1000) == 1000
    assert parse_size("1", whole=1000) == 1  # no point: a number of bytes


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "12 parsecs", "1e3", "25%", "0.25", "1..5MiB", -1, "9" * 400, 2**63]
)
def test_what_is_no_size_names_the_option(text: str | int) -> None:
    with pytest.raises(ConfigError, match=r"^--host-budget: "):
        parse_size(text, name="--host-budget")


@pytest.mark.parametrize("text", ["101%", "1.5"])
def test_no_fraction_exceeds_its_whole(text: str) -> None:
    with pytest.raises(ConfigError, match="25%"):
        parse_size(text, whole=1000)


@settings(max_examples=share(50))
@given(st.integers(0, 2**30))
def test_whole_mebibytes_are_exact(count: int) -> None:
    assert parse_size(f"{count}MiB") == count * 2**20


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (256 * 2**20, "256 MiB"),
        (1020 * 2**20, "1020 MiB"),
        (1.125 * 2**30, "1.12 GiB"),
        (5 * 2**40, "5 TiB"),
    ],
)
def test_format_bytes(count: float, text: str) -> None:
    assert format_bytes(count) == text


@settings(max_examples=share(50))
@given(st.integers(0, 2**50))
def test_formatted_bytes_are_within_half_a_percent(count: int) -> None:
    number, unit = format_bytes(count).split()
    assert parse_size(f"{float(number):f}{unit}") == pytest.approx(count, rel=0.006, abs=1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00085, "850 us"), (0.0123, "12.3 ms"), (4.21, "4.21 s"), (185, "3 min 05 s"), (3600, "60 min 00 s")],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


# How long a drive lasts -------------------------------------------------------------------------------------


def test_by_hand() -> None:
    """600 TB at 20 MB/s: 347 days."""
    assert drive_life_s(600e12, 20e6 * 100, 100) / DAY_S == pytest.approx(347.2, abs=0.1)
    assert drive_life_s(600e12, 0, 100) == math.inf
    assert drive_life_s(600e12, 5, 0) == math.inf
