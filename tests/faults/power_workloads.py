"""What stores are put through for the power to fail in the middle of it: commits of every kind, and what follows them."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
from faultfs import FaultFs
from power_loss import CrashState, Event, empty

from tierstore.capabilities import Capability
from tierstore.store import (
    IoConfig,
    OpenAt,
    ParameterStore,
    RecordSchema,
    StoreConfig,
    StripeConfig,
    WearConfig,
)
from tierstore.store.committing import Keep
from tierstore.store.disk import extents
from tierstore.store.disk.store_extents import StoreExtents
from tierstore.store.gc import Mode, collect
from tierstore.store.index.database import Commit

NUMEL = 1500
RECORDS = 5
SCHEMAS = [RecordSchema("expert", NUMEL), RecordSchema("other", 700)]
#: So small that most of what is updated is evicted, and some of it twice, between commits.
CONFIG = StoreConfig(host_budget=60_000, retain=2, io=IoConfig(compute_threads=1))


@dataclass
class Begun:
    """A commit: where in the log its call began and ended, and what was to be found after it."""

    generation: int
    began: int
    ended: int
    commit: Commit
    snapshots: dict[str, Commit]
    acknowledging: int = 0  # where in the log its acknowledgement began; 0: it needs none
    kept: dict[str, Commit] | None = None  # the snapshots after that


@dataclass
class Run:
    """A store that is worked on over a file system that keeps the log of all it is asked."""

    fs: FaultFs
    config: StoreConfig
    store: ParameterStore = field(init=False)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(5))
    commits: list[Begun] = field(default_factory=list)
    prepared: bool = False

    @property
    def path(self) -> Path:
        return self.fs.mount / "s"

    def create(self) -> None:
        self.store = ParameterStore.create(self.path, SCHEMAS, self.config)
        self.register("e", RECORDS)
        self.commit()

    def open(self, at: OpenAt = OpenAt.LAST) -> None:
        """To go back to the commit before is as good as a commit; what is found at first has long been there."""
        began = self.fs.log_length if self.commits else 0
        self.store = ParameterStore.open(self.path, self.config, at=at)
        if at is OpenAt.PREVIOUS or not self.commits:
            self._note(began, self.fs.log_length if self.commits else 0)

    def close(self) -> None:
        self.store.close()

    def update(self, steps: int = 1) -> None:
        for _ in range(steps):
            keys = [key for key in self.store.keys if self.rng.random() < 0.4]
            sizes = {key: self.store.info(key).schema.numel for key in keys}
            self.store.update(
                {key: self.rng.standard_normal(n).astype(np.float32) for key, n in sizes.items()}, lr=1e-2
            )

    def register(self, prefix: str, count: int, schema: str = "expert") -> None:
        numel = next(s.numel for s in SCHEMAS if s.name == schema)
        for number in range(count):
            weight = self.rng.standard_normal(numel).astype(np.float32)
            self.store.register(f"{prefix}{number}", schema, weight=weight)

    def commit(self, state: bytes = b"", snapshot: str | None = None) -> None:
        began = self.fs.log_length
        keep = Keep.PREVIOUS if self.prepared else Keep.NOTHING
        self.store.core.committer.commit({"n": state}, snapshot=snapshot, keep=keep)
        self._note(began, self.fs.log_length)

    def acknowledge(self) -> None:
        self.commits[-1].acknowledging = self.fs.log_length
        self.store.core.committer.acknowledge()
        self.commits[-1].kept = dict(self.store.core.committer.snapshots)

    def _note(self, began: int, ended: int) -> None:
        committer = self.store.core.committer
        commit = Commit(self.store.last_commit.generation, dict(committer.table), dict(committer.state))
        self.commits.append(
            Begun(self.store.last_commit.generation, began, ended, commit, dict(committer.snapshots))
        )


@dataclass(frozen=True)
class Workload:
    """``work`` on a new store, which has the stripe directories ``drives`` at some time.

    ``making``: it has them from the beginning, and the power fails while it is made, too.
    """

    name: str
    work: Callable[[Run], None]
    config: StoreConfig = CONFIG
    drives: tuple[str, ...] = ()
    making: bool = False


def plain(run: Run) -> None:
    for number in range(10):
        run.update(1 + number % 3)
        run.commit(b"%d" % number)


def retained(run: Run) -> None:
    for number in range(9):
        run.update(1 + number % 2)
        run.commit(b"%d" % number, snapshot=f"s{number}" if number % 2 else None)


def prepared(run: Run) -> None:
    run.prepared = True
    for number in range(8):
        run.update(1 + number % 2)
        run.commit(b"%d" % number, snapshot=f"s{number}" if number == 3 else None)
        run.acknowledge()


def rolled_back(run: Run) -> None:
    """Commits that the other ranks never got to are taken back, again and again."""
    run.prepared = True
    for number in range(4):
        run.update()
        run.commit(b"%d" % number, snapshot=f"s{number}")
        if number % 2:
            run.acknowledge()
            run.update()
            run.commit(b"undone")
        run.close()
        run.open(OpenAt.PREVIOUS)
        # What was undone took its snapshot with it, and what was acknowledged kept its own.
        assert (f"s{number}" in run.store.last_commit.snapshots) is bool(number % 2)


def growing(run: Run) -> None:
    """Records and state are added: extents and the index grow."""
    for number in range(4):
        run.register(f"f{number}.", 2, "other" if number % 2 else "expert")
        run.update()
        run.commit(run.rng.bytes(150_000 * number))


def created(run: Run) -> None:
    """Nothing but the making of it, and a commit more."""
    run.update()
    run.commit(b"1")


def discarding(run: Run) -> None:
    """Every free slot becomes a hole after every commit, and is reserved again for the next."""
    with _everything_is_discarded():
        for number in range(7):
            run.update(1 + number % 2)
            run.commit(b"%d" % number, snapshot=f"s{number}" if number in (1, 2, 3) else None)


@contextlib.contextmanager
def _everything_is_discarded() -> Iterator[None]:
    discard = StoreExtents.discard
    with (
        patch.object(extents, "_WORTH_BYTES", 0),
        patch.object(StoreExtents, "discard", lambda self, copies, counts: discard(self, 0, counts)),
    ):
        yield


def reweighed(run: Run) -> None:
    """A directory is added to a store that has been used; then shares change, and change back."""
    run.update(2)
    run.commit(b"alone")
    with _everything_is_discarded():
        for weights in ((), (1.0, 3.0), (5.0, 1.0)):
            run.close()
            run.config = replace(CONFIG, stripe=_stripe(run.fs.mount, weights))
            run.open()
            for number in range(2):
                run.update(2)
                run.commit(b"%d" % number, snapshot=f"w{len(run.commits)}" if number else None)


def _stripe(at: Path, weights: tuple[float, ...] = ()) -> StripeConfig:
    return StripeConfig(directories=(at / "b",), weights=weights)


def spread(run: Run) -> None:
    for number in range(5):
        run.update(2)
        run.commit(b"%d" % number, snapshot=f"s{number}" if number == 2 else None)


def collected(run: Run) -> None:
    """What a kill leaves: extents grown and slots written for a commit that never came; ``gc``; and on."""
    for number in range(3):
        run.store.reserve({"expert": 12 + number})
        run.update(3)
        run.close()
        collect(run.path, Mode.REMOVE)
        run.open()
        run.update()
        run.commit(b"%d" % number, snapshot=f"s{number}")


WORKLOADS = [
    Workload("plain", plain),
    Workload("retained", retained, replace(CONFIG, wear=WearConfig(daily_write_budget=1 << 50))),
    Workload("prepared", prepared),
    Workload("rolled_back", rolled_back),
    Workload("growing", growing),
    Workload("created", created, making=True),
    Workload("discarding", discarding, replace(CONFIG, wear=WearConfig(discard=Capability.ON))),
    Workload("reweighed", reweighed, drives=("b",)),
    Workload("spread", spread, drives=("b",), making=True),
    Workload("collected", collected),
]


def record(
    directory: Path,
    workload: Workload,
    start: CrashState | None = None,
    work: Callable[[Run], None] | None = None,
) -> tuple[list[Event], list[Begun]]:
    """The log of ``workload`` on ``directory/mount``, and its commits. With ``start``, of ``work`` on what a cut of its
    power left.
    """
    behind = directory / "behind"
    behind.mkdir(exist_ok=True)
    empty(behind)
    if start is not None:
        start.write(behind)
    with FaultFs(directory, keep_log=True) as fs:
        further = () if start is None and not workload.making else workload.drives
        stripe = StripeConfig(directories=tuple(fs.mount / name for name in further))
        config = replace(workload.config, stripe=stripe)
        run = Run(fs, config)
        if start is None:
            run.create()
            workload.work(run)
        elif work is not None:
            work(run)
        run.close()
        return fs.log(), run.commits


def goes_on(run: Run) -> None:
    """After a cut: the store is opened, and works."""
    run.open()
    for number in range(2):
        run.update()
        run.commit(b"again %d" % number)


def is_made_anew(run: Run) -> None:
    """After a cut in the making: once more, in the same places."""
    run.create()
    run.update()
    run.commit(b"anew")


def is_collected_and_goes_on(run: Run) -> None:
    collect(run.path, Mode.REMOVE)
    goes_on(run)
