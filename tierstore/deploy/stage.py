"""What a stage is, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tierstore.deploy.config import DeployConfig, StageName
from tierstore.deploy.records import StageRecord, stage_directory
from tierstore.errors import TierstoreError


class DeployInterrupted(TierstoreError):
    """A deployment was asked to stop, and has. The same command goes on."""


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """What a stage works with. ``root``: the directory of all stages. ``before``: those that have ended, in order.

    ``say`` prints a line for people; ``asked_to_stop`` is asked between two durable points.
    """

    config: DeployConfig
    root: Path
    stage: StageName
    before: tuple[StageRecord, ...]
    say: Callable[[str], None]
    asked_to_stop: Callable[[], bool]

    @property
    def directory(self) -> Path:
        """This stage's own; it exists."""
        return stage_directory(self.root, self.stage)

    @property
    def input_store(self) -> Path:
        """The store that the stage before has left."""
        return self.root / self.before[-1].store if self.before else self.config.store

    def relative(self, path: Path) -> str:
        """``path`` as a record names it."""
        return str(path.relative_to(self.root))

    def check(self) -> None:
        """Raises DeployInterrupted where a signal has asked for it."""
        if self.asked_to_stop():
            raise DeployInterrupted(
                f"stopped in stage {self.stage.value}; the same command goes on from here"
            )


@dataclass(frozen=True, kw_only=True)
class StageOutput:
    """What a stage has made: see ``StageRecord``."""

    store: Path
    checks: Mapping[str, object] = field(default_factory=dict)
    figures: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class DeployStage(Protocol):
    """One of the six. Its directory is its own: what a run before left there, it goes on from."""

    @property
    def name(self) -> StageName: ...

    def settings(self, config: DeployConfig) -> Mapping[str, object]:
        """What of ``config`` it depends on, as JSON has it: other settings make another output."""
        ...

    def run(self, context: StageContext) -> StageOutput:
        """Does the work, or the rest of it. Raises DeployInterrupted at a durable point, TierstoreError, OSError."""
        ...

    def verify(self, root: Path, record: StageRecord) -> None:
        """Finds what the record says. Raises StoreError naming what is not so."""
        ...
