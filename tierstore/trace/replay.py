"""Drives residency cores through traces."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierstore._native import CapacityError, GroupOrder, Replay, Residency, ResidencyStats, Scope, StepClock
from tierstore.errors import BudgetError, ConfigError, DataError
from tierstore.trace.files import read_chunks, read_header, read_summary
from tierstore.trace.format import EventColumns, TraceHeader, TraceKind

STEP_COUNTS = (
    *("hits", "misses", "creates", "evictions", "write_backs", "starved", "read_bytes", "written_bytes"),
    "prefetch_reads",
)
"""Fields of ``ResidencyStats`` that ``replay_steps`` reports for each step; ``read_bytes`` includes prefetches."""


def quotas_by_layer(layers: Sequence[int], frames: int, shares: Sequence[float] = ()) -> list[int]:
    """Divides a capacity: frames of each layer number up to the last.

    ``layers`` get parts of ``frames`` in proportion to ``shares`` (empty: equal); layers without records get none. The
    first layers get the remaining frames. Live stores, replays and the lab all use this division.
    """
    present = sorted(set(layers))
    if shares:
        total = sum(shares)
        parts = [frames * share / total for share in shares]
        # A part that is a whole number of frames but for rounding in its share is that number.
        whole = [int(part + 1e-8 * frames) for part in parts]
        if sum(whole) > frames:
            whole = [int(part) for part in parts]
    else:
        whole = [frames // len(present)] * len(present)
    left_over = frames - sum(whole)
    quotas = [0] * (present[-1] + 1)
    for index, layer in enumerate(present):
        quotas[layer] = whole[index] + (index < left_over)
    return quotas


def make_replay(header: TraceHeader) -> tuple[Residency, Replay]:
    """A fresh core as the header describes it, and what drives it through the trace's events. Raises ConfigError."""
    try:
        residency = Residency(
            header.capacity_frames,
            policy=header.policy,
            policy_options=dict(header.policy_options),
            scope=Scope.LAYER if header.scope == "layer" else Scope.GLOBAL,
            lookahead_frames=header.lookahead_frames,
            layer_quotas=list(header.layer_quotas),
            group_order=GroupOrder[header.group_order.upper().replace("-", "_")],
            clock=StepClock[header.clock.upper()],
            parts=header.parts,
        )
        table, first_late = header.table, len(header.records) - header.late_records
        for record in islice(table, first_late):
            residency.add_record(record.layer, record.frames, record.bytes, record.stored)
        loop = Replay(
            residency,
            table.layers[first_late:],
            table.frames[first_late:].reshape(-1),
            table.bytes[first_late:].reshape(-1),
            table.stored[first_late:],
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error
    return residency, loop


def replay(path: str | os.PathLike[str], header: TraceHeader | None = None) -> ResidencyStats:
    """Replays the trace at ``path`` in the native loop, chunk by chunk, and returns ``Residency.stats()``.

    ``header``: the trace's, with the settings of the replay. None: the recorded ones, with which the statistics are exactly
    those of the live run; a policy written in Python must then be named in a header, since a file alone shall not decide
    which code runs. Raises DataError (a malformed trace), ConfigError (an unknown policy or option), BudgetError (a capacity
    too small for the trace; it names what the refused access needs), OSError.
    """
    if header is None:
        with Path(path).open("rb") as file:
            header = read_header(file)
        if ":" in header.policy:
            raise ConfigError(
                f"{os.fspath(path)}: recorded under {header.policy}, a policy written in Python: "
                "expected a header that names it"
            )
    return _driven(path, header).stats()


def replay_steps(path: str | os.PathLike[str], header: TraceHeader) -> NDArray[np.int64]:
    """The counts of ``replay`` by step, [steps, len(STEP_COUNTS)]; what comes after the last end of a step is one more."""
    totals: list[list[int]] = []

    def note(residency: Residency) -> None:
        stats = residency.stats()
        totals.append([getattr(stats, name) for name in STEP_COUNTS])

    note(_driven(path, header, note))
    counts = np.array(totals, np.int64)
    counts[1:] -= counts[:-1].copy()
    return counts if len(counts) == 1 or counts[-1].any() else counts[:-1]


def _driven(
    path: str | os.PathLike[str], header: TraceHeader, after_step: Callable[[Residency], None] | None = None
) -> Residency:
    """A core as ``header`` describes it, after the events of the trace at ``path``."""
    residency, loop = make_replay(header)
    try:
        with Path(path).open("rb") as file:
            for chunk in read_chunks(file, read_summary(file)):
                begin = 0
                if after_step is not None:
                    for end in (np.flatnonzero(chunk.kinds == TraceKind.END_STEP) + 1).tolist():
                        _run(loop, chunk.part(begin, end))
                        after_step(residency)
                        begin = end
                _run(loop, chunk.part(begin, len(chunk)) if begin else chunk)
        loop.finish()
    except CapacityError as error:
        raise BudgetError(
            f"{os.fspath(path)}: a capacity of {header.capacity_frames} frames is too small for an access: "
            f"{error}"
        ) from error
    except DataError:
        raise
    except ValueError as error:
        if residency.policy_failed:  # the user's own, from a policy written in Python
            raise
        raise DataError(f"{os.fspath(path)}: {error}") from error
    return residency


def _run(loop: Replay, events: EventColumns) -> None:
    loop.run(
        events.kinds, events.phases, events.at, events.layers, events.offsets, events.records, events.flags
    )
