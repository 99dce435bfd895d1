"""One expert: the layout of its weights, and its forward and backward formulas.

Shapes: M tokens of this expert, D width of the model, F width of the expert, P = F for GELU and 2F for the others,
which have a gate.

An expert's weights are one flat tensor, in the layout of its record:

* ``swiglu``: ``[gate F x D | up F x D | down D x F]``, ``y = (silu(x gate^T) * (x up^T)) down^T``;
* ``gelu``: ``[up F x D | down D x F]``, ``y = gelu(x up^T) down^T`` (the exact GELU, by erf);
* ``geglu``, ``geglu_tanh``, ``reglu``: as ``swiglu``, with the exact GELU, its tanh approximation or ReLU for silu;
* ``clamped_swiglu`` (gpt-oss): ``[inner D x 2F | bias 2F | down F x D | bias D]``, where the columns of ``inner`` alternate
  between gate and up; with ``g = min(gate, limit)`` and ``u`` = up clamped to [-``limit``, ``limit``],
  ``y = ((u + 1) * g * sigmoid(alpha * g)) down + bias``.

In all of them one matrix, ``inner``, gives the activation's input, in one product. Nothing here uses autograd: the formulas
write into buffers that the layer owns, whose shapes depend only on the routing. Each formula performs the same operations,
in the same order and types, as autograd does for transformers' implementation, so that the bits are the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tierstore.moe.config import Activation, ExpertShape, tile_rows
from tierstore.moe.low_rank import LowRankTerm, PairLease, terms
from tierstore.moe.products import multiplies_at_once, multiply_at_once
from tierstore.moe.seeds import keyed_generator
from tierstore.quant.weights import QuantizedWeights, Weights


def weight_std(d_model: int) -> float:
    """Standard deviation of initial weights: 0.05 at width 256, inversely proportional to the root of the width.

    Measured at 4,096 tokens a step: with 0.02, the same model needs several times as many steps.
    """
    return 0.8 / math.sqrt(d_model)


def initial_expert(shape: ExpertShape, *, seed: int, layer: int, expert: int, layers: int) -> Tensor:
    """Initial weights of one expert, flat fp32 on the CPU. Depends only on the arguments.

    normal(0, s) with ``s = weight_std(d_model)``; ``down`` is scaled by ``1 / sqrt(2 * layers)``, like the projections onto
    the residual stream in GPT-2.
    """
    flat = torch.empty(shape.numel, dtype=torch.float32)
    flat.normal_(0.0, weight_std(shape.d_model), generator=keyed_generator(seed, "expert", layer, expert))
    shape.views(flat).down.mul_(1.0 / math.sqrt(2.0 * layers))
    return flat


#: Elements per iteration of the longest vector loop of torch's kernels (two AVX-512 registers of bf16). For the remainder a
#: kernel takes one element at a time, and its exp rounds differently: flat scratch is rounded up to whole iterations.
_LOOP = 64


#: Activations whose gate is a slice of the columns, with one kernel.
_BY_ROW = (Activation.SWIGLU, Activation.REGLU)
#: From this number of elements on, torch divides an operation among threads.
_ONE_THREAD = 32768
#: Alignment of rows in bytes with which matrix products choose the same kernels.
_ALIGNED = 64


class Scratch:
    """Memory shared by several workspaces, of which only one is in use at a time. It grows to the largest one's needs."""

    def __init__(self) -> None:
        self._parts: dict[str, Tensor] = {}

    def take(self, name: str, numel: int, like: Tensor) -> Tensor:
        """Flat memory of ``numel`` elements with undefined content, of the type and on the device of ``like``."""
        held = self._parts.get(name)
        if held is None or held.numel() < numel:
            held = self._parts[name] = like.new_empty(numel)
        return held[:numel]


