"""Batches and losses of several tasks, whose positions follow from the steps alone."""

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from torch.nn import functional as F

from tierstore.model import ModelConfig, Transformer
from tierstore.model.interface import Batch, ModelOutput, TaskSegment
from tierstore.model.store_schema import TaskProgress
from tierstore.moe import InMemoryExperts
from tierstore.train.data import permute
from tierstore.train.task_data import TaskData, TaskLosses
from tierstore.train.tasks import TaskConfig, TaskHead, TaskRows, assign, changes, own_heads, resumed


class Numbered:
    """Examples whose tokens say which they are: (task, number)."""

    def __init__(self, task: int, examples: int) -> None:
        self.task, self.examples, self.crc32 = task, examples, task

    def take(self, numbers: Sequence[int]) -> Batch:
        rows = [[self.task, self._at(number)] for number in numbers]
        tokens = torch.tensor(rows, dtype=torch.int64).view(-1, 2)
        return Batch(tokens, tokens)

    def _at(self, number: int) -> int:
        epoch, place = divmod(number, self.examples)
        return permute(place, self.examples, 31 * epoch + self.task)

    def targets(self, numbers: Sequence[int]) -> int:
        return 2 * len(numbers)

    def batch(self, step: int, micro: int = 0) -> Batch:
        raise NotImplementedError

    def validation_batches(self, count: int) -> Iterator[Batch]:
        yield self.take(range(3))

    def describe(self) -> str:
        return f"{self.examples} examples"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode()


NAMES = ("a", "b", "c")


def data(rows: dict[str, int], sizes: dict[str, int], ranks: int, micro_batches: int) -> TaskData:
    tasks = {name: TaskConfig(paths=("x",), rows=count) for name, count in rows.items()}
    sources = {name: Numbered(NAMES.index(name), sizes[name]) for name in rows}
    pieces = assign(tuple(TaskRows(name, count, 2) for name, count in rows.items()), ranks)
    return TaskData(tasks, sources, pieces, micro_batches=micro_batches)


def test_padding_of_one_task_stays_padding_beside_another() -> None:
    made = data({"a": 2, "b": 1}, {"a": 8, "b": 8}, ranks=2, micro_batches=1)
    made.begin(0, dict.fromkeys("ab", TaskProgress()))
    assert made.batch(0).mask_BT is None
    whole = made.sources["b"].take
    padded = torch.tensor([[True, False]])
    made.sources["b"].take = lambda numbers: replace(whole(numbers), mask_BT=padded)  # type: ignore[method-assign]
    mask_BT = made.batch(0).mask_BT
    assert mask_BT.tolist() == [[True, True], [True, True], [True, False]]
    for rank, expected in enumerate([None, mask_BT[1:]]):
        found = made.piece(0, 0, rank).mask_BT
        assert (found is None) == (expected is None)
        assert found is None or found.equal(expected)


