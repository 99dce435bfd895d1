"""Options that the cache commands share, and what they stand for in the lab."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tierstore.cli.options import FRACTION, PATH, SIZE, F, options, output_file
from tierstore.errors import ConfigError
from tierstore.outputs import OutputKind

if TYPE_CHECKING:
    from tierstore.lab.costs import Machine
    from tierstore.lab.requests import Requests
    from tierstore.lab.simulate import PolicySpec


def policy_option(default: str) -> Callable[[F], F]:
    """``--policy``, any number of times: the argument ``policies``."""
    return click.option(
        "--policy",
        "policies",
        multiple=True,
        metavar="NAME[:OPTION=VALUE,..]",
        help=f"A policy (or belady, belady-bypass, unbounded), any number of times; default: {default}. Or 'all'.",
    )


def capacity_option(*, multiple: bool) -> Callable[[F], F]:
    """``--capacity``: a size, or a fraction of the footprint."""
    return click.option(
        "--capacity",
        "capacities" if multiple else "capacity",
        type=FRACTION,
        multiple=multiple,
        default=("0.5",) if multiple else "0.5",
        help="Size of the cache: 512MiB, or a fraction of what the trace asks for.",
    )


def html_option(command: F) -> F:
    """``--html FILE``: a report for a browser."""
    return click.option("--html", type=output_file(OutputKind.PAGE), help="Write a report for a browser.")(
        command
    )


def replay_options(command: F) -> F:
    """``--scope``, ``--contract``, ``--warmup``, ``--threads``: the argument ``replay``, a mapping."""

    @wraps(command)
    def gather(*args: Any, scope: str, contract: str, warmup: int, threads: int, **rest: Any) -> Any:
        from tierstore.cache.config import Scope
        from tierstore.lab.simulate import Contract

        replay = {
            "scope": Scope(scope),
            "contract": Contract(contract),
            "warmup_steps": warmup,
            "threads": threads,
        }
        return command(*args, replay=replay, **rest)

    return options(
        click.option(
            "--scope",
            type=click.Choice(["global", "layer"]),
            default="global",
            help="One cache, or an equal quota for each layer.",
        ),
        contract_option,
        click.option(
            "--warmup", type=click.IntRange(min=0), default=0, help="Steps that fill the cache uncounted."
        ),
        threads_option,
    )(gather)  # type: ignore[return-value]


def pin_option(command: F) -> F:
    """``--pin``, any number of times: the argument ``pins``."""
    return click.option(
        "--pin",
        "pins",
        multiple=True,
        metavar="LAYER:EXPERT,..",
        help="Records that stay once they have come, by layer and place in it; any number of times.",
    )(command)


def contract_option(command: F) -> F:
    """``--contract``."""
    return click.option(
        "--contract",
        type=click.Choice(["event-atomic", "sequential"]),
        default="event-atomic",
        help="Whether what a layer asks for at once is one set.",
    )(command)


def threads_option(command: F) -> F:
    """``--threads``."""
    return click.option(
        "--threads", type=click.IntRange(min=0), default=0, help="Replays at a time (0: one for each core)."
    )(command)


def machine_options(command: F) -> F:
    """What estimates rest on: the argument ``machine``, a Machine."""

    @wraps(command)
    def gather(*args: Any, profile: Path | None, run: Path | None, overlap: str, **rest: Any) -> Any:
        from tierstore.lab.costs import Machine

        names = [field.name for field in fields(Machine) if field.name in rest]
        given = {name: rest.pop(name) for name in names}
        return command(*args, machine=_machine(profile, run, overlap, given), **rest)

    return options(
        click.option(
            "--profile",
            type=PATH,
            help="Costs measured by `tierstore bench machine` (default: plan's assumed ones).",
        ),
        click.option(
            "--run", type=PATH, help="Configuration of the run, whose computation of a step plan predicts."
        ),
        click.option(
            "--read", "read_bytes_per_s", type=SIZE, help="Read bandwidth, a second (default: the profile's)."
        ),
        click.option(
            "--write",
            "write_bytes_per_s",
            type=SIZE,
            help="Write bandwidth, a second (default: the profile's).",
        ),
        click.option(
            "--mixed", "mixed_bytes_per_s", type=SIZE, help="Bandwidth of reads and writes mixed, a second."
        ),
        click.option(
            "--compute",
            "compute_s_per_step",
            type=float,
            help="Computation of a step, seconds (default: that of --run, or 0).",
        ),
        click.option(
            "--overlap",
            type=click.Choice(["lookahead", "serial"]),
            default="lookahead",
            help="Whether a pass is fetched while the one before it computes.",
        ),
        click.option(
            "--endurance",
            "endurance_bytes",
            type=SIZE,
            help="Bytes the drive may be written (assumed, if not given: 600TB).",
        ),
        click.option(
            "--drive", "drive_bytes", type=SIZE, help="Size of the drive (assumed, if not given: 1TB)."
        ),
        click.option("--steps-per-s", type=float, help="Speed (default: from computation and stalls)."),
    )(gather)  # type: ignore[return-value]


def _machine(profile: Path | None, run: Path | None, overlap: str, given: Mapping[str, Any]) -> Machine:
    from tierstore.config import load
    from tierstore.lab.costs import Machine, Overlap
    from tierstore.machine_profile import ASSUMED, load_profile
    from tierstore.train.config import TrainConfig

    values = {name: None if value is None else float(value) for name, value in given.items()}
    try:
        return Machine(
            profile=ASSUMED if profile is None else load_profile(profile),
            run=None if run is None else load(TrainConfig, run),
            overlap=Overlap(overlap),
            **values,
        )
    except ConfigError as error:
        raise ConfigError(_as_typed(str(error))) from error


def _as_typed(message: str) -> str:
    """``message``, which names a field of a Machine, by the option of that field."""
    name, colon, rest = message.partition(":")
    typed = {param.name: param.opts[0] for param in click.get_current_context().command.params}
    return f"{typed.get(name, name)}{colon}{rest}"


def specs_of(requests: Requests, policies: tuple[str, ...], default: tuple[str, ...]) -> list[PolicySpec]:
    """The policies asked for, without repetition. Raises ConfigError naming ``--policy``."""
    from tierstore.lab.miss_curves import all_policies
    from tierstore.lab.simulate import PolicySpec

    found: list[PolicySpec] = []
    for text in policies or default:
        try:
            found += all_policies(requests) if text == "all" else [PolicySpec.parse(text)]
        except ConfigError as error:
            raise ConfigError(f"--policy: {error}") from error
    return [spec for index, spec in enumerate(found) if spec not in found[:index]]
