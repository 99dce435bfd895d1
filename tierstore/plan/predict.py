"""The time of a step, and what it is spent on: a run's own schedule, simulated with a machine's costs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tierstore.machine_profile import Evidence, Profile
from tierstore.plan.capacity import Capacity, Setting, capacity
from tierstore.plan.layer_degrees import LayerDegrees, layer_degrees
from tierstore.plan.simulate import SteadyState, outcome, simulate
from tierstore.plan.traffic import Traffic, step_traffic
from tierstore.plan.workload import SETTLED, STEPS, StepWorkload
from tierstore.prefetch.operations import Kind, Operation
from tierstore.prefetch.schedule import Pass


@dataclass(frozen=True)
class Prediction(SteadyState):
    """The steady state of a run. ``evidence`` is that of the weakest figure that went in. ``degrees``: in how many chunks
    rows travel to experts; None where none do. ``one_chunk_s``: a step whose passes all go in one.
    """

    tokens_per_s: float
    traffic: Traffic
    evidence: Evidence
    degrees: LayerDegrees | None
    one_chunk_s: float

    @property
    def chunks_save_s(self) -> float:
        """What chunks save of a step; below 0 where they cost."""
        return self.one_chunk_s - self.step_s


def predict(setting: Setting, profile: Profile, taken: Capacity | None = None) -> Prediction:
    """Simulates some steps of ``setting``. Raises BudgetError, ConfigError."""
    taken = taken or capacity(setting)
    traffic = step_traffic(setting, taken)
    workload = StepWorkload(setting, taken, traffic, profile)
    one = result = simulated(workload)
    degrees = layer_degrees(workload)
    if degrees is not None and max(degrees.taken.values(), default=1) > 1:
        result = simulated(replace(workload, chunks=degrees.taken))
    return Prediction(
        **vars(result),
        tokens_per_s=setting.tokens_per_step / result.step_s,
        traffic=traffic,
        evidence=profile.evidence.weaker(traffic.evidence),
        degrees=degrees,
        one_chunk_s=one.step_s,
    )


def simulated(workload: StepWorkload) -> SteadyState:
    """The steady state of ``workload``."""
    passes = workload.passes
    known: dict[tuple[Kind, Pass, int], float] = {}  # steps and micro-batches repeat their passes

    def seconds(operation: Operation) -> float:
        key = operation.kind, passes[operation.position % len(passes)], operation.nbytes
        if key not in known:
            known[key] = workload.seconds(operation)
        return known[key]

    return outcome(simulate(workload.operations, seconds), len(passes), steps=STEPS, settled=SETTLED)


def issued_bytes(workload: StepWorkload, kind: Kind) -> int:
    """What the operations of ``kind`` of one step move, once the first steps are over."""
    passes = len(workload.passes)
    return sum(
        operation.nbytes
        for operation in workload.operations
        if operation.kind is kind and operation.position // passes == SETTLED
    )
