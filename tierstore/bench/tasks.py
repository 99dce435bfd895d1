"""Several tasks on real ranks: each card's speed with one task a card, and with pieces of equal cost (SE-MoE section 4.1).

The paper trains four tasks of 512, 256, 128 and 128 samples a step, first on four cards with a task each, then on eight
with 4, 2, 1 and 1 for the tasks, and reports 62.6 and 74.0 samples a second and card (table 3): +18.2%. Both follow from
t = a + c max(rows of a card), a = 0.944 s, c = 6.14 ms. Here ranks are processes on Gloo. The tasks' data, the
assignment and each rank's batch are those of training; what a card computes is an emulated device's time, a + c rows,
``time_scale`` times faster; and ranks meet at the end of a step, in a sum, as gradients do.

The table prints batches of 312, 230, 120 and 120 for the eight cards, which add up to 782 and not to 1,024. They are
measured too, cut as the paper does it and in pieces of equal cost.

Modes take turns, round by round, in changing order; ``balanced again`` is the same as ``balanced``, and their difference
the noise.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tierstore.bench.checks import at_least
from tierstore.bench.processes.ranks import run_ranks
from tierstore.bench.results.document import Better, Measurement, derived, measured
from tierstore.bench.results.figures import INTERNAL, Figures, named, prefixed, ratios
from tierstore.errors import ConfigError
from tierstore.train.tasks.assignment import Assignment, TaskRows, assign

if TYPE_CHECKING:
    from tierstore.bench.overlap.device import EmulatedDevice
    from tierstore.parallel import Mesh

_TIMEOUT_S = 600.0
_SEQ_LEN = 8
#: Table 3: rows of each task as they add up to the total that it prints, and as it prints them for eight cards.
BATCHES, PRINTED = (512, 256, 128, 128), (312, 230, 120, 120)
#: Cards of each task: with a card each, and as the paper balances them.
ONE_EACH, PAPER_CARDS = (1, 1, 1, 1), (4, 2, 1, 1)
#: Points by which the speed-up may differ from the formula's.
TOLERANCE = 3.0


@dataclass(frozen=True, kw_only=True)
class TasksBench(Figures):
    """``fixed_s`` and ``row_s``: what a card takes for a step, and for each row of it. ``time_scale``: how many times faster
    the emulated device is. ``rounds`` of ``steps`` steps of each mode.
    """

    ranks: int = 8
    fixed_s: float = 0.944
    row_s: float = 6.14e-3
    time_scale: float = field(default=5.0, metadata=named("time_scale_count"))
    rounds: int = field(default=5, metadata=named("rounds_count"))
    steps: int = field(default=4, metadata=INTERNAL)

    def __post_init__(self) -> None:
        at_least(1, rounds=self.rounds, steps=self.steps)
        if self.ranks != sum(PAPER_CARDS):
            raise ConfigError(f"ranks: expected the table's {sum(PAPER_CARDS)}, got {self.ranks}")
        if not (self.fixed_s > 0 and self.row_s > 0 and self.time_scale > 0):
            raise ConfigError("fixed_s, row_s, time_scale: expected more than 0")

    def step_s(self, assignment: Assignment) -> float:
        """What the formula says of a step, in the time of the emulated device."""
        return (self.fixed_s + self.row_s * assignment.most_rows) / self.time_scale


@dataclass(frozen=True, kw_only=True)
class ModeSpeed(Figures):
    """One mode: ``cards`` with rows. Speeds are samples a second and card, in the paper's time."""

    mode: str
    cards_count: int
    samples_count: int
    most_samples_count: int
    step_samples_s: Sequence[float] = field(metadata=INTERNAL)
    step_s: float
    predicted_step_s: float
    speed: float = field(metadata=named("card_samples_per_s"))


@dataclass(frozen=True, kw_only=True)
class TasksResult(Figures):
    """What ``run`` found. ``gain_ratio``: how much faster a card is balanced than with one task a card, the
    median over rounds; ``noise_ratio``: how far two equal modes were apart.
    """

    bench: str = "tasks"
    asked: TasksBench = field(metadata=prefixed(""))
    modes: Sequence[ModeSpeed]
    gain_ratio: float
    predicted_gain_ratio: float
    noise_ratio: float
    every_example_once: bool

    @property
    def as_predicted(self) -> bool:
        """Whether the gain is the formula's, within the tolerance, and no example was lost or taken twice."""
        near = abs(self.gain_ratio - self.predicted_gain_ratio) * 100 <= TOLERANCE
        return near and self.every_example_once


