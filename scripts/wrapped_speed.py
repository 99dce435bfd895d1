#!/usr/bin/env python3
"""Steps of an imported model with everything in memory, in turns with plain transformers and torch's fused AdamW.

    tierstore import CHECKPOINT --store runs/q
    scripts/wrapped_speed.py run.toml CHECKPOINT runs/q --data train.jsonl --host-budget 8GiB

Each side is a process of its own, and steps when it is told to; both take the same batches of the configuration's data,
and their losses are printed side by side. ``ratio`` is the median over rounds of tierstore's time over transformers'; the
processors' time is counted too, which other work on the machine disturbs less. Nothing is committed: the store stays as
it is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

from tierstore.bench.processes import WorkerError, end, receive, send, serve

SIDES = ("transformers", "tierstore")


#: Steps of one side: their losses, and the time of each, by the clock (``seconds``) and of the processors (``cpu_s``).
Steps = dict[str, list[float]]


@contextlib.contextmanager
def plain(args: argparse.Namespace) -> Iterator[Callable[[int], float]]:
    """A step of plain transformers, all of it in memory."""
    import torch
    from finetune_reference import reference

    from tierstore.config import load
    from tierstore.train.config import TrainConfig

    config = load(TrainConfig, args.config, overrides(args))
    torch.set_num_threads(args.threads)
    *_, step = reference(config, args.checkpoint, args.store, fused=True)
    yield step


@contextlib.contextmanager
def tiered(args: argparse.Namespace) -> Iterator[Callable[[int], float]]:
    """A step of ``tierstore train``."""
    from tierstore.cli.options import with_stored_model
    from tierstore.config import load
    from tierstore.machine import keep_freed_memory
    from tierstore.train.config import TrainConfig
    from tierstore.train.ranks import Opening
    from tierstore.train.session import open_session

    keep_freed_memory()
    config = with_stored_model(load(TrainConfig, args.config, overrides(args)))
    with open_session(config, Opening.CREATE) as trainer:
        yield lambda number: trainer.step().loss


def overrides(args: argparse.Namespace) -> dict[str, object]:
    """What the command line says of the configuration."""
    given: dict[str, object] = {"store": args.store, "threads": args.threads}
    if args.data:
        given["data.paths"] = tuple(args.data)
    if args.host_budget:
        given["host_budget"] = args.host_budget
    return given


def work(args: argparse.Namespace) -> None:
    """A side: opens, then takes as many steps as it is asked for."""

    def answers(requests: Iterator[Any]) -> Generator[Mapping[str, object]]:
        with {"transformers": plain, "tierstore": tiered}[args.side](args) as step:
            yield {}
            taken = 0
            for request in requests:
                steps: Steps = {"losses": [], "seconds": [], "cpu_s": []}
                for number in range(taken, taken + request["steps"]):
                    begun, cpu = time.perf_counter(), time.process_time()
                    steps["losses"].append(step(number))
                    steps["cpu_s"].append(time.process_time() - cpu)
                    steps["seconds"].append(time.perf_counter() - begun)
                taken += request["steps"]
                yield steps

    serve(answers)


def measured(args: argparse.Namespace) -> list[list[Steps]]:
    """The rounds, each of both sides. Raises WorkerError."""
    rounds: list[list[Steps]] = []
    with contextlib.ExitStack() as stack:
        sides: dict[str, subprocess.Popen[bytes]] = {}
        for name in SIDES:
            command = [sys.executable, __file__, *sys.argv[1:], "--side", name]
            sides[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            stack.callback(end, sides[name])

        def taken(name: str, count: int) -> Steps:
            send(sides[name], {"steps": count})
            steps: Steps = receive(sides[name], name)
            return steps

        for name, side in sides.items():
            receive(side, name)
        for name in SIDES:
            taken(name, args.warmup)
        for number in range(args.rounds):
            found = {name: taken(name, args.steps) for name in (SIDES if number % 2 == 0 else SIDES[::-1])}
            rounds.append([found[name] for name in SIDES])
            said = [
                f"{name} {statistics.median(steps['seconds']):.3f} s ({statistics.median(steps['cpu_s']):.3f} s of "
                f"processors), loss {steps['losses'][-1]:.6f}"
                for name, steps in zip(SIDES, rounds[-1], strict=True)
            ]
            print(f"round {number + 1}: {', '.join(said)}", flush=True)
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, help="of the run, as tierstore train takes it")
    parser.add_argument("checkpoint", type=Path, help="what the store was imported from")
    parser.add_argument("store", type=Path)
    parser.add_argument("--data", nargs="+", help="files, if the configuration does not name them")
    parser.add_argument("--host-budget", help="enough for every record and gradient")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1, help="of each side in a round")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the first round")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        work(args)
        return
    try:
        rounds = measured(args)
    except WorkerError as error:
        sys.exit(str(error))

    def over(key: str) -> list[float]:
        return [statistics.median(b[key]) / statistics.median(a[key]) for a, b in rounds]

    clock, processors = over("seconds"), over("cpu_s")
    taken = zip(SIDES, zip(*rounds, strict=True), strict=True)
    result = {
        "step_median_s": {name: statistics.median(s for each in own for s in each["seconds"]) for name, own in taken},
        "ratio": statistics.median(clock),
        "ratios": clock,
        "cpu_ratio": statistics.median(processors),
        "same_losses": all(a["losses"] == b["losses"] for a, b in rounds),
        "threads": args.threads,
    }  # fmt: skip
    print(json.dumps(result | {"rounds": rounds}))


if __name__ == "__main__":
    main()
