"""The batch runner that a configuration asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.serve.batch.grouped import GroupedRunner
from tierstore.serve.batch.invariant import InvariantRunner
from tierstore.serve.batch.meeting import MeetingPasses
from tierstore.serve.batch.padded import PaddedRunner
from tierstore.serve.model.opening import served_model, source_slot

if TYPE_CHECKING:
    from tierstore.serve.opening import ServedParts


def open_runner(parts: ServedParts) -> GroupedRunner:
    """A ``BatchRunner`` over what ``open_served`` has opened; its memory is freed with it.

    Raises ConfigError for a ``batch.context`` beyond the model's own limit.
    """
    batch = parts.config.batch
    kind = InvariantRunner if batch.invariant else PaddedRunner
    return kind(
        served_model(parts.model, context=batch.context),
        parts.experts,
        MeetingPasses(source_slot(parts.model.module)),
        sequences=batch.sequences,
        device=parts.device,
    )
