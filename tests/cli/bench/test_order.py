"""tierstore bench order, end to end on tiny sizes. No test asserts a speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tierstore.bench.results.document import load_document
from tierstore.cli.main import cli

TINY = [
    *("model.d_model=32", "model.d_ff=64", "model.n_layers=2", "model.n_heads=2", "model.experts=8"),
    *("model.seq_len=16", "data.batch_size=2", "threads=1"),
]


def order(tmp_path: Path, *args: str) -> int:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 2048)
    settings = [f"--set={setting}" for setting in (*TINY, f"data.paths={text}")]
    with pytest.raises(SystemExit) as exit_:
        cli.main(
            ["bench", "order", f"--store={tmp_path / 'bench'}", "--steps=1", "--rounds=2", *settings, *args]
        )
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


@pytest.mark.slow
def test_both_orders_in_turns(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """4 micro-batches of 2 blocks with room for one block's inputs: half of them are spilled, a page each."""
    saved = tmp_path / "saved.json"
    budgets = ("--host-budget=300KiB", "--boundary-budget=16KiB")
    assert order(tmp_path, *budgets, "--warmup=1", "--also=one", "--json", f"--save={saved}") == 0
    out, err = capfd.readouterr()
    found = json.loads(out.splitlines()[-1])
    assert found["same_losses"] is True
    assert found["micro_batches_count"] == 4
    micro, layer, one = (found[way] for way in ("micro", "layer", "one"))
    assert layer["step_spilled_bytes"] == 2 * 4 * 4096
    assert micro["step_spilled_bytes"] == 0
    assert layer["step_moved_bytes"] - layer["step_spilled_bytes"] < 1.5 * one["step_moved_bytes"]
    assert found["moved_bytes_ratio"] == micro["step_moved_bytes"] / layer["step_moved_bytes"] > 1
    assert "larger" not in found
    assert "same losses: yes" in err
    assert {m.name for m in load_document(saved).measurements} >= {"step", "speed-up", "speed-up of bytes"}
    assert not (tmp_path / "bench").exists()


def test_one_micro_batch_has_no_order(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert order(tmp_path, "--micro-batches=1") == 2
    assert "data.micro_batches: expected at least 2" in capfd.readouterr().err
