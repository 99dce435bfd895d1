"""One expert: the layout of its weights, and its forward and backward formulas.

Shapes: M tokens of this expert, D width of the model, F width of the expert, P = 2F for SwiGLU and F for
GELU.

An expert's weights are one flat tensor, as they lie in its record:

* ``swiglu``: ``[gate F x D | up F x D | down D x F]``, ``y = (silu(x gate^T) * (x up^T)) down^T``;
* ``gelu``: ``[up F x D | down D x F]``, ``y = gelu(x up^T) down^T`` (the exact GELU, by erf).

What feeds the activation is one matrix ``inner P x D`` in both, so one product computes it. Nothing here uses
autograd: the formulas write into buffers that the layer owns, and their shapes depend on the routing alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from tierstore.moe.config import Activation, ExpertShape
from tierstore.moe.seeds import keyed_generator


def weight_std(d_model: int) -> float:
    """Spread of first weights: 0.05 at width 256, falling with the root of the width.

    Measured at 4,096 tokens a step: with 0.02 instead, the same model needs several times the steps.
    """
    return 0.8 / math.sqrt(d_model)


def initial_expert(shape: ExpertShape, *, seed: int, layer: int, expert: int, layers: int) -> Tensor:
    """First weights of one expert, flat fp32 on the CPU: a function of the arguments alone.

    normal(0, s) with ``s = weight_std(d_model)``; ``down`` scaled by ``1 / sqrt(2 * layers)``, as GPT-2
    scales what adds to the residual stream.
    """
    flat = torch.empty(shape.numel, dtype=torch.float32)
    flat.normal_(0.0, weight_std(shape.d_model), generator=keyed_generator(seed, "expert", layer, expert))
    shape.views(flat).down.mul_(1.0 / math.sqrt(2.0 * layers))
    return flat


class Workspace:
    """Scratch for experts of at most ``rows`` tokens, made once for a pass over a layer."""

    def __init__(
        self, shape: ExpertShape, rows: int, like: Tensor, *, inner: int = 1, hidden: int = 1
    ) -> None:
        self._inner = like.new_empty(inner, rows * shape.inner_rows)
        self._hidden = like.new_empty(hidden, rows * shape.d_ff)
        self._shape = shape

    def inner(self, index: int, rows: int) -> Tensor:
        """Scratch (rows, P), contiguous."""
        width = self._shape.inner_rows
        return self._inner[index, : rows * width].view(rows, width)

    def hidden(self, index: int, rows: int) -> Tensor:
        """Scratch (rows, F), contiguous."""
        width = self._shape.d_ff
        return self._hidden[index, : rows * width].view(rows, width)


def _activate(shape: ExpertShape, inner_MP: Tensor, out_MF: Tensor) -> None:
    if shape.activation == Activation.SWIGLU:
        torch.ops.aten.silu.out(inner_MP[:, : shape.d_ff], out=out_MF)
        out_MF.mul_(inner_MP[:, shape.d_ff :])
    else:
        torch.ops.aten.gelu.out(inner_MP, out=out_MF)


def forward_expert(
    shape: ExpertShape, flat: Tensor, x_MD: Tensor, inner_MP: Tensor, out_MD: Tensor, work: Workspace
) -> None:
    """Write ``inner_MP`` (what the backward pass needs) and ``out_MD``. Uses hidden scratch 0."""
    views = shape.views(flat)
    hidden_MF = work.hidden(0, x_MD.shape[0])
    torch.mm(x_MD, views.inner.t(), out=inner_MP)
    _activate(shape, inner_MP, hidden_MF)
    torch.mm(hidden_MF, views.down.t(), out=out_MD)


def backward_expert(
    shape: ExpertShape,
    flat: Tensor,
    gradients: Tensor,
    x_MD: Tensor,
    inner_MP: Tensor,
    weight_M: Tensor,
    grad_out_MD: Tensor,
    grad_x_MD: Tensor,
    work: Workspace,
) -> Tensor:
    """Gradients of ``sum(grad_out * weight * expert(x))``.

    Overwrites ``gradients`` (flat, as the weights) and ``grad_x_MD``, and returns the gradient of
    ``weight_M``. ``grad_out_MD`` is spoilt. Uses inner scratch 0 and hidden scratch 0 and 1.
    """
    rows = x_MD.shape[0]
    views, grads = shape.views(flat), shape.views(gradients)
    hidden_MF, grad_hidden_MF = work.hidden(0, rows), work.hidden(1, rows)
    grad_inner_MP = work.inner(0, rows)
    _activate(shape, inner_MP, hidden_MF)
    torch.mm(grad_out_MD, views.down, out=grad_hidden_MF)
    # <grad_out, y> = <grad_out down, hidden>: so the expert's output need not be kept for the router's
    # gradient.
    product_MF = grad_inner_MP[:, : shape.d_ff]
    torch.mul(grad_hidden_MF, hidden_MF, out=product_MF)
    grad_weight_M = product_MF.sum(dim=1, dtype=weight_M.dtype)
    scale_M1 = weight_M.to(x_MD.dtype).unsqueeze(1)
    grad_hidden_MF.mul_(scale_M1)
    grad_out_MD.mul_(scale_M1)
    _product(grad_out_MD.t(), hidden_MF, grads.down)
    if shape.activation == Activation.SWIGLU:
        gate_MF, up_MF = inner_MP[:, : shape.d_ff], inner_MP[:, shape.d_ff :]
        torch.ops.aten.silu.out(gate_MF, out=hidden_MF)
        torch.mul(grad_hidden_MF, hidden_MF, out=grad_inner_MP[:, shape.d_ff :])
        grad_hidden_MF.mul_(up_MF)
        grad_gate_MF = grad_inner_MP[:, : shape.d_ff]
        torch.ops.aten.silu_backward.grad_input(grad_hidden_MF, gate_MF, grad_input=grad_gate_MF)
    else:
        torch.ops.aten.gelu_backward.grad_input(grad_hidden_MF, inner_MP, grad_input=grad_inner_MP)
    _product(grad_inner_MP.t(), x_MD, grads.inner)
    torch.mm(grad_inner_MP, views.inner, out=grad_x_MD)
    return grad_weight_M


def recompute_inner(shape: ExpertShape, flat: Tensor, x_MD: Tensor, inner_MP: Tensor) -> None:
    """What :func:`forward_expert` wrote into ``inner_MP``, bit for bit: the same product, the same shape."""
    torch.mm(x_MD, shape.views(flat).inner.t(), out=inner_MP)


def _product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """``out = left @ right``; gradients may be of a wider type than the weights."""
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    else:
        out.copy_(torch.mm(left, right))


def feed_forward(x: Tensor, inner: Tensor, down: Tensor, activation: Activation) -> Tensor:
    """The same network under autograd, for ordinary parameters: shared experts and dense blocks."""
    hidden = F.linear(x, inner.to(x.dtype))
    if activation == Activation.SWIGLU:
        gate, up = hidden.chunk(2, dim=-1)
        hidden = F.silu(gate) * up
    else:
        hidden = F.gelu(hidden)
    return F.linear(hidden, down.to(x.dtype))
