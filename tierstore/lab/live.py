"""Replays of a recorded run as it was: through the live cache's own core, with the prefetches of the run.

A run reserves a part of its frames for prefetches, splits sets by the rest, and requests entries before they are needed.
This can change which policy is better, so a recorded run is tuned on these replays. A prefetched entry is a hit when it
is requested, and its read counts as the miss. So a miss here is a read, ahead or on demand.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierstore.errors import BudgetError
from tierstore.lab.requests import Requests
from tierstore.lab.results import Outcome
from tierstore.lab.simulate import ReplaySetting, expected_time, in_parallel
from tierstore.stats import OnProgress
from tierstore.trace.format import TraceHeader, TraceKind
from tierstore.trace.replay import STEP_COUNTS, replay_steps


@dataclass(frozen=True, slots=True)
class Recording:
    """A trace of a run, with its header: its prefetches could fill ``lookahead_frames`` of ``capacity_frames``."""

    path: Path
    header: TraceHeader

    def lookahead_at(self, capacity_frames: int) -> int:
        """Frames for prefetches at another capacity, in the same proportion."""
        lookahead, recorded = self.header.lookahead_frames, self.header.capacity_frames
        return min(capacity_frames, round(lookahead * capacity_frames / recorded))


def recording_of(path: str | os.PathLike[str], requests: Requests) -> Recording | None:
    """The trace at ``path``, from which ``requests`` were read; None if its run had no steps, or neither prefetches nor
    copies that steps make stale (of device slots).
    """
    header = requests.header
    prefetched = header.lookahead_frames and requests.left_out.get(TraceKind.PREFETCH.name.lower())
    if header.clock != "steps" or not (prefetched or header.of_slots):
        return None
    return Recording(Path(path), header)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class LiveReplay:
    """One replay: ``counts`` [steps, STEP_COUNTS]."""

    setting: ReplaySetting
    lookahead_frames: int
    counts: NDArray[np.int64]

    def column(self, name: str) -> NDArray[np.int64]:
        """One of ``STEP_COUNTS``, by step."""
        return self.counts[:, STEP_COUNTS.index(name)]

    @property
    def step_requests(self) -> NDArray[np.int64]:
        return self.column("hits") + self.column("misses") + self.column("creates")

    @property
    def step_misses(self) -> NDArray[np.int64]:
        """Reads by step, ahead or on demand."""
        return self.column("misses") + self.column("prefetch_reads")

    def outcome(self, requests: Requests, steps: slice) -> Outcome:
        """The outcome over ``steps``."""
        total = dict(zip(STEP_COUNTS, self.counts[steps].sum(axis=0).tolist(), strict=True))
        asked = total["hits"] + total["misses"] + total["creates"]
        misses = min(total["misses"] + total.pop("prefetch_reads"), asked - total["creates"])
        return self.setting.outcome(
            requests,
            lookahead_frames=self.lookahead_frames,
            steps=len(self.counts[steps]),
            requests=asked,
            hits=asked - total["creates"] - misses,
            misses=misses,
            **{name: count for name, count in total.items() if name not in ("hits", "misses")},
        )


def replay_recorded(
    requests: Requests,
    recording: Recording,
    settings: Sequence[ReplaySetting],
    *,
    threads: int = 0,
    progress: OnProgress | None = None,
) -> list[LiveReplay | None]:
    """Each setting's replay, in the order given; None if the lookahead leaves too few frames for an access.

    Raises ConfigError, or DataError for a malformed trace.
    """

    layers = 1 + int(recording.header.table.layers.max(initial=0))

    def one(setting: ReplaySetting) -> LiveReplay | None:
        lookahead = recording.lookahead_at(setting.capacity_frames)
        quotas = setting.quotas(requests)
        header = replace(
            recording.header,
            policy=setting.policy.name,
            policy_options=setting.policy.options,
            capacity_frames=setting.capacity_frames,
            lookahead_frames=lookahead,
            scope=setting.scope.value,
            layer_quotas=(*quotas, *[0] * (layers - len(quotas))) if quotas else (),
        )
        try:
            counts = replay_steps(recording.path, header)
        except BudgetError:
            return None
        return LiveReplay(setting=setting, lookahead_frames=lookahead, counts=counts)

    return in_parallel(
        [(expected_time(requests, setting), partial(one, setting)) for setting in settings],
        threads=threads,
        progress=progress,
    )
