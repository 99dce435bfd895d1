"""The configuration of a deployment; the input and output of a stage; the files ``stage.json`` and ``deployment.json``.
Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self, TypeAlias

from tierstore.capabilities import Capability
from tierstore.config import check_least, check_positive, key
from tierstore.errors import ConfigError, StoreFormatError, TierstoreError
from tierstore.hf.manifest import from_json
from tierstore.machine import MemoryAccount
from tierstore.stats import OnProgress
from tierstore.store.disk.home import fsync_directory, write_durably


class StageName(StrEnum):
    """The six stages, in their order."""

    FUSION = "fusion"
    DISTILLATION = "distillation"
    CONVERSION = "conversion"
    SEGMENTATION = "segmentation"
    OPTIMISATION = "optimisation"
    DEPLOYMENT = "deployment"

    @property
    def number(self) -> int:
        """The stage's number, from 1."""
        return list(StageName).index(self) + 1


class ExpertWeights(StrEnum):
    """The format of the deployed experts' weights."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def quantized(self) -> bool:
        return self in (ExpertWeights.INT8, ExpertWeights.INT4)


class Method(StrEnum):
    """The method that reduces a layer's experts."""

    MERGE = "merge"  # similar experts become one, weighted by their use
    PRUNE = "prune"  # the least used experts are left out


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """Changes of the experts. None leaves them unchanged."""

    experts: int | None = key(None, "experts of a layer (default: all)")
    method: Method = key(Method.MERGE, "merge similar experts, or prune the least used ones")
    weights: ExpertWeights | None = key(None, "format of the experts' weights (default: as in the store)")

    def __post_init__(self) -> None:
        check_least(self, 1, "experts", table="--")


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """The distillation of a compressed model from its teacher, and its text."""

    text: tuple[Path, ...] = key((), "text to calibrate, distil and evaluate with; repeat for several")
    minutes: float = key(30.0, "minutes of distillation (0: none)")
    steps: int = key(0, "steps of distillation (0: all that --minutes allow)")
    rate: float = key(3e-4, "largest learning rate")
    rows: int = key(4, "windows per step")
    length: int = key(256, "tokens per window")
    held_out: int = key(16, "largest number of held-out windows, on which losses are measured")
    seed: int = key(0, "seed of the order of windows")
    commit_s: float = key(60.0, "seconds between two commits")

    def __post_init__(self) -> None:
        check_least(self, 0, "minutes", "steps", table="--")
        check_positive(self, "rate", table="--")
        check_least(self, 1, "rows", "held_out", table="--")
        check_least(self, 2, "length", table="--")

    @property
    def trains(self) -> bool:
        """Whether distillation has any time."""
        return self.minutes > 0


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """The machine that will serve the model. ``segments``: the first block of each segment; empty: chosen automatically."""

    memory: int | None = key(None, "memory of a rank (default: its part of the machine's)", size=True)
    ranks: int = key(1, "ranks that share the experts")
    segments: tuple[int, ...] = key(
        (), "first block of each segment, such as 0,8,16 (default: chosen by memory)"
    )

    def __post_init__(self) -> None:
        check_positive(self, "memory", table="--")
        check_least(self, 1, "ranks", table="--")
        if self.segments and (self.segments[0] != 0 or list(self.segments) != sorted(set(self.segments))):
            raise ConfigError(
                f"--segments: expected the first block of each segment, ascending from 0, got {self.segments}"
            )


@dataclass(frozen=True, kw_only=True)
class DeployConfig:
    """A deployment of ``store`` to the new directory ``target``."""

    store: Path
    target: Path
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    graphs: Capability = key(Capability.AUTO, "compile the dense segments to graphs")
    host_budget: int = key(1 << 30, "memory for the experts of each open model", size=True)
    threads: int = key(0, "torch threads (0: one per core)")

    def __post_init__(self) -> None:
        check_least(self, 0, "threads", table="--")
        if self.graphs is Capability.ON and self.placement.ranks > 1:
            raise ConfigError(f"--graphs: on cannot be combined with --ranks {self.placement.ranks}")
        if self.compression.experts is not None and not self.distillation.text:
            raise ConfigError(
                "--text: expected a text file, on which the use of experts and the loss of the smaller model are measured"
            )
        how, usual = self.distillation, DistillationConfig()
        names = ("minutes", "steps", "rate", "rows") if how.trains else ()
        idle = [name for name in names if getattr(how, name) != getattr(usual, name)]
        idle += ["method"] * (self.compression.method is not Method.MERGE)
        if idle and self.compression.experts is None:
            raise ConfigError(f"--{idle[0]}: has effect with --experts only: no other change is distilled")
        if how.length != usual.length and not how.text:
            raise ConfigError("--length: has effect with --text only")


