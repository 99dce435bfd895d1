"""The layout of ranks, in numbers: stages of copies of the experts, each over a group of ranks. Imports no torch."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tierstore.errors import ConfigError
from tierstore.parallel.config import ParallelConfig


@dataclass(frozen=True, slots=True)
class Layout:
    """The number of ranks of each kind: ``stages`` stages of ``replicas`` copies of the experts, each over ``expert`` ranks,
    which are tensor-parallel or (``tensor`` = 1) each have their own piece of the batch.
    """

    stages: int
    replicas: int
    expert: int
    tensor: int

    def __str__(self) -> str:
        if self.world == 1:
            return "one rank"
        kind = (
            f"tensor-parallel groups of {self.tensor}"
            if self.tensor > 1
            else f"expert groups of {self.expert}"
        )
        stages = f"{self.stages} stages, " if self.stages > 1 else ""
        return f"{self.world} ranks ({stages}{kind})"

    @property
    def world(self) -> int:
        """All ranks."""
        return self.stages * self.replicas * self.expert

    @property
    def data(self) -> int:
        """The number of ranks of a stage that compute different pieces of the global batch."""
        return self.replicas if self.tensor > 1 else self.replicas * self.expert

    def as_json(self) -> dict[str, int]:
        """The numbers as commands print them, and stores record them."""
        return {
            "ranks": self.world,
            "expert_ranks": self.expert,
            "tensor_ranks": self.tensor,
            "stages": self.stages,
        }

    def rows(self, dimension: str) -> list[list[int]]:
        """The groups along ``dimension`` (a field of ``Mesh``), each as its ranks, ascending."""
        replicas, experts = range(self.replicas), range(self.expert)
        stages = [
            [
                [(stage * self.replicas + replica) * self.expert + place for place in experts]
                for replica in replicas
            ]
            for stage in range(self.stages)
        ]
        whole = [[rank for group in stage for rank in group] for stage in stages]
        if dimension == "world":
            return [[rank for stage in whole for rank in stage]]
        if dimension == "pipeline":
            return [list(ranks) for ranks in zip(*whole, strict=True)]
        if dimension == "expert" or (dimension == "tensor" and self.tensor > 1):
            return [group for stage in stages for group in stage]
        if dimension == "replica" or (dimension == "data" and self.tensor > 1):
            return [list(ranks) for stage in stages for ranks in zip(*stage, strict=True)]
        if dimension == "data":
            return whole
        return [[rank] for stage in whole for rank in stage]  # tensor parallelism of one rank


def layout_of(config: ParallelConfig, world: int) -> Layout:
    """The layout of ``world`` ranks. Raises ConfigError naming the setting that does not divide them."""
    each, more = divmod(world, config.stages)
    if more:
        raise ConfigError(f"parallel.stages: expected a divisor of the {world} ranks, got {config.stages}")
    if each % config.tensor:
        raise ConfigError(
            f"parallel.tensor: expected a divisor of the {each} ranks of a stage, got {config.tensor}"
        )
    if config.tensor > 1 and config.expert not in (0, config.tensor):
        raise ConfigError(
            f"parallel.expert: expected 0 or {config.tensor}: with parallel.tensor the experts are divided over the "
            f"tensor-parallel group, got {config.expert}"
        )
    expert = config.tensor if config.tensor > 1 else config.expert or each
    if each % expert:
        where = f"the {each} ranks" + (" of a stage" if config.stages > 1 else "")
        raise ConfigError(f"parallel.expert: expected a divisor of {where}, got {expert}")
    return Layout(config.stages, each // expert, expert, config.tensor)


# The environment of a rank ----------------------------------------------------------------------------------


_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
#: Optional: it only says where nodes end.
_LOCAL_WORLD = "LOCAL_WORLD_SIZE"
_JOB = "TORCHELASTIC_RUN_ID"
#: The job id that torchrun gives without ``--rdzv-id``.
_NO_JOB = "none"
_NEEDED = (*_NUMBERS, "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """Rank ``rank`` of ``world``. ``local_rank`` is its rank among the ``local_world`` ranks of its machine (0: unknown).

    ``address``: the machine of rank 0, and the port where ranks meet. ``supervised``: a ``torchrun`` process started
    this one and must outlive it. ``job``: its ``--rdzv-id``, which all attempts of a job share.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 0
    address: tuple[str, int] = ("127.0.0.1", 0)
    supervised: bool = False
    job: str = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> RankEnvironment:
        """Read ``environ`` (None: this process's); a single process if it does not mention ranks.

        Raises ConfigError naming the variable if the environment is incomplete or inconsistent.
        """
        environ = os.environ if environ is None else environ
        # MASTER_* alone means nothing: clusters set it for every process of a job.
        if not any(name in environ for name in _NUMBERS):
            return cls()
        missing = [name for name in _NEEDED if not environ.get(name)]
        if missing:
            given = ", ".join(name for name in _NUMBERS if name in environ)
            raise ConfigError(
                f"{', '.join(missing)}: not set, though {given} is; start ranks with torchrun, "
                "or unset them all for a single process"
            )
        rank, world, local = (_number(environ, name) for name in _NUMBERS)
        if world < 1:
            raise ConfigError(f"WORLD_SIZE: expected at least 1, got {world}")
        if rank >= world:
            raise ConfigError(f"RANK: expected 0 to {world - 1} (WORLD_SIZE is {world}), got {rank}")
        if local > rank:
            raise ConfigError(f"LOCAL_RANK: expected at most {rank} (RANK), got {local}")
        local_world = _number(environ, _LOCAL_WORLD) if environ.get(_LOCAL_WORLD) else 0
        if local_world and not local < local_world <= world:
            raise ConfigError(
                f"{_LOCAL_WORLD}: expected {local + 1} to {world} (LOCAL_RANK is {local}, WORLD_SIZE is {world}), "
                f"got {local_world}"
            )
        port = _number(environ, "MASTER_PORT")
        if not 0 < port < 65536:
            raise ConfigError(f"MASTER_PORT: expected 1 to 65535, got {port}")
        return cls(
            rank=rank,
            world=world,
            local_rank=local,
            local_world=local_world,
            address=(environ["MASTER_ADDR"], port),
            supervised=_JOB in environ,
            job="" if environ.get(_JOB) == _NO_JOB else environ.get(_JOB, ""),
        )


