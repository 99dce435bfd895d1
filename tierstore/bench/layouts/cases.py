"""The layouts that are measured: those that are judged, and others of other sizes that costs are fitted on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierstore.links import LinkConfig, LinksConfig
from tierstore.parallel.config import ExchangeMode, RowPlacement
from tierstore.parallel.layout import Layout
from tierstore.plan.layouts.candidates import LayoutChoice

_GATHER = LinkConfig(bandwidth=12_000_000, latency=0.5e-3)
_EXCHANGE = LinkConfig(bandwidth=6_000_000, latency=0.5e-3)
#: Between nodes: a rank's part of a slower adapter.
_NODE = LinkConfig(bandwidth=3_000_000, latency=3e-3)
#: Ranks of an emulated node.
NODE_RANKS = 2


@dataclass(frozen=True, kw_only=True)
class CaseSize:
    """What is trained: ``rows`` sequences of ``seq_len`` tokens on each data rank in each of ``micro_batches``."""

    rows: int = 2
    seq_len: int = 64
    micro_batches: int = 1
    layers: int = 2
    d_ff: int = 64


@dataclass(frozen=True, kw_only=True)
class LayoutCase:
    """One layout, and the size of what it trains. ``kind``: what it stands for; ``nodes``: of two ranks each, or one."""

    name: str
    kind: str
    choice: LayoutChoice
    size: CaseSize = field(default_factory=CaseSize)
    nodes: int = 1

    @property
    def node_ranks(self) -> int:
        return self.choice.ranks.world // self.nodes

    @property
    def links(self) -> LinksConfig:
        node = _NODE if self.nodes > 1 else LinkConfig()
        return LinksConfig(gather=_GATHER, exchange=_EXCHANGE, node=node)

    def settings(self, text: Path) -> dict[str, Any]:
        """The settings of a run in this layout, which trains on ``text``; all its experts fit in the host's cache."""
        size, links = self.size, self.links
        limits = {
            f"links.{name}.{key}": value
            for name, link in (("gather", links.gather), ("exchange", links.exchange), ("node", links.node))
            for key, value in (("bandwidth", link.bandwidth), ("latency", link.latency))
        }
        return {
            "device": "cpu",
            "threads": 1,
            "host_budget": 24 << 20,
            "commit_every": 0,
            "model.vocab_size": 512,
            "model.d_model": 64,
            "model.n_layers": size.layers,
            "model.n_heads": 4,
            "model.seq_len": size.seq_len,
            "model.d_ff": size.d_ff,
            "model.experts": 8,
            "model.top_k": 2,
            "data.paths": (str(text),),
            "data.batch_size": size.rows * self.choice.ranks.data,
            "data.micro_batches": size.micro_batches,
            "data.micro_order": "micro",
            "schedule.lr": 1e-6,
            "io.huge_pages": "off",
            "parallel.node_ranks": self.node_ranks,
            "parallel.timeout_s": 120.0,
            **self.choice.settings,
            **limits,
        }


def _case(
    kind: str,
    stages: int,
    replicas: int,
    expert: int,
    tensor: int = 1,
    *,
    degree: int = 1,
    exchange: ExchangeMode = ExchangeMode.FLAT,
    rows: RowPlacement = RowPlacement.GATHERED,
    nodes: int = 1,
    **size: int,
) -> LayoutCase:
    layout = Layout(stages, replicas, expert, tensor)
    choice = LayoutChoice(layout, degree, exchange, embedding=rows, head=rows)
    beside = [f"{nodes} nodes"] if nodes > 1 else []
    beside += [f"{count} {name.replace('_', '-')}" for name, count in size.items()]
    return LayoutCase(
        name=f"{layout.world} ranks: {', '.join([choice.name, *beside])}",
        kind=kind,
        choice=choice,
        size=CaseSize(**size),
        nodes=nodes,
    )


_DIVIDED, _TWO_STEPS = RowPlacement.PARTITIONED, ExchangeMode.HIERARCHICAL

#: Those that are judged.
JUDGED: tuple[LayoutCase, ...] = (
    _case("one rank", 1, 1, 1),
    _case("one rank", 1, 1, 1, micro_batches=2),
    _case("expert", 1, 1, 2),
    _case("chunks", 1, 1, 2, degree=2),
    _case("chunks", 1, 1, 2, degree=4),
    _case("copies", 1, 2, 1),
    _case("tensor", 1, 1, 2, 2),
    _case("divided tables", 1, 1, 2, rows=_DIVIDED),
    _case("stages", 2, 1, 1, micro_batches=4),
    _case("expert", 1, 1, 4),
    _case("chunks", 1, 1, 4, degree=2),
    _case("copies", 1, 2, 2),
    _case("copies", 1, 4, 1),
    _case("tensor", 1, 1, 4, 4),
    _case("tensor and data", 1, 2, 2, 2),
    _case("divided tables", 1, 1, 4, rows=_DIVIDED),
    _case("nodes", 1, 1, 4, nodes=2),
    _case("nodes, two steps", 1, 1, 4, exchange=_TWO_STEPS, nodes=2),
    _case("nodes, two steps, chunks", 1, 1, 4, degree=2, exchange=_TWO_STEPS, nodes=2),
    _case("nodes, copies", 1, 2, 2, nodes=2),
    _case("stages", 4, 1, 1, micro_batches=4, layers=4),
    _case("stages and expert", 2, 1, 2, micro_batches=2),
    _case("stages and tensor", 2, 1, 2, 2, micro_batches=2),
    _case("stages, expert, chunks", 2, 1, 2, degree=2, micro_batches=4),
)

#: Those that costs are fitted on: none is judged, and none has the size of one that is.
FITTED: tuple[LayoutCase, ...] = (
    _case("one rank", 1, 1, 1, seq_len=48),
    _case("one rank", 1, 1, 1, layers=3, seq_len=32),
    _case("expert", 1, 1, 2, seq_len=48),
    _case("copies", 1, 2, 1, layers=3, seq_len=32),
    _case("tensor", 1, 1, 2, 2, layers=3, seq_len=48),
    _case("stages", 2, 1, 1, seq_len=48, micro_batches=2),
    _case("expert", 1, 1, 4, seq_len=48),
    _case("copies", 1, 2, 2, layers=3, seq_len=32),
    _case("tensor and data", 1, 2, 2, 2, seq_len=96),
    _case("stages and expert", 2, 1, 2, seq_len=48, micro_batches=3),
)
