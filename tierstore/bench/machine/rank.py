"""One rank that measures collectives: ``python -m tierstore.bench.machine.rank LINKS REPEATS SIZE..``.

LINKS is a JSON object: the limits of ``tierstore.links.LinksConfig``. Each rank prints one JSON object: of each operation,
the bytes that a rank sends and the seconds that it took, pair by pair.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence

from tierstore.bench.processes.spawn import answer_channel, write_line
from tierstore.config import from_dict
from tierstore.links import LinksConfig
from tierstore.parallel.collectives import RankGroup, Work
from tierstore.parallel.config import ParallelConfig
from tierstore.parallel.launching import launch
from tierstore.parallel.limited import limited_groups


def measure(group: RankGroup, sizes: Sequence[int], repeats: int) -> dict[str, list[tuple[int, float]]]:
    """Seconds of gathers, reduce-scatters and all-to-alls in which each rank sends about ``sizes`` bytes."""
    import torch

    found: dict[str, list[tuple[int, float]]] = {"gather": [], "reduce_scatter": [], "all_to_all": []}
    others = group.size - 1
    for size in sizes:
        numel = max(size // 4 // others, 1)
        piece, whole = torch.zeros(numel), torch.zeros(numel * group.size)
        rows, received = torch.zeros(group.size * numel), torch.empty(group.size * numel)
        splits = [numel] * group.size
        works: dict[str, Callable[[], Work]] = {
            "gather": lambda w=whole, p=piece: group.all_gather(w, p),  # type: ignore[misc]
            "reduce_scatter": lambda w=whole, p=piece: group.reduce_scatter(w, p),  # type: ignore[misc]
            "all_to_all": lambda o=received, i=rows, s=splits: group.all_to_all(o, i, s, s),  # type: ignore[misc]
        }
        for _ in range(repeats + 1):
            for name, issue in works.items():
                group.barrier()
                started = time.perf_counter()
                issue().wait()
                found[name].append((numel * others * 4, time.perf_counter() - started))
    # The first of each is slower: connections are made.
    return {name: _without_first(pairs, repeats + 1) for name, pairs in found.items()}


def _without_first(pairs: list[tuple[int, float]], each: int) -> list[tuple[int, float]]:
    return [pair for index, pair in enumerate(pairs) if index % each]


def _main(arguments: Sequence[str]) -> None:
    import torch

    channel = answer_channel()
    torch.set_num_threads(1)
    links = from_dict(LinksConfig, json.loads(arguments[0]))
    repeats, *sizes = (int(argument) for argument in arguments[1:])
    groups = limited_groups(links)
    with launch(ParallelConfig(timeout_s=60.0), device="cpu", make_group=groups) as mesh:
        write_line(channel, measure(mesh.world, sizes, repeats))


if __name__ == "__main__":
    _main(sys.argv[1:])
