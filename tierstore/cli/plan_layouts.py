"""``tierstore plan --layouts``: which arrangement of ranks is fastest, and what the others would lose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.cli.output import Output
from tierstore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tierstore.plan import Profile
    from tierstore.train.config import TrainConfig

_TITLES = (
    "layout",
    "a step",
    "loses",
    "bubble",
    "sent a rank",
    "across nodes",
    "memory a rank",
    "disk a rank",
)


def show_layouts(
    config: TrainConfig, profile: Profile, ranks: int, node_ranks: int, memory: int, output: Output
) -> None:
    """The fastest of each arrangement; ``memory``: of one rank, which those that need more are marked by."""
    from tierstore.plan.layouts.comparing import best_of_each_kind, compare_layouts

    with output.progress(0, label="layouts") as progress:
        found = compare_layouts(
            config,
            profile,
            ranks=ranks,
            node_ranks=node_ranks,
            progress=lambda done, total: progress.update(done, total, {}),
        )
    rows = [
        (
            cost.choice.name,
            format_seconds(cost.step_s),
            f"{found.loses(cost):.1%}",
            f"{cost.bubble_ratio:.0%}",
            format_bytes(cost.sent.total),
            format_bytes(cost.sent.across),
            format_bytes(cost.memory_bytes) + (" (too much)" if cost.memory_bytes > memory else ""),
            format_bytes(cost.disk_bytes),
        )
        for cost in best_of_each_kind(found.costs)
    ]
    output.table(f"{ranks} ranks, {node_ranks} on a node: the fastest of each arrangement", _TITLES, rows)
    reasons: dict[str, str] = {}
    for choice, why in found.refused:
        reasons.setdefault(why, choice.name)
    for why, name in reasons.items():
        output.line(f"not {name}: {why}")
    settings = " ".join(f"--set {name}={value}" for name, value in found.best.choice.settings.items())
    output.line(f"the fastest: tierstore train {settings}")
    output.emit({"evidence": found.best.evidence.value, "rank_memory_bytes": memory, **found.as_json()})
