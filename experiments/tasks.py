"""Several tasks on real ranks (SE-MoE, section 4.1): each card's speed with one task a card, and with pieces of equal cost.

    python experiments/tasks.py [--time-scale 5] [--rounds 5] [--steps 4]

The paper trains four tasks of 512, 256, 128 and 128 samples a step, first on four cards with a task each, then on eight
with 4, 2, 1 and 1 for the tasks, and reports 62.6 and 74.0 samples a second and card (table 3): +18.2%. Both follow
from t = a + c max(rows of a card), a = 0.944 s, c = 6.14 ms. Here ranks are processes on Gloo. The tasks' data, the
assignment and each rank's batch are those of training; what a card computes is an emulated device's time, a + c rows,
``time_scale`` times faster; and ranks meet at the end of a step in a sum, as gradients do.

The table prints batches of 312, 230, 120 and 120 for the eight cards, which add up to 782 and not to 1,024. They are
measured too, cut as the paper does it and in pieces of equal cost.

Modes take turns, round by round, in changing order; ``balanced again`` equals ``balanced``, and their difference is the
noise. Exit status 1: the gain differs by more than 3 points from the formula's, or an example was lost or taken twice.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from emulation import OUTPUT, TIMEOUT_S, finish, options, run_ranks, start, table, timed

from tierstore import _native
from tierstore.bench.overlap_rank import EmulatedDevice
from tierstore.parallel import Mesh, ParallelConfig, launch
from tierstore.train.data import TextData
from tierstore.train.files import DataConfig
from tierstore.train.task_data import TaskData
from tierstore.train.tasks import Assignment, TaskConfig, TaskRows, assign

#: What a card takes for a step, and for each row of it, in seconds: fitted to table 3.
FIXED_S, ROW_S = 0.944, 6.14e-3
SEQ_LEN = 8
#: Table 3: rows of each task as they add up to the total that it prints, and as it prints them for eight cards.
BATCHES, PRINTED = (512, 256, 128, 128), (312, 230, 120, 120)
#: Cards of each task: with a card each, and as the paper balances them.
ONE_EACH, PAPER_CARDS = (1, 1, 1, 1), (4, 2, 1, 1)
RANKS = sum(PAPER_CARDS)
#: Points by which the gain may differ from the formula's.
TOLERANCE = 3.0


def task_rows(rows: Sequence[int]) -> tuple[TaskRows, ...]:
    return tuple(TaskRows(f"task-{number}", count, SEQ_LEN) for number, count in enumerate(rows, start=1))


def by_cards(rows: Sequence[int], cards: Sequence[int]) -> Assignment:
    """Each task on ``cards`` of its own, in parts as equal as possible; the ranks that are left have no rows."""
    cuts = [0]
    for count, own in zip(rows, cards, strict=True):
        start = cuts[-1]
        cuts += [start + (part + 1) * count // own for part in range(own)]
    return Assignment(task_rows(rows), (*cuts, *[cuts[-1]] * (RANKS + 1 - len(cuts))))


def assignments() -> dict[str, Assignment]:
    """The modes by name."""
    balanced = assign(task_rows(BATCHES), RANKS)
    return {
        "one task a card": by_cards(BATCHES, ONE_EACH),
        "balanced": balanced,
        "balanced again": balanced,
        "as printed, by the paper": by_cards(PRINTED, PAPER_CARDS),
        "as printed, equal cost": assign(task_rows(PRINTED), RANKS),
    }


class Mode:
    """Steps of one mode on this rank, and the examples that it took: (task, first, one past the last) of each piece."""

    def __init__(
        self, of: Assignment, directory: Path, mesh: Mesh, device: EmulatedDevice, time_scale: float
    ) -> None:
        self._assignment, self._mesh, self._device = of, mesh, device
        self._rows = len(of.piece(mesh.world.rank))
        self._computing_s = (FIXED_S + ROW_S * self._rows) / time_scale
        tasks = {task.name: TaskConfig(paths=(str(directory / task.name),)) for task in of.tasks}
        sources = {
            name: TextData(task.data(DataConfig(batch_size=of.rows)), seq_len=SEQ_LEN)
            for name, task in tasks.items()
        }
        self._data = TaskData(tasks, sources, of, micro_batches=1)
        self._numbers = {name: number for number, name in enumerate(tasks)}
        self._sum = torch.zeros(1024)  # stands for gradients
        self._steps = 0
        self.taken: list[tuple[int, int, int]] = []

    def step(self) -> None:
        # The device computes while its host makes the next batch, as a GPU would.
        if self._rows:
            self._device.launch(self._computing_s)
        rank, positions = self._mesh.world.rank, self._data.positions(self._steps)
        batch = self._data.piece(self._steps, 0, rank)
        piece, spans = self._assignment.piece(rank), self._assignment.spans()
        for segment in batch.segments:
            start = positions[segment.task] + piece.start + segment.rows.start - spans[segment.task].start
            self.taken.append((self._numbers[segment.task], start, start + len(segment.rows)))
        assert len(batch.tokens_BT) == self._rows
        self._device.synchronize()
        self._mesh.world.all_reduce(self._sum).wait()
        self._steps += 1

    def round(self, steps: int) -> float:
        """Seconds of a step, of ``steps``."""
        return timed(self._mesh.world, self.step, steps)


def rank(directory: str, time_scale: float, rounds: int, steps: int) -> dict[str, Any]:
    """The seconds of a step by mode and round on one rank, and the examples that it took."""
    engine = _native.Engine(backend=_native.IoBackend.THREADS)
    try:
        with launch(ParallelConfig(timeout_s=TIMEOUT_S), device="cpu") as mesh:
            modes = {
                name: Mode(of, Path(directory), mesh, EmulatedDevice(engine), time_scale)
                for name, of in assignments().items()
            }
            for each in modes.values():
                each.step()  # first touch, and connections
            samples: dict[str, list[float]] = {name: [] for name in modes}
            for number in range(rounds):
                for name in list(modes) if number % 2 == 0 else reversed(modes):
                    samples[name].append(modes[name].round(steps))
            return {"samples": samples, "taken": {name: each.taken for name, each in modes.items()}}
    finally:
        engine.close()


def each_once(taken: Sequence[Mapping[str, Sequence[tuple[int, int, int]]]]) -> bool:
    """Whether the ranks took, of each mode, each task's examples from the first to the last exactly once: the pieces
    leave no gap and do not overlap.
    """
    for mode in taken[0]:
        reached: dict[int, int] = {}
        for task, first, behind in sorted(piece for of_rank in taken for piece in of_rank[mode]):
            if first != reached.get(task, 0):
                return False
            reached[task] = behind
    return True


def main() -> None:
    asked = options(__doc__, time_scale=5.0, rounds=5, steps=4)
    with tempfile.TemporaryDirectory() as directory:
        for task in task_rows(BATCHES):
            Path(directory, task.name).write_bytes(f"{task.name} ".encode() * 20_000)
        answers = run_ranks(rank, RANKS, directory, asked.time_scale, asked.rounds, asked.steps)
    modes = {}
    for name, of in assignments().items():
        samples = answers[0]["samples"][name]  # between barriers all ranks see the same seconds
        cards = sum(len(of.piece(each)) > 0 for each in range(of.ranks))
        step_s = statistics.median(samples)
        modes[name] = {
            "cards_count": cards,
            "samples_count": of.rows,
            "most_samples_count": of.most_rows,
            "step_samples_s": samples,
            "step_s": step_s,
            "predicted_step_s": (FIXED_S + ROW_S * of.most_rows) / asked.time_scale,
            "card_samples_per_s": of.rows / (step_s * asked.time_scale) / cards,
        }
    alone, balanced, again = (modes[name] for name in ("one task a card", "balanced", "balanced again"))
    alone_rows, balanced_rows = (mode["samples_count"] / mode["cards_count"] for mode in (alone, balanced))
    per_card = alone_rows / balanced_rows
    pairs = list(zip(*(mode["step_samples_s"] for mode in (alone, balanced, again)), strict=True))
    gain = statistics.median(a / b / per_card - 1 for a, b, _ in pairs)
    predicted = alone["predicted_step_s"] / balanced["predicted_step_s"] / per_card - 1
    noise = statistics.median(abs(c / b - 1) for _, b, c in pairs)
    once = each_once([answer["taken"] for answer in answers])
    table(
        f"{RANKS} ranks, {asked.rounds} rounds of {asked.steps} steps, {asked.time_scale:g} x the paper's speed",
        [{"mode": name, **mode} for name, mode in modes.items()], "mode", "cards_count", "samples_count",
        "most_samples_count", "step_s", "predicted_step_s", "card_samples_per_s",
    )  # fmt: skip
    OUTPUT.line(
        f"balanced against one task a card: {gain:+.1%} a card (by the formula {predicted:+.1%}; noise {noise:.1%}); "
        f"every example once: {'yes' if once else 'NO'}"
    )
    failures = [] if once else ["an example was lost or taken twice"]
    if abs(gain - predicted) * 100 > TOLERANCE:
        failures.append(f"the gain is {gain:+.1%}, the formula gives {predicted:+.1%}")
    finish(
        {
            "modes": modes, "gain_ratio": gain, "predicted_gain_ratio": predicted, "noise_ratio": noise,
            "every_example_once": once,
        },
        failures,
    )  # fmt: skip


if __name__ == "__main__":
    start(main)
