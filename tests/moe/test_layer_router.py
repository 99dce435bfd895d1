"""One matrix for a norm and a router: where it chooses as they do, and where there is none."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tierstore.model.attention import RMSNorm
from tierstore.moe.router import LayerRouter

WIDTH, EXPERTS, TOP_K = 32, 16, 4


class Linear(nn.Module):
    """Scores of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, generator=torch.Generator().manual_seed(3)))

    def forward(self, x_TD: Tensor) -> Tensor:
        return x_TD @ self.weight.T


class Biased(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(EXPERTS))

    def forward(self, x_TD: Tensor) -> Tensor:
        return super().forward(x_TD) + self.bias


class Smallest(Linear):
    def forward(self, x_TD: Tensor) -> Tensor:
        return -super().forward(x_TD)


class OneMore(RMSNorm):
    """As Gemma's: the weight is what is added to one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def top(router: nn.Module, x_TD: Tensor) -> Tensor:
    return router(x_TD).softmax(-1).topk(TOP_K, dim=-1).indices


def half(router: nn.Module, x_TD: Tensor) -> Tensor:
    """Some tokens go nowhere."""
    chosen = top(router, x_TD)
    return chosen.masked_fill(x_TD[:, :1] > 0, -1)


def made(
    router: nn.Module, norm: nn.Module, choose: Callable[[nn.Module, Tensor], Tensor] = top
) -> LayerRouter:
    torch.nn.init.uniform_(next(norm.parameters()), 0.5, 1.5, generator=torch.Generator().manual_seed(4))
    return LayerRouter(0, norm, router, choose, EXPERTS)


@pytest.mark.parametrize("norm", [RMSNorm(WIDTH, 1e-6), OneMore(WIDTH, 1e-6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_chooses_what_the_modules_choose(norm: nn.Module, dtype: torch.dtype) -> None:
    router = made(Linear().to(dtype), norm.to(dtype))
    x_TD = torch.randn(500, WIDTH, generator=torch.Generator().manual_seed(9)).to(dtype) * 7
    with torch.no_grad():
        folded = router.folded(dtype)
        ours, theirs = folded.count(x_TD), router.count(x_TD)
        pairs = zip(folded.chosen(x_TD).tolist(), router.chosen(x_TD).tolist(), strict=True)
        common = sum(len(set(one) & set(other)) for one, other in pairs)
    assert int(ours.sum()) == int(theirs.sum()) == 500 * TOP_K
    assert common >= (0.97 if dtype == torch.bfloat16 else 1) * 500 * TOP_K
    assert folded.nbytes == EXPERTS * WIDTH * dtype.itemsize < router.nbytes
    x_TD = x_TD[:1]
    assert sorted(folded.chosen(x_TD)[0].tolist()) == folded.count(x_TD).nonzero().flatten().tolist()


def test_what_is_expected_is_added_wherever_streams_lie() -> None:
    router = made(Linear(), RMSNorm(WIDTH, 1e-6))
    generator = torch.Generator().manual_seed(9)
    x_BTD, prompt_BTD = (torch.randn(6, tokens, WIDTH, generator=generator) for tokens in (1, 5))
    added_B1D = torch.randn(6, 1, WIDTH, generator=generator)
    strided_B1D = added_B1D.transpose(0, 2).contiguous().transpose(0, 2)
    with torch.no_grad():
        folded = router.folded(torch.float32)
        for stream_BTD in (x_BTD, prompt_BTD):
            expected = router.count(stream_BTD + added_B1D)
            assert not torch.equal(expected, router.count(stream_BTD))
            for one in (router, folded):
                assert torch.equal(one.count(stream_BTD, added_B1D), expected)
                assert torch.equal(one.count(stream_BTD, strided_B1D), expected)
        with pytest.raises(RuntimeError, match="shape"):
            folded.count(x_BTD[:, :, 1:].contiguous())


@pytest.mark.parametrize(
    "router",
    [
        made(Biased(), RMSNorm(WIDTH, 1e-6)),
        made(Smallest(), RMSNorm(WIDTH, 1e-6)),
        made(Linear(), nn.LayerNorm(WIDTH)),
        made(Linear(), RMSNorm(WIDTH, 1e-6), half),
    ],
    ids=["a bias", "the smallest scores", "a norm with a mean", "tokens that go nowhere"],
)
def test_modules_that_choose_otherwise_have_none(router: LayerRouter) -> None:
    if isinstance(router.norm, nn.LayerNorm):
        torch.nn.init.normal_(router.norm.bias, generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        assert router.folded(torch.float32) is None


def test_a_copy_is_as_the_original_was_until_it_takes_what_that_is_now() -> None:
    router = made(Linear(), RMSNorm(WIDTH, 1e-6))
    copied = router.copied()
    x_TD = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(2))
    before = router.chosen(x_TD)
    with torch.no_grad():
        next(router.router.parameters()).neg_()
    assert torch.equal(copied.chosen(x_TD), before)
    assert not torch.equal(router.chosen(x_TD), before)
    with torch.no_grad():
        copied.take(router)
    assert torch.equal(copied.chosen(x_TD), router.chosen(x_TD))
    assert copied.nbytes == router.nbytes == 4 * WIDTH * (EXPERTS + 1)
