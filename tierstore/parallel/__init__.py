"""Several ranks: joining them, their groups, and collectives with fixed orders of summation."""

from tierstore.parallel.collectives import Channel, Failure, Group, LimitedLink, Operation, Traffic, Work
from tierstore.parallel.config import ParallelConfig
from tierstore.parallel.launch import launch, rank_device
from tierstore.parallel.mesh import ExpertBlocks, Mesh
from tierstore.parallel.place import Place

__all__ = [
    "Channel",
    "ExpertBlocks",
    "Failure",
    "Group",
    "LimitedLink",
    "Mesh",
    "Operation",
    "ParallelConfig",
    "Place",
    "Traffic",
    "Work",
    "launch",
    "rank_device",
]
