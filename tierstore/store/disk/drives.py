"""The directories of a store: its own, and stripe directories on other drives.

The index lists the directories in order, so the list changes only with a commit. Each stripe directory has an identity
with a uuid of its own, durable before the first commit that may refer to it: opening refuses a directory that is missing,
swapped, or another store's, naming it. Directories in the configuration beyond those of the index are added, and are part
of the store from the next commit on.
"""

from __future__ import annotations

import contextlib
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tierstore._native import FileCreate, Link, Meter
from tierstore.errors import (
    ConfigError,
    DataError,
    StoreExistsError,
    StoreFormatError,
    StoreInUseError,
    StoreMissingError,
)
from tierstore.machine_profile import load_io_point
from tierstore.store.config import StoreAccess, StripeConfig
from tierstore.store.disk.extents import Extent
from tierstore.store.disk.home import (
    IDENTITY,
    Home,
    Identity,
    fsync_directory,
    make_directories,
    read_directory_identity,
    refuse_foreign,
    refuse_shared,
    remove_content,
    remove_directories,
    remove_unfinished,
    same_directory,
    write_identity,
)
from tierstore.store.disk.lease import DirectoryLease

#: A drive is measured again once this many bytes were moved to or from it: less measures latency and noise.
LEAST_BYTES = 4 << 20
#: An estimate moves by the root of the measured ratio, clipped to this: a single hiccup cannot halve a drive's share
#: twice, and a drive that stays slow is detected within a few commits.
_MOST_CHANGE = 4.0
#: No share falls below this part of an equal one: without any traffic, a drive's recovery would not be noticed.
_LEAST_SHARE = 1 / 16
#: Shares stay unchanged while none is off by more than this: reserved space follows them, and should not follow noise.
_DEAD_BAND = 0.1


