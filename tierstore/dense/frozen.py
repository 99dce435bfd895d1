"""Dense parameters that are not trained: whole on every rank, read once from the records of their slices."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from tierstore._native import Arena, Buffer, HugePages
from tierstore.dense.layout import UnitLayout
from tierstore.errors import StoreError
from tierstore.parallel import RankGroup
from tierstore.store.core import StoreCore
from tierstore.store.format import SECTION_ALIGNMENT, Group
from tierstore.tiers.device import tensor_of


def load_frozen(
    store: StoreCore,
    units: Sequence[tuple[str, Sequence[nn.Parameter]]],
    layouts: Sequence[UnitLayout],
    *,
    group: RankGroup,
    device: torch.device,
    narrow: Collection[nn.Parameter] = (),
    compute: torch.dtype = torch.float32,
) -> None:
    """Gives the parameters of ``units`` memory of their own on ``device``, in their own types, with what the last commit
    holds of them; each rank's store has its slices, as ``layouts`` say. They get no gradients. A collective.

    Those of ``narrow`` become ``compute``: the model casts them before their only use. Beside what stays, one unit is in
    memory at a time, in fp32 (on several ranks also its slice). Raises StoreError for a record that is missing,
    ChecksumError, OSError.
    """
    cast = {id(parameter) for parameter in narrow}
    for (_, parameters), layout in zip(units, layouts, strict=True):
        if not layout.empty:
            types = [compute if id(parameter) in cast else parameter.dtype for parameter in parameters]
            _load_unit(store, parameters, types, layout, group, device)


def _load_unit(
    store: StoreCore,
    parameters: Sequence[nn.Parameter],
    types: Sequence[torch.dtype],
    layout: UnitLayout,
    group: RankGroup,
    device: torch.device,
) -> None:
    if layout.key not in store.records:
        raise StoreError(f"{store.directory}: record {layout.key!r} is missing")
    nbytes = layout.slice_numel * 4
    size = -(-nbytes // SECTION_ALIGNMENT) * SECTION_ALIGNMENT
    buffer = Buffer(Arena(size, HugePages.OFF), [(0, size)], nbytes)
    store.read_through(layout.key, {Group.WEIGHTS: [buffer]})
    slices = tensor_of(buffer, torch.float32)
    for region, kept in layout.slices():
        whole: Tensor = slices[kept]
        if group.size > 1:
            whole = torch.empty(region.padded_numel)
            group.all_gather(whole, slices[kept]).wait()
        for span in region.spans:
            parameter = parameters[span.index]
            values = whole[span.offset : span.offset + span.numel].view(span.shape)
            parameter.data = values.to(device=device, dtype=types[span.index], copy=True)
            parameter.requires_grad_(False)
