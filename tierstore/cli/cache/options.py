"""Options of the cache commands: dataclasses that become objects of the lab, and the few that stand alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tierstore.cli.options import FRACTION, F, option, output_file
from tierstore.errors import ConfigError
from tierstore.outputs import OutputKind

if TYPE_CHECKING:
    from tierstore.lab.costs import Machine
    from tierstore.lab.requests import Requests
    from tierstore.lab.simulate import PolicySpec
    from tierstore.lab.tuning import TuneOptions


@dataclass(frozen=True, kw_only=True)
class ContractOptions:
    """How traces are replayed."""

    contract: str = option(
        "event-atomic",
        help="Whether the requests of one layer pass are one set.",
        type=click.Choice(["event-atomic", "sequential"]),
    )
    threads: int = option(0, help="Replays at a time (0: one for each core).", type=click.IntRange(min=0))

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of functions of the lab."""
        from tierstore.lab.simulate import Contract

        return {"contract": Contract(self.contract), "threads": self.threads}


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(ContractOptions):
    """How a trace is replayed where a cache's scope is given."""

    scope: str = option(
        "global",
        help="One cache, or an equal quota for each layer.",
        type=click.Choice(["global", "layer"]),
    )
    warmup: int = option(0, help="Steps that fill the cache uncounted.", type=click.IntRange(min=0))

    def arguments(self) -> dict[str, Any]:
        from tierstore.cache.config import Scope

        return {**super().arguments(), "scope": Scope(self.scope), "warmup_steps": self.warmup}


@dataclass(frozen=True, kw_only=True)
class SearchOptions(ContractOptions):
    """What a tuner searches."""

    policies: tuple[str, ...] = option(
        (), "--policy", metavar="NAME", help="What to try; default: what train runs."
    )
    scope: str = option(
        "both",
        help="One cache, a quota for each layer, or whichever is better.",
        type=click.Choice(["global", "layer", "both"]),
    )
    objective: str = option(
        "misses",
        help="What is to be small: misses, bytes read and written, or stalled time.",
        type=click.Choice(["misses", "bytes", "stall"]),
    )
    prefix: float = option(0.5, help="Part of the steps to tune on.")
    confidence: float = option(0.95, help="Of the interval of the gain.")
    seed: int = option(0, help="Of the bootstrap.", type=click.IntRange(min=0))

    def search(self) -> TuneOptions:
        """Raises ConfigError naming the option."""
        from tierstore.cache.config import Scope
        from tierstore.lab.costs import Objective
        from tierstore.lab.simulate import PolicySpec, known_policies
        from tierstore.lab.tuning import TuneOptions

        known = known_policies(bounds=False)
        for name in self.policies:
            if ":" not in name and name not in known:
                raise ConfigError(f"--policy: expected one of {', '.join(known)}, got {name!r}")
            try:
                spec = PolicySpec.parse(name)
            except ConfigError as error:
                raise ConfigError(f"--policy: {error}") from error
            if spec.options:
                raise ConfigError(f"--policy: expected the name of a policy, without options, got {name!r}")
        try:
            return TuneOptions(
                **self.arguments(),
                policies=self.policies,
                scopes=tuple(Scope) if self.scope == "both" else (Scope(self.scope),),
                objective=Objective(self.objective),
                prefix=self.prefix,
                confidence=self.confidence,
                seed=self.seed,
            )
        except ConfigError as error:  # --prefix or --confidence
            raise ConfigError(f"--{error}") from error


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """What estimates rest on: the fields of ``tierstore.lab.Machine``."""

    profile: Path | None = option(
        None, help="Costs measured by `tierstore bench machine` (default: plan's assumed ones)."
    )
    run: Path | None = option(
        None, help="Configuration of the run, whose computation of a step plan predicts."
    )
    read_bytes_per_s: int | None = option(
        None, "--read", size=True, help="Read bandwidth, a second (default: the profile's)."
    )
    write_bytes_per_s: int | None = option(
        None, "--write", size=True, help="Write bandwidth, a second (default: the profile's)."
    )
    mixed_bytes_per_s: int | None = option(
        None, "--mixed", size=True, help="Bandwidth of reads and writes mixed, a second."
    )
    compute_s_per_step: float | None = option(
        None, "--compute", help="Computation of a step, seconds (default: that of --run, or 0)."
    )
    overlap: str = option(
        "lookahead",
        help="Whether a pass is fetched while the one before it computes.",
        type=click.Choice(["lookahead", "serial"]),
    )
    endurance_bytes: int | None = option(
        None, "--endurance", size=True, help="Bytes the drive may be written (assumed, if not given: 600TB)."
    )
    drive_bytes: int | None = option(
        None, "--drive", size=True, help="Size of the drive (assumed, if not given: 1TB)."
    )
    steps_per_s: float | None = option(None, help="Speed (default: from computation and stalls).")

    def machine(self) -> Machine:
        """Raises ConfigError naming the option; BudgetError for a run that cannot be."""
        from tierstore.config import load
        from tierstore.lab.costs import Machine, Overlap
        from tierstore.machine_profile import ASSUMED, load_profile
        from tierstore.train.config import TrainConfig

        figures = {
            name: None if value is None else float(value)
            for name, value in vars(self).items()
            if name not in ("profile", "run", "overlap")
        }
        try:
            return Machine(
                profile=ASSUMED if self.profile is None else load_profile(self.profile),
                run=None if self.run is None else load(TrainConfig, self.run),
                overlap=Overlap(self.overlap),
                **figures,
            )
        except ConfigError as error:
            field, colon, rest = str(error).partition(":")
            options = {one.name: one.metadata["names"] for one in fields(self)}
            typed = next(
                iter(options.get(field, ())), f"--{field.replace('_', '-')}" if field in options else field
            )
            raise ConfigError(f"{typed}{colon}{rest}") from error


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
        help="Size of the cache: 512MiB, or a fraction of all entries of the trace.",
    )


def html_option(command: F) -> F:
    """``--html FILE``: a report for a browser."""
    return click.option("--html", type=output_file(OutputKind.PAGE), help="Write a report for a browser.")(
        command
    )


def pin_option(command: F) -> F:
    """``--pin``, any number of times: the argument ``pins``."""
    return click.option(
        "--pin",
        "pins",
        multiple=True,
        metavar="LAYER:EXPERT,..",
        help="Records that stay once they have come, by layer and index in it; any number of times.",
    )(command)


def specs_of(requests: Requests, policies: tuple[str, ...], default: tuple[str, ...]) -> list[PolicySpec]:
    """The policies of ``--policy``, without repetition. Raises ConfigError naming the option."""
    from tierstore.lab.miss_curves import all_policies
    from tierstore.lab.simulate import PolicySpec

    found: list[PolicySpec] = []
    for text in policies or default:
        try:
            found += all_policies(requests) if text == "all" else [PolicySpec.parse(text)]
        except ConfigError as error:
            raise ConfigError(f"--policy: {error}") from error
    return [spec for index, spec in enumerate(found) if spec not in found[:index]]
