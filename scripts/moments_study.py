#!/usr/bin/env python3
"""What narrow moments do to learning: the main job with each format of moments, from the same seeds, beside fp32.

    scripts/moments_study.py runs/moments --processes 2
    scripts/moments_study.py runs/moments --table
    scripts/moments_study.py runs/tuned --model runs/moe --train-set data.paths=train.txt --train-set schedule.lr=1e-4

Everything is resident, since bits do not depend on it. Each run takes the schedule of the last horizon, stops at each
horizon, and goes on from its commit: what is finished (``results.jsonl`` in the directory) is not done again, and a study
that was killed goes on where it was. All runs reach the first horizon before any goes on. A run computes with one thread.

The table has, at each horizon, the mean over the seeds of the paired difference of the validation loss to fp32's, with the
95% interval of Student's t, and the same of a control: fp32 with an eps that is a little different. With ``--model`` each
run is the fine-tuning of that checkpoint, imported with its format.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tierstore.bench.comparing import student

TIERSTORE = (sys.executable, "-m", "tierstore.cli.main")
FORMATS = ("fp32", "bf16", "int8")
#: fp32 with an eps that differs in its fourth digit: how far training drifts apart by a difference that means nothing.
CONTROL = "control"
ARMS = (*FORMATS, CONTROL)
COMMIT_EVERY = 60


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--moments", nargs="+", default=ARMS, choices=ARMS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--horizons", nargs="+", type=int, default=[60, 600])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--host-budget", default="1700MiB", help="holds all experts")
    parser.add_argument("--model", type=Path, help="a checkpoint to fine-tune in place of the built-in model")
    parser.add_argument(
        "--train-set", action="append", default=[], metavar="KEY=VALUE", help="as train --set"
    )
    parser.add_argument("--table", action="store_true", help="print the table of what is finished")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    if not options.table:
        run(options)
    print(table(finished(options.directory)))


def run(options: argparse.Namespace) -> None:
    """Runs what is not finished, one horizon after another."""
    for horizon in sorted(options.horizons):
        done = {(each["moments"], each["seed"], each["horizon"]) for each in finished(options.directory)}
        jobs = [(moments, seed, horizon) for seed in options.seeds for moments in options.moments]
        jobs.sort(key=lambda job: job[0] == CONTROL)  # last
        with ThreadPoolExecutor(options.processes) as pool:
            for found in pool.map(lambda job: train(options, *job), [job for job in jobs if job not in done]):
                print("{moments} seed {seed}: {val_loss:.4f} at {horizon}".format(**found), flush=True)


def train(options: argparse.Namespace, moments: str, seed: int, horizon: int) -> dict[str, Any]:
    """Takes one run to its horizon, and notes what came of it: losses in nats a token."""
    directory: Path = options.directory
    kept = FORMATS[0] if moments == CONTROL else moments
    store, log = directory / f"store-{moments}-{seed}", directory / f"log-{moments}-{seed}"
    fresh = not (store / "tierstore.json").exists()
    if fresh and options.model is not None:
        imports = ["import", str(options.model), "--store", str(store), "--moments", kept]
        call([*TIERSTORE, *imports], log)
    settings = {
        "schedule.total_steps": max(options.horizons),
        "threads": 1,
        "sample_tokens": 0,
        "eval_every": COMMIT_EVERY,
        "eval_batches": 16,
        "adamw.moments": kept,
        **({"adamw.eps": "1.001e-8"} if moments == CONTROL else {}),
        "data.seed": seed,
        **({} if options.model is not None else {"model.seed": seed}),
        **dict(item.split("=", 1) for item in options.train_set),
    }
    command = [*TIERSTORE, "train", "--store", str(store), "--steps", str(horizon)]
    command += ["--host-budget", options.host_budget, "--commit-every", str(COMMIT_EVERY), "--json"]
    command += ["--metrics", f"{log}.jsonl", *([] if fresh else ["--resume"])]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    start = time.monotonic()
    output = json.loads(call(command, log).splitlines()[-1])
    result = {
        "moments": moments, "seed": seed, "horizon": horizon, "val_loss": output["val_loss"],
        "train_loss": output["train_loss"], "elapsed_s": time.monotonic() - start,
    }  # fmt: skip
    with open(directory / "results.jsonl", "a") as file:
        file.write(json.dumps(result) + "\n")
    return result


def call(command: Sequence[str], log: Path) -> str:
    """The command's output. What it says beside it goes to ``log``; raises CalledProcessError."""
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with open(log, "a") as errors:
        made = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=errors, env=one_thread, text=True, check=True
        )
    return made.stdout


def finished(directory: Path) -> list[dict[str, Any]]:
    path = directory / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(results: Sequence[dict[str, Any]]) -> str:
    """Losses by seed, and the paired differences to fp32's with their interval."""
    losses = {(r["horizon"], r["moments"], r["seed"]): r["val_loss"] for r in results}
    lines = ["step  moments  seeds  validation loss  difference to fp32 (95% interval), each seed's"]
    for horizon in sorted({horizon for horizon, _, _ in losses}):
        for moments in ARMS:
            own = {seed: loss for (h, m, seed), loss in losses.items() if (h, m) == (horizon, moments)}
            paired = [
                loss - losses[horizon, "fp32", seed]
                for seed, loss in sorted(own.items())
                if (horizon, "fp32", seed) in losses
            ]
            if own:
                mean = statistics.fmean(own.values())
                line = f"{horizon:4}  {moments:7}  {len(own):5}  {mean:15.4f}"
                lines.append(line if moments == "fp32" else f"{line}  {difference(paired)}")
    return "\n".join(lines)


def difference(paired: Sequence[float]) -> str:
    each = ", ".join(f"{value:+.4f}" for value in paired)
    if len(paired) < 2:
        return each
    half = student(len(paired) - 1) * statistics.stdev(paired) / math.sqrt(len(paired))
    return f"{statistics.fmean(paired):+.4f} +- {half:.4f}  ({each})"


if __name__ == "__main__":
    main()
