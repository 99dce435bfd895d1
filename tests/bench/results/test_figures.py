"""Result types as JSON: the keys by hand, and that every number of every benchmark says its unit."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import pytest

import tierstore.bench
from tierstore.bench.io.run import IoResult
from tierstore.bench.machine.run import MachineResult
from tierstore.bench.overlap.run import OverlapResult
from tierstore.bench.results.figures import IF_ANY, INTERNAL, Figures, named, prefixed, ratios, to_json
from tierstore.bench.soak.run import SoakResult
from tierstore.bench.tiers.run import TiersResult
from tierstore.bench.training.run import TrainResult

#: A key that ends in one of these says its unit, or is one of them without the underscore.
UNITS = ("_bytes", "_bytes_per_s", "_per_s", "_s", "_ns", "_ratio", "_count", "_per_gb_s", "_per_parameter")
#: Counts and pure numbers, which have no unit to say.
PLAIN = frozenset(
    {
        *("bytes_per_parameter", "parameters", "record_parameters", "replayed_steps", "threads", "repeats"),
        *("requests", "keys", "points", "cores", "records", "commits", "depth", "seed", "ranks"),
        *("steps", "warmup_steps", "rounds", "experts", "last_loss", "collectives", "disk_transfers"),
        *("losses", "first_loss", "loss_difference", "loss_tolerance", "clip_norm", "layers"),
    }
)


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True, kw_only=True)
class Times(Figures):
    samples_s: Sequence[float]
    median_s: float


@dataclass(frozen=True, kw_only=True)
class Found(Figures):
    unit: str = "bytes"
    colour: Colour = Colour.RED
    where: Path = Path("there")
    missing: float | None = None
    absent: float | None = field(default=None, metadata=IF_ANY)
    hidden: float = field(default=3.0, metadata=INTERNAL)
    last: float = field(default=2.0, metadata=named("last_{unit}"))
    commit: Times | None = field(metadata=prefixed("commit_"))
    by_name: Mapping[str, Times]
    listed: Sequence[Times]


def test_keys_by_hand() -> None:
    times = Times(samples_s=(1.0, 3.0), median_s=2.0)
    plain = {"samples_s": [1.0, 3.0], "median_s": 2.0}
    found = Found(commit=times, by_name={"one": times}, listed=[times])
    rest = {"unit": "bytes", "colour": "red", "where": "there", "missing": None, "last_bytes": 2.0}
    assert to_json(found) == {
        **rest,
        "commit_samples_s": [1.0, 3.0],
        "commit_median_s": 2.0,
        "by_name": {"one": plain},
        "listed": [plain],
    }
    none = dataclasses.replace(found, commit=None, absent=1.0, by_name={}, listed=())
    assert to_json(none) == {**rest, "absent": 1.0, "by_name": {}, "listed": []}


def test_ratios_are_of_one_round_each() -> None:
    assert ratios([2.0, 3.0], [1.0, 6.0], 10.0) == [20.0, 5.0]
    with pytest.raises(ValueError, match="longer"):
        ratios([1.0], [1.0, 2.0])


def result_types() -> list[type[Figures]]:
    for module in pkgutil.walk_packages(tierstore.bench.__path__, "tierstore.bench."):
        importlib.import_module(module.name)
    found = [kind for kind in Figures.__subclasses__() if kind.__module__.startswith("tierstore.bench.")]
    return sorted(found, key=lambda kind: kind.__qualname__)


def held(annotation: object) -> Iterator[object]:
    """The types that ``annotation`` is made of: ``Sequence[float] | None`` of float and None."""
    inner = typing.get_args(annotation)
    if not inner:
        yield annotation
    for one in inner:
        yield from held(one)


@pytest.mark.parametrize("kind", result_types(), ids=lambda kind: kind.__qualname__)
def test_every_number_says_its_unit(kind: type[Figures]) -> None:
    hints = typing.get_type_hints(kind)
    assert "Any" not in str(hints)
    assert object not in {one for hint in hints.values() for one in held(hint)}
    for each in dataclasses.fields(kind):
        if {int, float} & set(held(hints[each.name])) and "internal" not in each.metadata:
            key = str(each.metadata.get("key", each.name)).replace("{unit}", "bytes")
            assert key in PLAIN or any(key.endswith(unit) or key == unit[1:] for unit in UNITS), key


def test_the_types_of_all_benchmarks_are_there() -> None:
    assert len(result_types()) > 20


# The keys of an earlier version -----------------------------------------------------------------------------

#: What version 0.1.0 wrote, with short lists: bench and figures.
EARLIER = [
    each
    for each in json.loads(Path(__file__).parents[1].joinpath("figures-0.1.0.json").read_text())
    if each[0] in ("io", "machine", "overlap", "soak", "tiers", "train")
]
#: Keys that results have had since.
SINCE: dict[str, dict[str, object]] = {
    "train": {
        "round_cpu_to_in_ram_ratio": [],
        "cpu_to_in_ram_ratio": None,
        "tiered_parts": [],
        "in_ram_parts": [],
    },
}
RESULTS = {
    "io": IoResult,
    "machine": MachineResult,
    "overlap": OverlapResult,
    "soak": SoakResult,
    "tiers": TiersResult,
    "train": TrainResult,
}


def members(annotation: object) -> Iterator[object]:
    """What a value may be: ``float | None`` is a float or None."""
    union = isinstance(annotation, types.UnionType)
    yield from typing.get_args(annotation) if union else (annotation,)


def keys_of(kind: type[Figures]) -> Iterator[tuple[str, object, bool]]:
    """Each key of ``kind``, what its value may be, and whether it is always there."""
    hints = typing.get_type_hints(kind)
    for each in dataclasses.fields(kind):
        if "internal" in each.metadata:
            continue
        annotation, prefix = hints[each.name], each.metadata.get("prefix")
        always = types.NoneType not in members(annotation)
        if prefix is None:
            key = str(each.metadata.get("key", each.name))
            yield key, annotation, always or "if_any" not in each.metadata
            continue
        for member in members(annotation):
            if typing.get_origin(member) is not None:  # a mapping: names of programs
                yield "*", typing.get_args(member)[1], False
            elif member is not types.NoneType:
                assert isinstance(member, type)
                for key, inner, required in keys_of(member):
                    yield f"{prefix}{key}", inner, required and always


def agree(value: object, annotation: object) -> None:
    """Fails where an object in ``value`` lacks a key that its type would write, or has another."""
    for member in members(annotation):
        arguments = typing.get_args(member)
        if isinstance(value, list) and arguments:
            for one in value:
                agree(one, arguments[0])
        elif isinstance(value, dict) and arguments:
            for one in value.values():
                agree(one, arguments[1])
        elif isinstance(value, dict) and isinstance(member, type) and issubclass(member, Figures):
            unit = str(value.get("unit", ""))
            known = {key.replace("{unit}", unit): rest for key, *rest in keys_of(member)}
            assert {key for key, (_, required) in known.items() if required} <= value.keys(), member
            for key, inner in value.items():
                assert key in known or "*" in known, f"{member}: {key}"
                agree(inner, known.get(key, known.get("*"))[0])


@pytest.mark.parametrize(
    ("bench", "figures"), EARLIER, ids=[f"{bench}-{row}" for row, (bench, _) in enumerate(EARLIER)]
)
def test_the_keys_are_those_of_an_earlier_version(bench: str, figures: dict[str, object]) -> None:
    added = SINCE.get(bench, {})
    assert not added.keys() & figures.keys()
    agree(figures | added, RESULTS[bench])
