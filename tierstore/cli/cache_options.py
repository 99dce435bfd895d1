"""Options that the cache commands share, and what they stand for in the lab."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from tierstore.cli.options import FRACTION, SIZE
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from tierstore.lab.costs import Machine
    from tierstore.lab.requests import Requests
    from tierstore.lab.simulate import PolicySpec

__all__ = [
    "TRACE",
    "capacity_option",
    "html_option",
    "machine_options",
    "policy_option",
    "replay_options",
    "specs_of",
]

F = TypeVar("F", bound=Callable[..., Any])

TRACE = click.Path(exists=True, dir_okay=False, path_type=Path)


def policy_option(default: str) -> Callable[[F], F]:
    """``--policy``, any number of times: the argument ``policies``."""
    return click.option(
        "--policy",
        "policies",
        multiple=True,
        metavar="NAME[:OPTION=VALUE,..]",
        help=f"A policy or bound, any number of times; default: {default}. Or 'all'.",
    )


def capacity_option(*, multiple: bool) -> Callable[[F], F]:
    """``--capacity``: a size, or a fraction of the footprint."""
    return click.option(
        "--capacity",
        "capacities" if multiple else "capacity",
        type=FRACTION,
        multiple=multiple,
        default=("0.5",) if multiple else "0.5",
        show_default=True,
        help="Size of the cache: 512MiB, or a fraction of what the trace asks for.",
    )


def html_option(command: F) -> F:
    """``--html FILE``: a report for a browser."""
    return click.option(
        "--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a report for a browser."
    )(command)


def _chained(like: F, command: Callable[..., Any], *options: Callable[[Any], Any]) -> F:
    """As if ``options`` stood above ``command`` in this order; typed as ``like``, which it stands for."""
    return cast(F, reduce(lambda inner, option: option(inner), reversed(options), command))


def replay_options(command: F) -> F:
    """``--scope``, ``--contract``, ``--warmup``, ``--threads``: the argument ``replay``, a mapping."""

    @wraps(command)
    def gather(*args: Any, scope: str, contract: str, warmup: int, threads: int, **rest: Any) -> Any:
        from tierstore.lab.simulate import Contract, Scope

        replay = {
            "scope": Scope(scope),
            "contract": Contract(contract),
            "warmup_steps": warmup,
            "threads": threads,
        }
        return command(*args, replay=replay, **rest)

    return _chained(
        command,
        gather,
        click.option(
            "--scope",
            type=click.Choice(["global", "layer"]),
            default="global",
            show_default=True,
            help="One cache, or an equal quota for each layer.",
        ),
        contract_option,
        click.option(
            "--warmup", type=click.IntRange(min=0), default=0, help="Steps that fill the cache uncounted."
        ),
        threads_option,
    )


def contract_option(command: F) -> F:
    """``--contract``."""
    return click.option(
        "--contract",
        type=click.Choice(["event-atomic", "sequential"]),
        default="event-atomic",
        show_default=True,
        help="Whether what a layer asks for at once is one set.",
    )(command)


def threads_option(command: F) -> F:
    """``--threads``."""
    return click.option(
        "--threads", type=click.IntRange(min=0), default=0, help="Replays at a time (0: one for each core)."
    )(command)


def machine_options(command: F) -> F:
    """What estimates rest on: the argument ``machine``, a function that makes a Machine (or raises)."""

    @wraps(command)
    def gather(
        *args: Any,
        read: int,
        write: int,
        mixed: int | None,
        compute: float,
        overlap: str,
        endurance: int,
        drive: int,
        steps_per_s: float | None,
        **rest: Any,
    ) -> Any:
        return command(
            *args,
            machine=_machine(
                {
                    "read_bytes_per_s": float(read),
                    "write_bytes_per_s": float(write),
                    "mixed_bytes_per_s": None if mixed is None else float(mixed),
                    "compute_s_per_step": compute,
                    "endurance_bytes": float(endurance),
                    "drive_bytes": float(drive),
                    "steps_per_s": steps_per_s,
                },
                overlap,
            ),
            **rest,
        )

    return _chained(
        command,
        gather,
        click.option("--read", type=SIZE, default="3GB", show_default=True, help="Read bandwidth, a second."),
        click.option(
            "--write", type=SIZE, default="2GB", show_default=True, help="Write bandwidth, a second."
        ),
        click.option("--mixed", type=SIZE, help="Bandwidth of reads and writes mixed, a second."),
        click.option(
            "--compute", type=float, default=0.0, show_default=True, help="Computation of a step, seconds."
        ),
        click.option(
            "--overlap",
            type=click.Choice(["lookahead", "serial"]),
            default="lookahead",
            show_default=True,
            help="Whether a pass is fetched while the one before it computes.",
        ),
        click.option(
            "--endurance",
            type=SIZE,
            default="600TB",
            show_default=True,
            help="Bytes the drive may be written.",
        ),
        click.option("--drive", type=SIZE, default="1TB", show_default=True, help="Size of the drive."),
        click.option("--steps-per-s", type=float, help="Speed (default: from computation and stalls)."),
    )


def _machine(values: Mapping[str, Any], overlap: str) -> Machine:
    from tierstore.lab.costs import Machine, Overlap

    try:
        return Machine(overlap=Overlap(overlap), **values)
    except ConfigError as error:
        raise ConfigError(_as_typed(str(error))) from error


_TYPED = {
    "read_bytes_per_s": "--read",
    "write_bytes_per_s": "--write",
    "mixed_bytes_per_s": "--mixed",
    "compute_s_per_step": "--compute",
    "endurance_bytes": "--endurance",
    "drive_bytes": "--drive",
    "steps_per_s": "--steps-per-s",
}


def _as_typed(message: str) -> str:
    name, colon, rest = message.partition(":")
    return f"{_TYPED.get(name, name)}{colon}{rest}"


def specs_of(requests: Requests, policies: tuple[str, ...], default: tuple[str, ...]) -> list[PolicySpec]:
    """The policies asked for, without repetition. Raises ConfigError naming ``--policy``."""
    from tierstore.lab.curves import all_policies
    from tierstore.lab.simulate import PolicySpec

    found: list[PolicySpec] = []
    for text in policies or default:
        try:
            found += all_policies(requests) if text == "all" else [PolicySpec.parse(text)]
        except ConfigError as error:
            raise ConfigError(f"--policy: {error}") from error
    return [spec for index, spec in enumerate(found) if spec not in found[:index]]
