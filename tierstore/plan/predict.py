"""The time of a step, and what it is spent on: a run's own schedule, simulated with a machine's costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierstore.plan.capacity import Capacity, Setting, capacity
from tierstore.plan.costs import Profile
from tierstore.plan.evidence import Evidence
from tierstore.plan.simulate import SteadyState, outcome, simulate
from tierstore.plan.traffic import Traffic, step_traffic
from tierstore.plan.workload import StepWorkload
from tierstore.prefetch.operations import Kind, Operation, StepPasses, operations

_STEPS, _SETTLED = 3, 1


@dataclass(frozen=True)
class Prediction(SteadyState):
    """The steady state of a run. ``evidence`` is that of the weakest figure that went in."""

    tokens_per_s: float
    traffic: Traffic
    evidence: Evidence


def predict(setting: Setting, profile: Profile, taken: Capacity | None = None) -> Prediction:
    """Simulates some steps of ``setting``. Raises BudgetError, ConfigError."""
    taken = taken or capacity(setting)
    traffic = step_traffic(setting, taken)
    result = simulated(StepWorkload(setting, taken, traffic, profile))
    return Prediction(
        **vars(result),
        tokens_per_s=setting.tokens_per_step / result.step_s,
        traffic=traffic,
        evidence=profile.evidence.weaker(traffic.evidence),
    )


def simulated(workload: StepWorkload) -> SteadyState:
    """The steady state of ``workload``."""
    run = simulate(listed_operations(workload), workload.seconds)
    return outcome(run, len(workload.passes), steps=_STEPS, settled=_SETTLED)


def issued_bytes(workload: StepWorkload, kind: Kind) -> int:
    """What the operations of ``kind`` of one step move, once the first steps are over."""
    passes = len(workload.passes)
    return sum(
        operation.nbytes
        for operation in listed_operations(workload)
        if operation.kind is kind and operation.position // passes == _SETTLED
    )


def listed_operations(workload: StepWorkload) -> Sequence[Operation]:
    """The operations of a few steps of ``workload``, in program order."""
    schedule = workload.schedule
    slots, each = workload.taken.divided.slots, workload.experts / workload.parts
    return operations(
        schedule,
        workload.sizes,
        steps=_STEPS,
        # A part of several experts has their slots; at least one more is loaded meanwhile.
        slots=max(int(slots.weights / each), 2),
        gradient_slots=max(int(slots.gradients / each), 2),
        passes=StepPasses.TRAINING if workload.setting.usage.trains else StepPasses.FORWARD,
    )