class Run:
    """What is committed: progress and the examples that were taken, as a killed and resumed job has them."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        self.step = 0
        self.progress: dict[str, TaskProgress] = {}
        self.taken: list[tuple[int, int]] = []

    def attempt(
        self, rows: dict[str, int], ranks: int, micro_batches: int, commits: list[int], lost: int
    ) -> None:
        """Commits after so many steps each, takes ``lost`` more, and is killed."""
        made = data(rows, self.sizes, ranks, micro_batches)
        self.progress = resumed(made.tasks, self.progress)
        made.begin(self.step, self.progress)
        for steps in [*commits, None]:
            taken, at = [], self.step
            for step in range(at, at + (lost if steps is None else steps)):
                for micro in range(micro_batches):
                    pieces = [made.piece(step, micro, rank) for rank in range(ranks)]
                    rows_of_all = torch.cat([piece.tokens_BT for piece in pieces]).tolist()
                    assert rows_of_all == made.batch(step, micro).tokens_BT.tolist()
                    taken += [tuple(row) for row in rows_of_all]
            if steps is not None:
                self.step += steps
                for name, position in made.positions(self.step).items():
                    self.progress[name] = replace(self.progress[name], position=position)
                self.taken += taken


ATTEMPTS = st.tuples(
    st.dictionaries(st.sampled_from(NAMES), st.integers(1, 5), min_size=1),
    st.integers(1, 5),
    st.integers(1, 2),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 3),
)


@given(st.lists(ATTEMPTS, min_size=1, max_size=6), st.integers(3, 9))
def test_every_example_once_an_epoch(
    attempts: list[tuple[dict[str, int], int, int, list[int], int]], size: int
) -> None:
    """Whatever ranks, tasks, rows and micro-batches an attempt has, and wherever it is killed."""
    run = Run({name: size + number for number, name in enumerate(NAMES)})
    for rows, ranks, micro_batches, commits, lost in attempts:
        run.attempt(dict(sorted(rows.items())), ranks, micro_batches, commits, lost)
    for number, name in enumerate(NAMES):
        found = [example for task, example in run.taken if task == number]
        assert len(found) == (run.progress[name].position if name in run.progress else 0)
        whole, begun = divmod(len(found), run.sizes[name])
        counts = Counter(found)
        assert sum(count == whole + 1 for count in counts.values()) == begun
        assert all(count in (whole, whole + 1) for count in counts.values())
        # Epoch by epoch, in the order in which they were taken.
        for epoch in range(whole):
            part = found[epoch * run.sizes[name] : (epoch + 1) * run.sizes[name]]
            assert sorted(part) == list(range(run.sizes[name]))


def test_an_example_by_hand() -> None:
    """3 rows of a and 1 of b on two ranks, two micro-batches: step 1 takes a's 7th to 12th examples."""
    made = data({"a": 3, "b": 1}, {"a": 100, "b": 100}, 2, 2)
    made.begin(0, {"a": TaskProgress(), "b": TaskProgress(position=10)})
    assert made.positions(1) == {"a": 6, "b": 12}
    first, second = (made.piece(1, 1, rank) for rank in range(2))
    assert first.tokens_BT.tolist() == [[0, permute(9, 100, 0)], [0, permute(10, 100, 0)]]
    assert second.tokens_BT.tolist() == [[0, permute(11, 100, 0)], [1, permute(13, 100, 1)]]
    assert [(s.task, s.rows, s.weight, s.step_targets) for s in second.segments] == [
        ("a", range(1), 0.5, 12),
        ("b", range(1, 2), 0.5, 4),
    ]
    assert second.parts == 4


def test_a_step_of_no_rows() -> None:
    made = data({"a": 1}, {"a": 4}, 2, 1)
    made.begin(0, {"a": TaskProgress()})
    sizes = sorted(len(made.piece(0, 0, rank).tokens_BT) for rank in range(2))
    assert sizes == [0, 1]
    with refuses(ValueError, "micro-batch 1", "of 1"):
        made.batch(0, 1)


def test_tasks_that_come_and_go() -> None:
    first = resumed({"a": TaskConfig(paths=("x",)), "b": TaskConfig(paths=("x",), head=TaskHead.OWN)}, {})
    moved = {name: replace(known, position=7) for name, known in first.items()}
    then = resumed({"c": TaskConfig(paths=("x",))}, moved)
    assert {name: known.position for name, known in then.items()} == {"a": 7, "b": 7, "c": 0}
    assert own_heads(then) == ["b"]
    # The head that it once had is kept, though the shared one is trained now.
    back = resumed({"b": TaskConfig(paths=("x",))}, then)
    assert own_heads(back) == ["b"]


def test_changes_are_said() -> None:
    before = {"a": TaskProgress(position=5), "b": TaskProgress(position=6)}
    recorded = {"a": {"weight": 1.0, "rows": 2}, "b": {"weight": 1.0, "rows": 2}}
    present = {"a": {"weight": 2.0, "rows": 2}, "c": {"weight": 1.0, "rows": 2}}
    assert list(changes(recorded, present, before)) == [
        "task c: added, from its beginning",
        "task b: removed, kept at example 6 for when it comes back",
        "task a: weight was 1.0, is 2.0",
    ]
    again = list(changes(present, recorded, before))
    assert again[0] == "task b: added, from its example 6 on"


