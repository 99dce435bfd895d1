"""The time of a step, and what it is spent on: a run's own schedule, simulated with a machine's costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tierstore.plan.capacity import Capacity, Setting, capacity
from tierstore.plan.costs import Profile
from tierstore.plan.evidence import Evidence
from tierstore.plan.simulate import SteadyState, outcome, simulate
from tierstore.plan.traffic import Traffic, step_traffic
from tierstore.plan.workload import StepWorkload
from tierstore.prefetch.operations import Kind, Resource, operations

_STEPS, _SETTLED = 3, 1


@dataclass(frozen=True)
class Prediction:
    """``evidence`` is that of the weakest figure that went in; ``path_s`` divides one step's critical path by kind."""

    step_s: float
    tokens_per_s: float
    bottleneck: Resource
    busy_ratio: Mapping[Resource, float]
    path_s: Mapping[Kind, float]
    traffic: Traffic
    evidence: Evidence


def predict(setting: Setting, profile: Profile, taken: Capacity | None = None) -> Prediction:
    """Simulates some steps of ``setting``. Raises BudgetError, ConfigError."""
    taken = taken or capacity(setting)
    traffic = step_traffic(setting, taken)
    result = simulated(StepWorkload(setting, taken, traffic, profile))
    tokens = setting.config.tokens_per_step
    return Prediction(
        step_s=result.step_s,
        tokens_per_s=tokens / result.step_s,
        bottleneck=result.bottleneck,
        busy_ratio=result.busy_ratio,
        path_s=result.path_s,
        traffic=traffic,
        evidence=profile.evidence.weaker(traffic.evidence),
    )


def simulated(workload: StepWorkload) -> SteadyState:
    """The steady state of ``workload``."""
    schedule = workload.schedule
    slots, each = workload.taken.divided.slots, workload.experts / workload.parts
    listed = operations(
        schedule,
        workload.sizes,
        steps=_STEPS,
        # A part of several experts has their slots; at least one more is loaded meanwhile.
        slots=max(int(slots.weights / each), 2),
        gradient_slots=max(int(slots.gradients / each), 2),
    )
    run = simulate(listed, workload.seconds)
    return outcome(run, len(schedule.passes), steps=_STEPS, settled=_SETTLED)
