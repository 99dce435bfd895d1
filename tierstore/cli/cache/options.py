"""Options of the cache commands: dataclasses that make the lab's objects, and a few single options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tierstore.cli.options import FRACTION, F, output_file
from tierstore.config import option
from tierstore.errors import ConfigError
from tierstore.outputs import OutputKind

if TYPE_CHECKING:
    from tierstore.lab.costs import Machine
    from tierstore.lab.requests import Requests
    from tierstore.lab.simulate import PolicySpec
    from tierstore.lab.tuning import TuneOptions


@dataclass(frozen=True, kw_only=True)
class ContractOptions:
    """How a trace is replayed."""

    contract: str = option(
        "event-atomic",
        "Replay a layer pass's requests as one set, or one by one.",
        choices=("event-atomic", "sequential"),
    )
    threads: int = option(0, "Concurrent replays (0: one per core).", least=0)

    def arguments(self) -> dict[str, Any]:
        """The options as keyword arguments of the lab's functions."""
        from tierstore.lab.simulate import Contract

        return {"contract": Contract(self.contract), "threads": self.threads}


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(ContractOptions):
    """How a trace is replayed with a given scope of the cache."""

    scope: str = option(
        "global", "One cache for all layers, or an equal quota for each layer.", choices=("global", "layer")
    )
    warmup: int = option(0, "Initial steps not counted.", least=0)

    def arguments(self) -> dict[str, Any]:
        from tierstore.cache.config import Scope

        return {**super().arguments(), "scope": Scope(self.scope), "warmup_steps": self.warmup}


@dataclass(frozen=True, kw_only=True)
class SearchOptions(ContractOptions):
    """The search space and objective of the tuner."""

    policies: tuple[str, ...] = option(
        (), "Policy to try, repeatable (default: all that train runs).", "--policy", click={"metavar": "NAME"}
    )
    scope: str = option(
        "both",
        "One cache for all layers, a quota for each, or the better.",
        choices=("global", "layer", "both"),
    )
    objective: str = option(
        "misses",
        "Cost to minimise; bytes are read and written.",
        choices=("misses", "bytes", "stall"),
    )
    prefix: float = option(0.5, "Fraction of the steps to tune on.")
    confidence: float = option(0.95, "Confidence level of the gain's interval.")
    seed: int = option(0, "Seed of the bootstrap.", least=0)

    def search(self) -> TuneOptions:
        """The tuner's options. Raises ConfigError that names the option."""
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
                raise ConfigError(f"--policy: expected a policy's name without options, got {name!r}")
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
    """The machine that estimates assume: the fields of ``tierstore.lab.Machine``."""

    profile: Path | None = option(None, "Profile of `bench machine` (default: plan's assumed costs).")
    run: Path | None = option(None, "Configuration of a run, whose computation plan predicts.")
    read_bytes_per_s: int | None = option(
        None, "Read bandwidth, bytes/s (default: the profile's).", "--read", size=True
    )
    write_bytes_per_s: int | None = option(
        None, "Write bandwidth, bytes/s (default: the profile's).", "--write", size=True
    )
    mixed_bytes_per_s: int | None = option(
        None, "Bandwidth of mixed reads and writes, bytes/s.", "--mixed", size=True
    )
    compute_s_per_step: float | None = option(
        None, "Seconds of computation per step (default: from --run, or 0).", "--compute"
    )
    overlap: str = option(
        "lookahead",
        "Fetch for a pass during the previous one, or when it starts.",
        choices=("lookahead", "serial"),
    )
    endurance_bytes: int | None = option(
        None, "Bytes that the drive can take (default: 600TB, assumed).", "--endurance", size=True
    )
    drive_bytes: int | None = option(None, "Size of the drive (default: 1TB, assumed).", "--drive", size=True)
    steps_per_s: float | None = option(None, "Steps per second (default: from computation and stalls).")

    def machine(self) -> Machine:
        """The machine. Raises ConfigError that names the option, BudgetError for an impossible run."""
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
    """``--policy``, repeatable; the command gets the argument ``policies``."""
    return click.option(
        "--policy",
        "policies",
        multiple=True,
        metavar="NAME[:OPTION=VALUE,..]",
        help=f"Policy, all, or a bound: belady, belady-bypass, unbounded; repeat for several (default: {default}).",
    )


def capacity_option(*, multiple: bool) -> Callable[[F], F]:
    """``--capacity``: a size, or a fraction of the trace's footprint."""
    return click.option(
        "--capacity",
        "capacities" if multiple else "capacity",
        type=FRACTION,
        multiple=multiple,
        default=("0.5",) if multiple else "0.5",
        help="Cache size, such as 512MiB, or a fraction of the trace's entries.",
    )


html_option = click.option("--html", type=output_file(OutputKind.PAGE), help="Write an HTML report.")
#: The command gets the argument ``pins``.
pin_option = click.option(
    "--pin",
    "pins",
    multiple=True,
    metavar="LAYER:EXPERT,..",
    help="Records to pin once loaded, by layer and index in it; repeat for several.",
)


def specs_of(requests: Requests, policies: tuple[str, ...], default: tuple[str, ...]) -> list[PolicySpec]:
    """The policies of ``--policy``, without duplicates. Raises ConfigError that names the option."""
    from tierstore.lab.miss_curves import all_policies
    from tierstore.lab.simulate import PolicySpec

    found: list[PolicySpec] = []
    for text in policies or default:
        try:
            found += all_policies(requests) if text == "all" else [PolicySpec.parse(text)]
        except ConfigError as error:
            raise ConfigError(f"--policy: {error}") from error
    return [spec for index, spec in enumerate(found) if spec not in found[:index]]