class Workspace:
    """Scratch memory for experts of at most ``rows`` tokens, for one pass over a layer; taken from ``scratch``, if given.

    ``pads``: rows of zeros are added to an expert's, up to ``tile_rows``, so that products have few shapes.
    """

    def __init__(
        self,
        shape: ExpertShape,
        rows: int,
        like: Tensor,
        *,
        inner: int = 1,
        hidden: int = 1,
        scratch: Scratch | None = None,
        pads: bool = False,
    ) -> None:
        self._scratch = scratch or Scratch()
        self._like = like
        self._pads = pads
        rows = self.padded(rows)
        self._rows = rows
        # The layout depends only on ``rows``, not on the size of shared memory: kernels are chosen by alignment.
        self._inner = inner, rows * shape.inner_rows
        self._hidden = hidden, rows * shape.d_ff
        self._shape = shape

    def inner(self, index: int, rows: int) -> Tensor:
        """Scratch (rows, P), contiguous."""
        return self._part("inner", self._inner, index, rows, self._shape.inner_rows)

    def hidden(self, index: int, rows: int) -> Tensor:
        """Scratch (rows, F), contiguous."""
        return self._part("hidden", self._hidden, index, rows, self._shape.d_ff)

    def padded(self, rows: int) -> int:
        """The number of rows to compute for an expert of ``rows`` tokens."""
        return tile_rows(rows) if self._pads else rows

    def pad(self, name: str, tensor: Tensor, rows: int) -> Tensor:
        """``tensor``, or if it has fewer than ``rows`` rows a copy with zeros up to them, in scratch ``name``."""
        if len(tensor) == rows:
            return tensor
        copy = self.take(name, tensor, rows)
        copy[: len(tensor)].copy_(tensor)
        copy[len(tensor) :].zero_()
        return copy

    def take(self, name: str, tensor: Tensor, rows: int) -> Tensor:
        """Scratch ``name`` for ``rows`` rows like those of ``tensor``, with undefined content."""
        width = math.prod(tensor.shape[1:])
        # Memory for the most rows at once: scratch that grew from expert to expert would leave gaps in the heap.
        memory = self._scratch.take(name, self._rows * width, tensor)
        return memory[: rows * width].view(rows, *tensor.shape[1:])

    def _part(self, name: str, size: tuple[int, int], index: int, rows: int, width: int) -> Tensor:
        count, stride = size
        memory = self._scratch.take(name, count * stride, self._like)
        return memory[index * stride : index * stride + rows * width].view(rows, width)


def forward_expert(
    shape: ExpertShape,
    weights: Weights,
    x_MD: Tensor,
    inner_MP: Tensor,
    out_MD: Tensor,
    work: Workspace,
    pair: PairLease | None = None,
) -> None:
    """Write ``inner_MP`` (what the backward pass needs) and ``out_MD``. Uses hidden scratch 0.

    With a ``pair`` each projection has an additional low-rank term. Quantised weights are multiplied with
    ``QuantizedWeights.multiply``; their biases are fp32, and added to the rounded product.
    """
    rows = x_MD.shape[0]
    count = work.padded(rows)
    if count > rows:
        x_CD = work.pad("x", x_MD, count)
        inner_CP, out_CD = work.take("padded inner", inner_MP, count), work.take("out", out_MD, count)
        forward_expert(shape, weights, x_CD, inner_CP, out_CD, work, pair)
        inner_MP.copy_(inner_CP[:rows])
        out_MD.copy_(out_CD[:rows])
        return
    inner, down = terms(pair)
    hidden_MF = work.hidden(0, rows)
    _project_in(shape, weights, x_MD, inner, inner_MP)
    _activate(shape, inner_MP, hidden_MF)
    _project_out(shape, weights, hidden_MF, down, out_MD)


class ExpertRows(NamedTuple):
    """One of several experts that are computed together, and its rows."""

    weights: Weights
    span: slice
    pair: PairLease | None = None


def rows_together(shape: ExpertShape, dtype: torch.dtype) -> int:
    """The most rows that :func:`forward_experts` may compute for more than one expert; 0: compute each expert separately.

    One activation call serves all rows, and each row must have the same bits as alone. That holds if the gate is a slice of
    the columns and a single thread takes all rows, so that each row is one loop of the kernel, and if the products' inputs
    are aligned. (For GELU torch has two kernels, one for a single row and one for several.)
    """
    if shape.activation not in _BY_ROW or shape.d_ff * dtype.itemsize % _ALIGNED:
        return 0
    return (_ONE_THREAD - 1) // shape.d_ff


def forward_experts(
    shape: ExpertShape, experts: Sequence[ExpertRows], x_MD: Tensor, out_MD: Tensor, work: Workspace
) -> None:
    """:func:`forward_expert` for each of ``experts``, with the same bits; keeps nothing for a backward pass. Uses inner and
    hidden scratch 0.
    """
    whole: list[ExpertRows] = []
    for expert in experts:
        weights, span, pair = expert
        rows = span.stop - span.start
        if work.padded(rows) == rows:
            whole.append(expert)
        else:
            forward_expert(shape, weights, x_MD[span], work.inner(0, rows), out_MD[span], work, pair)
    if whole:
        _forward_whole(shape, whole, x_MD, out_MD, work)


