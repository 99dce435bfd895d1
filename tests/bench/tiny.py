"""A benchmark's command at a tiny size: what it printed, saved, and its exit status."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from key_units import violations

from tierstore.bench.documents import Document, load_document
from tierstore.cli.main import cli

#: What version 0.1.0 wrote, with short lists: bench and figures.
EARLIER: list[tuple[str, dict[str, Any]]] = json.loads(
    Path(__file__).with_name("figures-0.1.0.json").read_text()
)
#: Keys of what may not have happened in a short run.
OPTIONAL = frozenset({"median_s", "greatest_s"})
#: Settings of a model that trains in milliseconds.
SMALL_MODEL = (
    *("model.d_model=32", "model.d_ff=64", "model.n_layers=2", "model.n_heads=2", "model.experts=8"),
    *("model.seq_len=16", "data.batch_size=2", "threads=1"),
)


@dataclass(frozen=True)
class TinyRun:
    """``figures``: the object of --json; ``table``: what people see; ``document``: what --save wrote."""

    status: int
    figures: dict[str, Any]
    table: str
    document: Document


#: The fixtures ``tiny_bench`` and ``refused_bench``.
TinyBench = Callable[..., TinyRun]
RefusedBench = Callable[..., None]


def bench_status(*arguments: str | Path) -> int:
    """Runs ``tierstore bench`` and returns its exit status."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", *map(str, arguments)])
    return ended.value.code


def run_tiny(
    saved: Path, capture: pytest.CaptureFixture[str], name: str, *arguments: str | Path, status: int
) -> TinyRun:
    """Runs the command; checks its status, that every number says its unit, and the keys of version 0.1.0."""
    capture.readouterr()
    assert bench_status(name, *arguments, "--json", f"--save={saved}") == status
    out, err = capture.readouterr()
    (line,) = out.splitlines()[-1:]
    figures = json.loads(line)
    assert list(violations(figures)) == []
    document = load_document(saved)
    assert document.figures == figures
    earlier = [each for bench, each in EARLIER if bench == figures.get("bench", name)]
    assert not earlier or any(same_keys(each, figures) for each in earlier)
    return TinyRun(status, figures, err, document)


def same_keys(earlier: object, now: object) -> bool:
    """Whether ``now`` has every key that ``earlier`` has. Objects in a list are compared as one."""
    if isinstance(earlier, Mapping):
        assert isinstance(now, Mapping)
        return all(
            key in OPTIONAL if key not in now else same_keys(inner, now[key])
            for key, inner in earlier.items()
        )
    if isinstance(earlier, Sequence) and not isinstance(earlier, str) and earlier and now:
        assert isinstance(now, Sequence)
        return any(same_keys(earlier[0], each) for each in now)
    return True
