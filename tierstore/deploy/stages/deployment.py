"""Stage 6: the directory that is served, with what was measured of it.

Its files are links to those of the stages before, so that it takes no space and the stages stay whole until it has its name.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from tierstore.deploy.checking import bytes_on_disk, verify_checks
from tierstore.deploy.config import DeployConfig, StageName
from tierstore.deploy.records import StageRecord
from tierstore.deploy.stage import StageContext, StageOutput
from tierstore.store.disk.home import fsync_directory


class AssemblyStage:
    """See the module."""

    name = StageName.DEPLOYMENT

    def settings(self, config: DeployConfig) -> Mapping[str, object]:
        return {}

    def run(self, context: StageContext) -> StageOutput:
        before, store = context.before[-1], context.directory / "store"
        if store.exists():
            shutil.rmtree(store)
        link_tree(context.input_store, store)
        verify_checks(store, before.checks)
        return StageOutput(
            store=store,
            checks=before.checks,
            figures={"bytes_on_disk": bytes_on_disk(store), **profile_of(before)},
        )

    def verify(self, root: Path, record: StageRecord) -> None:
        verify_checks(root / record.store, record.checks)


def profile_of(optimisation: StageRecord) -> Mapping[str, object]:
    """What the optimisation measured of the way it chose."""
    profile = optimisation.figures.get("profile")
    return profile if isinstance(profile, dict) else {}


def link_tree(source: Path, target: Path) -> None:
    """``target`` with the files of ``source``, each a link to the same bytes; on disk when this returns. Raises OSError."""
    target.mkdir()
    for child in sorted(source.iterdir()):
        if child.is_dir():
            link_tree(child, target / child.name)
        else:
            os.link(child, target / child.name)
    fsync_directory(target)
