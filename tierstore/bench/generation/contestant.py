"""Who takes part: something that reads prompts and continues them, in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tierstore.bench.generation.workload import GenerationWorkload
from tierstore.bench.probes.usage import process_bytes


@dataclass(frozen=True, kw_only=True)
class ContestantTask:
    """What a contestant is to open.

    ``directory``: its own, for whatever it keeps on disk. ``checkpoint``, ``store`` and ``gguf`` hold the same weights; None
    where nobody needs it. ``host_budget``: tierstore's memory for experts, bytes. ``trace``: where tierstore records what it
    accesses. ``settings``: of tierstore's configuration, KEY=VALUE each.
    """

    contestant: str
    directory: Path
    threads: int
    sequences: int
    context: int
    checkpoint: Path | None = None
    store: Path | None = None
    gguf: Path | None = None
    host_budget: int = 0
    trace: Path | None = None
    settings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TierUse:
    """What tierstore's own counters say of a stretch of work. ``nvme_read_bytes``: all that was read; of those
    ``speculated_bytes`` before anybody asked, of which ``useful_speculated_bytes`` were asked for later.
    ``late_prefetch_bytes`` were still on their way then.
    """

    nvme_read_bytes: int
    speculated_bytes: int
    useful_speculated_bytes: int
    late_prefetch_bytes: int
    hits: int
    misses: int


@dataclass(frozen=True, kw_only=True)
class Generated:
    """One run of a workload. ``step_s``: by step, or the mean alone where no more is known. ``chosen``: the tokens that the
    model itself would have chosen, by step and sequence, the prompt's first; empty where they are not known.

    Bytes are those that the process had read from storage.
    """

    prefill_s: float
    step_s: Sequence[float]
    prefill_read_bytes: int
    decode_read_bytes: int
    chosen: Sequence[Sequence[int]] = ()
    tiers: TierUse | None = None


class Contestant(Protocol):
    """One that is ready. One thread."""

    def generate(self, workload: GenerationWorkload) -> Generated:
        """Runs the workload from an empty cache of keys and values."""
        ...

    def describe(self) -> Sequence[str]:
        """What of its configuration matters, a line each."""
        ...


#: Opens a contestant, and closes it at exit.
ContestantOpener = Callable[[ContestantTask], AbstractContextManager[Contestant]]


class Continued(Protocol):
    """Sequences that are computed step by step. Both return the token that the model would choose for each sequence."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]: ...
    def step(self, tokens: Sequence[int]) -> list[int]: ...
    def tier_use(self) -> TierUse | None:
        """Since it was last asked, if the library counts."""
        ...


def timed(sequences: Continued, workload: GenerationWorkload) -> Generated:
    """Prefill, and every step."""
    before = process_bytes()[0]
    begun = time.perf_counter()
    chosen = [sequences.prefill(workload.prompts())]
    prefill_s, after_prefill = time.perf_counter() - begun, process_bytes()[0]
    sequences.tier_use()
    seconds = []
    for tokens in workload.forced():
        begun = time.perf_counter()
        chosen.append(sequences.step(tokens))
        seconds.append(time.perf_counter() - begun)
    return Generated(
        prefill_s=prefill_s,
        step_s=seconds,
        prefill_read_bytes=after_prefill - before,
        decode_read_bytes=process_bytes()[0] - after_prefill,
        chosen=chosen,
        tiers=sequences.tier_use(),
    )
