"""The low-rank term of a projection, ``scale * B (A x)``, and its gradients, without autograd.

Shapes: M tokens, R the rank, O outputs of the projection, I its inputs. A pair is fp32 whatever type the expert computes
in: the term is computed in fp32 and rounded once, when it is added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tierstore.moe.lora import PairShape
from tierstore.moe.seeds import keyed_generator


def initial_pair(shape: PairShape, *, seed: int, layer: int, expert: int) -> Tensor:
    """Initial values of one expert's pairs, flat fp32 on the CPU: a function of the arguments alone.

    ``A`` is uniform within 1 / sqrt(I), as in peft (and torch's linear layers); ``B`` is zero, so the expert is
    unchanged at first.
    """
    flat = torch.zeros(shape.numel, dtype=torch.float32)
    generator = keyed_generator(seed, "lora", layer, expert)
    views = shape.views(flat)
    for part in (views.inner_a, views.down_a):
        bound = 1 / math.sqrt(part.shape[1])
        part.uniform_(-bound, bound, generator=generator)
    return flat


def merge_pair(shape: PairShape, weights: Tensor, pair: Tensor) -> None:
    """Adds the terms to ``weights``, flat fp32, in place: ``W + scale * B A``."""
    matrices, pairs = shape.expert.views(weights), shape.views(pair.to(torch.float32))
    for matrix, a_RI, b_OR in (
        (matrices.inner, pairs.inner_a, pairs.inner_b),
        (matrices.down, pairs.down_a, pairs.down_b),
    ):
        matrix_OI = matrix.t() if shape.expert.activation.transposed else matrix
        matrix_OI.addmm_(b_OR, a_RI, alpha=shape.scale)


@dataclass(frozen=True, slots=True)
class LowRankTerm:
    """``A`` and ``B`` of one projection, and memory for their gradients, if they are wanted."""

    a_RI: Tensor
    b_OR: Tensor
    scale: float
    grad_a_RI: Tensor | None = None
    grad_b_OR: Tensor | None = None

    def add(self, x_MI: Tensor, out_MO: Tensor) -> None:
        """Adds the term of ``x`` to ``out``."""
        low_MR = torch.mm(x_MI.to(self.a_RI.dtype), self.a_RI.t())
        _add_product(low_MR, self.b_OR.t(), self.scale, out_MO)

    def add_back(self, grad_out_MO: Tensor, grad_x_MI: Tensor) -> None:
        """Add the gradient that flows back through the term to ``grad_x``."""
        grad_low_MR = torch.mm(grad_out_MO.to(self.b_OR.dtype), self.b_OR)
        _add_product(grad_low_MR, self.a_RI, self.scale, grad_x_MI)

    def write_gradients(self, x_MI: Tensor, grad_out_MO: Tensor) -> None:
        """Overwrite the gradients of ``A`` and ``B``."""
        assert self.grad_a_RI is not None
        assert self.grad_b_OR is not None
        x_MI, grad_out_MO = x_MI.to(self.a_RI.dtype), grad_out_MO.to(self.b_OR.dtype)
        low_MR = torch.mm(x_MI, self.a_RI.t()).mul_(self.scale)
        torch.mm(grad_out_MO.t(), low_MR, out=self.grad_b_OR)
        grad_low_MR = torch.mm(grad_out_MO, self.b_OR).mul_(self.scale)
        torch.mm(grad_low_MR.t(), x_MI, out=self.grad_a_RI)


def _add_product(left: Tensor, right: Tensor, scale: float, out: Tensor) -> None:
    if out.dtype == left.dtype:
        out.addmm_(left, right, alpha=scale)
    else:
        out.add_(torch.mm(left, right), alpha=scale)


@dataclass(frozen=True, slots=True)
class PairLease:
    """The pairs of one leased expert: flat fp32 ``weights``, and in a backward pass ``gradients`` whose content is
    undefined until the layer has overwritten all of it.
    """

    shape: PairShape
    weights: Tensor
    gradients: Tensor | None = None


def terms(pair: PairLease | None) -> tuple[LowRankTerm | None, LowRankTerm | None]:
    """The terms of both projections, inner and down; none without a pair."""
    if pair is None:
        return None, None
    of, scale = pair.shape.views(pair.weights), pair.shape.scale
    if pair.gradients is None:
        return LowRankTerm(of.inner_a, of.inner_b, scale), LowRankTerm(of.down_a, of.down_b, scale)
    grads = pair.shape.views(pair.gradients)
    return (
        LowRankTerm(of.inner_a, of.inner_b, scale, grads.inner_a, grads.inner_b),
        LowRankTerm(of.down_a, of.down_b, scale, grads.down_a, grads.down_b),
    )
