"""What a rank with a simulated device trains in tests."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import simulated
import torch
from combination_cases import train_features
from rank_cases import TINY
from torch.nn.attention import SDPBackend, sdpa_kernel

from tierstore._native import Buffer
from tierstore.accelerator import has_own_memory
from tierstore.config import load
from tierstore.model.config import ComputeDtype
from tierstore.parallel import Mesh
from tierstore.tiers.accelerated import AcceleratedTier
from tierstore.tiers.slots import DeviceSlots, SlotGradient
from tierstore.train import budgets
from tierstore.train.combinations import Feature
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session

STEPS = 3
#: Four slots of weights and three of gradients of ``TINY``'s experts: each copy but the first few overwrites another.
FEW_SLOTS = {"device_budget": 7 << 13}

#: Ways to train on one device, each with something of its own to order.
WAYS: Mapping[str, Mapping[str, Any]] = {
    "fp32": {},
    "all that is free": {"device_budget": 0},
    "evictions": {"host_budget": 200_000, "model.experts": 8},
    "micro-batches": {"data.micro_batches": 2, "data.micro_order": "micro"},
    "layer order": {"data.micro_batches": 2, "data.micro_order": "layer"},
    "boundaries": {"data.micro_batches": 4, "data.micro_order": "layer", "boundary_budget": 16384},
    "recomputed": {"model.checkpoint_activations": "block"},
    "router guesses": {"prefetch.predictor": "router"},
    "dense on the host": {"dense.optimizer_state": "host"},
    "dense on the drive": {"dense.optimizer_state": "nvme"},
    "jitter": {"model.router_noise": "jitter", "model.router_noise_std": 0.1},
    "capacity": {"model.capacity_factor": 1.0},
    "limited link": {"links.copy.bandwidth": 1 << 28},
    "narrow moments": {"adamw.moments": "int8"},
    "bf16": {"model.compute_dtype": "bf16"},
    "bf16, clipped micro-batches": {
        "model.compute_dtype": "bf16",
        "data.micro_batches": 2,
        "data.micro_order": "micro",
        "clip_norm": 0.5,
    },
    "bf16, layer order": {
        "model.compute_dtype": "bf16",
        "data.micro_batches": 2,
        "data.micro_order": "layer",
    },
}


#: Losses, that of an evaluation, the checksum of the rank's records; on a simulated device, violations and the counts of
#: the steps.
Trained = tuple[tuple[list[float], float, int], dict[str, int], dict[str, int]]


def train(mesh: Mesh, store: Path, settings: Mapping[str, Any], text: str) -> Trained:
    """``STEPS`` steps of a new run, an evaluation and a commit, on the device of ``mesh``."""
    torch.manual_seed(0)
    simulating = has_own_memory(mesh.device)
    config = load(TrainConfig, None, {**TINY, **FEW_SLOTS, "data.paths": (text,), "store": store, **settings})
    # The CPU's own kernel of attention has other bits, and is no other device's.
    with sdpa_kernel(SDPBackend.MATH), open_session(config, Opening.CREATE, mesh=mesh) as trainer:
        if simulating:
            simulated.reset()
        losses = [trainer.step().loss for _ in range(STEPS)]
        counts = simulated.counts() if simulating else {}
        assert (trainer.timer.total.device_s > 0) == simulating
        evaluated = trainer.evaluate()
        trainer.commit()
        crc = trainer.store.records_crc32c()
    return (losses, evaluated, crc), simulated.violations() if simulating else {}, counts


def uploads(
    mesh: Mesh, store: Path, slots: int, text: str, depth: int = 0, host_budget: int = 4 << 20
) -> tuple[int, int, int, int]:
    """What a step copies to a device with ``slots``, if each pass reaches all 12 experts: experts, and all bytes. Also an
    expert's bytes, and the experts that a forward pass after the step copies.
    """
    settings = {**TINY, "model.top_k": TINY["model.experts"], "prefetch.depth": depth, "data.paths": (text,)}
    settings["host_budget"] = host_budget
    numel = load(TrainConfig, None, settings).model.expert_shape.numel
    nbytes = DeviceSlots(numel, torch.float32, slots, min(slots, 3)).nbytes
    config = load(TrainConfig, None, {**settings, "device_budget": nbytes, "store": store})
    with open_session(config, Opening.CREATE, mesh=mesh) as trainer:
        cache = trainer.experts.walk.slots
        assert cache.count == slots
        trainer.step()
        simulated.reset()
        before = cache.copies
        trainer.step()
        stepped, all_bytes = cache.copies, simulated.counts()["h2d.bytes"]
        trainer.evaluate()
        evaluated = cache.copies
        trainer.commit()
    assert not simulated.violations()
    return stepped - before, all_bytes, 4 * numel, evaluated - stepped


def train_holding(
    mesh: Mesh, store: Path, settings: Mapping[str, Any], text: str, gradient: SlotGradient
) -> tuple[Trained, int]:
    """``train`` with ``gradient`` in the slots of gradients, and the bytes of gradients that left the device."""
    divide, leave, left = budgets._slots, AcceleratedTier.copy_to_host, 0

    def slots(*args: Any) -> list[DeviceSlots[ComputeDtype]]:
        return [replace(each, gradient=gradient) for each in divide(*args)]

    def copy_to_host(tier: AcceleratedTier, slot: int, **options: bool) -> tuple[Buffer, list[int]]:
        nonlocal left
        buffer, after = leave(tier, slot, **options)
        left += buffer.nbytes
        return buffer, after

    with (
        mock.patch.object(budgets, "_slots", slots),
        mock.patch.object(AcceleratedTier, "copy_to_host", copy_to_host),
    ):
        return train(mesh, store, settings, text), left


def check_counts(counts: Mapping[str, int], settings: Mapping[str, Any]) -> None:
    """In steps nothing is copied to or from pageable memory, no copy blocks the host, and it waits for the device once in a
    pass over an MoE layer: for how many rows go to each expert, and where. Once more for a guess, a micro-batch's loss, and
    the norm of the gradients.
    """
    for name in ("sync.item", "sync.op", "sync.device"):
        assert name not in counts, name
    for direction in ("h2d", "d2h"):
        assert not {f"{direction}.blocking", f"{direction}.pageable_bytes"} & counts.keys()
        assert counts[f"{direction}.async"] > 0
    micros = settings.get("data.micro_batches", 1)
    again = "model.checkpoint_activations" in settings or settings.get("data.micro_order") == "layer"
    guess = settings.get("prefetch.predictor") == "router"
    passes = micros * TINY["model.n_layers"] * (1 + again + guess)
    assert counts["sync.stream"] <= STEPS * (passes + micros + 1)


def train_with(
    mesh: Mesh, store: Path, settings: Mapping[str, Any], features: frozenset[Feature], model: Path
) -> tuple[tuple[list[float], int, str, bool], dict[str, int]]:
    """What ``combination_cases.train_features`` gives, and the violations on a simulated device."""
    simulating = has_own_memory(mesh.device)
    if simulating:
        simulated.reset()
    with sdpa_kernel(SDPBackend.MATH):
        found = train_features(mesh, store, {"device_budget": 1 << 17, **settings}, features, model)
    return found, simulated.violations() if simulating else {}


def record(mesh: Mesh, store: Path, settings: Mapping[str, Any], text: str) -> list[simulated.Node]:
    """The graph of the steps after the first, without what differs in each run: times, tickets, numbers of streams."""
    config = load(TrainConfig, None, {**TINY, "data.paths": (text,), "store": store, **settings})
    with sdpa_kernel(SDPBackend.MATH), open_session(config, Opening.CREATE, mesh=mesh) as trainer:
        trainer.step()
        nodes = simulated.record_steps(trainer.step, STEPS)
    made = dict.fromkeys(each.stream for each in nodes if each.stream > 0)
    streams = {each: number for number, each in enumerate(made, 1)}
    return [
        each._replace(stream=streams.get(each.stream, each.stream), ticket=0, begin_ns=0, end_ns=0)
        for each in nodes
    ]
