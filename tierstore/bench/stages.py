"""1F1B through pipeline stages: the time of a step on an emulated device, what is held, and what it costs in disk traffic.

**Time.** Real ranks, one a stage, with the driver that training uses: torch's schedule, Gloo's messages. A pass through a
stage takes a given time on an emulated device, which the rank waits for; so figures survive a machine that others use.
The model of Pipeline MoE (and of PipeDream-Flush, Narayanan et al. 2021) is ``(M + p - 1)(t_f + t_b)``.

**Held.** Stage s of p holds activations of at most ``min(M, p - s)`` micro-batches: counted by the driver.

**Traffic.** The residency core, as the planner runs it, takes stage 0's accesses in 1F1B order; beside it those of one
micro-batch after another and of layer order, which a pipeline cannot have. Units are the bytes of all of the stage's
records. It shows where 1F1B does not pay: each micro-batch walks the stage's experts again.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstore.bench.checks import at_least
from tierstore.bench.pictures.slices import read_slices
from tierstore.bench.pictures.stages import draw_stages
from tierstore.bench.processes.ranks import run_ranks
from tierstore.bench.results.document import Better, Measurement, counted, derived, measured
from tierstore.bench.results.figures import INTERNAL, Figures, named
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from tierstore.model.interface import Batch
    from tierstore.parallel import Mesh
    from tierstore.prefetch.program import Finals
    from tierstore.timeline import TimelineSink

_TIMEOUT_S = 300.0
#: A step may take this much longer than the model says.
TARGET_RATIO = 1.10
_ROWS, _TOKENS, _WIDTH = 2, 32, 64


@dataclass(frozen=True, kw_only=True)
class StagesBench(Figures):
    """What to measure: pipelines of ``stages`` stages, each with ``micro_batches`` times as many micro-batches; passes of
    ``forward_s`` and ``backward_s`` seconds. ``svg``: a file for a picture of one step of the longest pipeline with the
    most micro-batches.
    """

    stages: Sequence[int] = field(default=(2, 4), metadata=named("stages_count"))
    micro_batches: Sequence[int] = field(default=(1, 2, 4), metadata=named("micro_batches_ratio"))
    forward_s: float = 0.05
    backward_s: float = 0.1
    rounds: int = field(default=5, metadata=named("rounds_count"))
    host_budget: int = field(default=768 << 20, metadata=INTERNAL)
    svg: Path | None = field(default=None, metadata=INTERNAL)

    def __post_init__(self) -> None:
        at_least(1, rounds=self.rounds)
        if any(count < 2 for count in self.stages):
            raise ConfigError(f"stages: expected at least 2 each, got {list(self.stages)}")
        if any(times < 1 for times in self.micro_batches):
            raise ConfigError(f"micro_batches: expected at least 1 each, got {list(self.micro_batches)}")
        if min(self.forward_s, self.backward_s) <= 0:
            raise ConfigError("passes: expected more than 0 seconds")


@dataclass(frozen=True, kw_only=True)
class PipelineTimes(Figures):
    """One pipeline: steps by round, what the model says, and the micro-batches that each stage held at most."""

    stages_count: int
    micro_batches_count: int
    step_samples_s: Sequence[float]
    step_s: float
    model_s: float
    ratio: float = field(metadata=named("step_to_model_ratio"))
    held_count: Sequence[int]
    in_order: bool

    @property
    def holds_no_more(self) -> bool:
        """Whether no stage held more than it should."""
        count, stages = self.micro_batches_count, self.stages_count
        return all(held <= min(count, stages - stage) for stage, held in enumerate(self.held_count))


@dataclass(frozen=True, kw_only=True)
class OrderTraffic(Figures):
    """What a step of stage 0 reads and writes in one order, in units of all of its records."""

    order: str
    stages_count: int
    micro_batches_count: int
    read_ratio: float
    written_ratio: float


@dataclass(frozen=True, kw_only=True)
class StagesResult(Figures):
    """What ``run`` found."""

    bench: str = "stages"
    asked: StagesBench = field(metadata=INTERNAL)
    pipelines: Sequence[PipelineTimes]
    traffic: Sequence[OrderTraffic]
    host_budget_bytes: int

    @property
    def passed(self) -> bool:
        """Whether every pipeline took its passes in order, held no more than it should, and kept to the model."""
        return all(
            each.in_order and each.holds_no_more and each.ratio <= TARGET_RATIO for each in self.pipelines
        )


def run(bench: StagesBench) -> StagesResult:
    """Measures. Raises WorkerError, BudgetError, OSError."""
    pipelines = [each for stages in bench.stages for each in _pipelines(bench, stages)]
    return StagesResult(
        asked=bench,
        pipelines=pipelines,
        traffic=list(_traffic(bench)),
        host_budget_bytes=bench.host_budget,
    )


def measurements(result: StagesResult) -> Iterator[Measurement]:
    """What ``run`` found, for a document."""
    for each in result.pipelines:
        how = {"stages": each.stages_count, "micro-batches": each.micro_batches_count}
        yield measured("step", each.step_samples_s, "s", Better.LOWER, parameters=how)
        yield derived(
            "step to model", [each.ratio], "ratio", Better.LOWER, parameters=how, target=TARGET_RATIO
        )
        for stage, held in enumerate(each.held_count):
            limit = min(each.micro_batches_count, each.stages_count - stage)
            yield counted(
                "held", held, "micro-batches", Better.LOWER, parameters={**how, "stage": stage}, target=limit
            )
    for order in result.traffic:
        what: Mapping[str, float | str] = {"order": order.order, "micro-batches": order.micro_batches_count}
        yield derived("read a step", [order.read_ratio], "ratio", Better.LOWER, parameters=what)
        yield derived("written a step", [order.written_ratio], "ratio", Better.LOWER, parameters=what)


def _pipelines(bench: StagesBench, stages: int) -> Iterator[PipelineTimes]:
    counts = [times * stages for times in bench.micro_batches]
    svg = bench.svg if stages == max(bench.stages) else None
    with tempfile.TemporaryDirectory() as directory:
        asked = {
            "micro_batches": counts,
            "forward_s": bench.forward_s,
            "backward_s": bench.backward_s,
            "rounds": bench.rounds,
            "drawn": max(counts) if svg is not None else 0,
            "timelines": directory,
        }
        answers = run_ranks("tierstore.bench.stages", [json.dumps(asked)], ranks=stages, timeout_s=_TIMEOUT_S)
        if svg is not None:
            svg.write_text(draw_stages([read_slices(_timeline(directory, stage)) for stage in range(stages)]))
    for count, found in zip(counts, zip(*answers, strict=True), strict=True):
        yield _times(bench, stages, count, found)


def _timeline(directory: str, stage: int) -> Path:
    return Path(directory) / f"stage-{stage}.json"


def _times(
    bench: StagesBench, stages: int, micro_batches: int, answers: Sequence[dict[str, Any]]
) -> PipelineTimes:
    # Between barriers: a step has ended when all stages have.
    samples = [max(seconds) for seconds in zip(*(each["step_s"] for each in answers), strict=True)]
    model_s = (micro_batches + stages - 1) * (bench.forward_s + bench.backward_s)
    median = statistics.median(samples)
    return PipelineTimes(
        stages_count=stages,
        micro_batches_count=micro_batches,
        step_samples_s=samples,
        step_s=median,
        model_s=model_s,
        ratio=median / model_s,
        held_count=[each["held"] for each in answers],
        in_order=all(each["in_order"] for each in answers),
    )


# Disk traffic -----------------------------------------------------------------------------------------------


def _traffic(bench: StagesBench) -> Iterator[OrderTraffic]:
    """Stage 0 of the longest pipeline, whose stages each have a main job's two layers."""
    from tierstore.config import load
    from tierstore.plan.capacity import Capacity, Setting
    from tierstore.plan.traffic import step_traffic
    from tierstore.train.budgets import DeviceKind, budgets
    from tierstore.train.config import TrainConfig
    from tierstore.train.files import MicroOrder
    from tierstore.train.stages.order import one_forward_one_backward
    from tierstore.train.stages.spec import stage_config

    stages = max(bench.stages)
    for count in (stages, 2 * stages):
        whole = load(
            TrainConfig,
            None,
            {"host_budget": bench.host_budget, "model.n_layers": 2 * stages, "data.micro_batches": count},
        )
        config = stage_config(whole, 0, stages)
        pipelined = one_forward_one_backward(0, stages, count)
        records = config.model.architecture.records
        for name, order, taken in (
            ("1F1B", MicroOrder.MICRO, pipelined),
            ("one after another", MicroOrder.MICRO, ()),
            ("layer order", MicroOrder.LAYER, ()),
        ):
            of = replace(config, data=replace(config.data, micro_order=order))
            if order is MicroOrder.LAYER:  # the stage's layers as a model of their own, which has no pipeline
                of = replace(of, model=replace(whole.model, n_layers=2))  # type: ignore[type-var]
            setting = Setting(config=of, model=of.model.architecture)
            divided = budgets(of, DeviceKind.CPU)
            traffic = step_traffic(setting, Capacity((), divided), order=taken)
            unit = records * setting.schemas[-1].record_bytes
            yield OrderTraffic(
                order=name,
                stages_count=stages,
                micro_batches_count=count,
                read_ratio=traffic.read_bytes / unit,
                written_ratio=traffic.written_bytes / unit,
            )


