"""A model with fewer experts, written as a checkpoint: merged experts, and routers with a row for each of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tierstore.dense import UnitLayout
from tierstore.deploy.compress.columns import merge
from tierstore.deploy.compress.grouping import Groups, LayerUse
from tierstore.errors import ConfigError, StoreFormatError
from tierstore.hf.exports.exporting import outline_of, write_outline
from tierstore.hf.exports.reading import Bits, Floats, StoredWeights, open_weights, round_bf16
from tierstore.hf.manifest import Manifest, ParameterEntry
from tierstore.hf.stored import stored_spec
from tierstore.model.buffers import BUFFERS_KEY, pack_arrays, unpack_arrays
from tierstore.moe.config import ExpertShape
from tierstore.train.config import FinetuneConfig

#: Under which names configurations count the experts of a layer.
COUNTED = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ROUTER = re.compile(r"^model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.(?:gate|router)\.")


def check_count(manifest: Manifest, config: Mapping[str, Any], count: int) -> None:
    """Raises ConfigError where no model of this kind has ``count`` experts a layer."""
    experts = manifest.experts
    if count > experts.count:
        raise ConfigError(
            f"--experts: expected at most the {experts.count} experts that there are, got {count}"
        )
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
            f"config.json: none of {', '.join(COUNTED)} says {experts.count}, the number of experts"
        )


def write_student(
    store: Path, checkpoint: Path, groups: Mapping[int, Groups], uses: Mapping[int, LayerUse]
) -> None:
    """Writes the model of the frozen ``store``, with the experts of ``groups`` in each layer, to the new directory
    ``checkpoint``, in the type of the store.

    Raises ConfigError, StoreError, OSError; on a failure there is nothing at ``checkpoint``.
    """
    spec = stored_spec(store, FinetuneConfig())
    if spec is None:
        raise StoreFormatError(f"{store}: no imported model")
    manifest = spec.manifest
    (count,) = {len(each) for each in groups.values()}
    check_count(manifest, spec.config, count)
    with open_weights(store) as weights:
        merged = MergedWeights(weights, manifest, spec.expert_shape, groups, uses)
        smaller = _smaller(manifest, count)
        outline = outline_of(store, smaller, 1, None)
        files = dict(outline.files)
        config = json.loads(files["config.json"])
        config.update(dict.fromkeys(_counts(config, manifest.experts.count), count))
        files["config.json"] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
        write_outline(replace(outline, files=files), merged, checkpoint)


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
    """``weights`` with the experts of ``groups`` (``ModelWeights``): each expert, and each row of a router, is that of its
    group, weighted by ``uses``.
    """

    def __init__(
        self,
        weights: StoredWeights,
        manifest: Manifest,
        shape: ExpertShape,
        groups: Mapping[int, Groups],
        uses: Mapping[int, LayerUse],
    ) -> None:
        self._weights = weights
        self._shape = shape
        self._groups = groups
        self._uses = uses
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

    def expert_fp32(self, layer: int, expert: int, experts: int) -> Floats:
        """Of the group ``expert``; valid until the next one is read."""
        if self._last is not None and self._last[0] == (layer, expert):
            return self._last[1]
        members = self._groups[layer][expert]
        read = [
            torch.from_numpy(self._weights.expert_fp32(layer, member, self._experts).copy())
            for member in members
        ]
        uses = [self._uses[layer].uses[member] for member in members]
        flat = read[0] if len(read) == 1 else merge(self._shape, read, uses)
        self._last = (layer, expert), flat.numpy()
        return self._last[1]

    def expert_bf16(self, layer: int, expert: int, experts: int) -> Bits:
        return round_bf16(self.expert_fp32(layer, expert, experts))

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
        return np.stack([self._row(layer, rows_EW, group) for group in self._groups[layer]])

    def _row(
        self, layer: int, rows_EW: npt.NDArray[np.float32], group: Sequence[int]
    ) -> npt.NDArray[np.float32]:
        members = list(group)
        uses = np.array([self._uses[layer].uses[member] for member in members], np.float32)
        if len(members) == 1 or not uses.any():
            row: npt.NDArray[np.float32] = rows_EW[members[0]]
            return row
        mean: npt.NDArray[np.float32] = (uses / uses.sum()) @ rows_EW[members]
        return mean
