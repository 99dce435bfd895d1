"""Cuts the power of stores at work, and sees what they are then. As a program, as often as one likes:

``python tests/faults/power_cuts.py --states 5000 [--twice N] [--seed N] [WORKLOAD..]``, from the repository's root. It
prints a line for each workload, and ends with 1 if a state was not an acknowledged commit.

A *state* is what the disk holds after a cut (every name and byte) together with the commits that may be found there; none
is tried twice within a workload.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

# Before the store is imported: what this user's disks were found to do best is nobody's business here.
os.environ["TIERSTORE_IO_PROFILE"] = "none"

from power_loss import CrashState, Event, Kind, crash_states, empty
from power_workloads import (
    CONFIG,
    SCHEMAS,
    WORKLOADS,
    Begun,
    Workload,
    goes_on,
    is_collected_and_goes_on,
    is_made_anew,
    record,
)

from tierstore import _native
from tierstore.errors import StoreError, StoreMissingError
from tierstore.store import IoBackendName, IoConfig, ParameterStore, StoreConfig, StripeConfig
from tierstore.store.format import COMMITTED_GROUPS, Group
from tierstore.store.gc import Mode, collect
from tierstore.store.index.database import PREVIOUS
from tierstore.store.index.table import RecordEntry

# One thread each: a store is opened ten thousand times here.
_IO = IoConfig(backend=IoBackendName.THREADS, threads=1, compute_threads=1)
#: Of so many states one is worked on as well, and one of two of those is collected before; and of those of a store's
#: making, where one is made anew.
_GOES_ON, _MADE_ANEW = 19, 4


@dataclass
class Tried:
    """What was tried, and the first thing found wrong."""

    kinds: Counter[Kind] = field(default_factory=Counter)
    went_on: int = 0
    wrong: str = ""

    @property
    def states(self) -> int:
        return self.kinds.total()

    def add(self, other: Tried) -> None:
        self.kinds += other.kinds
        self.went_on += other.went_on
        self.wrong = self.wrong or other.wrong


def opening(root: Path, drives: Sequence[str] = ()) -> StoreConfig:
    """How a state below ``root`` is opened; naming ``drives``, or as the store knows them."""
    stripe = StripeConfig(directories=tuple(root / name for name in drives))
    return replace(CONFIG, io=_IO, stripe=stripe)


def damage(state: CrashState, table: dict[str, RecordEntry], drives: Sequence[str] = ()) -> str:
    """The first section of ``table`` that the disk does not hold as it was written."""
    directories = ("s", *drives)
    for key, entry in table.items():
        schema = SCHEMAS[entry.schema]
        for group, location in zip(COMMITTED_GROUPS, entry.groups, strict=True):
            layout = schema.layout(Group(group))
            at = location.slot * layout.slot_bytes
            extent = state.files[f"{directories[location.directory]}/extents/{schema.name}.{group.label}"]
            for section, crc in zip(layout.sections, location.crcs, strict=True):
                content = np.frombuffer(extent.read(at, section.nbytes), np.uint8)
                if _native.crc32c(content, 0) != crc:
                    return f"record {key!r}, section {section.name}"
                at += section.padded_nbytes
    return ""


def promised(commits: list[Begun], cut: int) -> list[Begun]:
    """What may be found after ``cut``: the last acknowledged commit, or one that had begun. The first is None's place."""
    last = max((number for number, commit in enumerate(commits) if commit.ended <= cut), default=0)
    return [commit for commit in commits[last:] if commit.began < cut]


def wrong_with(
    root: Path, state: CrashState, commits: list[Begun], config: StoreConfig, drives: Sequence[str]
) -> str:
    """What is wrong with the store that ``state`` leaves; empty when it is an acknowledged commit, or the next."""
    legal = promised(commits, state.cut)
    empty(root)
    state.write(root)
    try:
        with ParameterStore.open(root / "s", config) as store:
            committer = store.core.committer
            found = [
                c
                for c in legal
                if (c.generation, c.commit.records, c.commit.state)
                == (store.last_commit.generation, committer.table, committer.state)
            ]
            if not found:
                names = ", ".join(str(commit.generation) for commit in legal)
                return f"generation {store.last_commit.generation}, or what it holds, is none of {names}"
            if not any(committer.snapshots in _kept(commit, state.cut) for commit in found):
                return f"snapshots {sorted(committer.snapshots)} are not what they were"
            tables = [committer.table, *(s.records for s in committer.snapshots.values())]
            return next(filter(None, (damage(state, table, drives) for table in tables)), "")
    except StoreMissingError as error:
        return str(error) if any(commit.ended <= state.cut for commit in legal) else ""
    except (StoreError, OSError) as error:
        return f"{type(error).__name__}: {error}"


def _kept(commit: Begun, cut: int) -> list[dict[str, object]]:
    """The snapshots that there may be with ``commit``."""
    kept: list[dict[str, object]] = [dict(commit.snapshots)]
    if commit.kept is not None and commit.acknowledging < cut:
        kept.append(dict(commit.kept))
    return kept


