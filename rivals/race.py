#!/usr/bin/env python3
"""Races: the same work by tierstore and by others, in turns, on one machine (rivals/README.md).

    python rivals/race.py train examples/configs/deepspeed-139m.toml --save race.json
    python rivals/race.py generate MODEL_DIR --memory 1240MiB --host-budget 512MiB

Each prints a table and, as its last line, one JSON object. Exit status 1: a rival trained something else, or tierstore chose
other tokens than transformers; 2: the race cannot be run here.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import click
import generation_race
import training_race

from tierstore.bench.documents import Document, Measurement, machine_facts, now, save_document
from tierstore.cli.options import (
    EXISTING_DIRECTORY,
    FILE,
    PATH,
    SIZE,
    config_overrides,
    help_config_option,
    options,
    output_file,
    set_option,
)
from tierstore.cli.output import Output, finite
from tierstore.config import load as load_config
from tierstore.errors import ConfigError, TierstoreError
from tierstore.outputs import OutputKind
from tierstore.train.config import TrainConfig

#: Where races keep what they need on disk without ``--store``.
WORK_DIRECTORY = Path("tierstore-race")
RESULTS = Path(__file__).parent / "results"

common_options = options(
    click.option("--timeout", type=float, default=900.0, help="Seconds within which each must answer."),
    click.option("--store", type=PATH, default=WORK_DIRECTORY, help="A directory to make, use, and remove."),
    set_option(),
    click.option(
        "--save",
        type=output_file(OutputKind.DOCUMENT),
        help="Write everything, for bench compare and report.",
    ),
    click.option("--machine", help="Save it as rivals/results/MACHINE/DATE-RACE.json."),
)


@click.group()
def race() -> None:
    """The same work by tierstore and by others, in turns."""


@race.command()
@click.argument("config", required=False, type=PATH)
@click.option(
    "--rival",
    "rivals",
    multiple=True,
    type=click.Choice([*training_race.RIVALS]),
    help="A rival that takes part; repeat the option for several (default: all).",
)
@click.option(
    "--model",
    type=click.Choice(training_race.MODELS),
    default="built-in",
    help="The built-in model, or a Mixtral of transformers of its sizes, which tierstore wraps.",
)
@click.option("--steps", type=int, default=2, help="Steps of each in a round.")
@click.option("--warmup", type=int, default=2, help="Steps of each before the first round.")
@click.option("--rounds", type=int, default=5, help="Rounds; each begins with another rival.")
@click.option("--host-budget", type=SIZE, help="Memory for experts in tierstore.")
@click.option(
    "--memory-limit",
    type=SIZE,
    default="0",
    help="Memory of each process: a cgroup, or RLIMIT_DATA without the right to make one (0: no limit).",
)
@click.option(
    "--deepspeed",
    type=FILE,
    metavar="FILE.json",
    help="Laid over DeepSpeed's configuration, key by key.",
)
@common_options
@help_config_option()
def train(
    config: Path | None,
    rivals: tuple[str, ...],
    host_budget: int | None,
    deepspeed: Path | None,
    timeout: float,
    store: Path,
    settings: tuple[str, ...],
    save: Path | None,
    machine: str | None,
    **sizes: Any,
) -> int:
    """The same training by plain torch, FSDP2, DeepSpeed ZeRO-3 and tierstore, each in its own process.

    Rivals that are not installed (pip install tierstore[rivals]), do not open or die are left out with a reason.
    """
    overrides = config_overrides(settings, {"host_budget": host_budget, "store": store})
    loaded = load_config(TrainConfig, config, overrides)
    plan = training_race.TrainingRace(
        rivals=rivals or tuple(training_race.RIVALS), timeout_s=timeout, settings=deepspeed, **sizes
    )
    return report(training_race, lambda say: plan.run(loaded, say), store, save, machine)


@race.command()
@click.argument("model", type=EXISTING_DIRECTORY, metavar="MODEL_DIR_OR_STORE")
@click.option(
    "--rivals",
    metavar="NAME,..",
    default=",".join(generation_race.RIVALS),
    show_default=True,
    help="The rivals that take part.",
)
@click.option("--imported", type=EXISTING_DIRECTORY, help="A store of MODEL_DIR that is there already.")
@click.option("--gguf", type=FILE, help="A GGUF file of the same weights (default: made, for Qwen3-MoE).")
@click.option("--memory", type=SIZE, default="1240MiB", help="Memory of each confined process (0: no limit).")
@click.option("--host-budget", type=SIZE, default="512MiB", help="Of that, tierstore's memory for experts.")
@click.option("--batch", default="1,8", show_default=True, help="Sequences of a batch, several with commas.")
@click.option("--prompt-tokens", type=int, default=32, show_default=True)
@click.option("--new-tokens", type=int, default=16, show_default=True)
@click.option("--rounds", type=int, default=3, show_default=True, help="Each begins with another rival.")
@click.option("--threads", type=int, default=0, help="Of each rival (0: one for each core).")
@click.option(
    "--read-ahead",
    type=SIZE,
    default=0,
    help="Set the disk's readahead while measuring: mapped files live by it (0: as it is).",
)
@click.option(
    "--load",
    type=float,
    default=0.0,
    help="Then open-loop load on tierstore, at this share of its capacity (0: none).",
)
@click.option("--requests", type=int, default=40, show_default=True, help="Requests of that load.")
@common_options
def generate(
    model: Path,
    rivals: str,
    imported: Path | None,
    gguf: Path | None,
    batch: str,
    timeout: float,
    store: Path,
    settings: tuple[str, ...],
    save: Path | None,
    machine: str | None,
    **sizes: Any,
) -> int:
    """Prefill and decoding by tierstore, transformers, accelerate and llama.cpp, each turn in its own process.

    Rivals that are not installed or die are left out with a reason.
    """
    if not re.fullmatch(r"\d+(,\d+)*", batch):
        raise ConfigError(f"--batch: expected whole numbers separated by commas, got {batch!r}")
    plan = generation_race.GenerationRace(
        rivals=tuple(filter(None, rivals.split(","))),
        batches=tuple(map(int, batch.split(","))),
        timeout_s=timeout,
        settings=config_overrides(settings, {}),
        **sizes,
    )
    raced = generation_race.RacedModel(model, store=imported, gguf=gguf)
    return report(generation_race, lambda say: plan.run(raced, store, say), store, save, machine)


def report(
    kind: Any,
    run: Callable[[Callable[[str], None]], dict[str, Any]],
    store: Path,
    save: Path | None,
    machine: str | None,
) -> int:
    """Runs a race, prints what it found, and saves it; the exit status. ``kind``: the race's module."""
    output, started = Output.for_option(False), now()
    found = run(output.line)
    kind.show(found, output)
    context = click.get_current_context()
    given = {name: value for name, value in context.params.items() if value not in (None, ())}
    for path in (save, machine and RESULTS / machine / f"{date.today()}-{context.info_name}.json"):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_document(_document(found, kind.measurements(found), given, store, started), path)
            output.line(f"saved as {path}")
    print(json.dumps(finite(found), allow_nan=False), flush=True)
    return 0 if kind.agreed(found) else 1


def _document(
    found: Mapping[str, Any],
    measurements: Iterable[Measurement],
    given: Mapping[str, Any],
    store: Path,
    started: str,
) -> Document:
    return Document(
        bench=found["bench"],
        options={
            name: value if type(value) in (int, float) else " ".join(map(str, value))
            if isinstance(value, tuple) else str(value)
            for name, value in given.items()
            if name not in ("save", "machine")
        },
        machine=machine_facts(store),
        started=started,
        ended=now(),
        measurements=tuple(measurements),
        figures=finite(found),
    )  # fmt: skip


if __name__ == "__main__":
    try:
        sys.exit(race(standalone_mode=False))
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (TierstoreError, OSError) as error:
        print(f"race.py: error: {error}", file=sys.stderr)
        sys.exit(2)
