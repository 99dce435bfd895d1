"""``tierstore plan --serve``: tokens a second of a served model, by the memory that its experts get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierstore.cli.options import FILE, F, bundled, options
from tierstore.cli.output import Output
from tierstore.errors import ConfigError
from tierstore.units import format_bytes, format_seconds, parse_size

if TYPE_CHECKING:
    from tierstore.machine_profile import Profile
    from tierstore.plan.serving import PassPlan
    from tierstore.train.config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingAsked:
    """What was asked for; without ``serve`` nothing."""

    serve: bool
    batch: int
    prompt_tokens: int
    context: int
    budgets: str
    trace: Path | None

    @property
    def asked(self) -> bool:
        return self.serve


def serving_options() -> Callable[[F], F]:
    """The options of serving, as one argument ``serving`` of the command."""
    return options(
        click.option(
            "--serve", is_flag=True, help="Plan serving: a table of budgets for experts (with --model)."
        ),
        click.option(
            "--batch", type=int, default=1, help="With --serve: sequences that are continued together."
        ),
        click.option("--prompt-tokens", type=int, default=32, help="With --serve: tokens of each prompt."),
        click.option("--context", type=int, default=4096, help="With --serve: most tokens of a sequence."),
        click.option(
            "--budgets",
            default="",
            show_default=False,
            metavar="SIZE,..",
            help="With --serve: budgets (default: a range).",
        ),
        click.option(
            "--trace",
            type=FILE,
            help="With --serve: a trace of `tierstore generate --record-trace` to replay.",
        ),
        bundled(ServingAsked, "serving"),
    )


def show_serving(
    config: TrainConfig, path: Path | None, asked: ServingAsked, costs: Profile, output: Output
) -> None:
    """The plan of the imported model of ``config``, for people and for programs."""
    from tierstore.hf.spec import HfSpec
    from tierstore.plan.serving import ServedWork, plan_serving

    if not isinstance(config.model, HfSpec):
        raise ConfigError("--serve: expected an imported model (--model), got the built-in one")
    work = ServedWork(
        sequences=asked.batch, prompt_tokens=asked.prompt_tokens, context=asked.context, trace=asked.trace
    )
    made = plan_serving(
        config.model,
        work,
        costs,
        budgets=[parse_size(part, name="--budgets") for part in asked.budgets.split(",") if part],
        missed_records=_missed_records(config.store if path is None else path),
    )
    routing = "even routing (no --trace)" if asked.trace is None else f"the passes of {asked.trace}"
    rows = [
        (
            format_bytes(one.host_budget),
            f"{one.share:.0%}",
            format_bytes(made.memory(one)),
            *_pass_cells(one.prefill),
            *_pass_cells(one.decode),
            format_seconds(one.decode.seconds),
        )
        for one in made.budgets
    ]
    output.table(
        f"Serving, batch {asked.batch}, prompts of {asked.prompt_tokens} tokens, by {routing} "
        f"({made.evidence.value}: {made.machine})",
        (
            *("for experts", "of them", "memory in all", "prefill tokens/s", "missed", "read a prefill"),
            *("decode tokens/s", "missed", "read a step", "step"),
        ),
        rows,
    )
    output.line(
        f"memory beside the experts: dense {format_bytes(made.dense)}, keys and values of {asked.context} tokens of each "
        f"sequence {format_bytes(made.keys_and_values)}, the process {format_bytes(made.process)}"
    )
    if made.missed_records:
        output.line(
            f"{made.missed_records} records have missed steps: each is read whole once, replayed, and its weights kept; "
            "again when it was evicted (tierstore deploy removes them)"
        )
    output.emit(made.as_json())


def _pass_cells(made: PassPlan | None) -> tuple[str, str, str]:
    if made is None:
        return ("-", "-", "-")
    return (f"{made.tokens_per_s:.1f}", f"{made.missed / made.asked:.1%}", format_bytes(made.read_bytes))


def _missed_records(store: Path) -> int | None:
    """Of a training store at ``store``; None where there is none."""
    from tierstore.errors import StoreMissingError
    from tierstore.store.summary import read_summary
    from tierstore.train.budgets import EXPERT_SCHEMA

    try:
        return read_summary(store).missed.get(EXPERT_SCHEMA, 0)
    except (StoreMissingError, FileNotFoundError, NotADirectoryError):
        return None