class WeightedRoundRobin:
    """Smooth weighted round robin: in any run of turns each number has about its share, spread evenly.

    Each turn credits every number with its weight, picks the one with the highest credit (the first of equals), and
    charges it the sum of the weights.
    """

    def __init__(self, count: int) -> None:
        self._credits = [0.0] * count

    def next(self, weights: Sequence[float], among: Sequence[int]) -> int:
        """The number whose turn it is among ``among`` (not empty); the others are neither credited nor charged."""
        for number in among:
            self._credits[number] += weights[number]
        chosen = max(among, key=lambda number: (self._credits[number], -number))
        self._credits[chosen] -= sum(weights[number] for number in among)
        return chosen


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """``total`` divided into whole parts by weight, by largest remainder (ties to the first); they add up to it."""
    whole = sum(weights)
    exact = [total * weight / whole for weight in weights]
    parts = [math.floor(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda number: (parts[number] - exact[number], number))
    for number in by_remainder[: total - sum(parts)]:
        parts[number] += 1
    return parts


class BandwidthEstimator:
    """Estimates the drives' bandwidths, and their ``shares`` of new slots, which add up to 1.

    ``fixed`` weights, if given, are the permanent shares. Otherwise shares follow ``bandwidths`` (bytes a second; 0 is
    unknown and counts as the mean of the others), which ``observe`` updates with the traffic since the last commit.
    """

    def __init__(self, bandwidths: Sequence[float], fixed: Sequence[float] = ()) -> None:
        self.bandwidths = list(bandwidths)
        self._fixed = bool(fixed)
        self._pending = [(0, 0.0) for _ in bandwidths]
        self.shares = _normalized(fixed or self._known())

    def observe(self, moved: Sequence[tuple[int, float]]) -> None:
        """``moved``: for each drive the bytes since the last call, and the seconds with transfers in flight."""
        for number, (nbytes, seconds) in enumerate(moved):
            before = self._pending[number]
            self._pending[number] = pending = (before[0] + nbytes, before[1] + seconds)
            if pending[0] >= LEAST_BYTES and pending[1] > 0:
                self.bandwidths[number] = _estimate(self.bandwidths[number], pending[0] / pending[1])
                self._pending[number] = (0, 0.0)
        if self._fixed:
            return
        shares = _normalized(self._known())
        if any(abs(new - old) > _DEAD_BAND * old for new, old in zip(shares, self.shares, strict=True)):
            self.shares = shares

    def _known(self) -> list[float]:
        known = [bandwidth for bandwidth in self.bandwidths if bandwidth]
        mean = sum(known) / len(known) if known else 1.0
        return [bandwidth or mean for bandwidth in self.bandwidths]


def _estimate(before: float, measured: float) -> float:
    if not before:
        return measured
    ratio = min(max(measured / before, 1 / _MOST_CHANGE), _MOST_CHANGE)
    return before * math.sqrt(ratio)


def _normalized(weights: Sequence[float]) -> list[float]:
    whole = sum(weights)
    least = _LEAST_SHARE / len(weights)
    raised = [max(weight / whole, least) for weight in weights]
    return [weight / sum(raised) for weight in raised]


@dataclass(frozen=True, kw_only=True)
class DriveReport:
    """One directory of a store: its ``share`` of new slots, the bytes stored there, and traffic since the opening.

    ``bandwidth`` is bytes a second while transfers were in flight: since the opening, or the last commits' estimate if
    little was moved since (0: not known).
    """

    path: Path
    share: float
    used_bytes: int
    reserved_bytes: int
    bandwidth: float
    read_bytes: int = 0
    written_bytes: int = 0

    def as_json(self) -> dict[str, object]:
        return {
            "path": str(self.path),
            "share_ratio": self.share,
            "used_bytes": self.used_bytes,
            "reserved_bytes": self.reserved_bytes,
            "read_bytes": self.read_bytes,
            "written_bytes": self.written_bytes,
            "bandwidth_bytes_per_s": self.bandwidth,
        }


@dataclass
class Drive:
    """One directory. Number 0 is the store's own, which has the store's identity and lease."""

    number: int
    given: Path
    own: str = ""
    published: bool = True
    made: tuple[Path, ...] = ()
    lease: DirectoryLease | None = None
    #: Most bytes of extents here; 0: no limit.
    limit: int = 0
    link: Link | None = None
    meter: Meter = field(default_factory=Meter)
    extents: list[Extent] = field(default_factory=list)
    _seen: tuple[int, float] = (0, 0.0)

    @property
    def path(self) -> Path:
        """Its current path: an open store's directory may have been renamed."""
        return self.given if self.lease is None else self.lease.directory

    @property
    def create(self) -> FileCreate:
        """Whether missing extents are created, or are an error."""
        return FileCreate.NO if self.published else FileCreate.YES

    @property
    def reserved_bytes(self) -> int:
        return sum(extent.reserved_slots * extent.slot_bytes for extent in self.extents)

    def close(self) -> None:
        """Releases the lease; removes a directory that no commit knows."""
        with contextlib.ExitStack() as stack:
            if not self.published:
                stack.callback(remove_directories, self.made)
            if self.lease is not None:
                stack.callback(self.lease.close)
                if not self.published and self.lease.is_at(self.path):
                    remove_unfinished(self.path)

    def totals(self) -> tuple[int, int, float]:
        """Bytes read and written since the opening, and the seconds with transfers in flight."""
        read, written, busy_s = self.meter.reading()
        if self.link is not None:
            busy_s = max(busy_s, float(self.link.stats()["busy_s"]))
        return read, written, busy_s

    def moved(self) -> tuple[int, float]:
        """Bytes moved since the last call, and the seconds with transfers in flight."""
        read, written, busy_s = self.totals()
        now = (read + written, busy_s)
        since = (now[0] - self._seen[0], now[1] - self._seen[1])
        self._seen = now
        return since


class Drives:
    """The directories of one open store, in the order of their numbers."""

    def __init__(self, home: Home, config: StripeConfig) -> None:
        self.home = home
        self._config = config
        self._drives = [Drive(0, home.directory, published=home.published, lease=home.lease)]
        self.estimator = BandwidthEstimator([0.0])

    @classmethod
    def create(cls, home: Home, config: StripeConfig, abandoned: str) -> Drives:
        """The directories of a new store. They may reuse those of ``abandoned``, a store whose creation never finished.

        Raises StoreExistsError, StoreFormatError, StoreInUseError, ConfigError, OSError, leaving nothing behind.
        """
        drives = cls(home, config)
        with drives._closed_on_error():
            for path in config.directories:
                drives._claim(path, abandoned)
            drives._configure([])
        return drives

    @classmethod
    def open(
        cls,
        home: Home,
        config: StripeConfig,
        known: Sequence[Mapping[str, object]],
        access: StoreAccess = StoreAccess.WRITE,
    ) -> Drives:
        """The directories that the index lists (``known``, the store's own first), and those that ``config`` adds. With
        ``StoreAccess.READ`` none can be added.

        Raises StoreMissingError, StoreFormatError, StoreInUseError, ConfigError, OSError.
        """
        drives = cls(home, config)
        recorded = [Path(str(entry["path"])) for entry in known[1:]]
        paths = list(config.directories) or recorded
        if len(paths) < len(recorded):
            raise ConfigError(
                f"stripe.directories: the store in {home.directory} has {len(recorded)} stripe directories "
                f"({', '.join(map(str, recorded))}), got {len(paths)}: none can be left out"
            )
        if access is StoreAccess.READ and len(paths) > len(recorded):
            raise ConfigError(
                f"stripe.directories: the store in {home.directory} is opened to read, and has no directory "
                f"{paths[len(recorded)]}"
            )
        with drives._closed_on_error():
            for entry, path in zip(known[1:], paths, strict=False):
                drives._attach(path, str(entry["own"]), access)
            for path in paths[len(recorded) :]:
                drives._claim(path, home.uuid)
            drives._configure([float(str(entry["bandwidth"])) for entry in known])
        return drives

    @contextlib.contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _attach(self, path: Path, own: str, access: StoreAccess) -> None:
        """Adds a directory that commits refer to; a writer records the store's current path in its identity."""
        number = len(self._drives)
        self._recognise(path, number, own)
        lease = DirectoryLease(path.absolute(), access=access)
        self._drives.append(Drive(number, path.absolute(), own, lease=lease))
        identity = self._recognise(path, number, own)  # the lease keeps it so
        refuse_shared(self.home, path, identity)
        if access is StoreAccess.READ:
            return
        here = replace(identity, home=str(self.home.directory.absolute()), path=str(path.absolute()))
        if here != identity:
            _put_identity(path, here)
        lease.watch(IDENTITY)

    def _recognise(self, path: Path, number: int, own: str) -> Identity:
        """The identity of directory ``number``, expected at ``path``. Raises StoreMissingError or StoreFormatError."""
        home = self.home
        what = f"directory {number} of the store in {home.directory}"
        identity = read_directory_identity(path)
        if identity is None:
            raise StoreMissingError(
                f"{path}: {what} is missing: mount its drive, or say in stripe.directories where it is now"
            )
        if identity.uuid != home.uuid:
            raise StoreFormatError(
                f"{path}: expected {what}, found one of the store in {identity.home or path}"
            )
        if identity.number != number:
            raise StoreFormatError(
                f"{path}: expected {what}, found its directory {identity.number}: stripe.directories is out of order"
            )
        if identity.own != own:
            raise StoreFormatError(
                f"{path}: expected {what}, found a directory {number} that it no longer refers to"
            )
        return identity

    def _claim(self, path: Path, abandoned: str) -> None:
        """Adds an empty or missing directory, or the remains of a claim without a commit."""
        number = len(self._drives)
        if any(same_directory(path, drive.path) for drive in self._drives):
            raise ConfigError(f"stripe.directories: {path} is there twice")
        self._check_free(path, number, abandoned)
        drive = Drive(
            number, path.absolute(), str(uuid.uuid4()), published=False, made=make_directories(path)
        )
        self._drives.append(drive)
        with contextlib.ExitStack() as stack:
            try:
                lease = stack.enter_context(DirectoryLease(path.absolute()))
            except StoreInUseError:
                drive.made = ()  # it belongs to the lease's holder, even while it is empty
                raise
            identity = self._check_free(
                path, number, abandoned
            )  # another process may have claimed it meanwhile
            stack.pop_all()
        drive.lease = lease  # with it, ``close`` may remove the content
        # After a power cut the lease marks any files beside it as debris.
        fsync_directory(path)
        remove_content(path)
        if identity is not None:  # removed before the announced identity, which names this directory
            fsync_directory(path)

    def _check_free(self, path: Path, number: int, abandoned: str) -> Identity | None:
        """The identity of an abandoned claim, or None. Raises StoreExistsError or StoreFormatError if ``path`` belongs to
        another store, or has other content.
        """
        identity = read_directory_identity(path)
        if identity is None:
            refuse_foreign(path)
            return None
        if identity.uuid != abandoned or (self.home.published and identity.number < number):
            raise StoreExistsError(
                f"{path}: expected an empty or missing directory, found directory {identity.number} of the store in "
                f"{identity.home or path}"
            )
        refuse_shared(self.home, path, identity)
        return identity

    def _configure(self, bandwidths: Sequence[float]) -> None:
        config, count = self._config, len(self)
        for name in ("limits", "weights", "bandwidths"):
            given = len(getattr(config, name))
            if given not in (0, count):
                raise ConfigError(
                    f"stripe.{name}: expected {count}, the store's own directory first, got {given}"
                )
        for drive, limit in zip(self, config.limits, strict=False):
            drive.limit = limit
        for drive, speed in zip(self, config.bandwidths, strict=False):
            drive.link = Link(speed) if speed else None
        start = list(bandwidths) + [0.0] * (count - len(bandwidths))
        if not any(start):
            # Bandwidths measured in operation are lower than those of a benchmark: the two are not mixed.
            start = [profiled_bandwidth(drive.path) for drive in self]
        self.estimator = BandwidthEstimator(start, config.weights)

    # Shares and reports -------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._drives)

    def __iter__(self) -> Iterator[Drive]:
        return iter(self._drives)

    def __getitem__(self, number: int) -> Drive:
        return self._drives[number]

    @property
    def shares(self) -> Sequence[float]:
        """The shares of new slots, by directory."""
        return self.estimator.shares

    def reweigh(self) -> None:
        """Updates the shares at a commit, for later slots."""
        self.estimator.observe([drive.moved() for drive in self])

    def as_json(self) -> list[dict[str, object]]:
        """The index entry of the directories: empty for a store of one directory."""
        if len(self) == 1:
            return []
        return [
            {"path": str(drive.path), "own": drive.own, "bandwidth": round(bandwidth)}
            for drive, bandwidth in zip(self, self.estimator.bandwidths, strict=True)
        ]

    def reports(self, used_bytes: Sequence[int]) -> list[DriveReport]:
        """One report for each directory; ``used_bytes`` are those of slots in use."""
        rows = []
        for drive, used, share, bandwidth in zip(
            self, used_bytes, self.shares, self.estimator.bandwidths, strict=True
        ):
            read, written, busy_s = drive.totals()
            known = read + written >= LEAST_BYTES and busy_s > 0
            rows.append(
                DriveReport(
                    path=drive.path,
                    share=share,
                    used_bytes=used,
                    reserved_bytes=drive.reserved_bytes,
                    read_bytes=read,
                    written_bytes=written,
                    bandwidth=(read + written) / busy_s if known else bandwidth,
                )
            )
        return rows

    # Publishing and closing ---------------------------------------------------------------------------------

    @property
    def unlocked(self) -> list[tuple[Path, str]]:
        """The directories that the file system could not lock, where the lease alone counts, and why."""
        leases = [drive.lease for drive in self if drive.lease is not None]
        return [(lease.directory, lease.directory_reason) for lease in leases if lease.directory_reason]

    def check(self) -> None:
        """Raises OSError (ESTALE) naming the first file of the store that was removed or replaced since it was opened."""
        for drive in self:
            if drive.lease is not None:
                drive.lease.check()

    def publish(self) -> None:
        """Writes the identity of each new directory durably, before a commit that may refer to it."""
        new = [drive for drive in self if drive.number and not drive.published]
        if not new:
            return
        # If the process dies after this, a new store's own directory names the owner of the others.
        self.home.announce(len(self))
        fsync_directory(self.home.directory)
        for drive in new:
            fsync_directory(drive.path / "extents")
            home = str(self.home.directory.absolute())
            _put_identity(
                drive.path,
                Identity(self.home.uuid, drive.number, len(self), drive.own, home, str(drive.path)),
            )
            for made in drive.made:
                fsync_directory(made.parent)
            if drive.lease is not None:
                drive.lease.watch(IDENTITY)
            # An existing store's commit may be durable although it failed: nothing is removed any more.
            drive.published = self.home.published
        if self.home.published:
            self.home.publish(len(self))

    def committed(self) -> None:
        """Records that a commit lists all directories: from now on ``close`` removes none."""
        for drive in self:
            drive.published = True

    def close(self) -> None:
        """Closes every stripe directory, even after failures; removes those that no commit knows."""
        with contextlib.ExitStack() as stack:
            for drive in self._drives[1:]:
                stack.callback(drive.close)


def profiled_bandwidth(directory: Path) -> float:
    """The benchmarked write bandwidth of the disk under ``directory``, bytes a second; 0 if the profile has none."""
    try:
        point = load_io_point(directory)
    except (DataError, OSError):  # a profile only makes a store faster
        return 0.0
    return 0.0 if point is None else point.write_bytes_per_s


def _put_identity(path: Path, identity: Identity) -> None:
    """Replaces the identity atomically and durably."""
    write_identity(path, identity, f"{IDENTITY}.new")
    (path / f"{IDENTITY}.new").rename(path / IDENTITY)
    fsync_directory(path)
