"""Reduces the number of experts: measures their use on a text, groups them, merges their weights, and writes the model.

Shapes: N tokens, D width of the model, F width of an expert, W values of one column, E experts of a layer, K experts of a
token.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from tierstore.dense import UnitLayout
from tierstore.deploy.records import Method
from tierstore.deploy.teacher import Teacher
from tierstore.errors import ConfigError
from tierstore.hf.experts import experts_modules
from tierstore.hf.exporting import outline_of, write_outline
from tierstore.hf.manifest import Manifest, ParameterEntry
from tierstore.hf.spec import HfSpec, imported_spec
from tierstore.hf.stored_weights import ExpertRequest, StoredWeights, open_weights
from tierstore.hf.weights import Bits, Floats, round_bf16
from tierstore.hf.writing import json_bytes
from tierstore.model.spec import ModelSpec
from tierstore.model.store_schema import BUFFERS_KEY, pack_arrays, unpack_arrays
from tierstore.moe.config import ExpertShape
from tierstore.moe.experts import Workspace, forward_expert
from tierstore.moe.source import ExpertLease
from tierstore.serve.experts import ServingPhase
from tierstore.stats import OnProgress, no_progress


@dataclass(frozen=True)
class LayerUse:
    """Measurements of a layer of E experts on a calibration text.

    ``uses``: each expert's share of the routers' weights; the shares add up to 1. ``alike``: E x E, the similarity of two
    experts' outputs for the same tokens (mean cosine).
    """

    uses: tuple[float, ...]
    alike: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if len(self.alike) != len(self.uses) or any(len(row) != len(self.uses) for row in self.alike):
            raise ValueError(f"alike: expected {len(self.uses)} rows and columns")


Groups = tuple[tuple[int, ...], ...]


def groups_of(layer: LayerUse, count: int, method: Method) -> Groups:
    """``count`` groups of experts, each of which becomes one; in the order of their first expert, ascending within.

    Pruning keeps the most used experts, each a group of its own. Merging repeatedly joins the two groups that lose the least
    by it; among equals, the first.
    """
    experts = range(len(layer.uses))
    if method is Method.PRUNE:
        order = sorted(experts, key=lambda expert: (-layer.uses[expert], expert))
        return tuple((expert,) for expert in sorted(order[:count]))
    groups = [[expert] for expert in experts]
    while len(groups) > count:
        pairs = [(one, other) for one in range(len(groups)) for other in range(one + 1, len(groups))]
        one, other = min(pairs, key=lambda pair: _loss(layer, groups[pair[0]], groups[pair[1]]))
        groups[one] += groups.pop(other)
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def _loss(layer: LayerUse, one: Sequence[int], other: Sequence[int]) -> float:
    """The loss of joining two groups: the difference of their outputs, times the use of the less used."""
    pairs = [layer.alike[a][b] for a in one for b in other]
    differs = 1.0 - sum(pairs) / len(pairs)
    use = min(sum(layer.uses[a] for a in one), sum(layer.uses[b] for b in other))
    return differs * use


#: Columns less similar than this are not averaged: the mean of two different functions approximates neither.
LEAST_ALIKE = 0.5


def columns_of(shape: ExpertShape, flat: Tensor) -> tuple[Tensor, Tensor]:
    """The columns (F, W) of an expert: the weights into the activation, its biases, and the weights out of it; and the
    output bias, which belongs to no column (empty without one).
    """
    views = shape.views(flat)
    gates = shape.inner_rows // shape.d_ff
    if not shape.activation.transposed:
        inner = views.inner.view(gates, shape.d_ff, shape.d_model).transpose(0, 1).flatten(1)
        return torch.cat([inner, views.down.T], 1), flat.new_empty(0)
    bias, end = views.inner_bias, views.down_bias
    assert bias is not None
    assert end is not None
    inner = views.inner.T.reshape(shape.d_ff, gates * shape.d_model)  # gate and up are interleaved
    return torch.cat([inner, bias.view(shape.d_ff, gates), views.down], 1), end


def expert_of(shape: ExpertShape, columns_FW: Tensor, bias: Tensor) -> Tensor:
    """The inverse of ``columns_of``: a flat expert."""
    gates, width = shape.inner_rows // shape.d_ff, shape.d_model
    flat = columns_FW.new_empty(shape.numel)
    views = shape.views(flat)
    inner, rest = columns_FW[:, : gates * width], columns_FW[:, gates * width :]
    if not shape.activation.transposed:
        views.inner.copy_(inner.view(shape.d_ff, gates, width).transpose(0, 1).reshape(-1, width))
        views.down.copy_(rest.T)
        return flat
    assert views.inner_bias is not None
    assert views.down_bias is not None
    views.inner.copy_(inner.reshape(-1, width).T)
    views.inner_bias.copy_(rest[:, :gates].reshape(-1))
    views.down.copy_(rest[:, gates:])
    views.down_bias.copy_(bias)
    return flat


def partners(base_FW: Tensor, other_FW: Tensor) -> tuple[Tensor, Tensor]:
    """A one-to-one matching: for each column of ``base`` its column of ``other`` (int64 (F,)), and their similarity (cosine,
    (F,)). Greedy, the most similar first, ties by position.
    """
    alike_FF = functional.normalize(base_FW, dim=1) @ functional.normalize(other_FW, dim=1).T
    count = len(base_FW)
    order = torch.argsort(alike_FF.flatten(), descending=True, stable=True)
    rows, others = (order // count).tolist(), (order % count).tolist()
    chosen = [-1] * count
    taken = [False] * count
    left = count
    for row, other in zip(rows, others, strict=True):
        if chosen[row] < 0 and not taken[other]:
            chosen[row], taken[other] = other, True
            left -= 1
            if not left:
                break
    partner_F = torch.tensor(chosen)
    return partner_F, alike_FF.gather(1, partner_F[:, None])[:, 0]


def merge(shape: ExpertShape, experts: list[Tensor], uses: list[float]) -> Tensor:
    """Merges several experts (flat, fp32) into one: matched columns become their mean, weighted by use. A column without a
    counterpart is taken from the most used expert, among equals the first.
    """
    first = max(range(len(experts)), key=lambda index: uses[index])
    base_FW, bias = columns_of(shape, experts[first])
    weight = max(uses[first], 1e-9)
    sum_FW, weight_F = base_FW * weight, torch.full((len(base_FW), 1), weight)
    bias_sum, bias_weight = bias * weight, weight
    for index, expert in enumerate(experts):
        if index == first or uses[index] <= 0:
            continue
        other_FW, other_bias = columns_of(shape, expert)
        partner_F, alike_F = partners(base_FW, other_FW)
        share_F = (alike_F >= LEAST_ALIKE).to(base_FW.dtype)[:, None] * uses[index]
        sum_FW += other_FW[partner_F] * share_F
        weight_F += share_F
        bias_sum, bias_weight = bias_sum + other_bias * uses[index], bias_weight + uses[index]
    return expert_of(shape, sum_FW / weight_F, bias_sum / bias_weight)


#: Tokens of each window for which the outputs of all experts are compared.
SAMPLED = 64


def calibrate(
    teacher: Teacher, windows: Iterable[Tensor], *, passed: Callable[[], None] = lambda: None
) -> dict[int, LayerUse]:
    """Measures ``teacher`` on ``windows`` (each (T,)), by layer; ``passed`` is called after each window.

    Use is the sum of the routers' weights. The outputs of all experts are compared on some tokens of each window, whether
    or not the tokens are routed to them. Raises ChecksumError, OSError.
    """
    spec, experts = teacher.parts.spec, teacher.parts.experts
    weight_LE = {layer: torch.zeros(spec.experts, dtype=torch.float64) for layer in spec.moe_layers}
    alike_LEE = {
        layer: torch.zeros(spec.experts, spec.experts, dtype=torch.float64) for layer in spec.moe_layers
    }
    inputs: dict[int, Tensor] = {}
    samples = 0

    def routed(layer: int, _: object, called: tuple[Tensor, Tensor, Tensor]) -> None:
        """Before the experts of ``layer`` compute: tokens (N, D), their experts (N, K) and weights (N, K)."""
        x_ND, expert_NK, weight_NK = called
        weight_LE[layer].index_add_(0, expert_NK.flatten(), weight_NK.flatten().double())
        inputs[layer] = x_ND[:: max(len(x_ND) // SAMPLED, 1)].clone()

    for window_T in windows:
        with contextlib.ExitStack() as stack:
            for layer, module in experts_modules(teacher.model.module):
                stack.callback(module.register_forward_pre_hook(partial(routed, layer)).remove)
            teacher.logits(window_T[None])
        experts.begin(ServingPhase.PREFILL, 1)
        for layer in spec.moe_layers:
            alike_LEE[layer] += _cosines(spec, experts.forward(layer, range(spec.experts)), inputs[layer])
        samples += len(inputs[spec.moe_layers[0]])
        passed()
    return {
        layer: LayerUse(
            tuple((weight_E / weight_E.sum().clamp(min=1e-30)).tolist()),
            tuple(tuple(row) for row in (alike_LEE[layer] / max(samples, 1)).tolist()),
        )
        for layer, weight_E in weight_LE.items()
    }


@torch.no_grad()
def _cosines(spec: ModelSpec, leases: Iterable[ExpertLease], x_ND: Tensor) -> Tensor:
    """The similarity of all experts' outputs for ``x``: cosines (E, E), summed over its tokens."""
    work = Workspace(spec.expert_shape, len(x_ND), x_ND)
    out_END = x_ND.new_empty(spec.experts, *x_ND.shape)
    for lease in leases:
        inner_NP = work.inner(0, len(x_ND))
        forward_expert(spec.expert_shape, lease.weights, x_ND, inner_NP, out_END[lease.expert], work)
    unit_END = functional.normalize(out_END.float(), dim=-1)
    return torch.einsum("and,bnd->ab", unit_END, unit_END).double()


