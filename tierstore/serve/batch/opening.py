"""The batch runner that a configuration asks for."""

from __future__ import annotations

import torch

from tierstore.machine import memory
from tierstore.serve.batch.askers import AskerBits
from tierstore.serve.batch.grouped import GroupedRunner
from tierstore.serve.batch.invariant import InvariantRunner
from tierstore.serve.batch.meeting import MeetingPasses
from tierstore.serve.batch.padded import PaddedRunner
from tierstore.serve.model.memory import fitted_batch
from tierstore.serve.model.opening import served_model
from tierstore.serve.opening import ServedParts

#: The interpreter, torch, transformers, and what a pass works in: 325 MiB measured beside experts and dense parameters.
_PROCESS_BYTES = 400 << 20


def open_runner(parts: ServedParts) -> GroupedRunner:
    """A ``BatchRunner`` over what ``open_served`` has opened; its memory is freed with it.

    Without ``batch.context``, a sequence may be as long as the model's own limit, or as fits in memory ``batch.sequences``
    times. Raises ConfigError for a context beyond the model's limit, BudgetError for one that does not fit.
    """
    own = served_model(parts.model, context=parts.config.batch.context)
    batch = fitted_batch(parts.spec, parts.config.batch, longest=own.context, room=_room(parts))
    kind = InvariantRunner if batch.invariant else PaddedRunner
    return kind(
        served_model(parts.model, context=batch.context),
        parts.experts,
        MeetingPasses(parts.source),
        sequences=batch.sequences,
        device=parts.device,
        askers=AskerBits() if parts.config.cache.tells_askers_apart else None,
    )


def _room(parts: ServedParts) -> int:
    """Bytes that the caches of sequences may take where the model computes."""
    if parts.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(parts.device)
        return int(free)
    dense = sum(parameter.nbytes for parameter in parts.model.module.parameters())
    return memory().usable_bytes - parts.config.host_budget - dense - _PROCESS_BYTES
