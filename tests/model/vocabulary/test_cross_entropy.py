"""Cross entropy by vocabulary slices: by hand, against torch's, and the same bits however it is chunked by whom."""

from typing import Any

import pytest
import torch
from launcher import Ranks
from torch import Tensor
from torch.nn import functional as F
from vocabulary_cases import losses, unlike_factors, unlike_tokens


def of_torch(x_TD: Tensor, whole_VD: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each token's loss, and the gradients of the mean, in double precision."""
    x, head = x_TD.double().requires_grad_(), whole_VD.double().requires_grad_()
    each = F.cross_entropy(F.linear(x, head), targets_T, reduction="none")
    each.mean().backward()
    assert x.grad is not None
    assert head.grad is not None
    return each.detach(), x.grad, head.grad


def drawn(vocab: int, width: int, tokens: int, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocab + tokens)
    x_TD = torch.randn(tokens, width, generator=generator) * spread
    whole_VD = torch.randn(vocab, width, generator=generator)
    return x_TD, whole_VD, torch.randint(vocab, (tokens,), generator=generator)


def test_by_hand(ranks: Ranks) -> None:
    """Width 16, of which one element counts; V = 2 over two ranks. Logits (0, ln 3): probabilities 1/4 and 3/4."""
    x_TD = torch.zeros(2, 16)
    x_TD[:, 0] = 1.0
    whole_VD = torch.zeros(2, 16)
    whole_VD[1, 0] = torch.tensor(3.0).log()
    found = ranks.run(2, losses, x_TD, whole_VD, torch.tensor([0, 1]), 1 << 10, 1.0)
    # Rank 0's token has target 0: -ln(1/4); rank 1's has target 1: -ln(3/4).
    assert float(found[0]["loss"]) == pytest.approx(1.3862944)
    assert float(found[1]["loss"]) == pytest.approx(0.2876821)
    # Of the mean: row 0 gets (1/4 - 1) / 2 from token 0 and 1/4 / 2 from token 1.
    assert float(found[0]["rows_grad"][0, 0]) == pytest.approx(-0.25)
    assert float(found[1]["rows_grad"][0, 0] if len(found[1]["rows_grad"]) else 0) == pytest.approx(0.25)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("vocab", "width", "tokens", "spread", "chunk"),
    [(40, 16, 24, 1.0, 1 << 20), (37, 8, 48, 1.0, 37 * 5), (3, 16, 8, 1.0, 1), (50, 16, 16, 30.0, 1 << 20)],
    ids=["whole", "chunks", "padding", "large logits"],
)
def test_as_torch(
    ranks: Ranks, size: int, vocab: int, width: int, tokens: int, spread: float, chunk: int
) -> None:
    x_TD, whole_VD, targets_T = drawn(vocab, width, tokens, spread)
    each_T, x_grad, head_grad = of_torch(x_TD, whole_VD, targets_T)
    found = ranks.run(size, losses, x_TD, whole_VD, targets_T, chunk, 1.0)
    near: dict[str, Any] = {"rtol": 2e-5, "atol": 3e-6 * spread, "check_dtype": False}
    means = each_T.view(size, -1).mean(dim=1)
    for rank, mean in zip(found, means, strict=True):
        torch.testing.assert_close(rank["loss"], mean, **near)
        assert torch.equal(rank["loss"], rank["evaluated"])
    torch.testing.assert_close(torch.cat([rank["x_grad"] for rank in found]), x_grad, **near)
    rows = torch.cat([rank["rows_grad"] for rank in found])
    torch.testing.assert_close(rows[:vocab], head_grad, **near)
    assert not rows[vocab:].any()
    logits = torch.cat([rank["logits"] for rank in found])
    torch.testing.assert_close(logits, F.linear(x_TD, whole_VD), rtol=1e-5, atol=1e-4)


def test_the_same_bits_again_and_a_factor_behind(ranks: Ranks) -> None:
    case = drawn(40, 16, 24)
    first = ranks.run(2, losses, *case, 200, 1.0)
    again = ranks.run(2, losses, *case, 200, 1.0)
    scaled = ranks.run(2, losses, *case, 200, 0.25)
    for one, other, quarter in zip(first, again, scaled, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert torch.equal(quarter["rows_grad"], one["rows_grad"] * 0.25)
        assert torch.equal(quarter["x_grad"], one["x_grad"] * 0.25)


def test_bf16(ranks: Ranks) -> None:
    x_TD, whole_VD, targets_T = drawn(40, 16, 24)
    each_T, x_grad, _ = of_torch(x_TD.bfloat16(), whole_VD.bfloat16(), targets_T)
    found = ranks.run(2, losses, x_TD.bfloat16(), whole_VD, targets_T, 1 << 20, 1.0)
    mean = torch.stack([rank["loss"] for rank in found]).mean()
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean, each_T.mean(), rtol=1e-2, atol=1e-2, check_dtype=False)
    grads = torch.cat([rank["x_grad"] for rank in found])
    assert grads.dtype == torch.bfloat16
    torch.testing.assert_close(grads, x_grad, rtol=0.05, atol=2e-3, check_dtype=False)


def test_ranks_must_differentiate_the_same_multiple(ranks: Ranks) -> None:
    messages = ranks.run(2, unlike_factors, *drawn(40, 16, 8))
    assert messages == ["the ranks multiply their losses by different factors"] * 2


def test_numbers_of_tokens_that_differ_are_refused_on_every_rank(ranks: Ranks) -> None:
    messages = ranks.run(2, unlike_tokens, *drawn(40, 16, 8))
    assert messages == ["the ranks have [8, 7] tokens: a divided head needs equally many on each"] * 2