#: Configuration keys that give the number of experts of a layer.
COUNTED = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ROUTER = re.compile(r"^model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.(?:gate|router)\.")


def check_count(manifest: Manifest, config: Mapping[str, Any], count: int) -> None:
    """Raises ConfigError if this kind of model cannot have ``count`` experts a layer."""
    experts = manifest.experts
    if count > experts.count:
        raise ConfigError(f"--experts: expected at most {experts.count}, the model's own number, got {count}")
    if count < experts.top_k:
        raise ConfigError(
            f"--experts: expected at least {experts.top_k}, since each token is sent to {experts.top_k} experts "
            f"(num_experts_per_tok), got {count}"
        )
    groups = config.get("n_group") or 1
    if isinstance(groups, int) and count % groups:
        raise ConfigError(
            f"--experts: expected a multiple of the router's {groups} groups (n_group), got {count}"
        )
    if not _counts(config, experts.count):
        raise ConfigError(
            f"config.json: expected one of {', '.join(COUNTED)} to be {experts.count}, the number of experts"
        )


def write_student(
    store: Path,
    checkpoint: Path,
    groups: Mapping[int, Groups],
    uses: Mapping[int, LayerUse],
    progress: OnProgress = no_progress,
) -> None:
    """Writes the model of the frozen ``store``, with the experts of ``groups`` in each layer, to the new directory
    ``checkpoint``, in the type of the store.

    Raises ConfigError, StoreError, OSError; after a failure nothing exists at ``checkpoint``.
    """
    spec = imported_spec(store)
    manifest = spec.manifest
    (count,) = {len(each) for each in groups.values()}
    check_count(manifest, spec.config, count)
    with open_weights(store) as weights:
        merged = MergedWeights(weights, spec, groups, uses)
        smaller = _smaller(manifest, count)
        outline = outline_of(store, smaller, 1, None)
        files = dict(outline.files)
        config = json.loads(files["config.json"])
        config.update(dict.fromkeys(_counts(config, manifest.experts.count), count))
        files["config.json"] = json_bytes(config)
        write_outline(replace(outline, files=files), merged, checkpoint, progress=progress)


