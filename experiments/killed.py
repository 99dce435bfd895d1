"""A training run, once whole and once with SIGKILLs on the way: both must end with the same bits.

    python experiments/killed.py CONFIG --work DIRECTORY [--memory 20GiB] [--killed-memory 14GiB] [--kills 10] [--seed 0]
    scripts/plot.py killed DIRECTORY docs/five-billion.svg

Trains as CONFIG says in DIRECTORY/store, reads the checksum of all records, and removes the store; then again, killed in the
midst of ``--kills`` steps, which ``--seed`` draws, and resumed from the last commit after each. Every step that is repeated
must have the loss that it had. Each run leaves its metrics and a report in DIRECTORY; a run whose report is there is not
repeated. Exit status 1: losses or checksums differ, or a process ends otherwise than by its kill.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from emulation import finish, options, start, table
from memory import TIERSTORE

from tierstore.config import load
from tierstore.errors import DataError
from tierstore.train.config import TrainConfig

SAMPLE_S = 0.5
_POLL_S = 0.01


class Run:
    """The processes of one run, one after the other. Times in its ``report`` are seconds from the start of the first one."""

    def __init__(self, config: Path, work: Path, name: str, memory: str, step_tokens: int) -> None:
        self.store, self.metrics, self.errors = (
            work / end for end in ("store", f"{name}.jsonl", f"{name}.log")
        )
        self._command = [sys.executable, "-c", TIERSTORE, "train", str(config), "--store", str(self.store)]
        self._command += ["--metrics", str(self.metrics), "--memory", memory, "--checksum", "--json"]
        self._begun_s = time.monotonic()
        self.report: dict[str, Any] = {
            "memory": memory,
            "step_tokens": step_tokens,
            "kills_s": [],
            "resident": [],  # time and resident bytes of the process, every SAMPLE_S seconds
            "first_steps_s": [],  # time from the start of each process to the end of its first step
        }

    def run(self, kill_at: int | None, pause: float) -> bool:
        """Runs a process; kills it after step ``kill_at``, in the midst of the next one: after ``pause`` of its time. Says
        whether it ended by itself. Raises DataError if it failed.
        """
        command = [*self._command, *(["--resume"] if self.store.exists() else [])]
        begun, before, read_bytes = time.monotonic(), len(steps_of(self.metrics)), self._written()
        first = True
        with self.errors.open("a") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
            try:
                while process.poll() is None:
                    time.sleep(_POLL_S)
                    self._sample(process.pid)
                    if self._written() == read_bytes:
                        continue
                    read_bytes, steps = self._written(), steps_of(self.metrics)[before:]
                    if steps and first:
                        first = False
                        self.report["first_steps_s"].append(time.monotonic() - begun)
                    if steps and kill_at is not None and steps[-1]["step"] >= kill_at:
                        time.sleep(pause * steps[-1]["step_s"])
                        process.kill()
                        process.wait()
                        self.report["kills_s"].append(self._now())
                        return False
                assert process.stdout is not None
                printed = process.stdout.read()
            finally:
                process.kill()
                process.wait()
        if process.returncode:
            last = self.errors.read_text().splitlines()[-1]
            raise DataError(f"{self.errors.stem}: status {process.returncode}: {last}")
        self.report |= {"ended_s": self._now(), "summary": json.loads(printed.splitlines()[-1])}
        return True

    def _now(self) -> float:
        return time.monotonic() - self._begun_s

    def _written(self) -> int:
        return self.metrics.stat().st_size if self.metrics.exists() else 0

    def _sample(self, pid: int) -> None:
        resident = self.report["resident"]
        if resident and self._now() < resident[-1][0] + SAMPLE_S:
            return
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            resident.append((round(self._now(), 2), psutil.Process(pid).memory_info().rss))


def trained(
    config: Path, work: Path, name: str, memory: str, tokens: int, kills: list[tuple[int, float]]
) -> dict[str, Any]:
    """The report of a run that is killed after the steps of ``kills``, each after that share of the next step's time."""
    saved, run = work / f"{name}.json", Run(config, work, name, memory, tokens)
    if not saved.exists():
        shutil.rmtree(run.store, ignore_errors=True)
        run.metrics.unlink(missing_ok=True)
        # Steps shorter than a poll may all be over before the kill.
        if not any(run.run(step, pause) for step, pause in kills):
            run.run(None, 0)
        saved.write_text(json.dumps(run.report))
        shutil.rmtree(run.store)
    report: dict[str, Any] = json.loads(saved.read_text())
    return report


def steps_of(metrics: Path) -> list[dict[str, Any]]:
    """The lines of all processes so far; what follows the last is not whole yet."""
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    return [json.loads(line) for line in lines]


def losses(metrics: Path) -> dict[int, set[float]]:
    """The losses that each step had: one, unless a repetition differs."""
    found: dict[int, set[float]] = {}
    for step in steps_of(metrics):
        found.setdefault(step["step"], set()).add(step["loss"])
    return found


def main() -> None:
    asked = options(
        __doc__, config="examples/configs/five-billion.toml", work="killed", memory="20GiB", killed_memory=None,
        kills=10, seed=0,
    )  # fmt: skip
    config, work = Path(asked.config), Path(asked.work)
    work.mkdir(parents=True, exist_ok=True)
    trains = load(TrainConfig, config)
    draw = random.Random(asked.seed)
    if not 0 < asked.kills < trains.steps:
        raise DataError(f"--kills: expected 1 to {trains.steps - 1} (steps - 1), got {asked.kills}")
    at = [(step, draw.random()) for step in sorted(draw.sample(range(1, trains.steps), asked.kills))]
    tokens = trains.tokens_per_step
    whole = trained(config, work, "whole", asked.memory, tokens, [])
    killed = trained(config, work, "killed", asked.killed_memory or asked.memory, tokens, at)
    once, again = losses(work / "whole.jsonl"), losses(work / "killed.jsonl")
    rows = [
        {
            "run": name, **report, "train_loss": report["summary"]["train_loss"],
            "records_crc32c": str(report["summary"]["records_crc32c"]), "kills": len(report["kills_s"]),
            "peak_bytes": max(resident for _, resident in report["resident"]),
        }
        for name, report in (("whole", whole), ("killed", killed))
    ]  # fmt: skip
    table("", rows, "run", "memory", "kills", "ended_s", "peak_bytes", "train_loss", "records_crc32c")
    failures = [
        f"step {step}: losses {sorted(once[step] | again.get(step, set()))}"
        for step in once
        if once[step] != again.get(step)
    ]
    if whole["summary"]["records_crc32c"] != killed["summary"]["records_crc32c"]:
        failures.append("the records differ")
    finish({"whole": whole, "killed": killed}, failures)


if __name__ == "__main__":
    start(main)
