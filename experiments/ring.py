"""A ring of K of N layers' experts against all of them resident, on an emulated device (SE-MoE, section 3.2).

    python experiments/ring.py [--layers 20] [--shares 0.2 0.4 0.6 0.8] [--loads 0.9 1.0]

The experts, their store, the host cache, the device slots and the ring are real. What computes a layer only takes time,
as a GPU's stream does: the program that launches it goes on meanwhile. Each pass asks for all experts of each layer.
The time of a layer is measured with everything resident; the copy link is then limited so that loading a layer's
experts takes 0.9 and 1.0 of it. Copies over an unlimited link stand beside. All take turns in one process.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from emulation import finish, options, start, table

from tierstore._native import HugePages
from tierstore.bench.overlap_rank import EmulatedDevice
from tierstore.errors import ConfigError
from tierstore.links import LinkConfig
from tierstore.prefetch import PredictorName, Schedule, make_predictor
from tierstore.prefetch.experts import FrozenExperts
from tierstore.serve.experts import Ring
from tierstore.stats import StallLedger
from tierstore.store.config import StoreConfig
from tierstore.store.core import StoreCore
from tierstore.store.format import RecordSchema, Training, WeightFormat
from tierstore.store.parameter_store import ParameterStore
from tierstore.store.registering import NewRecord
from tierstore.tiers import DeviceSlots, HostDeviceTier, limited_tier
from tierstore.units import format_bytes, format_seconds


@contextlib.contextmanager
def open_store(directory: Path, layers: int, experts: int, numel: int) -> Iterator[StoreCore]:
    schema = RecordSchema("expert", numel, WeightFormat.BF16, training=Training.FROZEN)
    # Records are padded to pages, and everything is to stay in memory.
    budget = layers * experts * (2 * numel + (1 << 16)) + (8 << 20)
    weights = np.linspace(-1.0, 1.0, numel, dtype=np.float32)
    config = StoreConfig(host_budget=budget, layers=tuple(range(layers)))
    with ParameterStore.create(directory / "store", [schema], config) as opened:
        opened.register_many(
            NewRecord(f"{layer}.{expert}", "expert", layer, weights)
            for layer in range(layers)
            for expert in range(experts)
        )
        opened.commit()
        yield opened.core


class Layers:
    """The experts of all layers in a store, what each run's slots are made from, and the device."""

    def __init__(
        self, store: StoreCore, layers: int, experts: int, numel: int, stack: contextlib.ExitStack
    ) -> None:
        self.store, self.layers, self.experts, self.numel = store, layers, experts, numel
        self._stack = stack
        self._records = {
            layer: {expert: store.record(f"{layer}.{expert}") for expert in range(experts)}
            for layer in range(layers)
        }
        self.device = EmulatedDevice(store.engine)

    def source(self, count: int, link: LinkConfig, ledger: StallLedger) -> FrozenExperts:
        """The experts in slots for those of ``count`` layers, filled over ``link``."""
        shape = DeviceSlots(self.numel, torch.bfloat16, weights=count * self.experts, gradients=0)
        tier = HostDeviceTier(self.store.engine, shape, HugePages.OFF, computed=self.device.finished)
        self._stack.callback(tier.close)
        limited = limited_tier(tier, self.store.engine, link, self.device.finished)
        return FrozenExperts(
            self.store,
            limited,
            self._records,
            predictor=make_predictor(PredictorName.NONE, range(self.experts)),
            schedule=Schedule.of_layers(tuple(range(self.layers)), depth=0),
            ledger=ledger,
        )

    def copy_s(self) -> float:
        """Seconds of copying a layer's experts with nothing else to do: the median over layers."""
        experts = range(self.experts)
        walk = self.source(1, LinkConfig(), StallLedger()).walk
        spent = []
        for layer in range(self.layers):
            started = time.perf_counter()
            self.store.wait(walk.bring(layer, experts))
            spent.append(time.perf_counter() - started)
            walk.give_up(layer)
        return statistics.median(spent)


