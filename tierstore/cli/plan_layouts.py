"""``tierstore plan --layouts``: which arrangement of ranks is fastest, and what the others would lose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.cli.output import Output
from tierstore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.machine_profile import Profile
    from tierstore.plan.layouts.comparing import LayoutComparison, LayoutCost
    from tierstore.train.config import TrainConfig

_TITLES = (
    "layout",
    "a step",
    "loses",
    "bubble",
    "sent within a node",
    "between nodes",
    "memory a rank",
    "disk a rank",
)
#: Variants of the best arrangement that are shown.
_VARIANTS = 12


def show_layouts(
    config: TrainConfig, profile: Profile, ranks: int, node_ranks: int, memory: int, output: Output
) -> None:
    """The fastest of each arrangement, and the variants of the best; ``memory``: of one rank, which those that need more are
    marked by.
    """
    from tierstore.plan.layouts.comparing import best_of_each_kind, compare_layouts

    with output.progress(0, label="layouts") as progress:
        found = compare_layouts(
            config,
            profile,
            ranks=ranks,
            node_ranks=node_ranks,
            progress=lambda done, total: progress.update(done, total, {}),
        )
    title = f"{ranks} ranks, {node_ranks} on a node: the fastest of each arrangement (bytes a rank sends in a step)"
    _table(title, best_of_each_kind(found.costs), found, memory, output)
    variants = found.variants()
    if len(variants) > 1:
        _table("The best arrangement otherwise", variants[:_VARIANTS], found, memory, output)
    if len(variants) > _VARIANTS:
        output.line(f"and {len(variants) - _VARIANTS} more, in --json")
    reasons: dict[str, str] = {}
    for choice, why in found.refused:
        reasons.setdefault(why, choice.name)
    for why, name in reasons.items():
        output.line(f"not {name}: {why}")
    settings = " ".join(f"--set {name}={value}" for name, value in found.best.choice.settings.items())
    output.line(f"the fastest: tierstore train {settings}")
    output.emit({"evidence": found.best.evidence.value, "rank_memory_bytes": memory, **found.as_json()})


def _table(
    title: str, costs: Sequence[LayoutCost], found: LayoutComparison, memory: int, output: Output
) -> None:
    rows = []
    for cost in costs:
        lost = f"{format_seconds(cost.step_s - found.best.step_s)} ({found.loses(cost):.1%})"
        rows.append(
            (
                cost.choice.name,
                format_seconds(cost.step_s),
                "-" if cost is found.best else lost,
                f"{cost.bubble_ratio:.0%}",
                format_bytes(cost.sent.within),
                format_bytes(cost.sent.across),
                format_bytes(cost.memory_bytes) + (" (too much)" if cost.memory_bytes > memory else ""),
                format_bytes(cost.disk_bytes),
            )
        )
    output.table(title, _TITLES, rows)
