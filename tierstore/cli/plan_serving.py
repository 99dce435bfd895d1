"""``tierstore plan --serve``: tokens a second of a served model, by the memory that its experts get."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tierstore.cli.models import deployed_settings
from tierstore.cli.options import FILE, F, bundled, options
from tierstore.cli.output import Output
from tierstore.config import load
from tierstore.errors import ConfigError
from tierstore.units import format_bytes, format_seconds, parse_size

if TYPE_CHECKING:
    from tierstore.hf.spec import HfSpec
    from tierstore.machine_profile import Profile
    from tierstore.serve.planning import PassPlan
    from tierstore.tiers.slots import DeviceKind
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
        click.option(
            "--context",
            type=int,
            default=0,
            show_default=False,
            help="With --serve: most tokens of a sequence (default: 4096, or the model's limit).",
        ),
        click.option(
            "--budgets",
            default="",
            show_default=False,
            metavar="SIZE,..",
            help="With --serve: budgets (default: --host-budget, or a range).",
        ),
        click.option(
            "--trace",
            type=FILE,
            help="With --serve: a trace of `tierstore generate --record-trace` to replay.",
        ),
        bundled(ServingAsked, "serving"),
    )


def server_settings(overrides: Mapping[str, object]) -> dict[str, object]:
    """Those of ``overrides`` that are keys of ``ServeConfig``."""
    from tierstore.serve.config import ServeConfig

    names = {one.name for one in fields(ServeConfig)}
    return {key: value for key, value in overrides.items() if key.partition(".")[0] in names}


def show_serving(
    config: TrainConfig,
    path: Path | None,
    asked: ServingAsked,
    costs: Profile,
    output: Output,
    *,
    overrides: Mapping[str, object],
    device: DeviceKind,
) -> None:
    """The plan of the imported model of ``config``, for people and for programs. ``overrides``: keys of ``ServeConfig``; the
    others are as ``tierstore deploy`` left them.
    """
    from tierstore.hf.spec import HfSpec
    from tierstore.serve.config import ServeConfig
    from tierstore.serve.planning import ServedWork, plan_serving

    if not isinstance(config.model, HfSpec):
        raise ConfigError("--serve: expected an imported model (--model), got the built-in one")
    work = ServedWork(
        sequences=asked.batch, prompt_tokens=asked.prompt_tokens, context=asked.context, trace=asked.trace
    )
    store = config.store if path is None else path
    spec, records = _stored(store) or (config.model, {})
    served = load(ServeConfig, None, {**deployed_settings(store), **overrides})
    budgets = [parse_size(part, name="--budgets") for part in asked.budgets.split(",") if part]
    if not budgets and "host_budget" in overrides:
        budgets = [served.host_budget]
    made = plan_serving(spec, work, costs, budgets=budgets, config=served, device=device, **records)
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
        f"memory beside the experts: dense {format_bytes(made.dense)}, keys and values of {made.context} tokens of each "
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
    missed = made.missed / made.asked if made.asked else 0.0  # all layers of a ring are on the device
    return (f"{made.tokens_per_s:.1f}", f"{missed:.1%}", format_bytes(made.read_bytes))


def _stored(store: Path) -> tuple[HfSpec, dict[str, Any]] | None:
    """The model in ``store`` as a server opens it, and what ``plan_serving`` takes of its records; None without a store."""
    from tierstore.errors import StoreMissingError
    from tierstore.hf.spec import HfSpec
    from tierstore.serve.opening import read_stored

    try:
        stored = read_stored(store)
    except (StoreMissingError, FileNotFoundError, NotADirectoryError):
        return None
    assert isinstance(stored.spec, HfSpec)
    names = ("experts", "pairs", "scratch", "missed_records")
    return stored.spec, {name: getattr(stored, name) for name in names}