def test_the_random_attempts_differ() -> None:
    """The drawn attempts do cover several ranks, kills and both kinds of cuts, or the property would say little."""
    random_ = random.Random(3)
    run = Run(dict.fromkeys(NAMES, 5))
    for _ in range(30):
        rows = {name: random_.randint(1, 4) for name in NAMES if random_.random() < 0.7} or {"a": 1}
        run.attempt(
            rows, random_.randint(1, 4), random_.randint(1, 2), [random_.randint(0, 2)], random_.randint(0, 2)
        )
    assert set(Counter(run.taken)) == {(task, example) for task in range(3) for example in range(5)}


# Losses by task ---------------------------------------------------------------------------------------------


SMALL = ModelConfig(
    d_model=16, n_layers=2, n_heads=2, seq_len=8, d_ff=24, experts=4, aux_loss_weight=0.0, z_loss_weight=0.0
)


def model() -> Transformer:
    source = InMemoryExperts(SMALL.expert_shape, layers=SMALL.moe_layers, experts=4, depth=2)
    built = Transformer(SMALL, source)
    built.add_heads(["own"])
    return built


def batch() -> Batch:
    both = torch.randint(256, (5, 9), generator=torch.Generator().manual_seed(3))
    segments = (TaskSegment("shared", range(2), 0.25, 16), TaskSegment("own", range(2, 5), 0.75, 24))
    return Batch(both[:, :-1], both[:, 1:], segments=segments)


def test_weights_times_means_with_each_tasks_head() -> None:
    """Against logits of the whole batch, by torch's own cross entropy."""
    ours, theirs = model(), model()
    given = batch()
    output = ours.run(given)
    stream: list[torch.Tensor] = []
    theirs.norm.register_forward_hook(lambda *call: stream.append(call[2]))
    theirs(given.tokens_BT)
    shared = F.cross_entropy((stream[0][:2] @ theirs.head.t()).flatten(0, 1), given.targets_BT[:2].flatten())
    own = F.cross_entropy(
        (stream[0][2:] @ theirs.heads["own"].t()).flatten(0, 1), given.targets_BT[2:].flatten()
    )
    expected = 0.25 * shared + 0.75 * own
    torch.testing.assert_close(output.loss, expected)
    assert [(found.task, found.counted) for found in output.segments] == [("shared", 16), ("own", 24)]
    torch.testing.assert_close([found.loss for found in output.segments], [shared, own])
    output.objective.backward()
    expected.backward()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs.get_parameter(name).grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("cuts", [(0, 2, 5), (0, 1, 5), (0, 0, 3, 5), (0, 4, 4, 5)])
def test_losses_of_pieces_add_up(cuts: tuple[int, ...]) -> None:
    """Their means over ranks are the loss of the whole, empty pieces included."""
    built, given, world = model(), batch(), len(cuts) - 1
    whole = built.run(given)
    pieces = [given.piece(range(start, stop), world) for start, stop in itertools.pairwise(cuts)]
    assert sum(len(piece.tokens_BT) for piece in pieces) == 5
    outputs = [_balanced(built, piece) for piece in pieces]
    torch.testing.assert_close(torch.stack([o.loss for o in outputs]).detach().mean(), whole.loss.detach())
    total = TaskLosses(["shared", "own"])
    for output in outputs:
        total.add(total.own(output))
    assert total.tokens() == {"shared": 16, "own": 24}
    expected = {found.task: float(found.loss.detach()) for found in whole.segments}
    assert total.losses() == pytest.approx(expected)


def _balanced(built: Transformer, piece: Batch) -> ModelOutput:
    output = built.run(piece)
    output.objective.backward()  # an empty piece has one, too
    return output


def test_a_task_without_targets_has_no_loss() -> None:
    assert TaskLosses(["a"]).losses() == {}
