"""A capacity in parts, one for each layer: what a live store, a replay and the lab give to layers."""

from __future__ import annotations

from collections.abc import Sequence


def quotas_by_layer(layers: Sequence[int], frames: int, shares: Sequence[float] = ()) -> list[int]:
    """Frames of each layer number up to the last: parts of ``frames`` in proportion to ``shares`` (empty: equal)
    for ``layers``, none for those without records. The first layers get the frames that are left over.
    """
    present = sorted(set(layers))
    if shares:
        total = sum(shares)
        parts = [frames * share / total for share in shares]
        # A part that is a whole number of frames but for rounding in its share is that number.
        whole = [int(part + 1e-8 * frames) for part in parts]
        if sum(whole) > frames:
            whole = [int(part) for part in parts]
    else:
        whole = [frames // len(present)] * len(present)
    left_over = frames - sum(whole)
    quotas = [0] * (present[-1] + 1)
    for place, layer in enumerate(present):
        quotas[layer] = whole[place] + (place < left_over)
    return quotas