def by_cards(rows: Sequence[int], cards: Sequence[int], ranks: int) -> Assignment:
    """Each task on ``cards`` of its own, in as equal parts as can be; the ranks that are left have no rows."""
    cuts = [0]
    for count, own in zip(rows, cards, strict=True):
        start = cuts[-1]
        cuts += [start + (part + 1) * count // own for part in range(own)]
    return Assignment(_tasks(rows), (*cuts, *[cuts[-1]] * (ranks + 1 - len(cuts))))


def assignments(ranks: int) -> dict[str, Assignment]:
    """The modes by name."""
    balanced = assign(_tasks(BATCHES), ranks)
    return {
        "one task a card": by_cards(BATCHES, ONE_EACH, ranks),
        "balanced": balanced,
        "balanced again": balanced,
        "as printed, by the paper": by_cards(PRINTED, PAPER_CARDS, ranks),
        "as printed, equal cost": assign(_tasks(PRINTED), ranks),
    }


def _tasks(rows: Sequence[int]) -> tuple[TaskRows, ...]:
    return tuple(TaskRows(f"task-{number}", count, _SEQ_LEN) for number, count in enumerate(rows, start=1))


def run(bench: TasksBench) -> TasksResult:
    """Measures. Raises WorkerError."""
    with tempfile.TemporaryDirectory(prefix="tierstore-tasks-") as directory:
        for task in _tasks(BATCHES):
            text = f"{task.name} ".encode() * 20_000
            Path(directory, task.name).write_bytes(text)
        answers = run_ranks(
            "tierstore.bench.tasks",
            [json.dumps(asdict(bench)), directory],
            ranks=bench.ranks,
            timeout_s=_TIMEOUT_S,
        )
    # Between barriers all ranks see the same seconds.
    samples: Mapping[str, Sequence[float]] = answers[0]["samples"]
    taken = [answer["taken"] for answer in answers]
    modes = [_speed(bench, name, of, samples[name]) for name, of in assignments(bench.ranks).items()]
    alone, balanced = (
        next(mode for mode in modes if mode.mode == name) for name in ("one task a card", "balanced")
    )
    per_card = (alone.samples_count / alone.cards_count) / (balanced.samples_count / balanced.cards_count)
    gains = [ratio / per_card - 1 for ratio in ratios(alone.step_samples_s, balanced.step_samples_s)]
    noise = ratios(samples["balanced again"], balanced.step_samples_s)
    return TasksResult(
        asked=bench,
        modes=modes,
        gain_ratio=statistics.median(gains),
        predicted_gain_ratio=alone.predicted_step_s / balanced.predicted_step_s / per_card - 1,
        noise_ratio=statistics.median(abs(ratio - 1) for ratio in noise),
        every_example_once=_each_once(taken),
    )


def _speed(bench: TasksBench, name: str, of: Assignment, samples: Sequence[float]) -> ModeSpeed:
    cards = sum(len(of.piece(rank)) > 0 for rank in range(of.ranks))
    step_s = statistics.median(samples)
    return ModeSpeed(
        mode=name,
        cards_count=cards,
        samples_count=of.rows,
        most_samples_count=of.most_rows,
        step_samples_s=samples,
        step_s=step_s,
        predicted_step_s=bench.step_s(of),
        speed=of.rows / (step_s * bench.time_scale) / cards,
    )


def _each_once(taken: Sequence[Mapping[str, Sequence[Sequence[int]]]]) -> bool:
    """Whether the ranks took, of each mode, each task's examples from the first to the last exactly once: (number of the
    task, first example, and the one behind the last) of all pieces leave no gap and do not overlap.
    """
    for mode in taken[0]:
        pieces = sorted(tuple(piece) for of_rank in taken for piece in of_rank[mode])
        reached: dict[int, int] = {}
        for task, first, behind in pieces:
            if first != reached.get(task, 0):
                return False
            reached[task] = behind
    return True


def measurements(result: TasksResult) -> Iterator[Measurement]:
    """What ``run`` found, for a document."""
    for mode in result.modes:
        yield measured("step", mode.step_samples_s, "s", Better.LOWER, parameters={"mode": mode.mode})
    by_name = {mode.mode: mode.step_samples_s for mode in result.modes}
    balanced = ratios(by_name["one task a card"], by_name["balanced"])
    yield derived("step of one task a card to balanced", balanced, "ratio", Better.HIGHER)


# One rank ---------------------------------------------------------------------------------------------------


def _rank(bench: TasksBench, directory: Path) -> dict[str, object]:
    import torch

    from tierstore import _native
    from tierstore.bench.overlap.device import EmulatedDevice
    from tierstore.parallel import ParallelConfig, launch

    torch.set_num_threads(1)
    engine = _native.Engine(backend=_native.IoBackend.THREADS)
    try:
        with launch(ParallelConfig(timeout_s=_TIMEOUT_S), device="cpu") as mesh:
            runs = {
                name: _Mode(bench, of, directory, mesh, EmulatedDevice(engine))
                for name, of in assignments(bench.ranks).items()
            }
            names = list(runs)
            for one in runs.values():
                one.step()  # first touch, and connections
            samples: dict[str, list[float]] = {name: [] for name in names}
            for number in range(bench.rounds):
                for name in names if number % 2 == 0 else reversed(names):
                    samples[name].append(runs[name].round())
            return {"samples": samples, "taken": {name: one.taken for name, one in runs.items()}}
    finally:
        engine.close()


class _Mode:
    """Steps of one mode on this rank, and the examples that it took."""

    def __init__(
        self, bench: TasksBench, assignment: Assignment, directory: Path, mesh: Mesh, device: EmulatedDevice
    ) -> None:
        import torch

        from tierstore.train.data import TextData
        from tierstore.train.files import DataConfig
        from tierstore.train.tasks.config import TaskConfig
        from tierstore.train.tasks.data import TaskData

        self._bench, self._assignment, self._mesh, self._device = bench, assignment, mesh, device
        self._rows = len(assignment.piece(mesh.world.rank))
        tasks = {task.name: TaskConfig(paths=(str(directory / task.name),)) for task in assignment.tasks}
        sources = {
            name: TextData(task.data(DataConfig(batch_size=assignment.rows)), seq_len=_SEQ_LEN)
            for name, task in tasks.items()
        }
        self._data = TaskData(tasks, sources, assignment, micro_batches=1)
        self._numbers = {name: number for number, name in enumerate(tasks)}
        self._sum = torch.zeros(1024)  # what stands for gradients
        self._steps = 0
        self.taken: list[tuple[int, int, int]] = []

    def step(self) -> None:
        # The device computes while its host makes the next batch, as a GPU would.
        if self._rows:
            bench = self._bench
            self._device.launch((bench.fixed_s + bench.row_s * self._rows) / bench.time_scale)
        self._take(self._steps)
        self._device.synchronize()
        self._mesh.world.all_reduce(self._sum).wait()
        self._steps += 1

    def _take(self, step: int) -> None:
        rank, positions = self._mesh.world.rank, self._data.positions(step)
        batch = self._data.piece(step, 0, rank)
        piece, spans = self._assignment.piece(rank), self._assignment.spans()
        for segment in batch.segments:
            start = positions[segment.task] + piece.start + segment.rows.start - spans[segment.task].start
            number = self._numbers[segment.task]
            self.taken.append((number, start, start + len(segment.rows)))
        assert len(batch.tokens_BT) == self._rows

    def round(self) -> float:
        """Seconds of a step, of ``steps`` between barriers."""
        self._mesh.world.barrier()
        started = time.perf_counter()
        for _ in range(self._bench.steps):
            self.step()
        self._mesh.world.barrier()
        return (time.perf_counter() - started) / self._bench.steps


if __name__ == "__main__":
    print(json.dumps(_rank(TasksBench(**json.loads(sys.argv[1])), Path(sys.argv[2]))), flush=True)
    # Gloo's threads have aborted processes whose interpreter was being taken apart; the answer is out.
    os._exit(0)
