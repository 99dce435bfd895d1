"""What a stage is given and what it leaves; the files ``stage.json`` and ``deployment.json``. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tierstore.deploy.config import DeployConfig, StageName
from tierstore.errors import StoreFormatError, TierstoreError
from tierstore.hf.manifest import write_durably
from tierstore.store.disk.home import fsync_directory

RECORD_NAME = "stage.json"
RECORD_VERSION = 1
DEPLOYMENT_NAME = "deployment.json"
DEPLOYMENT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class StageRecord:
    """A stage that has ended.

    ``fingerprint``: of its settings and of the stages before it. ``store``: where the model is from here on, relative to
    the directory of all stages. ``checks``: what a later look must find again; ``figures``: what it measured.
    """

    stage: StageName
    fingerprint: str
    settings: Mapping[str, object]
    store: str
    checks: Mapping[str, object]
    figures: Mapping[str, object]
    notes: tuple[str, ...] = ()
    elapsed_s: float = 0.0
    version: int = field(default=RECORD_VERSION)

    @property
    def number(self) -> int:
        """Its place among the stages, from 1."""
        return list(StageName).index(self.stage) + 1

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    def write(self, directory: Path) -> None:
        """From here on the stage has ended."""
        write_json(directory / RECORD_NAME, self.as_json(), indent=1)

    @classmethod
    def read(cls, directory: Path) -> StageRecord | None:
        """The record in ``directory``; None where the stage has not ended. Raises StoreFormatError."""
        path = directory / RECORD_NAME
        try:
            return cls.from_json(json.loads(path.read_bytes()), where=str(path))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise StoreFormatError(f"{path}: not JSON: {error}") from error

    @classmethod
    def from_json(cls, value: Any, *, where: str) -> StageRecord:
        """Raises StoreFormatError naming ``where``."""
        try:
            if value["version"] != RECORD_VERSION:
                raise ValueError(f"version {value['version']!r}, expected {RECORD_VERSION}")
            return cls(**{**value, "stage": StageName(value["stage"]), "notes": tuple(value["notes"])})
        except (KeyError, TypeError, ValueError) as error:
            raise StoreFormatError(f"{where}: not a stage's record: {error}") from error


def write_json(path: Path, value: object, *, indent: int | None = None) -> None:
    """Writes the file and fsyncs it and its directory."""
    write_durably(path, (json.dumps(value, indent=indent) + "\n").encode())
    fsync_directory(path.parent)


def stage_directory(root: Path, stage: StageName) -> Path:
    """Where ``stage`` works, below the directory of all stages."""
    return root / f"{list(StageName).index(stage) + 1:02d}-{stage.value}"


def fingerprint(stage: StageName, settings: Mapping[str, object], before: str) -> str:
    """Of a stage that is run with ``settings`` behind what ``before`` is the fingerprint of."""
    text = json.dumps([RECORD_VERSION, stage.value, settings, before], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


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


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """How a directory came about and what was measured of it.

    ``settings``: keys of ``ServeConfig`` by dotted name, as the optimisation chose them. ``profile``: tokens/s of prefill
    and of decoding, bytes a token, memory.
    """

    settings: Mapping[str, object]
    profile: Mapping[str, object]
    stages: tuple[StageRecord, ...]

    def write(self, directory: Path) -> None:
        value = {
            "version": DEPLOYMENT_VERSION,
            "settings": dict(self.settings),
            "profile": dict(self.profile),
            "stages": [stage.as_json() for stage in self.stages],
        }
        write_json(directory / DEPLOYMENT_NAME, value, indent=1)


def read_deployment(directory: Path) -> Deployment | None:
    """What ``directory`` says; None where it was not deployed. Raises StoreFormatError."""
    path = directory / DEPLOYMENT_NAME
    try:
        value = json.loads(path.read_bytes())
        if value["version"] != DEPLOYMENT_VERSION:
            raise ValueError(f"version {value['version']!r}, expected {DEPLOYMENT_VERSION}")
        stages = tuple(StageRecord.from_json(stage, where=str(path)) for stage in value["stages"])
        return Deployment(settings=value["settings"], profile=value["profile"], stages=stages)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (KeyError, TypeError, ValueError) as error:
        raise StoreFormatError(f"{path}: not a deployment: {error}") from error
