#!/usr/bin/env python3
"""Races: the same work by tierstore and by others, in turns, on one machine (rivals/README.md).

python rivals/race.py train examples/configs/deepspeed-139m.toml --save race.json
python rivals/race.py generate MODEL_DIR --memory 1240MiB --host-budget 512MiB
"""

from __future__ import annotations

import sys

import click
from generation_race import GenerationRace
from training_race import TrainingRace

from tierstore.cli.bench import benchmark_command
from tierstore.cli.main import disable_thread_cache
from tierstore.errors import TierstoreError


@click.group()
def race() -> None:
    """The same work by tierstore and by others, in turns."""


race.add_command(benchmark_command("train", TrainingRace))
race.add_command(benchmark_command("generate", GenerationRace))


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:  # every rival runs as tierstore train does; generation keeps the cache
        disable_thread_cache()
    try:
        sys.exit(race(standalone_mode=False))
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (TierstoreError, OSError) as error:
        print(f"race.py: error: {error}", file=sys.stderr)
        sys.exit(2)
