"""Small stores, and a second opinion on what their records must hold."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tierstore import _native
from tierstore.store import (
    AdamWConfig,
    Inactive,
    MomentFormat,
    ParameterStore,
    RecordSchema,
    StoreConfig,
    StripeConfig,
    WeightFormat,
)
from tierstore.store.disk.extents import scratch_buffers
from tierstore.store.format import GroupLayout, moment_sections
from tierstore.store.optimizer import record_hash

Array = npt.NDArray[np.float32]


def fingerprint(store: Path) -> dict[str, object]:
    """Of every file and directory: what it is, when it was changed, and what is in it."""
    found: dict[str, object] = {}
    for path in [store, *sorted(store.rglob("*"))]:
        status = path.stat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        where = (status.st_ino, status.st_mode, status.st_size, status.st_blocks)
        found[str(path.relative_to(store))] = (*where, status.st_mtime_ns, status.st_ctime_ns, content)
    return found


@contextlib.contextmanager
def read_only(path: Path) -> Iterator[None]:
    """``path`` and what is below it, mounted read-only where we may mount, without permission to write elsewhere."""
    below = {file: file.stat().st_mode for file in [path, *path.rglob("*")]}
    mounted = os.geteuid() == 0 and not _run("mount", "--bind", path, path)
    try:
        if mounted and _run("mount", "-o", "remount,ro,bind", path):
            raise OSError(f"{path}: the mount cannot be made read-only")
        if not mounted:
            for file, mode in below.items():
                file.chmod(mode & ~0o222)
        yield
    finally:
        if mounted:
            _run("umount", path)
        else:
            for file, mode in below.items():
                file.chmod(mode)


def _run(*command: object) -> int:
    return subprocess.run([str(part) for part in command], capture_output=True, check=False).returncode


def weights(count: int, numel: int, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {f"e{i}": rng.standard_normal(numel).astype(np.float32) for i in range(count)}


def small_store(
    path: Path,
    *,
    count: int = 4,
    numel: int = 3000,
    budget: int = 1 << 20,
    retain: int = 0,
    inactive: Inactive = Inactive.EXACT,
    weight_format: WeightFormat = WeightFormat.FP32,
    moments: MomentFormat = MomentFormat.FP32,
    io_log: Path | None = None,
    stripe: StripeConfig | None = None,
) -> ParameterStore:
    """A store of ``count`` registered, committed records ``e0``, ``e1`` and so on."""
    store = ParameterStore.create(
        path,
        [RecordSchema("expert", numel, weight_format, moments=moments)],
        StoreConfig(host_budget=budget, retain=retain, stripe=stripe or StripeConfig()),
        adamw=AdamWConfig(inactive=inactive),
        io_log=io_log,
    )
    for key, weight in weights(count, numel).items():
        store.register(key, "expert", weight=weight)
    store.commit()
    return store


def step_all(store: ParameterStore, lr: float, seed: int | None = None) -> None:
    """A step of every record with gradients of ones, or with drawn ones."""
    rng, sizes = np.random.default_rng(seed), {key: store.info(key).schema.numel for key in store.keys}
    drawn = {key: np.ones(n) if seed is None else rng.standard_normal(n) for key, n in sizes.items()}
    store.update({key: gradient.astype(np.float32) for key, gradient in drawn.items()}, lr=lr)


def flip_bit(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


class _Slot(list[_native.Buffer]):
    """Memory of one slot that can be watched."""


class ScratchMemory:
    """In place of ``extents.scratch_buffers``: counts the bytes that ``read_ahead`` holds."""

    def __init__(self) -> None:
        self.held = self.most = self.made = 0

    def __call__(self, layout: GroupLayout) -> list[_native.Buffer]:
        slot, nbytes = _Slot(scratch_buffers(layout)), layout.slot_bytes
        weakref.finalize(slot, self._freed, nbytes)
        self.held, self.made = self.held + nbytes, self.made + 1
        self.most = max(self.most, self.held)
        return slot

    def _freed(self, nbytes: int) -> None:
        self.held -= nbytes


class ArrayModel:
    """AdamW on whole arrays in memory: every record is stepped in every step, as dense AdamW does."""

    def __init__(self, config: AdamWConfig, moments: MomentFormat = MomentFormat.FP32) -> None:
        self.config = config
        self.moments = moments
        self.step = 0
        self.records: dict[str, list[Array]] = {}
        self.counts: dict[str, int] = {}

    def register(self, key: str, weight: Array) -> None:
        sections = moment_sections(self.moments, len(weight))
        self.records[key] = [weight.copy(), *(np.zeros(s.numel, s.dtype) for s in sections)]
        self.counts[key] = 0

    def update(self, gradients: dict[str, Array], lr: float) -> None:
        self.step += 1
        for key, (weight, *moments) in self.records.items():
            gradient = gradients.get(key)
            if self.config.inactive is Inactive.EXACT:
                step = self.step
                gradient = np.zeros_like(weight) if gradient is None else gradient
            elif gradient is None:
                continue
            else:
                self.counts[key] += 1
                step = self.counts[key]
            row = self.config.row(lr, step)
            # Int8: codes and scales of each.
            exp_avg, exp_avg_sq = moments if len(moments) == 2 else zip(moments[:2], moments[2:], strict=True)
            _native.adamw(
                weight, exp_avg, exp_avg_sq, gradient, row[None], record_hash=record_hash(key), last_step=step
            )

    def copy(self) -> ArrayModel:
        other = ArrayModel(self.config, self.moments)
        other.step, other.counts = self.step, dict(self.counts)
        other.records = {key: [array.copy() for array in arrays] for key, arrays in self.records.items()}
        return other


def small_model(numel: int) -> ArrayModel:
    """Of what ``small_store`` holds."""
    model = ArrayModel(AdamWConfig())
    for key, weight in weights(4, numel).items():
        model.register(key, weight)
    return model
