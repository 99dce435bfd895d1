"""Training with tables whose rows are divided over ranks: one process's bits where sums are in the order of tokens, losses
within rounding of gathered tables elsewhere; resumes, other layouts, and what is refused.
"""

from typing import Any

import numpy as np
import pytest
import torch
from launcher import RankFailedError, Ranks
from rank_cases import Make, alone, train, whole_run
from refusals import refuses
from vocabulary_train_cases import embedding_gradients

from tierstore.store.adamw import AdamWConfig
from tierstore.train.ranks import Opening

BOTH = {"parallel.embedding": "partitioned", "parallel.head": "partitioned"}
TIED = {"parallel.embedding": "partitioned", "model.tie_embeddings": "tied"}
MODES: dict[str, dict[str, Any]] = {
    "both": BOTH,
    "embedding": {"parallel.embedding": "partitioned", "data.micro_batches": 2},
    "head": {"parallel.head": "partitioned", "clip_norm": 0.5},
    "tied": {**TIED, "clip_norm": 0.5, "data.micro_batches": 2},
}


def one_process(found: list[dict[str, Any]], vocab: int) -> torch.Tensor:
    """The table that one process has after steps with the gradients that all ranks saw: torch's own embedding over the whole
    micro-batch, and AdamW over the whole table.
    """
    adamw = AdamWConfig()
    table = found[0]["before"].clone().requires_grad_()
    moments = torch.zeros_like(table), torch.zeros_like(table)
    count = torch.zeros(())
    for step, lr in enumerate(found[0]["rates"]):
        summed = torch.zeros_like(table)
        for micro in range(len(found[0]["seen"][step])):
            tokens, grads = (
                torch.cat(parts) for parts in zip(*(rank["seen"][step][micro] for rank in found), strict=True)
            )
            own = table.detach().clone().requires_grad_()
            torch.nn.functional.embedding(tokens, own).backward(grads)
            summed.add_(own.grad)
        count += 1
        with torch.no_grad():
            torch._fused_adamw_(
                [table], [summed], [moments[0]], [moments[1]], [], [count],
                lr=lr, beta1=adamw.betas[0], beta2=adamw.betas[1], weight_decay=adamw.weight_decay,
                eps=adamw.eps, amsgrad=False, maximize=False,
            )  # fmt: skip
    return table.detach()


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_table_is_that_of_one_process(ranks: Ranks, settings: Make, size: int) -> None:
    """Given the gradients of the embedding's rows, bit for bit, micro-batches too. A gathered table is near it: it is summed
    by rank, and which bits that gives is up to the processor.
    """
    changes = {"data.micro_batches": 2, "data.batch_size": 4}
    divided = ranks.run(
        size, embedding_gradients, settings({**changes, "parallel.embedding": "partitioned"}), 3
    )
    expected = one_process(divided, 256)
    for rank in divided:
        assert torch.equal(rank["after"], expected)
    gathered = ranks.run(size, embedding_gradients, settings(changes), 3)
    assert torch.equal(gathered[0]["before"], divided[0]["before"])
    torch.testing.assert_close(gathered[0]["after"], one_process(gathered, 256), rtol=1e-5, atol=1e-6)
    # The first forward passes read the same table.
    assert gathered[0]["losses"][0] == divided[0]["losses"][0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("size", "expert"), [(2, 0), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_as_with_gathered_tables(ranks: Ranks, settings: Make, mode: str, size: int, expert: int) -> None:
    """Losses and norms within rounding, of one process too; a resume goes on with the bits."""
    changes = MODES[mode]
    gathered = {name: value for name, value in changes.items() if not name.startswith("parallel")}
    expected, norms, _ = train(alone(), settings(gathered), 4, Opening.CREATE)
    made = settings(changes)
    found = ranks.run(size, train, made, 4, Opening.CREATE, expert=expert)
    assert all(rank[:2] == found[0][:2] for rank in found)
    np.testing.assert_allclose(found[0][0], expected, rtol=2e-5)
    np.testing.assert_allclose(found[0][1], norms, rtol=2e-3)
    halves = settings(changes)
    first = ranks.run(size, train, halves, 2, Opening.CREATE, expert=expert)
    # AUTO goes on with what the store was made with.
    back = {**halves, **{name: "auto" for name in changes if name.startswith("parallel")}}
    rest = ranks.run(size, train, back, 4, Opening.RESUME, expert=expert)
    for rank in range(size):
        assert first[rank][0] + rest[rank][0] == found[rank][0]
        assert rest[rank][2] == found[rank][2]


def test_another_choice_needs_reshard(ranks: Ranks, settings: Make) -> None:
    made = settings(BOTH)
    ranks.run(2, train, made, 1, Opening.CREATE)
    with refuses(RankFailedError, "parallel.head: was partitioned, is gathered", "tierstore reshard"):
        ranks.run(2, train, {**made, "parallel.head": "gathered"}, 2, Opening.RESUME)


@pytest.mark.parametrize("changes", [BOTH, {**TIED, "clip_norm": 0.5}], ids=["untied", "tied"])
def test_layer_order(ranks: Ranks, settings: Make, changes: dict[str, Any]) -> None:
    """The bits of micro order."""
    micro = {**changes, "data.micro_batches": 3}
    expected = ranks.run(2, train, settings(micro), 3, Opening.CREATE)
    layered = settings({**micro, "data.micro_order": "layer"})
    assert ranks.run(2, train, layered, 3, Opening.CREATE) == expected


def test_validation_and_sampling(ranks: Ranks, settings: Make) -> None:
    """All ranks write the same text, which is that of gathered tables."""
    gathered = ranks.run(2, whole_run, settings({}), 2)
    found = ranks.run(2, whole_run, settings(BOTH), 2)
    assert found[0] == found[1]
    np.testing.assert_allclose(found[0][1], gathered[0][1], rtol=2e-5)
    assert found[0][2] == gathered[0][2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"model.compute_dtype": "bf16"},
        {"dense.optimizer_state": "nvme"},
        {"dense.fusion": "parameter"},
        {"model.checkpoint_activations": "block", "adamw.moments": "int8"},
    ],
)
def test_however_the_rest_is_held(ranks: Ranks, settings: Make, changes: dict[str, Any]) -> None:
    """Losses of gathered tables, within the rounding of the type that it computes in."""
    gathered = ranks.run(2, train, settings(changes), 4, Opening.CREATE)
    found = ranks.run(2, train, settings({**BOTH, **changes}), 4, Opening.CREATE)
    near = 5e-3 if "model.compute_dtype" in changes else 2e-5
    np.testing.assert_allclose(found[0][0], gathered[0][0], rtol=near)
