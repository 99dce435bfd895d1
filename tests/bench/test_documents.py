"""The document: what is computed from samples, that it survives the disk, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documents import document, small
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore import machine
from tierstore.bench.comparing import compare
from tierstore.bench.documents import (
    Better,
    Origin,
    counted,
    derived,
    load_document,
    machine_facts,
    measured,
    save_document,
    shown,
)
from tierstore.bench.report import write_report
from tierstore.errors import ConfigError, DataError


def test_a_measurement_by_hand() -> None:
    one = measured("step", [4, 1, 2, 3], "s", Better.LOWER, parameters={"run": "tiered"}, target=2.4)
    assert (one.count, one.median, one.low, one.high) == (4, 2.5, 1.75, 3.25)
    assert one.samples == (4.0, 1.0, 2.0, 3.0)  # in the order that they were taken
    assert one.met is False
    assert replace(one, better=Better.HIGHER).met is True
    assert replace(one, target=2.5).met is True  # at most
    assert replace(one, target=None).met is None
    assert one.label == "step (run=tiered)"
    assert counted("sent", 7, "bytes").evidence is Origin.COUNTED
    assert derived("ratio", 0.5, "ratio", Better.HIGHER).samples == (0.5,)


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=30))
@settings(max_examples=share(60))
def test_quartiles_are_numpys(samples: list[float]) -> None:
    one = measured("x", samples, "s", Better.LOWER)
    wanted = np.percentile(samples, [25, 50, 75])
    assert [one.low, one.median, one.high] == pytest.approx(wanted, rel=1e-9, abs=1e-6)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"samples": []}, "finite samples"),
        ({"samples": [1.0, float("nan")]}, "finite samples"),
        ({"better": Better.NEITHER, "target": 1.0}, "target"),
        ({"name": ""}, "name"),
    ],
)
def test_a_measurement_that_cannot_be(wrong: dict[str, Any], said: str) -> None:
    arguments = {"name": "x", "samples": [1.0], "unit": "s", "better": Better.LOWER, **wrong}
    with pytest.raises(ConfigError, match=said):
        measured(**arguments)


def test_the_same_thing_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="commit: given twice"):
        document([*small(), small()[0]])


def test_a_document_survives_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    whole = document(small())
    save_document(whole, path)
    assert load_document(path) == whole
    assert [each.name for each in tmp_path.iterdir()] == ["found.json"]
    plain = json.loads(path.read_text())
    assert (plain["format"], plain["format_version"]) == ("tierstore-bench", 1)
    assert [one["met"] for one in plain["measurements"]][:3] == [None, True, None]


def without_samples(plain: dict[str, Any]) -> None:
    plain["measurements"][0]["samples"] = []


def test_a_summary_alone_will_do(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    save_document(document(small()), path)
    plain = json.loads(path.read_text())
    without_samples(plain)
    path.write_text(json.dumps(plain))
    one = load_document(path).measurements[0]
    assert (one.samples, one.count, one.median) == ((), 4, 2.5)


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        (["format"], "other", "not a benchmark's document"),
        (["format_version"], 2, "expected a benchmark's document of version 1, got 2"),
        (["bench"], 3, "bench: expected text"),
        (["extra"], 3, "extra: unknown key"),
        (["machine", "cores"], "two", "machine: cores: expected an integer"),
        (["machine"], [], "machine: expected a table"),
        (["measurements"], {}, "measurements: expected a list"),
        (["measurements", 0], 1, r"measurements\[0\]: expected a table"),
        (["measurements", 1, "unit"], 5, r"measurements\[1\]: unit: expected text"),
        (["measurements", 1, "count"], 5, r"measurements\[1\]: count"),
        (["measurements", 0, "better"], "more", r"measurements\[0\]: better: expected one of higher, lower"),
        (["measurements", 0, "median"], 9.0, "median: 9.0 is not between"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, keys: list[Any], value: object, said: str) -> None:
    path = tmp_path / "found.json"
    save_document(document(small()), path)
    plain = json.loads(path.read_text())
    place = plain
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path.write_text(json.dumps(plain))
    with pytest.raises(DataError, match=rf"^{path}: .*{said}") as error:
        load_document(path)
    assert "\n" not in str(error.value)


def test_what_is_no_document(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    for text, said in (("{", "not JSON"), ("[]", "not a benchmark's document"), ("\xff", "not JSON")):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(DataError, match=said):
            load_document(path)
    path.unlink()
    save_document(document(small()), path)
    plain = json.loads(path.read_text())
    del plain["options"]
    path.write_text(json.dumps(plain))
    with pytest.raises(DataError, match="options: missing key"):
        load_document(path)


def test_the_facts_of_this_machine(tmp_path: Path) -> None:
    facts = machine_facts(tmp_path / "not" / "there" / "yet")
    assert facts.cores == machine.cores()
    assert facts.filesystem == machine.disk(tmp_path).filesystem
    assert facts.torch.startswith("2.")
    assert machine_facts().filesystem == machine_facts().device == "none"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0125, "s", "12.5 ms"),
        (-0.0125, "s", "-12.5 ms"),
        (1 << 20, "bytes", "1 MiB"),
        (1 << 30, "bytes/s", "1 GiB/s"),
        (0.98765, "ratio", "0.988"),
        (1234567.0, "requests/s", "1.235e+06"),
    ],
)
def test_amounts_for_people(value: float, unit: str, text: str) -> None:
    assert shown(value, unit) == text


def test_a_document_of_an_earlier_version_is_read_compared_and_reported(tmp_path: Path) -> None:
    earlier = load_document(Path(__file__).with_name("commit-0.1.0.json"))
    assert [one.name for one in earlier.measurements] == [
        *("commit", "durable write of the same bytes", "commit to write", "dirty")
    ]
    added = measured("heartbeat late, idle loop", [0.002, 0.003], "s", Better.LOWER)
    new = replace(earlier, measurements=(*earlier.measurements, added), tool_version="9.9")
    found = compare(earlier, new)
    assert (len(found.rows), found.only_old, found.only_new) == (4, (), (added.label,))
    write_report([earlier, new], tmp_path / "page.html", comparisons=[found])
