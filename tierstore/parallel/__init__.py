"""Several ranks: joining them, their groups, and collectives that sum in a fixed order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.lazy import exports

if TYPE_CHECKING:
    from tierstore.parallel.collectives import (
        Channel,
        Collective,
        CollectiveTraffic,
        Failure,
        RankGroup,
        Work,
    )
    from tierstore.parallel.config import ExchangeMode, ParallelConfig, RowPlacement
    from tierstore.parallel.hierarchical import (
        Exchange,
        FlatExchange,
        HierarchicalExchange,
        SizedExchange,
    )
    from tierstore.parallel.job_store import JobStore, MemoryJobStore
    from tierstore.parallel.launching import launch, rank_device
    from tierstore.parallel.layout import RankEnvironment
    from tierstore.parallel.limited import LimitedGroup, limited_groups
    from tierstore.parallel.mesh import ExpertBlocks, Mesh
    from tierstore.parallel.tensor import TensorRanks
else:
    __all__, __getattr__, __dir__ = exports(__name__, __file__)
