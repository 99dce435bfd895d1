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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

SIDES = ("transformers", "tierstore")


@dataclass(frozen=True)
class Steps:
    """Steps of one side: their losses, and the time of each, by the clock and of the processors."""

    losses: list[float]
    seconds: list[float]
    cpu_s: list[float]


@contextlib.contextmanager
def plain(args: argparse.Namespace) -> Iterator[Callable[[int], float]]:
    """A step of plain transformers, all of it in memory."""
    import torch
    import transformers
    from finetune_reference import losses_of

    from tierstore.config import load
    from tierstore.train.config import TrainConfig
    from tierstore.train.tokens.data import open_data

    config = load(TrainConfig, args.config, overrides(args))
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.checkpoint, dtype=torch.float32, experts_implementation="grouped_mm"
    ).train()
    data = open_data(
        config.data,
        seq_len=config.finetune.length(0),
        vocab_size=model.config.vocab_size,
        tokenizer=args.checkpoint,
        store=args.store,
    )
    weight = config.finetune.aux_loss_weight
    if weight is None:
        weight = getattr(model, "router_aux_loss_coef", 0.0)
    adamw, parts = config.adamw, config.data.micro_batches
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=adamw.betas, eps=adamw.eps, weight_decay=adamw.weight_decay, fused=True
    )

    def step(number: int) -> float:
        optimizer.param_groups[0]["lr"] = config.lr_at(number)
        total = 0.0
        for micro in range(parts):
            loss, objective = losses_of(model, data.batch(number, micro), aux_loss_weight=weight)
            (objective / parts).backward()
            total += float(loss.detach()) / parts
        optimizer.step()
        optimizer.zero_grad(set_to_none=args.gradients == "new")
        return total

    yield step


@contextlib.contextmanager
def tiered(args: argparse.Namespace) -> Iterator[Callable[[int], float]]:
    """A step of ``tierstore train``."""
    from tierstore.cli.options import with_stored_model
    from tierstore.config import load
    from tierstore.train.config import TrainConfig
    from tierstore.train.footprint import keep_freed_memory
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
    """A side: opens, then takes as many steps as each line of stdin says."""
    with {"transformers": plain, "tierstore": tiered}[args.side](args) as step:
        print("open", flush=True)
        number = 0
        for line in sys.stdin:
            steps = Steps([], [], [])
            for _ in range(int(line)):
                begun, cpu = time.perf_counter(), time.process_time()
                steps.losses.append(step(number))
                steps.cpu_s.append(time.process_time() - cpu)
                steps.seconds.append(time.perf_counter() - begun)
                number += 1
            print(json.dumps(asdict(steps)), flush=True)


class Side:
    """The process of a side."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, __file__, *sys.argv[1:], "--side", name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def opened(self) -> None:
        self._answer("open\n")

    def steps(self, count: int) -> Steps:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        return Steps(**json.loads(self._answer()))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self, expected: str | None = None) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer or expected not in (None, answer):
            sys.exit(f"a side ended, or answered {answer!r}")
        return answer


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
    parser.add_argument(
        "--gradients", choices=("new", "kept"), default="new", help="of transformers, from step to step"
    )
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    if args.side:
        work(args)
        return
    sides = [Side(name) for name in SIDES]
    for side in sides:
        side.opened()
    for side in sides:
        side.steps(args.warmup)
    rounds: list[list[Steps]] = []
    for number in range(args.rounds):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        found = {place: sides[place].steps(args.steps) for place in order}
        rounds.append([found[0], found[1]])
        print(
            f"round {number + 1}: "
            + ", ".join(
                f"{name} {statistics.median(steps.seconds):.3f} s ({statistics.median(steps.cpu_s):.3f} s of processors), "
                f"loss {steps.losses[-1]:.6f}"
                for name, steps in zip(SIDES, rounds[-1], strict=True)
            ),
            flush=True,
        )
    for side in sides:
        side.close()

    def over(values: Callable[[Steps], list[float]]) -> list[float]:
        return [statistics.median(values(b)) / statistics.median(values(a)) for a, b in rounds]

    clock, processors = over(lambda steps: steps.seconds), over(lambda steps: steps.cpu_s)
    result = {
        "step_median_s": {
            name: statistics.median(s for each in rounds for s in each[place].seconds)
            for place, name in enumerate(SIDES)
        },
        "ratio": statistics.median(clock),
        "ratios": clock,
        "cpu_ratio": statistics.median(processors),
        "same_losses": all(a.losses == b.losses for a, b in rounds),
        "threads": args.threads,
    }
    print(json.dumps(result))
    if args.json is not None:
        args.json.write_text(
            json.dumps(result | {"rounds": [[asdict(s) for s in r] for r in rounds]}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