# One rank ---------------------------------------------------------------------------------------------------


class _EmulatedStage:
    """A stage whose passes take time alone."""

    def __init__(self, mesh: Mesh, forward_s: float, backward_s: float) -> None:
        import torch

        from tierstore.model.stage import StageBorder

        stage = mesh.pipeline
        self.border = StageBorder(stage.rank == 0, stage.rank == stage.size - 1, _WIDTH, torch.float32)
        self._seconds = forward_s, backward_s

    def run_stage(self, batch: Batch, given: Tensor, values: Tensor) -> Any:
        import torch

        from tierstore.model.interface import ModelOutput
        from tierstore.model.stage import StagePass

        forward_s, backward_s = self._seconds
        x = torch.zeros(*given.shape, _WIDTH, requires_grad=True) if self.border.begins else given
        x = taking(x, forward_s, backward_s)
        objective = x.sum() if self.border.ends else torch.zeros((), requires_grad=True)
        loads = (torch.ones(1, dtype=torch.int64),)
        part = ModelOutput(
            objective if self.border.ends else None, torch.zeros(()), torch.zeros(()), objective, loads, None
        )
        return StagePass(None if self.border.ends else x, part)


def taking(x: Tensor, forward_s: float, backward_s: float) -> Tensor:
    """``x``; both ways take their time on a device that the rank waits for."""
    import torch

    from tierstore.links import wait_until

    class Passing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            wait_until(time.monotonic_ns() + round(forward_s * 1e9))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            wait_until(time.monotonic_ns() + round(backward_s * 1e9))
            return gradient

    apply: Any = Passing.apply
    passed: Tensor = apply(x)
    return passed