def _forward_whole(
    shape: ExpertShape, experts: Sequence[ExpertRows], x_MD: Tensor, out_MD: Tensor, work: Workspace
) -> None:
    """:func:`forward_experts` for experts whose rows need no padding."""
    spans = [expert.span for expert in experts]
    starts = list(itertools.accumulate((span.stop - span.start for span in spans), initial=0))
    inner_MP, hidden_MF = work.inner(0, starts[-1]), work.hidden(0, starts[-1])
    own = [slice(*pair) for pair in itertools.pairwise(starts)]
    addresses = _addresses(shape, experts, x_MD)
    if addresses is None:
        for (weights, span, pair), at in zip(experts, own, strict=True):
            _project_in(shape, weights, x_MD[span], terms(pair)[0], inner_MP[at])
    else:
        _multiply(inner_MP, own, x_MD, spans, addresses)
    _activate(shape, inner_MP, hidden_MF)
    if addresses is None:
        for (weights, span, pair), at in zip(experts, own, strict=True):
            _project_out(shape, weights, hidden_MF[at], terms(pair)[1], out_MD[span])
    else:
        before = shape.inner_rows * shape.d_model * x_MD.element_size()
        _multiply(out_MD, spans, hidden_MF, own, [address + before for address in addresses])


def _addresses(shape: ExpertShape, experts: Sequence[ExpertRows], x_MD: Tensor) -> list[int] | None:
    """The addresses of the weights of ``experts``; None if their products must be computed one by one. Raises ValueError for
    weights of the wrong size, which an address could not reveal.
    """
    if shape.activation.transposed or not multiplies_at_once(x_MD):
        return None
    addresses = []
    for weights, _, pair in experts:
        if pair is not None or isinstance(weights, QuantizedWeights):
            return None
        if weights.dtype != x_MD.dtype or not weights.is_contiguous():
            return None
        shape.check(weights)
        addresses.append(weights.data_ptr())
    return addresses


def _multiply(
    out: Tensor, out_spans: Sequence[slice], x: Tensor, x_spans: Sequence[slice], addresses: Sequence[int]
) -> None:
    rows = [span.stop - span.start for span in x_spans]
    out_first, x_first = [span.start for span in out_spans], [span.start for span in x_spans]
    multiply_at_once(out, out_first, x, x_first, rows, addresses)


def recompute_inner(
    shape: ExpertShape, flat: Tensor, x_MD: Tensor, inner_MP: Tensor, pair: PairLease | None = None
) -> None:
    """Write ``inner_MP`` with the same bits as :func:`forward_expert`, if ``x_MD`` is padded as there: the product and its
    shape are the same.
    """
    _project_in(shape, flat, x_MD, terms(pair)[0], inner_MP)


