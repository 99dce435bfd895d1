"""Drives residency cores through traces."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tierstore._native import CapacityError, Replay, Residency, Scope
from tierstore.errors import BudgetError, ConfigError, DataError
from tierstore.trace.format import TraceHeader
from tierstore.trace.quotas import quotas_by_layer
from tierstore.trace.reader import read_chunks, read_header
from tierstore.trace.records import RecordTable

__all__ = ["make_residency", "replay"]


def make_residency(header: TraceHeader) -> Residency:
    """A fresh core as the header describes it, with its records. Raises ConfigError."""
    try:
        residency = Residency(
            header.capacity_frames,
            policy=header.policy,
            policy_options=dict(header.policy_options),
            scope=Scope.LAYER if header.scope == "layer" else Scope.GLOBAL,
            lookahead_frames=header.lookahead_frames,
            layer_quotas=list(header.layer_quotas),
        )
        for record in header.records:
            residency.add_record(record.layer, record.frames, record.bytes, record.stored)
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error
    return residency


def replay(
    path: str | os.PathLike[str],
    *,
    policy: str | None = None,
    policy_options: Mapping[str, float | str] | None = None,
    capacity_frames: int | None = None,
    lookahead_frames: int | None = None,
    scope: str | None = None,
    layer_quotas: Sequence[int] | None = None,
) -> dict[str, object]:
    """Replays a trace in the native loop, chunk by chunk, and returns ``Residency.stats()``.

    What is not given is as it was recorded: then the statistics are those of the live run, exactly. Another
    policy starts with its default options; one written in Python must be given, as a file alone shall not
    decide which code runs; with layer scope and another capacity or scope, quotas are equal shares for the
    layers that have records unless given. Raises DataError (a malformed trace), ConfigError (a policy or option
    that cannot be), BudgetError (a capacity too small for the trace; names what the refused access needs),
    OSError.
    """
    with Path(path).open("rb") as file:
        recorded = read_header(file)
        capacity = recorded.capacity_frames if capacity_frames is None else capacity_frames
        chosen_scope = recorded.scope if scope is None else scope
        if chosen_scope not in ("global", "layer"):
            raise ConfigError(f"scope: expected 'global' or 'layer', got {chosen_scope!r}")
        quotas: tuple[int, ...] = ()
        if chosen_scope == "layer":
            if layer_quotas is not None:
                quotas = tuple(layer_quotas)
            elif capacity_frames is None and recorded.scope == "layer":
                quotas = recorded.layer_quotas
            else:
                layers = np.unique(RecordTable.of(recorded.records).layers).tolist()
                quotas = tuple(quotas_by_layer(layers or [0], capacity))
        if policy is None and ":" in recorded.policy:
            raise ConfigError(
                f"{os.fspath(path)}: recorded under {recorded.policy}, a policy written in Python: "
                "name it as the policy of the replay"
            )
        options = recorded.policy_options if policy in (None, recorded.policy) else {}
        header = TraceHeader(
            capacity_frames=capacity,
            lookahead_frames=recorded.lookahead_frames if lookahead_frames is None else lookahead_frames,
            scope=chosen_scope,
            layer_quotas=quotas,
            policy=policy if policy is not None else recorded.policy,
            policy_options=policy_options if policy_options is not None else options,
            records=recorded.records,
        )
        residency = make_residency(header)
        loop = Replay(residency)
        try:
            for chunk in read_chunks(file, header):
                loop.run(
                    chunk.kinds,
                    chunk.phases,
                    chunk.at,
                    chunk.layers,
                    chunk.offsets,
                    chunk.records,
                    chunk.flags,
                )
            loop.finish()
        except CapacityError as error:
            raise BudgetError(
                f"{os.fspath(path)}: a capacity of {capacity} frames is too small for an access: {error}"
            ) from error
        except DataError:
            raise
        except ValueError as error:
            if residency.policy_failed:  # the user's own, from a policy written in Python
                raise
            raise DataError(f"{os.fspath(path)}: {error}") from error
    return residency.stats()