class Run:
    """Passes over all layers, whose experts come from a ring of ``count`` layers. ``load``: of loading a layer to
    computing it; None: copies as fast as they are.
    """

    def __init__(
        self, of: Layers, forward_s: float, count: int, load: float | None, link: LinkConfig
    ) -> None:
        self._of, self._dense_s = of, forward_s / 2
        self.ledger = StallLedger(clock=of.device.clock_ns)
        self.count, self.load = count, load
        source = of.source(count, link, self.ledger)
        self._ring = Ring(source, range(of.layers), of.experts, count=count, done=of.store.engine.done)
        self.nbytes = count * of.experts * DeviceSlots(of.numel, torch.bfloat16).weight_bytes
        self.pass_s: list[float] = []
        #: Of each round, to that of everything resident beside it.
        self.speeds: list[float] = []

    def passes(self, count: int) -> float:
        """Seconds of ``count`` passes, one after another."""
        device, of = self._of.device, self._of
        started = device.clock_ns()
        for _ in range(count):
            for layer in range(of.layers):
                device.launch(self._dense_s)
                device.synchronize()  # the program asks for the experts that a router has chosen
                for _ in self._ring.forward(layer, range(of.experts)):
                    device.launch(self._dense_s / of.experts)
            device.synchronize()  # the next token depends on this one
        return (device.clock_ns() - started) / 1e9

    def measure(self, count: int) -> None:
        """One round: the ring is first brought to where it goes on."""
        self.passes(1)
        self.pass_s.append(self.passes(count) / count)

    def found(self, whole: int, rounds: int, passes: int) -> dict[str, Any]:
        return {
            "layers_count": self.count,
            "load_ratio": self.load,
            "device_bytes": self.nbytes,
            "saved_ratio": 1 - self.nbytes / whole,
            "pass_s": self.pass_s,
            "round_speed_ratio": self.speeds,
            "speed_ratio": statistics.median(self.speeds),
            "pass_stall_s": self.ledger.total_s / (1 + rounds * (1 + passes)),
        }


def main() -> None:
    asked = options(
        __doc__, layers=20, experts=8, expert_bytes=1 << 20, forward_s=0.01, shares=(0.2, 0.4, 0.6, 0.8), loads=(0.9, 1.0),
        passes=3, rounds=7,
    )  # fmt: skip
    if not all(0 < share < 1 for share in asked.shares):
        raise ConfigError(f"--shares: expected parts between 0 and 1, got {list(asked.shares)}")
    counts = sorted({max(1, round(share * asked.layers)) for share in asked.shares})
    numel = asked.expert_bytes // 2
    with tempfile.TemporaryDirectory(dir=".") as directory, contextlib.ExitStack() as stack:
        store = stack.enter_context(open_store(Path(directory), asked.layers, asked.experts, numel))
        layers = Layers(store, asked.layers, asked.experts, numel, stack)
        resident = Run(layers, asked.forward_s, asked.layers, None, LinkConfig())
        for _ in range(2):  # the first reads all experts from disk
            resident.passes(asked.passes)
        layer_s = statistics.median(resident.passes(1) for _ in range(5)) / asked.layers
        copy_s = layers.copy_s()
        rings = []
        for load in (*asked.loads, None):
            limit = 0 if load is None else round(asked.experts * asked.expert_bytes / (load * layer_s))
            rings += [
                Run(layers, asked.forward_s, count, load, LinkConfig(bandwidth=limit)) for count in counts
            ]
        for ring in rings:
            ring.passes(1)
        for number in range(asked.rounds):
            # Each ring is measured next to everything resident: other work on the machine treats the two alike.
            for ring in rings:
                for run in (resident, ring) if number % 2 == 0 else (ring, resident):
                    run.measure(asked.passes)
                ring.speeds.append(resident.pass_s[-1] / ring.pass_s[-1])
        found = [ring.found(resident.nbytes, asked.rounds, asked.passes) for ring in rings]
    rows = [
        {**row, "worst_ratio": min(row["round_speed_ratio"]), "best_ratio": max(row["round_speed_ratio"])}
        for row in found
    ]
    table(
        f"{asked.layers} layers of {asked.experts} experts of {format_bytes(asked.expert_bytes)}, a layer computed in "
        f"{format_seconds(layer_s)}, {asked.rounds} rounds; everything resident: {format_bytes(resident.nbytes)}; real "
        f"copies (no load) take {copy_s / layer_s:.3f} of a layer", rows,
        "layers_count", "load_ratio", "device_bytes", "saved_ratio", "speed_ratio", "worst_ratio", "best_ratio",
        "pass_stall_s",
    )  # fmt: skip
    finish(
        {
            "layer_s": layer_s, "copy_layer_s": copy_s, "resident_device_bytes": resident.nbytes,
            "resident_pass_s": resident.pass_s, "rings": found,
        }
    )  # fmt: skip


if __name__ == "__main__":
    start(main)
