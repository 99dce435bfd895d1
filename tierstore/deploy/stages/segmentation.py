"""Stage 4: where the model will lie, by the memory that there is.

Its blocks are in as few segments as the memory holds one at a time, balanced by bytes, or as they were given. All of the
dense parameters and the experts that the rest of the memory holds stay resident; a segment is what the tiers bring in turn
where that is not the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tierstore.deploy.checking import verify_checks
from tierstore.deploy.config import DeployConfig, StageName
from tierstore.deploy.records import StageRecord
from tierstore.deploy.segments import balanced, block_bytes, cut, fewest
from tierstore.deploy.stage import StageContext, StageOutput
from tierstore.errors import BudgetError, StoreFormatError
from tierstore.hf.manifest import Manifest
from tierstore.machine import memory
from tierstore.model.store_schema import EXPERT_SCHEMA
from tierstore.store.format import Group
from tierstore.store.reading import read_schemas
from tierstore.units import format_bytes

#: Of the memory that is there, what a server leaves to caches of keys and values, activations and the interpreter.
_SERVED_PART = 0.75


class SegmentationStage:
    """See the module."""

    name = StageName.SEGMENTATION

    def settings(self, config: DeployConfig) -> Mapping[str, object]:
        placement = config.placement
        return {
            "memory": placement.memory,
            "ranks": placement.ranks,
            "segments": list(placement.segments),
        }

    def run(self, context: StageContext) -> StageOutput:
        placement, store = context.config.placement, context.input_store
        manifest = Manifest.read(store)
        one = _expert_bytes(store)
        blocks = block_bytes(manifest, one)
        sizes = [block.whole for block in blocks]
        available = placement.memory if placement.memory is not None else memory().usable_bytes
        given = int(available * _SERVED_PART)
        firsts = list(placement.segments) or balanced(sizes, min(fewest(sizes, given), len(sizes)))
        segments = cut(blocks, firsts)
        dense = sum(block.dense for block in blocks)
        experts = sum(block.experts for block in blocks)
        least = manifest.experts.top_k * one
        host_budget = min(given - dense, experts)
        if host_budget < least:
            raise BudgetError(
                f"--memory: {format_bytes(available)} leave too little beside {format_bytes(dense)} of dense parameters; "
                f"the minimum is {int((dense + least) / _SERVED_PART) + 1} bytes"
            )
        for segment in segments:
            context.say(
                f"segmentation: blocks {segment.first} to {segment.last}: {format_bytes(segment.dense)} dense, "
                f"{format_bytes(segment.experts)} of experts"
            )
        return StageOutput(
            store=store,
            checks=dict(context.before[-1].checks),
            figures={
                "ranks": placement.ranks,
                "kind": "pipeline of one rank",
                "segments": [segment.as_json() for segment in segments],
                "memory": available,
                "dense_bytes": dense,
                "expert_bytes": experts,
                "host_budget": host_budget,
                "resident_fraction": host_budget / experts,
            },
        )

    def verify(self, root: Path, record: StageRecord) -> None:
        verify_checks(root / record.store, record.checks)


def _expert_bytes(store: Path) -> int:
    """What one expert takes in memory: its record as it is kept. Raises StoreFormatError."""
    for schema in read_schemas(store):
        if schema.name == EXPERT_SCHEMA:
            return sum(section.nbytes for section in schema.layout(Group.WEIGHTS).sections)
    raise StoreFormatError(f"{store}: it holds no experts")