def local_environments(count: int) -> list[dict[str, str]]:
    """What ``count`` ranks on this machine need in their environment, in rank order, to meet on the loopback interface."""
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **common} for rank in range(count)]


def free_port() -> int:
    """A TCP port on which no process of this machine listens, for a server that starts later. The kernel gives no such port
    to a socket that asks for any (on Linux it gives those from 32,768 on), so that no connection takes it before the server
    does. Raises OSError when all that were tried are taken.
    """
    ipv6 = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ipv6 else socket.AF_INET
    for _ in range(100):
        # Not from random: processes that were forked from one would draw the same.
        port = 10_000 + secrets.randbelow(20_000)
        with contextlib.suppress(OSError):
            socket.create_server(("", port), family=family, dualstack_ipv6=ipv6).close()
            return port
    raise OSError("none of 100 ports from 10,000 to 29,999 is free")


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name}: expected an integer of at least 0, got {text!r}")
    return int(text)


# Nodes ------------------------------------------------------------------------------------------------------
#
# Ranks are numbered node by node, as ``torchrun`` numbers them: rank r is on node r // node_ranks.


@dataclass(frozen=True, slots=True)
class NodeGrid:
    """An expert group as ``nodes`` x ``each``: ``each`` of its ranks, with adjacent numbers, on each of its nodes."""

    nodes: int
    each: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.each

    def neighbours(self, ranks: Sequence[int]) -> list[list[int]]:
        """A group's ``ranks``, by node."""
        return [list(ranks[first : first + self.each]) for first in range(0, self.ranks, self.each)]

    def rails(self, ranks: Sequence[int]) -> list[list[int]]:
        """A group's ``ranks``, by place in their nodes: one rank of every node."""
        return [list(ranks[place :: self.each]) for place in range(self.each)]


