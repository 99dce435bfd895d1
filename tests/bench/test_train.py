"""bench train: tiny runs in RAM and tiered, and in both step orders. No test asserts a speed."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import SMALL_MODEL, TinyBench, bench_status

from tierstore.bench import train

pytestmark = pytest.mark.usefixtures("forked_python")


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """Options of runs that take a second."""
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 2048)
    settings = [f"--set={setting}" for setting in (*SMALL_MODEL, f"data.paths={text}")]
    return [f"--store={tmp_path / 'bench'}", "--steps=2", "--warmup=1", "--rounds=2", *settings]


def once(function: Callable[..., object]) -> Callable[..., object]:
    """``function``, which answers every call with what it returned to the first."""
    found: list[object] = []

    def called(*arguments: object, **named: object) -> object:
        if not found:
            found.append(function(*arguments, **named))
        return found[0]

    return called


def test_a_round_names_the_first_step_whose_loss_differs() -> None:
    def steps(*losses: float) -> train.RoundSteps:
        return train.RoundSteps(
            step_s=[1.0] * 3,
            losses=losses,
            cpu_s=1.0,
            stall_s_by_cause={},
            peak_resident_bytes=1,
            read_bytes=1,
            written_bytes=1,
            wasted_prefetch_bytes=0,
            hits=1,
            misses=1,
            part_s={},
        )

    rounds = train._Rounds(opened={}, tiered=[steps(3.0, 2.0, 1.0)], in_ram=[steps(3.0, 2.0, 1.0)])
    assert rounds.progress == "tiered 1.000 s, in_ram 1.000 s"
    rounds.tiered.append(steps(3.0, 2.6399169, 1.5))
    rounds.in_ram.append(steps(3.0, 2.6399171, 1.0))
    assert rounds.progress.endswith(", step 2 differs: loss 2.6399169, in RAM 2.6399171")


@pytest.mark.slow
def test_in_ram_and_tiered(
    tmp_path: Path, small: list[str], tiny_bench: TinyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other losses than in RAM are exit status 1 (of the same measurement: that it is taken once is enough)."""
    for name in ("_measure", "compulsory"):
        monkeypatch.setattr(train, name, once(getattr(train, name)))
    run = tiny_bench("train", *small, "--host-budget=300KiB")
    found = run.figures
    assert found["same_losses"] is True
    assert found["in_ram"]["step_read_bytes"] == found["in_ram"]["step_written_bytes"] == 0
    assert found["in_ram"]["hit_ratio"] == 1
    assert found["tiered"]["step_read_bytes"] > 0
    moved = found["compulsory_read_bytes"] + found["compulsory_written_bytes"]
    assert 0 < moved <= min(policy["step_moved_bytes"] for policy in found["policies"]) + 1
    assert found["bound_s"] > 0
    assert found["step_to_bound_ratio"] > 0
    assert "step to bound" in run.table
    listed = {one.label: one for one in run.document.measurements}
    assert listed["step (run=in ram)"].count == listed["step (run=tiered)"].count == 4
    assert listed["step to bound"].median == pytest.approx(found["step_to_bound_ratio"])
    assert listed["step to bound"].target == 1.15
    assert not (tmp_path / "bench").exists()
    monkeypatch.setattr(train, "same_losses", lambda one, other: False)
    assert tiny_bench("train", *small, "--host-budget=300KiB", status=1).figures["same_losses"] is False


@pytest.mark.slow
def test_without_a_baseline(small: list[str], tiny_bench: TinyBench) -> None:
    run = tiny_bench("train", *small, "--host-budget=300KiB", "--baseline=none")
    assert "in_ram" not in run.figures
    assert run.figures["step_to_in_ram_ratio"] is None
    assert "peak resident memory" in run.table
    (target,) = {one.target for one in run.document.measurements if one.name == "step to bound"}
    assert target is None


@pytest.mark.slow
def test_both_orders_in_turns(tmp_path: Path, small: list[str], tiny_bench: TinyBench) -> None:
    """4 micro-batches of 2 blocks with room for one block's inputs: half of them are spilled, a page each."""
    budgets = ("--host-budget=300KiB", "--boundary-budget=16KiB")
    run = tiny_bench("train", "--orders", *small, *budgets, "--also=one")
    found = run.figures
    assert found["same_losses"] is True
    assert found["micro_batches_count"] == 4
    micro, layer, one = (found[way] for way in ("micro", "layer", "one"))
    assert layer["step_spilled_bytes"] == 2 * 4 * 4096
    assert micro["step_spilled_bytes"] == 0
    assert layer["step_moved_bytes"] - layer["step_spilled_bytes"] < 1.5 * one["step_moved_bytes"]
    assert found["moved_bytes_ratio"] == micro["step_moved_bytes"] / layer["step_moved_bytes"] > 1
    assert "larger" not in found
    assert "same losses: yes" in run.table
    assert {m.name for m in run.document.measurements} >= {"step", "speed-up", "speed-up of bytes"}
    assert not (tmp_path / "bench").exists()
    assert run.document.bench == "order"


@pytest.mark.slow
def test_a_failure_of_a_training_process_is_one_line(
    tmp_path: Path, small: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert bench_status("train", *small, "--host-budget=4KiB") == 2
    err = capfd.readouterr().err.splitlines()
    assert err[-1].startswith("tierstore: error: tiered: BudgetError: host_budget")
    assert not (tmp_path / "bench").exists()
