"""Several ranks: joining them, their groups, and collectives with fixed orders of summation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.lazy import exports

if TYPE_CHECKING:
    from tierstore.parallel.collectives import Channel, Failure, Group, Operation, Traffic, Work
    from tierstore.parallel.config import ParallelConfig
    from tierstore.parallel.launching import launch, rank_device
    from tierstore.parallel.limited import LimitedGroup, LimitedLink, limited_groups
    from tierstore.parallel.mesh import ExpertBlocks, Mesh
    from tierstore.parallel.notes import MemoryNotes, Notes
    from tierstore.parallel.place import Place
else:
    __getattr__ = exports(
        __name__,
        {
            "collectives": ["Channel", "Failure", "Group", "Operation", "Traffic", "Work"],
            "config": ["ParallelConfig"],
            "launching": ["launch", "rank_device"],
            "limited": ["LimitedGroup", "LimitedLink", "limited_groups"],
            "mesh": ["ExpertBlocks", "Mesh"],
            "notes": ["MemoryNotes", "Notes"],
            "place": ["Place"],
        },
    )

__all__ = [
    "Channel",
    "ExpertBlocks",
    "Failure",
    "Group",
    "LimitedGroup",
    "LimitedLink",
    "MemoryNotes",
    "Mesh",
    "Notes",
    "Operation",
    "ParallelConfig",
    "Place",
    "Traffic",
    "Work",
    "launch",
    "limited_groups",
    "rank_device",
]
