"""``tierstore bench guesses``: what each predictor guesses of a store's model, and what that costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierstore.cli.bench.results import Reporting, results_options
from tierstore.cli.models import with_stored_model
from tierstore.cli.options import (
    EXISTING_DIRECTORY,
    PATH,
    SIZE,
    config_overrides,
    help_config_option,
    set_option,
)
from tierstore.cli.output import Output
from tierstore.config import load
from tierstore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tierstore.bench.guesses import GuessResult

_PREDICTORS = ("none", "history", "router", "all")


@click.command()
@click.argument("config", required=False, type=PATH)
@click.option(
    "--store", type=EXISTING_DIRECTORY, required=True, help="Of tierstore train or import; stays as it is."
)
@click.option("--steps", type=int, default=8, help="Steps that count.")
@click.option("--warmup", type=int, default=3, help="Steps before them.")
@click.option("--prompt", type=int, default=16, help="Tokens of the prompt.")
@click.option("--tokens", type=int, default=32, help="Tokens to generate (0: none).")
@click.option(
    "--predictor",
    "predictors",
    type=click.Choice(_PREDICTORS),
    multiple=True,
    default=_PREDICTORS[:3],
    help="One of those to compare; repeatable.",
)
@click.option("--host-budget", type=SIZE, help="Memory for experts.")
@set_option()
@results_options()
@help_config_option()
def guesses(
    config: Path | None,
    store: Path,
    steps: int,
    warmup: int,
    prompt: int,
    tokens: int,
    predictors: tuple[str, ...],
    host_budget: int | None,
    settings: tuple[str, ...],
    reporting: Reporting,
) -> None:
    """Recall, precision, and bytes of what predictors guess, in training steps and in generated text.

    The model and its routers are those of a store that was trained; the configuration is that of its run.
    """
    from tierstore.bench.guesses import GuessBench, measurements, run
    from tierstore.prefetch.predictor import PredictorName
    from tierstore.train.config import TrainConfig

    overrides = config_overrides(settings, {"host_budget": host_budget, "store": store})
    loaded = with_stored_model(load(TrainConfig, config, overrides))
    asked = GuessBench(
        predictors=tuple(PredictorName(name) for name in predictors),
        warmup=warmup,
        steps=steps,
        prompt=prompt,
        tokens=tokens,
    )
    session = reporting.begin(directory=store)
    result = run(loaded, asked, session.output.line)
    _show(result, session.output)
    session.end(result, measurements(result))


def _show(result: GuessResult, output: Output) -> None:
    parts = (
        (f"training, {result.steps} steps of {result.step_tokens_count} tokens", "training"),
        (f"decoding, {result.generated_tokens_count} tokens", "decoding"),
    )
    for title, name in parts:
        found = [(one.predictor.value, getattr(one, name)) for one in result.predictors]
        rows = [
            (
                predictor,
                f"{one.recall:.3f}",
                f"{one.precision:.3f}",
                f"{one.misses_count}",
                format_bytes(one.read_bytes),
                format_bytes(one.speculative_read_bytes),
                format_bytes(one.wasted_read_bytes),
                format_bytes(one.forward_demanded_bytes),
                format_seconds(one.forward_stall_s),
            )
            for predictor, one in found
            if one is not None
        ]
        if rows:
            output.table(
                f"{title}; {result.layers_count} layers of {result.experts} experts, top-{result.top_k_count}, host budget "
                f"{format_bytes(result.host_budget_bytes)}",
                (
                    "predictor",
                    "recall",
                    "precision",
                    "misses",
                    "read",
                    "speculatively",
                    "wasted",
                    "demanded in forward passes",
                    "forward stalls",
                ),
                rows,
            )
