"""Stage 3: whether dense segments are served as graphs.

A graph is compiled by the process that runs it, for the processor that it runs on. So nothing of it lies in the directory:
this stage leaves the decision, and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tierstore.capabilities import Capability
from tierstore.deploy.checking import verify_checks
from tierstore.deploy.config import DeployConfig, StageName
from tierstore.deploy.records import StageRecord
from tierstore.deploy.stage import StageContext, StageOutput
from tierstore.errors import CapabilityError
from tierstore.hf.manifest import Manifest


class Conversion:
    """See the module."""

    name = StageName.CONVERSION

    def settings(self, config: DeployConfig) -> Mapping[str, object]:
        return {"graphs": config.graphs.value}

    def run(self, context: StageContext) -> StageOutput:
        before, store = context.before[-1], context.input_store
        why = _why_eager(context.config.graphs)
        units = [unit for unit in Manifest.read(store).units if unit.numel]
        return StageOutput(
            store=store,
            checks=before.checks,
            figures={"dense_segments": len(units), "graphs": 0, "graphs_kept_eager": len(units)},
            notes=(f"dense segments stay eager: {why}",),
        )

    def verify(self, root: Path, record: StageRecord) -> None:
        verify_checks(root / record.store, record.checks)


def _why_eager(graphs: Capability) -> str:
    """Raises CapabilityError where graphs were asked for."""
    if graphs is Capability.OFF:
        return "--graphs off"
    reason = "the server runs the modules of transformers as they are"
    if graphs is Capability.ON:
        raise CapabilityError(f"--graphs on: {reason}")
    return reason
