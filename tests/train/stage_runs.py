"""What the ranks of a test of pipeline stages tell of their runs: apart from the cases, so that it can be pickled."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tierstore.prefetch.schedule import MicroPass


@dataclass
class StageRun:
    """What a rank saw: losses, norms and active experts of each step, validation and a sample at the end; checksums of the
    weights that it holds, by record and by dense unit; the passes of the last step.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    active: list[int] = field(default_factory=list)
    validation: float = math.nan
    sample: str = ""
    skipped: int = 0
    weights: dict[str, int] = field(default_factory=dict)
    log: list[MicroPass] = field(default_factory=list)
    most_held: int = 0
    sends: tuple[int, int] = (0, 0)


def merged(runs: list[StageRun]) -> Mapping[str, int]:
    """What all ranks hold together; what several hold must be the same."""
    found: dict[str, int] = {}
    for run in runs:
        for key, crc in run.weights.items():
            assert found.setdefault(key, crc) == crc, key
    return found


def same(several: list[StageRun], one: StageRun) -> None:
    """Every rank has the losses, norms, validation and sample of ``one``, and together they have its weights."""
    for rank in several:
        for name in ("losses", "norms", "active", "validation", "sample", "skipped"):
            assert getattr(rank, name) == getattr(one, name), name
    assert merged(several) == one.weights
