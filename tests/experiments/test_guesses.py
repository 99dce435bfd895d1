"""experiments/guesses.py, end to end on a tiny store, which stays as it is."""

import json
import sys
from pathlib import Path
from typing import Any

import guesses
import pytest

from tierstore.cli.main import cli

TINY = [
    *("model.d_model=32", "model.d_ff=64", "model.n_layers=3", "model.n_heads=2", "model.experts=8"),
    *(
        "model.seq_len=16",
        "model.top_k=1",
        "data.batch_size=1",
        "threads=1",
        "sample_tokens=0",
        "eval_batches=1",
    ),
]


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        cli.main(list(arguments))
    return exit_.value.code


def guess(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[dict[str, Any], str]:
    """What the experiment found, and its tables."""
    monkeypatch.setattr(sys, "argv", ["guesses.py", *arguments])
    capfd.readouterr()
    with pytest.raises(SystemExit) as exit_:
        guesses.main()
    assert exit_.value.code == 0
    *tables, last = capfd.readouterr().out.splitlines()
    return json.loads(last), "\n".join(tables)


def verified(out: str) -> dict[str, object]:
    """What ``verify`` found, without what depends on the process."""
    found: dict[str, object] = json.loads(out.splitlines()[-1])
    varies = ("memory", "peak_resident_bytes")
    return {key: value for key, value in found.items() if not key.endswith("_s") and key not in varies}


def test_predictors_are_compared_and_nothing_is_committed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, store = tmp_path / "text", tmp_path / "store"
    text.write_bytes(bytes(range(256)) * 64)
    given = (*TINY, f"data.paths={text}")
    settings = [f"--set={setting}" for setting in given]
    assert run("train", f"--store={store}", "--steps=2", *settings) == 0
    assert run("verify", str(store), "--json") == 0
    before = verified(capsys.readouterr().out)
    asked = ["--steps=2", "--warmup=1", "--prompt=3", "--tokens=4", f"--host-budget={300 << 10}"]
    found = []
    for _ in range(2):
        one, tables = guess(capsys, monkeypatch, f"--store={store}", *asked, "--set", *given)
        assert "demanded in forward passes" in " ".join(tables.split())
        found.append(one)
    assert run("verify", str(store), "--json") == 0
    assert verified(capsys.readouterr().out) == before
    for one in found:
        for predictor in one["predictors"]:
            for part in ("training", "decoding"):
                del predictor[part]["forward_stall_s"]
    assert found[0] == found[1], "all but the seconds is counted"
    none, history, router = found[0]["predictors"]
    assert [one["predictor"] for one in (none, history, router)] == ["none", "history", "router"]
    for part in ("training", "decoding"):
        assert none[part]["guessed_count"] == none[part]["right_count"] == 0
        assert none[part]["used_count"] == history[part]["used_count"] == router[part]["used_count"] > 0
        for one in (history[part], router[part]):
            assert 0 < one["right_count"] <= min(one["used_count"], one["guessed_count"])
            assert one["wasted_read_bytes"] <= one["speculative_read_bytes"] <= one["read_bytes"]


def test_in_layer_order_forward_passes_are_watched_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is read without a predictor is demanded, and a part of it by forward passes."""
    text, store = tmp_path / "text", tmp_path / "store"
    text.write_bytes(bytes(range(256)) * 64)
    ordered = ("data.micro_batches=2", "data.micro_order=layer", f"data.paths={text}")
    given = (*TINY, *ordered)
    settings = [f"--set={setting}" for setting in given]
    assert run("train", f"--store={store}", "--steps=1", *settings) == 0
    asked = ["--predictors=none", "--steps=2", "--warmup=1", "--tokens=0", f"--host-budget={300 << 10}"]
    found, _ = guess(capsys, monkeypatch, f"--store={store}", *asked, "--set", *given)
    (none,) = found["predictors"]
    assert 0 < none["training"]["forward_demanded_bytes"] < none["training"]["read_bytes"]
