"""1F1B through pipeline stages (Pipeline MoE, section 3.3): the time of a step, what is held, and the disk traffic.

    python experiments/stages.py [--stages 2 4] [--micro-batches 1 2 4] [--svg docs/stages.svg]

**Time.** Real ranks, one a stage, with the driver that training uses: torch's schedule, Gloo's messages. A stage's pass
takes a given time on an emulated device. The model of Pipeline MoE (and of PipeDream-Flush, Narayanan et al. 2021) is
``(M + p - 1)(t_f + t_b)``; a step may take 1.10 of it.

**Held.** Stage s of p holds the activations of at most ``min(M, p - s)`` micro-batches: the driver counts them.

**Traffic.** The residency core, as the planner runs it, takes stage 0's accesses in 1F1B order; beside it those of one
micro-batch after another and of layer order, which a pipeline cannot have. The figures are in units of the bytes of all
of the stage's records. They show where 1F1B does not pay: each micro-batch walks the stage's experts again.

Exit status 1: passes came in another order, a stage held more than it should, or a step took longer than allowed.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from emulation import TIMEOUT_S, finish, options, run_ranks, start, table, taking, timed
from torch import Tensor

from tierstore.config import load
from tierstore.model.config import ModelConfig
from tierstore.model.interface import Batch, ModelOutput
from tierstore.model.stage import StageBorder, StagePass
from tierstore.parallel import Mesh, ParallelConfig, RankEnvironment, launch
from tierstore.plan.capacity import Capacity, Setting
from tierstore.plan.traffic import step_traffic
from tierstore.prefetch.program import Finals
from tierstore.reports.bars import Bar, BarPanel, draw_bars
from tierstore.stats import StallLedger
from tierstore.tiers.slots import DeviceKind
from tierstore.timeline import TimelineSlice, Track, open_timeline, read_slices
from tierstore.train.budgets import budgets
from tierstore.train.config import TrainConfig
from tierstore.train.files import MicroOrder
from tierstore.train.stage_pipeline import StagePipeline
from tierstore.train.stages import one_forward_one_backward, stage_config
from tierstore.train.stepping import OpenStep
from tierstore.units import format_seconds

TARGET = 1.10
ROWS, TOKENS, WIDTH = 2, 32, 64
COLOURS = {"forward": "#4c72b0", "backward": "#dd8452"}


class EmulatedStage:
    """A stage whose passes take time alone."""

    def __init__(self, mesh: Mesh, forward_s: float, backward_s: float) -> None:
        stage = mesh.pipeline
        self.border = StageBorder(stage.rank == 0, stage.rank == stage.size - 1, WIDTH, torch.float32)
        self._seconds = forward_s, backward_s

    def run_stage(self, batch: Batch, given: Tensor, values: Tensor) -> StagePass:
        x = torch.zeros(*given.shape, WIDTH, requires_grad=True) if self.border.begins else given
        x = taking(x, *self._seconds)
        ends = self.border.ends
        objective = x.sum() if ends else torch.zeros((), requires_grad=True)
        loads = (torch.ones(1, dtype=torch.int64),)
        loss = objective if ends else None
        output = ModelOutput(loss, torch.zeros(()), torch.zeros(()), objective, loads, None)
        return StagePass(None if ends else x, output)


class NoStep:
    """A step without parameters: of ``OpenStep`` what a pipeline calls."""

    def __init__(self) -> None:
        self.passes_begun = 0

    def begin_pass(self) -> None:
        self.passes_begun += 1

    def resume_pass(self, index: int, finals: Finals) -> None: ...

    def end_pass(self) -> None: ...


def rank(
    counts: Sequence[int], forward_s: float, backward_s: float, rounds: int, timelines: str
) -> list[dict[str, Any]]:
    """One stage: for each number of micro-batches its steps, in seconds, what it held, and whether passes were in order.
    The timeline of the last number goes to ``timelines``.
    """
    with launch(
        ParallelConfig(stages=RankEnvironment.from_environment().world, timeout_s=TIMEOUT_S), device="cpu"
    ) as mesh:
        found = []
        for count in counts:
            drawn = timeline_file(timelines, mesh.pipeline.rank) if count == counts[-1] else None
            with open_timeline(drawn) as timeline:
                pipeline = StagePipeline(
                    EmulatedStage(mesh, forward_s, backward_s), mesh.pipeline, mesh.device,
                    ledger=StallLedger(), timeline=timeline, agree=lambda output, finite: 0.0,
                )  # fmt: skip
                tokens = torch.zeros(ROWS, TOKENS, dtype=torch.long)
                batches = [Batch(tokens, tokens)] * count
                pipeline.run(cast(OpenStep, NoStep()), 0, batches)  # makes the connections
                wanted = one_forward_one_backward(mesh.pipeline.rank, mesh.stages, count)
                seconds, in_order = [], True
                for number in range(1, rounds + 1):
                    step = partial(pipeline.run, cast(OpenStep, NoStep()), number, batches)
                    seconds.append(timed(mesh.world, step))
                    in_order = in_order and tuple(pipeline.log) == wanted
            found.append({"step_s": seconds, "held": pipeline.most_held, "in_order": in_order})
        return found


def timeline_file(directory: str, stage: int) -> Path:
    return Path(directory) / f"stage-{stage}.json"


def pipelines(
    stages: int, times: Sequence[int], forward_s: float, backward_s: float, rounds: int, svg: Path | None
) -> Iterator[dict[str, Any]]:
    """A row for each number of micro-batches, ``times`` the number of stages."""
    counts = [each * stages for each in times]
    with tempfile.TemporaryDirectory() as directory:
        answers = run_ranks(rank, stages, counts, forward_s, backward_s, rounds, directory)
        if svg is not None:
            svg.write_text(draw([read_slices(timeline_file(directory, stage)) for stage in range(stages)]))
    for count, found in zip(counts, zip(*answers, strict=True), strict=True):
        # Between barriers: a step has ended when all stages have.
        steps = [max(seconds) for seconds in zip(*(each["step_s"] for each in found), strict=True)]
        model_s = (count + stages - 1) * (forward_s + backward_s)
        yield {
            "stages_count": stages,
            "micro_batches_count": count,
            "step_samples_s": steps,
            "step_s": statistics.median(steps),
            "model_s": model_s,
            "step_to_model_ratio": statistics.median(steps) / model_s,
            "held_count": [each["held"] for each in found],
            "in_order": all(each["in_order"] for each in found),
        }


def failures(row: Mapping[str, Any]) -> Iterator[str]:
    """What one pipeline did otherwise than it should."""
    stages, count = row["stages_count"], row["micro_batches_count"]
    name = f"{stages} stages, {count} micro-batches"
    for stage, held in enumerate(row["held_count"]):
        if held > min(count, stages - stage):
            yield f"{name}: stage {stage} held {held} micro-batches, expected at most {min(count, stages - stage)}"
    if not row["in_order"]:
        yield f"{name}: passes came in another order than 1F1B's"
    if row["step_to_model_ratio"] > TARGET:
        yield f"{name}: a step took {row['step_to_model_ratio']:.3f} of the model, at most {TARGET} is allowed"


def traffic(stages: int, host_budget: int) -> Iterator[dict[str, Any]]:
    """Stage 0 of a pipeline whose stages each have a main job's two layers, by the order of its passes."""
    for count in (stages, 2 * stages):
        settings = {"host_budget": host_budget, "model.n_layers": 2 * stages, "data.micro_batches": count}
        whole = load(TrainConfig, None, settings)
        config = stage_config(whole, 0, stages)
        # The stage's layers as a model of their own, which has no pipeline.
        assert isinstance(whole.model, ModelConfig)
        alone = replace(config, model=replace(whole.model, n_layers=2))
        for name, of, order, passes in (
            ("1F1B", config, MicroOrder.MICRO, one_forward_one_backward(0, stages, count)),
            ("one after another", config, MicroOrder.MICRO, ()),
            ("layer order", alone, MicroOrder.LAYER, ()),
        ):
            of = replace(of, data=replace(of.data, micro_order=order))
            setting = Setting(config=of, model=of.model.architecture)
            experts = setting.local_experts * len(setting.model.moe_layers)
            divided = budgets(of, DeviceKind.CPU, experts=experts)
            moved = step_traffic(setting, Capacity((), divided), order=passes)
            unit = config.model.architecture.records * setting.schemas[-1].record_bytes
            yield {
                "order": name,
                "stages_count": stages,
                "micro_batches_count": count,
                "read_ratio": moved.read_bytes / unit,
                "written_ratio": moved.written_bytes / unit,
            }


