"""The objective of a batch of tasks: weights times the tasks' means, whatever pieces it is cut into."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from tierstore.model import ModelConfig, Transformer
from tierstore.model.interface import Batch, ModelOutput, TaskSegment
from tierstore.moe import InMemoryExperts
from tierstore.train.task_data import TaskLosses

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
    assert theirs.head is not None
    shared = F.cross_entropy((stream[0][:2] @ theirs.head.t()).flatten(0, 1), given.targets_BT[:2].flatten())
    own = F.cross_entropy(
        (stream[0][2:] @ theirs.heads["own"].t()).flatten(0, 1), given.targets_BT[2:].flatten()
    )
    expected = 0.25 * shared + 0.75 * own
    torch.testing.assert_close(output.loss, expected)
    assert [(found.task, found.counted) for found in output.segments] == [("shared", 16), ("own", 24)]
    torch.testing.assert_close([found.loss for found in output.segments], [shared, own])
    assert output.objective is not None
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
    assert output.objective is not None
    output.objective.backward()  # an empty piece has one, too
    return output


def test_a_task_without_targets_has_no_loss() -> None:
    assert TaskLosses(["a"]).losses() == {}
