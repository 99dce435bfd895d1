"""What all-to-alls and expert products cost on this machine and its links: a short probe when a session is opened, or the
profile of the machine that ``tierstore bench machine`` has written.

All ranks hold the same numbers afterwards: the largest of any rank, since a pass takes as long as its slowest. They probe
together; each number comes from medians over a few rounds of a small and a large case. What the probe sends is not counted
as traffic.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tierstore.errors import ConfigError, DataError
from tierstore.links import LinkConfig
from tierstore.machine_profile import Profile, load_profile, over_link
from tierstore.moe.config import ExpertShape
from tierstore.moe.experts import Workspace, forward_expert
from tierstore.parallel import Mesh
from tierstore.parallel.collectives import uncounted

_ROUNDS = 5
#: Bytes to each other rank in the large exchange, at most.
_LARGE_BYTES = 2 << 20
#: Rows of an expert in the large product, at most.
_LARGE_ROWS = 256
#: A product that takes as long is measured once.
_SLOW_S = 0.2


@dataclass(frozen=True, slots=True)
class BackwardCosts:
    """Seconds that the backward pass of an expert takes (``expert``), and a further chunk; that each of its rows takes
    (``row``), and beside that where what feeds the activation is computed again (``row_again``).
    """

    expert: float
    row: float
    row_again: float


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Seconds: that an all-to-all takes to start (``message``) and for each byte that a rank sends in it (``byte``); that a
    further chunk takes of the thread that computes (``chunk``); that the forward pass of an expert takes (``expert``), and
    each of its rows (``row``). ``backward``: None where it takes two forward passes.
    """

    message: float
    byte: float
    chunk: float
    expert: float
    row: float
    backward: BackwardCosts | None = None


@dataclass(frozen=True, slots=True)
class ProbeSizes:
    """What a layer's pass moves and computes: bytes of a row, rows that travel to each other rank, rows of an expert."""

    row_bytes: int
    rows_to_each: int
    rows_of_expert: int


def probe(mesh: Mesh, shape: ExpertShape, dtype: torch.dtype, sizes: ProbeSizes) -> LayerCosts:
    """The costs of passes over experts of ``shape``; a collective of all ranks. Raises PeerError."""
    with uncounted(mesh.expert, *mesh.exchange.groups):
        message, byte, chunk = _exchanges(mesh, sizes)
    expert, row = _products(mesh.device, shape, dtype, sizes.rows_of_expert)
    found = torch.tensor([message, byte, chunk, expert, row], dtype=torch.float64)
    mesh.world.max(found)
    return LayerCosts(*found.tolist())


def read_profile(path: Path, sharing: int) -> Profile:
    """The profile at ``path``. Raises ConfigError where it has not what the passes of ``sharing`` ranks are chosen by."""
    try:
        profile = load_profile(path)
    except OSError as error:
        raise ConfigError(f"parallel.profile: {path}: {error.strerror or error}") from error
    except DataError as error:
        raise ConfigError(f"parallel.profile: {error}") from error
    if profile.expert_forward is None or profile.expert_backward is None or not profile.exchanges:
        raise ConfigError(
            f"parallel.profile: {path}: expected costs of all-to-alls by ranks (exchanges) and of experts (expert_forward, "
            "expert_backward), as `tierstore bench machine` measures them"
        )
    if sharing not in profile.exchanges:
        raise ConfigError(
            f"parallel.profile: {path}: expected all-to-alls of {sharing} ranks, which share the experts, got those of "
            f"{', '.join(str(count) for count in sorted(profile.exchanges))}: `tierstore bench machine --ranks {sharing}`"
        )
    return profile


def profiled(mesh: Mesh, shape: ExpertShape, path: Path, link: LinkConfig) -> LayerCosts:
    """The costs that the profile at ``path`` has of passes over experts of ``shape``, whose rows go over ``link``; a
    collective of all ranks, which may have files of their own. Raises ConfigError, PeerError.
    """
    profile = read_profile(path, mesh.expert.size)
    exchange = over_link(profile.exchanges[mesh.expert.size], link)
    forward, backward = profile.expert_forward, profile.expert_backward
    assert forward is not None
    assert backward is not None
    flops = 2 * shape.numel
    again = 2 * shape.inner_rows * shape.d_model
    found = torch.tensor(
        [
            exchange.latency_s,
            1 / exchange.per_s,
            forward.latency_s,
            flops / forward.per_s,
            backward.latency_s,
            2 * flops / backward.per_s,
            again / backward.per_s,
        ],
        dtype=torch.float64,
    )
    mesh.world.max(found)
    message, byte, expert, row, *back = found.tolist()
    return LayerCosts(message, byte, expert, expert, row, BackwardCosts(*back))


def line(small: tuple[float, float], large: tuple[float, float]) -> tuple[float, float]:
    """The start and the slope of the line through two points (amount, seconds), neither below 0."""
    amount = large[0] - small[0]
    slope = max((large[1] - small[1]) / amount, 0.0) if amount > 0 else 0.0
    return max(small[1] - slope * small[0], 0.0), slope


def _exchanges(mesh: Mesh, sizes: ProbeSizes) -> tuple[float, float, float]:
    """Seconds an exchange takes to start, for each byte sent, and of the issuing thread for a chunk."""
    group, device = mesh.expert, mesh.device
    wanted = min(sizes.row_bytes * max(sizes.rows_to_each, 1), _LARGE_BYTES)
    each = (64, max(wanted, 64 << 4))
    spent: tuple[list[float], list[float]] = ([], [])
    issued: list[float] = []
    others = group.size - 1
    buffers = []
    for nbytes in each:
        rows = torch.zeros(group.size * nbytes, dtype=torch.uint8, device=device)
        buffers.append((torch.empty_like(rows), rows, torch.full((group.size, group.size), nbytes)))
    for _ in range(_ROUNDS):
        for (out, rows, rows_SS), times in zip(buffers, spent, strict=True):
            group.barrier()
            started = time.perf_counter()
            work = mesh.exchange.all_to_all(out, rows, rows_SS)
            issued.append(time.perf_counter() - started)
            work.wait()
            _synchronize(device)
            times.append(time.perf_counter() - started)
    small, large = (
        (float(nbytes * others), statistics.median(times)) for nbytes, times in zip(each, spent, strict=True)
    )
    # A chunk is issued twice: its rows, and their results.
    return *line(small, large), 2 * statistics.median(issued)


def _products(device: torch.device, shape: ExpertShape, dtype: torch.dtype, rows: int) -> tuple[float, float]:
    """Seconds that the forward pass of an expert takes, and each of its rows."""
    large = max(min(rows, _LARGE_ROWS), 2)
    weights = torch.zeros(shape.numel, dtype=dtype, device=device)
    x_MD = torch.zeros(large, shape.d_model, dtype=dtype, device=device)
    work = Workspace(shape, large, x_MD)
    inner_MP, out_MD = x_MD.new_empty(large, shape.inner_rows), torch.empty_like(x_MD)

    def compute(count: int) -> float:
        def once() -> None:
            forward_expert(shape, weights, x_MD[:count], inner_MP[:count], out_MD[:count], work)

        return _median_s(once, device)

    few = max(large // 4, 1)
    return line((few, compute(few)), (large, compute(large)))


def _median_s(call: Callable[[], None], device: torch.device) -> float:
    """The median of a few calls after a first one; that one alone where it is slow."""
    times: list[float] = []
    for _ in range(1 + _ROUNDS):
        started = time.perf_counter()
        call()
        _synchronize(device)
        times.append(time.perf_counter() - started)
        if times[0] > _SLOW_S:
            return times[0]
    return statistics.median(times[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
