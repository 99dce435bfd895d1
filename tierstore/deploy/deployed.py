"""``deployment.json``: what a deployed directory says of itself. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tierstore.deploy.records import StageRecord
from tierstore.errors import StoreFormatError
from tierstore.hf.manifest import write_durably

DEPLOYMENT_NAME = "deployment.json"
DEPLOYMENT_VERSION = 1


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
        """Durably; the directory must be synced by the caller."""
        value = {
            "version": DEPLOYMENT_VERSION,
            "settings": dict(self.settings),
            "profile": dict(self.profile),
            "stages": [stage.as_json() for stage in self.stages],
        }
        write_durably(directory / DEPLOYMENT_NAME, (json.dumps(value, indent=1) + "\n").encode())


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
