"""Experts that a step copies to a device, by the number of its slots, beside the formula that bounds them.

    python experiments/uploads.py [--layers 4] [--experts 4] [--micro-batches 2] [--slots 1 4 8] [--policy lru]

Every token goes to every expert, so each pass reaches all E of them. Of S slots that keep experts between passes, a step
of M micro-batches that updates all experts finds S at each turn from one direction of the layers to the other:
``2ME - (2M - 1)S`` copies, and E with a slot for each. In layer order the micro-batches share their passes: M is 1. A
forward pass that changes nothing (an evaluation) finds S of E: ``E - S`` copies.

S is at most the number of slots; copies ahead take some of them: of the layer that computes, and with ``--depth`` of so
many layers after it. So the formula is shown for both: the least with all slots, the most with those of ``1 + depth``
layers fewer. The device is a CPU to which experts are copied; decisions are the same on any device.

``--slots`` defaults to nine counts from 1 to E. Exit status 1: a case copies fewer than the least or more than the most,
as LRU does in evaluations, whose passes go round.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from emulation import finish, options, start, table

from tierstore.config import load
from tierstore.errors import ConfigError
from tierstore.tiers.slots import DeviceSlots
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session

#: Steps, and evaluations, until the policy knows the order of passes; the last of them is counted.
STEPS, EVALUATIONS = 3, 5
ORDERS = ("micro", "layer")


class Way(NamedTuple):
    """What is counted: ``passes`` over all experts, the last of which updates them, or not."""

    name: str
    passes: int
    updates: bool

    def copies(self, experts: int, kept: int) -> int:
        """The copies of a step, or an evaluation, if ``kept`` of ``experts`` stay in slots from pass to pass."""
        if self.updates:
            return self.passes * experts - (self.passes - 1) * kept
        return self.passes * (experts - kept)


def bounds(way: Way, slots: int, *, layers: int, per_layer: int, depth: int) -> tuple[int, int]:
    """The least and the most copies with ``slots``, those of ``1 + depth`` layers of which copies ahead may take."""
    experts = layers * per_layer
    kept = slots if slots == experts else max(slots - (1 + depth) * per_layer, 0)
    return way.copies(experts, slots), way.copies(experts, kept)


def counted(settings: dict[str, Any], slots: int, directory: Path) -> tuple[int, int]:
    """Experts copied in a step and in an evaluation, with ``slots``."""
    model = load(TrainConfig, None, settings).model
    nbytes = DeviceSlots(model.expert_shape.numel, model.compute_dtype.torch, slots, min(slots, 3)).nbytes
    config = load(TrainConfig, None, {**settings, "device_budget": nbytes, "store": directory})
    found = []
    with open_session(config, Opening.CREATE) as trainer:
        cache = trainer.experts.walk.slots
        assert cache.count == slots
        for count, run in ((STEPS, trainer.step), (EVALUATIONS, trainer.evaluate)):
            for _ in range(count):
                before = cache.copies
                run()
            found.append(cache.copies - before)
    return found[0], found[1]


def cases(asked: argparse.Namespace, slots: Sequence[int], directory: Path) -> Iterator[dict[str, Any]]:
    """Copies, and the formula's with all slots kept and with those of ``1 + depth`` layers fewer."""

    def case(way: Way, depth: int, slots: int, copies: int) -> dict[str, Any]:
        least, most = bounds(way, slots, layers=asked.layers, per_layer=asked.experts, depth=depth)
        return {
            "depth_layers": depth, "way": way.name, "slots_count": slots, "copies_count": copies,
            "least_count": least, "most_count": most,
        }  # fmt: skip

    text = directory / "text"
    text.write_bytes(bytes(range(32, 127)) * 100)
    for depth, count, (name, micro_batches, order) in itertools.product(
        sorted({0, asked.depth}),
        slots,
        [
            ("one micro-batch", 1, "micro"),
            *((f"{order} order", asked.micro_batches, order) for order in ORDERS),
        ],
    ):
        settings = {
            "data.paths": (str(text),), "data.micro_batches": micro_batches, "data.micro_order": order,
            "data.batch_size": 2 * micro_batches, "device": "cpu", "weights_in_place": "off", "threads": 1,
            "host_budget": 4 * asked.layers * asked.experts * (12 * 3 * 16 * 32) + (1 << 20),
            "io.huge_pages": "off", "model.n_layers": asked.layers, "model.experts": asked.experts,
            "model.top_k": asked.experts, "model.d_model": 16, "model.d_ff": 32, "model.n_heads": 2,
            "model.seq_len": 16, "prefetch.depth": depth, "cache.device_policy": asked.policy,
            "eval_batches": 1, "eval_every": 0, "commit_every": 0, "sample_tokens": 0,
        }  # fmt: skip
        stepped, evaluated = counted(settings, count, directory / f"{name}-{depth}-{count}")
        yield case(
            Way(name, 2 * micro_batches if order == "micro" else 2, updates=True), depth, count, stepped
        )
        if micro_batches == 1:
            yield case(Way("evaluation", 1, updates=False), depth, count, evaluated)


def main() -> None:
    asked = options(__doc__, layers=4, experts=4, micro_batches=2, slots=(0,), depth=1, policy="next-use")
    experts = asked.layers * asked.experts
    slots = sorted(asked.slots) if any(asked.slots) else sorted({max(experts * i // 8, 1) for i in range(9)})
    if not 1 <= slots[0] <= slots[-1] <= experts:
        raise ConfigError(f"--slots: expected numbers from 1 to {experts}, got {slots}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        found = list(cases(asked, slots, Path(directory)))
    for depth, rows in itertools.groupby(found, key=lambda case: case["depth_layers"]):
        title = f"{experts} experts, copied ahead of {depth} layers"
        table(title, list(rows), "slots_count", "way", "copies_count", "least_count", "most_count")
    failures = [
        f"{case['way']}, depth {case['depth_layers']}, {case['slots_count']} slots: {case['copies_count']} "
        f"({case['least_count']} to {case['most_count']})"
        for case in found
        if not case["least_count"] <= case["copies_count"] <= case["most_count"]
    ]
    finish({"experts_count": experts, "policy": asked.policy, "cases": found}, failures)


if __name__ == "__main__":
    start(main)
