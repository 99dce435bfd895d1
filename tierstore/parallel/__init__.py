"""Several ranks: joining them, their groups, and collectives with fixed orders of summation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.lazy import exports

if TYPE_CHECKING:
    from tierstore.parallel.collectives import Channel, Collective, CollectiveTraffic, Failure, Group, Work
    from tierstore.parallel.config import ParallelConfig
    from tierstore.parallel.environment import RankEnvironment
    from tierstore.parallel.job_store import JobStore, MemoryJobStore
    from tierstore.parallel.launching import launch, rank_device
    from tierstore.parallel.limited import LimitedGroup, LimitedLink, limited_groups
    from tierstore.parallel.mesh import ExpertBlocks, Mesh
else:
    __getattr__ = exports(
        __name__,
        {
            "collectives": ["Channel", "Failure", "Group", "Collective", "CollectiveTraffic", "Work"],
            "config": ["ParallelConfig"],
            "environment": ["RankEnvironment"],
            "job_store": ["JobStore", "MemoryJobStore"],
            "launching": ["launch", "rank_device"],
            "limited": ["LimitedGroup", "LimitedLink", "limited_groups"],
            "mesh": ["ExpertBlocks", "Mesh"],
        },
    )

__all__ = [
    "Channel",
    "Collective",
    "CollectiveTraffic",
    "ExpertBlocks",
    "Failure",
    "Group",
    "JobStore",
    "LimitedGroup",
    "LimitedLink",
    "MemoryJobStore",
    "Mesh",
    "ParallelConfig",
    "RankEnvironment",
    "Work",
    "launch",
    "limited_groups",
    "rank_device",
]