def wrong_later(root: Path, config: StoreConfig, mode: Mode | None) -> str:
    """What is wrong once the store below ``root`` was collected, if so, and has had another commit."""
    try:
        if mode is not None:
            collect(root / "s", mode)
        with ParameterStore.open(root / "s", config) as store:
            # A prepared commit is one like any other from here on.
            before = store.last_commit
            named = [name for name in before.snapshots if name != PREVIOUS]
            gradients = {key: np.ones(store.info(key).schema.numel, np.float32) for key in store.keys}
            store.update(gradients, lr=0.1)
            store.commit()
        with ParameterStore.open(root / "s", config) as store:
            after = store.last_commit
            if (after.generation, after.snapshots) != (before.generation + 1, named):
                return f"generation {after.generation} with {after.snapshots} after {before.generation} with {named}"
            return "; ".join(store.verify().failures)
    except (StoreError, OSError) as error:
        return f"{type(error).__name__}: {error}"


def wrong_anew(root: Path, config: StoreConfig) -> str:
    """What is wrong once a store is made where the power failed while one was made."""
    try:
        with ParameterStore.create(root / "s", SCHEMAS, config) as store:
            store.register("e", "expert")
            store.commit()
        with ParameterStore.open(root / "s", config) as store:
            return "; ".join(store.verify().failures)
    except (StoreError, OSError) as error:
        return f"made anew: {type(error).__name__}: {error}"


def violation(
    directory: Path,
    log: list[Event],
    commits: list[Begun],
    count: int,
    *,
    drives: Sequence[str] = (),
    first: int = 0,
    seed: int = 0,
    start: CrashState | None = None,
) -> Tried:
    """Tries ``count`` states of what was recorded in ``directory``, or as many as it takes to find one wrong.

    Every other one is opened without naming ``drives``: it knows them.
    """
    # Where the store was while it was recorded: nothing is mounted there any more.
    root, tried = directory / "mount", Tried()
    configs = (opening(root, drives), opening(root))

    def promise(cut: int) -> tuple[int, ...]:
        return tuple(commit.began for commit in promised(commits, cut))

    for state in crash_states(log, count, seed=seed, first=first, start=start, promise=promise):
        tried.kinds[state.kind] += 1
        config = configs[tried.states % 2]
        wrong = wrong_with(root, state, commits, config, drives)
        stands = "s/tierstore.json" in state.files
        every = _GOES_ON if stands else _MADE_ANEW if start is None else 1
        if not wrong and tried.states % every == 0:
            tried.went_on += 1
            if stands:
                wrong = wrong_later(root, config, Mode.REMOVE if tried.went_on % 2 else None)
            else:
                wrong = wrong_anew(root, configs[0])
        if wrong:
            tried.wrong = f"cut {state.cut}, {state.kind.value}: {wrong}"
            break
    return tried


def first_cut(workload: Workload, commits: list[Begun]) -> int:
    """The making of a store is tried in workloads of its own."""
    return 0 if workload.making else commits[0].ended


def cut_once(directory: Path, workload: Workload, count: int, seed: int = 0) -> Tried:
    """Tries ``count`` states of ``workload``."""
    log, commits = record(directory, workload)
    first = first_cut(workload, commits)
    return violation(directory, log, commits, count, drives=workload.drives, first=first, seed=seed)


def cut_twice(directory: Path, workload: Workload, count: int, starts: int, seed: int = 0) -> Tried:
    """Cuts the power of ``workload``, lets the store go on from there, and cuts it again: ``starts`` times, ``count``
    states in all.
    """
    log, commits = record(directory, workload)
    states = list(crash_states(log, 40 * starts, seed=seed, first=first_cut(workload, commits)))
    rng, tried = random.Random(seed), Tried()
    half_made = [state for state in states if _half_made(state, workload.drives)]
    chosen = rng.sample(half_made, min(len(half_made), starts // 2))
    chosen += rng.sample(states, starts - len(chosen))
    for number, state in enumerate(chosen):
        work = is_collected_and_goes_on if number % 2 else goes_on
        if "s/tierstore.json" not in state.files:
            work = is_made_anew
        again, found = record(directory, workload, state, work)
        if _half_made(state, workload.drives):
            again = again[: found[0].began]  # the taking over of what there was is what matters
        drives = workload.drives
        tried.add(violation(directory, again, found, count // starts, drives=drives, seed=seed, start=state))
        if tried.wrong:
            tried.wrong = f"after cut {state.cut}, {state.kind.value}: {tried.wrong}"
            break
    return tried


def _half_made(state: CrashState, drives: Sequence[str]) -> bool:
    """Whether stripe directories have an identity, and the store has none yet."""
    identities = [f"{name}/tierstore.json" in state.files for name in ("s", *drives)]
    return any(identities) and not identities[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help="only these")
    parser.add_argument("--states", type=int, default=5000, help="of each workload (5000)")
    parser.add_argument("--twice", type=int, default=0, help="and so many of each after a second cut (0)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    total, began = Tried(), time.monotonic()
    for workload in WORKLOADS:
        if options.workloads and workload.name not in options.workloads:
            continue
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            started, tried = (
                time.monotonic(),
                cut_once(Path(directory), workload, options.states, options.seed),
            )
        if options.twice and not tried.wrong:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
                tried.add(cut_twice(Path(directory), workload, options.twice, 8, options.seed))
        total.add(tried)
        print(
            f"{workload.name:12} {tried.states:7} states  {tried.went_on:5} worked on  "
            f"{time.monotonic() - started:6.1f} s  {tried.wrong or 'none wrong'}",
            flush=True,
        )
    for kind in Kind:
        print(f"{total.kinds[kind]:9} {kind.value}")
    print(f"{total.states:9} states in {time.monotonic() - began:.0f} s")
    sys.exit(1 if total.wrong else 0)


if __name__ == "__main__":
    main()
