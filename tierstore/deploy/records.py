"""``stage.json``: what a stage was made of, what it found, and what the next one must find. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tierstore.deploy.config import StageName
from tierstore.errors import StoreFormatError
from tierstore.hf.manifest import write_durably
from tierstore.store.disk.home import fsync_directory

RECORD_NAME = "stage.json"
RECORD_VERSION = 1


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
        """Durably: from here on the stage has ended."""
        write_durably(directory / RECORD_NAME, (json.dumps(self.as_json(), indent=1) + "\n").encode())
        fsync_directory(directory)

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


def stage_directory(root: Path, stage: StageName) -> Path:
    """Where ``stage`` works, below the directory of all stages."""
    return root / f"{list(StageName).index(stage) + 1:02d}-{stage.value}"


def fingerprint(stage: StageName, settings: Mapping[str, object], before: str) -> str:
    """Of a stage that is run with ``settings`` behind what ``before`` is the fingerprint of."""
    text = json.dumps([RECORD_VERSION, stage.value, settings, before], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