def draw(timelines: Sequence[Mapping[str, Sequence[TimelineSlice]]]) -> str:
    """An SVG of the last step: a row a stage, a bar a pass with its micro-batch's number. Timelines name a pass by phase,
    step and micro-batch ("forward 3.0").
    """
    steps = []
    for slices in timelines:
        passes = slices[Track.COMPUTE.value]
        numbers = [int(each.name.split()[1].split(".")[0]) for each in passes]
        steps.append([each for each, number in zip(passes, numbers, strict=True) if number == max(numbers)])
    begin = min(each.begin for passes in steps for each in passes)
    end = max(each.end for passes in steps for each in passes)
    rows = {}
    for stage, passes in enumerate(steps):
        bars = []
        for name, first, last in passes:
            phase, _, micro = name.replace(".", " ").split()
            bars.append(Bar((first - begin) / 1e3, (last - begin) / 1e3, COLOURS[phase], micro))
        rows[f"stage {stage}"] = bars
    caption = "ms: one step, forward (blue) and backward (orange) passes by micro-batch"
    return draw_bars([BarPanel(rows=rows)], length=(end - begin) / 1e3, caption=caption)


def main() -> None:
    asked = options(
        __doc__, stages=(2, 4), micro_batches=(1, 2, 4), forward_s=0.05, backward_s=0.1, rounds=5,
        host_budget=768 << 20, svg=None,
    )  # fmt: skip
    found: list[dict[str, Any]] = []
    for stages in asked.stages:
        svg = Path(asked.svg) if asked.svg and stages == max(asked.stages) else None
        found += pipelines(stages, asked.micro_batches, asked.forward_s, asked.backward_s, asked.rounds, svg)
    moved = list(traffic(max(asked.stages), asked.host_budget))
    table(
        f"1F1B, passes of {format_seconds(asked.forward_s)} and {format_seconds(asked.backward_s)}", found,
        "stages_count", "micro_batches_count", "step_s", "model_s", "step_to_model_ratio", "held_count",
    )  # fmt: skip
    title = "disk traffic of stage 0 a step, in units of its records"
    table(title, moved, "stages_count", "micro_batches_count", "order", "read_ratio", "written_ratio")
    finish({"pipelines": found, "traffic": moved}, [each for row in found for each in failures(row)])


if __name__ == "__main__":
    start(main)
