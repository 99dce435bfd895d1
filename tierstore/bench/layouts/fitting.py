"""What the plan says of a layout, and the costs of this machine's own work, fitted on layouts that are not judged.

The emulated device and the links take known times. What is not known is what training itself takes on this machine, with
so many ranks: to drive a pass over a unit's dense part, to drive one over an expert, and a message. These three are the
latencies of ``Profile``'s costs; they are fitted so that the relative errors of the plan have the least sum of squares.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tierstore.bench.layouts.cases import LayoutCase
from tierstore.bench.layouts.device import DENSE, EXPERT
from tierstore.bench.results.figures import Figures
from tierstore.config import load
from tierstore.machine_profile import ASSUMED, Cost, Profile
from tierstore.plan.layouts.comparing import layout_cost
from tierstore.plan.layouts.workload import LayoutWorkload, stage_workloads
from tierstore.train.config import TrainConfig

_ROUNDS = 4
#: A difference for derivatives, seconds.
_DIFFERENCE = 1e-4
#: Overheads that are as bad as a relative error of 1%: they decide between fits that are about as good.
_USUAL = (5e-3, 1e-3, 1e-3)
_WEIGHT = 0.01
#: What loopback carries, bytes a second: the limited links are far slower.
_LOOPBACK = 1e9


@dataclass(frozen=True)
class Overheads(Figures):
    """Seconds of this machine's own work: to drive a pass over a unit and one over an expert; and a message."""

    unit_s: float = 0.0
    expert_s: float = 0.0
    message_s: float = 0.0

    def profile(self, ranks: int) -> Profile:
        """The emulated device with these overheads."""
        message = Cost(self.message_s, _LOOPBACK)
        return replace(
            ASSUMED,
            ranks=ranks,
            gather=message,
            reduce_scatter=message,
            all_to_all=message,
            dense_flops=Cost(DENSE.latency_s + self.unit_s, DENSE.per_s),
            expert_flops=Cost(EXPERT.latency_s + self.expert_s, EXPERT.per_s),
        )


class PlannedCase:
    """A layout as the plan sees it, for any overheads."""

    def __init__(self, case: LayoutCase, text: Path) -> None:
        config = load(TrainConfig, None, case.settings(text))
        self._ranks = case.choice.ranks.world
        self._works: list[LayoutWorkload] = list(
            stage_workloads(config, case.choice, ASSUMED, case.node_ranks)
        )

    def step_s(self, overheads: Overheads) -> float:
        """What a step takes."""
        profile = overheads.profile(self._ranks)
        return layout_cost([replace(work, profile=profile) for work in self._works]).step_s


def fit(planned: Sequence[PlannedCase], measured_s: Sequence[float]) -> Overheads:
    """Overheads, none below 0, with which ``planned`` take ``measured_s`` seconds as nearly as can be; of those that do so
    about alike, small ones (a ridge).
    """
    found = np.zeros(3)
    wanted = np.array(measured_s, float)

    def errors(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        took = np.array([each.step_s(Overheads(*values.tolist())) for each in planned], float)
        return np.asarray(took / wanted - 1, float)

    ridge = _WEIGHT * np.diag(1 / np.array(_USUAL))
    for _ in range(_ROUNDS):
        now = errors(found)
        slopes = np.stack([(errors(found + step) - now) / _DIFFERENCE for step in _DIFFERENCE * np.eye(3)], 1)
        found = least_squares(np.vstack([slopes, ridge]), np.concatenate([slopes @ found - now, np.zeros(3)]))
    return Overheads(*found.tolist())


def least_squares(
    matrix: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """The x of no negative element with the least ``|matrix x - wanted|``, the smallest of several: for few columns, all
    sets of those that are not 0 are tried.
    """
    columns = matrix.shape[1]
    best, least = np.zeros(columns), float(np.linalg.norm(wanted))
    for count in range(1, columns + 1):
        for chosen in itertools.combinations(range(columns), count):
            x = np.zeros(columns)
            x[list(chosen)] = np.linalg.lstsq(matrix[:, chosen], wanted, rcond=None)[0]
            distance = float(np.linalg.norm(matrix @ x - wanted))
            if x.min() >= 0 and distance < least * (1 - 1e-9):
                best, least = x, distance
    return best