def backward_expert(
    shape: ExpertShape,
    flat: Tensor,
    gradients: Tensor | None,
    x_MD: Tensor,
    inner_MP: Tensor,
    grad_out_MD: Tensor,
    grad_x_MD: Tensor,
    work: Workspace,
    pair: PairLease | None = None,
    *,
    weights: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Compute the gradients of ``sum(grad_out * expert(x))``, or with ``weights`` of ``sum(grad_out * weight * expert(x))``:
    the router's weights (M) of the rows, in the type of ``x_MD``, and memory for their gradients, in any type.

    Overwrites ``gradients`` (flat, like the weights; None: the expert is frozen), those of ``pair``, ``grad_x_MD``, and
    with ``weights`` also ``grad_out_MD``. Uses inner scratch 0 and hidden scratch 0 and 1. A gated expert with gradients
    of the type of ``x_MD`` takes nine launches on a device, 13 with ``weights``. The router's gradient does not
    need the expert's output: ``<grad_out, y> = <grad_out down, hidden>`` (without biases). The rows are computed as they
    are: the caller pads them (``Workspace.pad``).
    """
    rows = x_MD.shape[0]
    hidden_MF, grad_hidden_MF = work.hidden(0, rows), work.hidden(1, rows)
    grad_inner_MP = work.inner(0, rows)
    inner, down = terms(pair)
    matrices = shape.views(flat)
    _activate(shape, inner_MP, hidden_MF, grad_inner_MP[:, shape.d_ff :])
    _project_back(shape, grad_out_MD, matrices.down, down, grad_hidden_MF)
    if weights is not None:
        weight_M, grad_weight_M = weights
        product_MF = grad_inner_MP[:, : shape.d_ff]
        torch.mul(grad_hidden_MF, hidden_MF, out=product_MF)
        torch.sum(product_MF, dim=1, dtype=grad_weight_M.dtype, out=grad_weight_M)
        grad_hidden_MF.mul_(weight_M.unsqueeze(1))
        grad_out_MD.mul_(weight_M.unsqueeze(1))
    grads = None if gradients is None else shape.views(gradients)
    if grads is not None:
        _project_gradients(shape, hidden_MF, grad_out_MD, grads.down, grads.down_bias)
    if down is not None:
        down.write_gradients(hidden_MF, grad_out_MD)
    _activate_back(shape, inner_MP, grad_hidden_MF, grad_inner_MP)
    if grads is not None:
        _project_gradients(shape, x_MD, grad_inner_MP, grads.inner, grads.inner_bias)
    if inner is not None:
        inner.write_gradients(x_MD, grad_inner_MP)
    _project_back(shape, grad_inner_MP, matrices.inner, inner, grad_x_MD)


# Projections ------------------------------------------------------------------------------------------------


def _project_in(
    shape: ExpertShape, weights: Weights, x: Tensor, term: LowRankTerm | None, out: Tensor
) -> None:
    """The product with ``inner``. Raises ValueError for weights of the wrong size."""
    if isinstance(weights, QuantizedWeights):
        _project_quantized(shape, x, weights, 0, term, out)
    else:
        shape.check(weights)
        _project(shape, x, *shape.inner_of(weights), term, out)


def _project_out(
    shape: ExpertShape, weights: Weights, hidden: Tensor, term: LowRankTerm | None, out: Tensor
) -> None:
    if isinstance(weights, QuantizedWeights):
        _project_quantized(shape, hidden, weights, 2 if shape.activation.transposed else 1, term, out)
    else:
        _project(shape, hidden, *shape.down_of(weights), term, out)


def _project(
    shape: ExpertShape, x: Tensor, matrix: Tensor, bias: Tensor | None, term: LowRankTerm | None, out: Tensor
) -> None:
    torch.mm(x, matrix if shape.activation.transposed else matrix.t(), out=out)
    if bias is not None:
        out.add_(bias)
    if term is not None:
        term.add(x, out)


def _project_quantized(
    shape: ExpertShape,
    x: Tensor,
    weights: QuantizedWeights,
    index: int,
    term: LowRankTerm | None,
    out: Tensor,
) -> None:
    """Part ``index`` of ``weights`` is the matrix; its bias, if any, is the next part."""
    weights.multiply(index, x, out)
    if shape.activation.transposed:
        out.add_(weights.plain(index + 1))
    if term is not None:
        term.add(x, out)


def _project_back(
    shape: ExpertShape, grad_out: Tensor, matrix: Tensor, term: LowRankTerm | None, grad_x: Tensor
) -> None:
    torch.mm(grad_out, matrix.t() if shape.activation.transposed else matrix, out=grad_x)
    if term is not None:
        term.add_back(grad_out, grad_x)


def _project_gradients(
    shape: ExpertShape, x: Tensor, grad_out: Tensor, matrix: Tensor, bias: Tensor | None
) -> None:
    """Overwrite the gradients of a projection, whose type may be wider than that of the weights."""
    left, right = (x, grad_out) if shape.activation.transposed else (grad_out, x)
    if matrix.dtype == left.dtype:
        torch.mm(left.t(), right, out=matrix)
    else:
        matrix.copy_(torch.mm(left.t(), right))
    if bias is not None:
        bias.copy_(_sum_in_turn(grad_out))


def _sum_in_turn(rows_MP: Tensor) -> Tensor:
    """The sum of the rows, rounded after each row, as autograd sums the gradients of an indexed bias."""
    total_1P = rows_MP.new_zeros(1, rows_MP.shape[1])
    first_M = torch.zeros(rows_MP.shape[0], dtype=torch.int64, device=rows_MP.device)
    if rows_MP.dtype.itemsize >= 4:
        # Not index_put_: with several threads it adds fp32 in any order.
        total_1P.index_add_(0, first_M, rows_MP)
    else:
        # Not index_add_: it sums bf16 in fp32.
        total_1P.index_put_((first_M,), rows_MP, accumulate=True)
    return total_1P[0]


# Activations ------------------------------------------------------------------------------------------------


def _activate(shape: ExpertShape, inner_MP: Tensor, out_MF: Tensor, gate_MF: Tensor | None = None) -> None:
    """``gate_MF``: memory for the activated gate, which :func:`_activate_back` needs, if there is a gate."""
    kind = shape.activation
    if kind is Activation.GELU:
        torch.ops.aten.gelu.out(inner_MP, out=out_MF)
    elif kind is Activation.CLAMPED_SWIGLU:
        clamped = _ClampedSwiGLU(shape, inner_MP)
        torch.mul(clamped.up_MF.add_(1), clamped.glu(), out=out_MF)
    else:
        gate_MF = out_MF if gate_MF is None else gate_MF
        _gate(kind, inner_MP[:, : shape.d_ff], gate_MF)
        torch.mul(gate_MF, inner_MP[:, shape.d_ff :], out=out_MF)


def _activate_back(
    shape: ExpertShape, inner_MP: Tensor, grad_hidden_MF: Tensor, grad_inner_MP: Tensor
) -> None:
    """Write ``grad_inner_MP``, whose second half is the activated gate before; overwrites ``grad_hidden_MF``."""
    kind = shape.activation
    if kind is Activation.GELU:
        torch.ops.aten.gelu_backward.grad_input(grad_hidden_MF, inner_MP, grad_input=grad_inner_MP)
    elif kind is Activation.CLAMPED_SWIGLU:
        _ClampedSwiGLU(shape, inner_MP).backward(grad_hidden_MF, grad_inner_MP)
    else:
        gate_MF, up_MF = inner_MP[:, : shape.d_ff], inner_MP[:, shape.d_ff :]
        grad_inner_MP[:, shape.d_ff :].mul_(grad_hidden_MF)
        grad_hidden_MF.mul_(up_MF)
        _gate_back(kind, gate_MF, grad_hidden_MF, grad_inner_MP[:, : shape.d_ff])


def _gate(kind: Activation, gate: Tensor, out: Tensor) -> None:
    if kind is Activation.SWIGLU:
        torch.ops.aten.silu.out(gate, out=out)
    elif kind is Activation.REGLU:
        torch.clamp_min(gate, 0, out=out)
    else:
        torch.ops.aten.gelu.out(gate, approximate=_APPROXIMATE[kind], out=out)


def _gate_back(kind: Activation, gate: Tensor, grad: Tensor, grad_gate: Tensor) -> None:
    if kind is Activation.SWIGLU:
        torch.ops.aten.silu_backward.grad_input(grad, gate, grad_input=grad_gate)
    elif kind is Activation.REGLU:
        torch.ops.aten.threshold_backward.grad_input(grad, gate, 0, grad_input=grad_gate)
    else:
        approximate = _APPROXIMATE[kind]
        torch.ops.aten.gelu_backward.grad_input(grad, gate, approximate=approximate, grad_input=grad_gate)


_APPROXIMATE = {Activation.GEGLU: "none", Activation.GEGLU_TANH: "tanh"}


class _ClampedSwiGLU:
    """gpt-oss's gate: ``hidden = (up + 1) * gate * sigmoid(alpha * gate)``, with ``gate`` and ``up`` clamped."""

    def __init__(self, shape: ExpertShape, inner_MP: Tensor) -> None:
        self._shape = shape
        self._raw_gate_MF, self._raw_up_MF = inner_MP[:, ::2], inner_MP[:, 1::2]
        self.gate_MF = self._raw_gate_MF.clamp(max=shape.limit)
        self.up_MF = self._raw_up_MF.clamp(min=-shape.limit, max=shape.limit)
        count = self.gate_MF.numel()
        scaled = inner_MP.new_zeros(-(-count // _LOOP) * _LOOP)
        self.sigmoid_MF = scaled[:count].view_as(self.gate_MF)
        torch.mul(self.gate_MF, shape.alpha, out=self.sigmoid_MF)
        scaled.sigmoid_()

    def glu(self) -> Tensor:
        return self.gate_MF * self.sigmoid_MF

    def backward(self, grad_MF: Tensor, grad_inner_MP: Tensor) -> None:
        limit = self._shape.limit
        grad_up_MF = grad_MF * self.glu()
        grad_glu_MF = grad_MF.mul_(self.up_MF.add_(1))
        through_MF = torch.ops.aten.sigmoid_backward(grad_glu_MF * self.gate_MF, self.sigmoid_MF)
        grad_gate_MF = (grad_glu_MF * self.sigmoid_MF).add_(through_MF.mul_(self._shape.alpha))
        grad_inner_MP[:, ::2] = grad_gate_MF.masked_fill_(self._raw_gate_MF > limit, 0)
        outside_MF = self._raw_up_MF.abs() > limit
        grad_inner_MP[:, 1::2] = grad_up_MF.masked_fill_(outside_MF, 0)


def feed_forward(x: Tensor, inner: Tensor, down: Tensor, activation: Activation) -> Tensor:
    """The same network with autograd, for ordinary parameters: shared experts and dense blocks."""
    hidden = F.linear(x, inner.to(x.dtype))
    if activation is Activation.SWIGLU:
        gate, up = hidden.chunk(2, dim=-1)
        hidden = F.silu(gate) * up
    else:
        hidden = F.gelu(hidden)
    return F.linear(hidden, down.to(x.dtype))