class _NoStep:
    """A step without parameters."""

    def __init__(self) -> None:
        self.passes_begun = 0

    def begin_pass(self) -> None:
        self.passes_begun += 1

    def resume_pass(self, index: int, finals: Finals) -> None: ...

    def end_pass(self) -> None: ...


def _rank(asked: dict[str, Any]) -> list[dict[str, Any]]:
    import torch

    from tierstore.parallel import ParallelConfig, RankEnvironment, launch
    from tierstore.timeline import open_timeline

    torch.set_num_threads(1)
    stages = RankEnvironment.from_environment().world
    with launch(ParallelConfig(stages=stages, timeout_s=_TIMEOUT_S), device="cpu") as mesh:
        stage = _EmulatedStage(mesh, asked["forward_s"], asked["backward_s"])
        found = []
        for count in asked["micro_batches"]:
            drawn = _timeline(asked["timelines"], mesh.pipeline.rank) if count == asked["drawn"] else None
            with open_timeline(drawn) as timeline:
                found.append(_measured(mesh, stage, count, asked["rounds"], timeline))
        return found


def _measured(
    mesh: Mesh, stage: _EmulatedStage, count: int, rounds: int, timeline: TimelineSink
) -> dict[str, Any]:
    """The steps of this rank, of ``count`` micro-batches."""
    import torch

    from tierstore.model.interface import Batch
    from tierstore.stats import StallLedger
    from tierstore.train.stages.order import one_forward_one_backward
    from tierstore.train.stages.pipeline import StagePipeline

    pipeline = StagePipeline(
        stage,
        mesh.pipeline,
        mesh.device,
        ledger=StallLedger(),
        timeline=timeline,
        agree=lambda output, finite: 0.0,
    )
    tokens = torch.zeros(_ROWS, _TOKENS, dtype=torch.long)
    batches = [Batch(tokens, tokens)] * count
    pipeline.run(_NoStep(), 0, batches)  # connections
    wanted = one_forward_one_backward(mesh.pipeline.rank, mesh.stages, count)
    taken, in_order = [], True
    for step in range(1, rounds + 1):
        mesh.world.barrier()
        started = time.perf_counter()
        pipeline.run(_NoStep(), step, batches)
        mesh.world.barrier()
        taken.append(time.perf_counter() - started)
        in_order = in_order and tuple(pipeline.log) == wanted
    return {"step_s": taken, "held": pipeline.most_held, "in_order": in_order}


if __name__ == "__main__":
    print(json.dumps(_rank(json.loads(sys.argv[1]))), flush=True)
    # Gloo's threads have aborted processes whose interpreter was being taken apart; the answer is out.
    os._exit(0)