def ranks_of_a_node(config: ParallelConfig, environment: RankEnvironment) -> int:
    """Ranks of a node; all ranks if neither the configuration nor ``torchrun`` says it."""
    return config.node_ranks or environment.local_world or environment.world


def node_grid(groups: Sequence[Sequence[int]], node_ranks: int) -> NodeGrid | str:
    """How each of the expert ``groups`` (global ranks, ascending) is spread over nodes of ``node_ranks`` ranks; the reason
    if that leaves nothing to do in two steps, or differs between nodes.
    """
    size = len(groups[0])
    # For each group, the number of its ranks on each of its nodes.
    spreads = {tuple(Counter(rank // node_ranks for rank in group).values()) for group in groups}
    if all(len(counts) == 1 for counts in spreads):
        return f"each expert group of {size} is within one node of {node_ranks} ranks"
    if len(spreads) > 1 or any(len(set(counts)) > 1 for counts in spreads):
        return f"nodes of {node_ranks} ranks do not divide the expert groups of {size} evenly"
    (counts,) = spreads
    if counts[0] == 1:
        return f"each node has one rank of an expert group of {size}"
    return NodeGrid(len(counts), counts[0])


# Parameters divided over tensor-parallel ranks --------------------------------------------------------------
#
# A parameter may be several matrices side by side: queries, keys and values, or gate and up. Each of these *blocks* is
# cut separately, and a rank's *part* is its pieces, block after block: of ``[Q0 Q1 | K0 K1 | V0 V1]`` rank 0 has
# ``[Q0 K0 V0]``.


@dataclass(frozen=True, slots=True)
class Division:
    """A parameter whose dimension ``dimension`` is ``blocks`` equal blocks, each cut into a piece for each rank."""

    dimension: int
    blocks: int = 1

    def part_shape(self, shape: Sequence[int], ranks: int) -> tuple[int, ...]:
        """The shape of one of ``ranks`` parts of a parameter of ``shape``. Raises ValueError if it does not divide."""
        length, more = divmod(shape[self.dimension], self.blocks * ranks)
        if more:
            raise ValueError(
                f"expected a multiple of {self.blocks} x {ranks} in dimension {self.dimension} of {tuple(shape)}"
            )
        part = list(shape)
        part[self.dimension] = length * self.blocks
        return tuple(part)

    def pieces(self, length: int, rank: int, ranks: int) -> Iterator[slice]:
        """The slices of ``rank`` along ``dimension``, of ``length`` elements in the whole parameter: one piece of each
        block, in the order of the part.
        """
        block = length // self.blocks
        piece = block // ranks
        for number in range(self.blocks):
            start = number * block + rank * piece
            yield slice(start, start + piece)


# Tables divided by rows over ranks (SE-MoE, section 4.3) ----------------------------------------------------


#: Slices are multiples of this many elements: 64 bytes in fp32, 32 in bf16. So vector kernels have no remainder.
SLICE_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class TableRows:
    """A table of ``rows`` rows of ``width`` elements in contiguous blocks over ``ranks`` ranks, all of ``each`` rows: those
    after the last row of the table are padding, and zero. The last ranks may have only padding.
    """

    rows: int
    width: int
    ranks: int

    @property
    def each(self) -> int:
        """Rows that one rank holds, padding included: whole rows whose elements are a multiple of SLICE_ALIGNMENT."""
        step = SLICE_ALIGNMENT // math.gcd(SLICE_ALIGNMENT, self.width)
        return -(-self.rows // (self.ranks * step)) * step

    def owned(self, rank: int) -> range:
        """The rows of ``rank``, without padding."""
        return range(min(rank * self.each, self.rows), min((rank + 1) * self.each, self.rows))