# Input and output of a stage -------------------------------------------------------------------------------

RECORD_VERSION = 1


class JsonRecord:
    """A dataclass that is the file ``NAME`` of a directory; ``WHAT``: its name in errors."""

    NAME = WHAT = ""  # without annotations: no fields of the dataclass

    def write(self, directory: Path) -> None:
        """Writes the file, durably."""
        record: Any = self
        write_durably(directory / self.NAME, (json.dumps(asdict(record), indent=1) + "\n").encode())
        fsync_directory(directory)

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """The record in ``directory``; None if there is none. Raises StoreFormatError for another file or version."""
        path = directory / cls.NAME
        try:
            value = json.loads(path.read_bytes())
            found, expected = value.get("version"), getattr(cls, "version", None)
            if found not in (None, expected):
                raise ValueError(f"version {found!r}, expected {expected}")
            read: Self = from_json(cls, value, path.name)
            return read
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (AttributeError, TypeError, ValueError) as error:
            raise StoreFormatError(f"{path}: not {cls.WHAT}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class StageOutput:
    """The output of a stage. ``store``: the model's store from here on. ``checks``: values that a later verification must
    find again; ``figures``: the stage's measurements. A stage that writes no store returns the previous stage's.
    """

    store: Path | None = None
    checks: Mapping[str, object] = field(default_factory=dict)
    figures: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StageRecord(JsonRecord):
    """A completed stage and its output; ``store`` is relative to the directory of all stages. Written to the stage's
    directory, which completes the stage. ``fingerprint`` covers its settings and those of the stages before it.
    """

    NAME, WHAT = "stage.json", "a stage's record"

    stage: StageName
    fingerprint: str
    settings: Mapping[str, object]
    store: str
    checks: Mapping[str, object]
    figures: Mapping[str, object]
    notes: tuple[str, ...] = ()
    elapsed_s: float = 0.0
    version: int = RECORD_VERSION


@dataclass(frozen=True, kw_only=True)
class Deployment(JsonRecord):
    """The origin of a deployed directory, and its measurements.

    ``settings``: keys of ``ServeConfig`` by dotted name, as the optimisation chose them. ``profile``: tokens/s of prefill
    and of decoding, bytes read a token, memory.
    """

    NAME, WHAT = "deployment.json", "a deployment"

    version: int = 1
    settings: Mapping[str, object]
    profile: Mapping[str, object]
    stages: tuple[StageRecord, ...]


def stage_directory(root: Path, stage: StageName) -> Path:
    """The directory of ``stage``, below the directory of all stages."""
    return root / f"{stage.number:02d}-{stage.value}"


def fingerprint(stage: StageName, settings: Mapping[str, object], before: str) -> str:
    """The fingerprint of a stage with ``settings`` that follows the stages with the fingerprint ``before``."""
    text = json.dumps([RECORD_VERSION, stage.value, settings, before], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class DeployInterrupted(TierstoreError):
    """A deployment stopped on request. The same command resumes it."""


#: Shows the progress of the pass of this name while the context is entered.
ShowPass: TypeAlias = Callable[[str], AbstractContextManager[OnProgress]]


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """The context of a stage. ``root``: the directory of all stages. ``before``: the completed stages, in order.

    ``say`` prints a line for people, ``show`` the progress of a pass; ``announced`` receives what the process will hold,
    before each part of a stage that holds more than the store's checks; ``asked_to_stop`` is called in passes and between
    two durable points.
    """

    config: DeployConfig
    root: Path
    stage: StageName
    before: tuple[StageRecord, ...]
    say: Callable[[str], None]
    show: ShowPass
    announced: Callable[[MemoryAccount], None]
    asked_to_stop: Callable[[], bool]

    @property
    def directory(self) -> Path:
        """This stage's own directory, which exists."""
        return stage_directory(self.root, self.stage)

    @property
    def input_store(self) -> Path:
        """The store that the previous stage wrote."""
        return self.root / self.before[-1].store if self.before else self.config.store

    @contextmanager
    def passing(self, what: str) -> Iterator[OnProgress]:
        """Shows the progress of pass ``what`` over a store, and ends it by DeployInterrupted if a stop is requested."""
        with self.show(f"{self.stage.value}: {what}") as show:

            def progress(done: int, total: int) -> None:
                show(done, total)
                self.check()

            yield progress

    def check(self) -> None:
        """Raises DeployInterrupted if a signal has requested a stop."""
        if self.asked_to_stop():
            raise DeployInterrupted(f"stopped in stage {self.stage.value}; the same command resumes here")