def _counts(config: Mapping[str, Any], count: int) -> list[str]:
    return [name for name in COUNTED if config.get(name) == count]


def _smaller(manifest: Manifest, count: int) -> Manifest:
    """The manifest of the same model with ``count`` experts a layer."""

    def cut(entry: ParameterEntry) -> ParameterEntry:
        if not is_router(manifest, entry):
            return entry
        return replace(entry, shape=(count, *entry.shape[1:]))

    return replace(
        manifest,
        experts=replace(manifest.experts, count=count),
        units=tuple(
            replace(unit, parameters=tuple(cut(entry) for entry in unit.parameters))
            for unit in manifest.units
        ),
        buffers=tuple(cut(entry) for entry in manifest.buffers),
    )


def is_router(manifest: Manifest, entry: ParameterEntry) -> bool:
    """Whether ``entry``, a parameter or a buffer, has a row for each expert of a layer."""
    found = _ROUTER.match(entry.name)
    has_experts = found is not None and int(found[1]) in manifest.experts.layers
    return has_experts and bool(entry.shape) and entry.shape[0] == manifest.experts.count


class MergedWeights:
    """``weights`` with one expert for each of ``groups`` (``ModelWeights``): experts and router rows are the means of their
    groups, weighted by ``uses``.
    """

    def __init__(
        self,
        weights: StoredWeights,
        spec: HfSpec,
        groups: Mapping[int, Groups],
        uses: Mapping[int, LayerUse],
    ) -> None:
        self._weights, self._groups, self._uses = weights, groups, uses
        self._shape, manifest = spec.expert_shape, spec.manifest
        self._experts = manifest.experts.count
        self._layouts = {layout.key: layout for layout in manifest.unit_layouts(1)}
        self._rows: dict[tuple[str, int], tuple[int, int]] = {}
        for layout, unit in zip(manifest.unit_layouts(1), manifest.units, strict=True):
            for index, entry in enumerate(unit.parameters):
                if is_router(manifest, entry):
                    layer = int(unit.name.partition(".")[2])
                    self._rows[layout.key, index] = layer, entry.numel // self._experts
        self._buffers = {entry.name: entry for entry in manifest.buffers if is_router(manifest, entry)}
        self._last: tuple[tuple[int, int], Floats] | None = None

    @property
    def small(self) -> Mapping[str, bytes]:
        if not self._buffers:
            return self._weights.small
        arrays = unpack_arrays(self._weights.small[BUFFERS_KEY], where="the buffers of the last commit")
        for name in self._buffers:
            found = _ROUTER.match(name)
            assert found is not None
            wide = np.ascontiguousarray(arrays[name], np.float32)
            rows = wide.reshape(self._experts, -1)
            arrays[name] = self._reduced(int(found[1]), rows).reshape(-1, *wide.shape[1:])
        return {**self._weights.small, BUFFERS_KEY: pack_arrays(arrays)}

    def expect(self, order: Sequence[ExpertRequest]) -> None:
        """As in ``StoredWeights``, for groups."""
        groups = [group for group, _ in groupby((layer, expert) for layer, expert, _ in order)]
        members = [(layer, member) for layer, expert in groups for member in self._groups[layer][expert]]
        self._weights.expect([ExpertRequest(layer, member, masters=True) for layer, member in members])

    def expert_fp32(self, layer: int, expert: int) -> Floats:
        """Weights of the group ``expert``; valid until the next one is read."""
        if self._last is not None and self._last[0] == (layer, expert):
            return self._last[1]
        members = self._groups[layer][expert]
        read = [torch.from_numpy(self._weights.expert_fp32(layer, member).copy()) for member in members]
        uses = [self._uses[layer].uses[member] for member in members]
        flat = read[0] if len(read) == 1 else merge(self._shape, read, uses)
        self._last = (layer, expert), flat.numpy()
        return self._last[1]

    def expert_bf16(self, layer: int, expert: int) -> Bits:
        return round_bf16(self.expert_fp32(layer, expert))

    def dense(self, layout: UnitLayout, index: int) -> Iterator[Floats]:
        pieces = self._weights.dense(self._layouts[layout.key], index)
        router = self._rows.get((layout.key, index))
        if router is None:
            yield from pieces
            return
        layer, width = router
        whole = np.concatenate(list(pieces)).reshape(self._experts, width)
        yield self._reduced(layer, whole).reshape(-1)

    def _reduced(self, layer: int, rows_EW: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """A row for each group: the mean of its experts' rows, weighted by their use."""

        def row(members: list[int]) -> npt.NDArray[np.float32]:
            uses = np.array([self._uses[layer].uses[member] for member in members], np.float32)
            alone = len(members) == 1 or not uses.any()
            made: npt.NDArray[np.float32] = (
                rows_EW[members[0]] if alone else (uses / uses.sum()) @ rows_EW[members]
            )
            return made

        return np.stack([row(list(group)) for group in self._groups[layer]])
