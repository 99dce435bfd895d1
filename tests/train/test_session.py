"""Sessions at the edges: odd shapes, the smallest budgets, and live runs against their own traces."""

import errno
import gc
import os
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refuses
from slowness import in_turns, mostly_slow

from tierstore import machine
from tierstore.errors import BudgetError
from tierstore.stats import delta
from tierstore.store import verify_store
from tierstore.store.disk.store_extents import extent_bytes
from tierstore.tiers.slots import DeviceKind
from tierstore.trace.files import load_trace
from tierstore.trace.replay import replay
from tierstore.train.budgets import adds_up, budgets, expert_schema, least_host_budget
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session
from tierstore.train.setup import compute_deterministically

Make = Callable[..., TrainConfig]
Least = Callable[[TrainConfig], int]

SHAPES: dict[str, dict[str, Any]] = {
    "one expert a layer": {"model.experts": 1, "model.top_k": 1},
    "every token to all": {"model.experts": 3, "model.top_k": 3},
    "few are reached": {"model.experts": 64, "model.top_k": 1, "model.seq_len": 2, "data.batch_size": 1},
    "dense blocks between": {"model.n_layers": 5, "model.moe_every": 2},
    "shared expert": {"model.shared_expert_d_ff": 24},
    "capacity factor": {"model.capacity_factor": 0.5},
    "noise": {"model.router_noise": "jitter", "model.router_noise_std": 0.3},
    "untied gelu": {"model.tie_embeddings": "untied", "model.activation": "gelu"},
    "recomputed experts": {"model.expert_activations": "recompute"},
    "odd sizes": {"model.d_model": 12, "model.d_ff": 29, "model.n_heads": 3},
    "uneven frames": {"model.d_model": 32, "model.d_ff": 200, "model.experts": 4},
    "no warm-up, constant": {"schedule.kind": "constant", "schedule.warmup_steps": 0},
}


@pytest.mark.parametrize(
    ("shape", "clip"),
    mostly_slow(in_turns(SHAPES, [0.0, 0.2]), ("one expert a layer", 0.0), ("few are reached", 0.0)),
)
def test_every_shape_fits_the_minimum(
    shape: str, clip: float, configure: Make, train: Any, least: Least
) -> None:
    """And computes there what it computes with everything in RAM."""
    mode = SHAPES[shape] | {"clip_norm": clip, "steps": 4}
    expected = train(configure(mode))
    config = configure(mode | {"host_budget": least(configure(mode))})
    found = train(config, stops=(2,))
    assert found.bits == expected.bits
    assert found.stats.evictions > 0
    report = verify_store(config.store)
    assert report.failures == []
    assert report.records >= config.model.architecture.records


def test_a_store_for_which_there_is_no_space_is_refused_at_once(
    configure: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it takes memory, and with nothing made."""
    config = configure()
    needed = extent_bytes(expert_schema(config), config.model.architecture.records, config.retain)
    found = machine.disk(config.store.parent)
    for free in (needed - 1, needed):
        monkeypatch.setattr(machine, "disk", lambda _, free=free: replace(found, free_bytes=free))
        if free < needed:
            with (
                pytest.raises(OSError, match=r"need .* are free") as caught,
                open_session(config, Opening.CREATE),
            ):
                pytest.fail("it was opened")
            assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(config.store))
            assert not config.store.exists()
        else:
            with open_session(config, Opening.CREATE) as trainer:
                trainer.step()


def test_a_closed_session_frees_its_memory_at_once(configure: Make) -> None:
    """Its arenas are too large to wait until Python collects reference cycles."""
    gc.collect()
    gc.disable()
    try:
        with open_session(configure(), Opening.CREATE) as trainer:
            trainer.step()
            left = [
                weakref.ref(part) for part in (trainer.store, trainer.dense, trainer.model, trainer.experts)
            ]
        del trainer
        assert [part() for part in left] == [None] * 4
    finally:
        gc.enable()


def test_one_expert_gets_every_token(configure: Make, train: Any, least: Least) -> None:
    """A router that has collapsed: one expert of each layer is stepped, the others only replay."""
    config = configure({"model.top_k": 1, "model.aux_loss_weight": 0.0, "host_budget": least(configure())})
    with open_session(config, Opening.CREATE) as trainer:
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                if "router" in name:
                    parameter.zero_()
        for _ in range(5):
            with torch.no_grad():
                for name, parameter in trainer.model.named_parameters():
                    if "router" in name:
                        parameter.zero_()
            assert trainer.step().active_experts == 2
        trainer.commit()
        found = trainer.store.records
        reached = [record.step for record in map(found.live, found.keys) if record.cached]
        assert sorted(reached) == [0] * 22 + [5] * 2


def test_less_than_the_minimum_is_refused(configure: Make, least: Least) -> None:
    minimum = least(configure())
    config = configure({"host_budget": minimum - 1})
    with refuses(BudgetError, minimum), open_session(config, Opening.CREATE):
        pass
    assert not config.store.exists()
    with open_session(configure({"host_budget": minimum}), Opening.CREATE) as trainer:
        trainer.step()


@pytest.mark.parametrize("share", [1, 2, 3, 5, 10, 50])
@pytest.mark.parametrize("depth", [0, 2])
def test_the_budget_is_divided_whole(share: int, depth: int, configure: Make, least: Least) -> None:
    config = configure({"prefetch.depth": depth})
    minimum = least(config)
    config = configure({"prefetch.depth": depth, "host_budget": share * minimum})
    divided = budgets(config, DeviceKind.CPU, experts=1)
    assert divided.cache + divided.device == config.host_budget
    assert divided.device == divided.slots.nbytes
    assert divided.slots.weights >= 1
    assert divided.slots.gradients >= 1
    assert 0 <= divided.lookahead < divided.cache
    assert (divided.lookahead > 0) == (depth > 0 and share > 1)


def test_slots_of_an_accelerator(configure: Make) -> None:
    """A slot of weights, or of gradients, takes 1,536 x 4 bytes, padded to 8 KiB; of gradients there are three."""
    page = 8192

    def slots(experts: int, free: int | None, budget: int = 0) -> int:
        divided = budgets(configure({"device_budget": budget}), DeviceKind.CUDA, experts=experts, free=free)
        assert divided.slots.gradients == 3
        return divided.slots.weights

    assert slots(24, free=20 * page) == 17
    assert slots(24, free=20 * page - 1) == 16
    assert slots(12, free=20 * page) == 12  # no more than there are experts
    assert slots(24, free=-1) == slots(24, free=None) == 4  # an estimate may be wrong: memory decides
    assert slots(24, free=20 * page, budget=10 * page) == 7


@pytest.mark.parametrize(
    ("changes", "replicas", "sharing", "nbytes"),
    [
        ({"model.compute_dtype": "fp32"}, 1, 1, 8192),
        ({}, 1, 1, 4096),
        ({"data.micro_batches": 2, "data.micro_order": "micro"}, 1, 1, 4096),
        ({"data.micro_batches": 2, "data.micro_order": "layer"}, 1, 1, 8192),
        ({}, 2, 1, 8192),
        ({"parallel.pipeline_degree": 6}, 1, 2, 4096),
        ({"parallel.pipeline_degree": 7}, 1, 2, 8192),
        ({"parallel.pipeline_degree": 7}, 1, 1, 4096),
        ({"parallel.pipeline_degree": "auto-split"}, 1, 2, 8192),
    ],
    ids=[
        *("fp32", "bf16", "micro-batches", "added up in layer order", "added up over replicas"),
        *("chunks of whole experts", "added up over parts", "no rows travel", "parts may be chosen"),
    ],
)
def test_slots_of_gradients(
    changes: Mapping[str, Any], replicas: int, sharing: int, nbytes: int, configure: Make
) -> None:
    """Of 1,536 parameters, 6,144 bytes in fp32: a product in bf16 takes half, on the device and on the host. Each layer has
    12 experts, of which two ranks share 6 each.
    """
    changes = {"model.compute_dtype": "bf16", **changes}
    made = configure(changes)
    sums = adds_up(made, experts=12, replicas=replicas, sharing=sharing)
    divided = budgets(made, DeviceKind.CUDA, experts=24, sums=sums)
    assert divided.slots.gradient_bytes == nbytes
    assert divided.landing == (3 + divided.slots.spare) * nbytes
    assert divided.slots.spare == (0 if made.keeps_gradients else 12)
    assert divided.device == 4 * divided.slots.weight_bytes + 3 * nbytes
    config = configure({**changes, "host_budget": least_host_budget(configure(changes), DeviceKind.CPU)})
    if not sums:
        assert budgets(config, DeviceKind.CPU, experts=24).slots.gradients == 1


def test_host_memory_that_the_cache_cannot_use_keeps_gradients(configure: Make) -> None:
    """A record has a frame of 8 KiB for its weights and one for each moment; of 24 gradients, as many as have room."""
    page = 8192
    # Three gradient slots instead of one, and all records.
    full = least_host_budget(configure({}), DeviceKind.CUDA) + 2 * page + 24 * 3 * page

    def spare(
        nbytes: int,
        changes: Mapping[str, Any],
        device: DeviceKind = DeviceKind.CUDA,
        *,
        external: bool = False,
    ) -> int:
        divided = budgets(
            configure({"host_budget": nbytes, **changes}), device, experts=24, external=external
        )
        slots = divided.slots
        on_host = divided.device if device is DeviceKind.CPU else 0
        assert divided.cache + divided.landing + on_host == nbytes
        assert divided.cache >= min(full - 3 * page, nbytes - 3 * page - on_host)
        return slots.spare

    assert [spare(full + extra, {}) for extra in (-page, 0, page - 1, page, 5 * page)] == [0, 0, 0, 1, 5]
    assert spare(1 << 30, {}) == 12
    assert spare(1 << 30, {"links.copy.bandwidth": 1 << 30}, DeviceKind.CPU) == 12
    # Gradients that are kept for other reasons, and experts whose weights are not copied.
    assert spare(1 << 30, {}, DeviceKind.CPU) == 0
    assert spare(1 << 30, {}, external=True) == 0
    for changes in ({"clip_norm": 1.0}, {"data.micro_batches": 2, "data.micro_order": "micro"}):
        assert spare(1 << 30, changes) == 0


TRACED: dict[str, Mapping[str, Any]] = {
    "lfu": {"prefetch.depth": 2},
    "lru, no lookahead": {"cache.policy": "lru", "prefetch.depth": 0},
    "paper": {"cache.policy": "lfu-decay", "cache.options.variant": "paper", "prefetch.predictor": "all"},
    "clip": {"clip_norm": 0.3, "data.micro_batches": 2, "prefetch.depth": 1},
    "checkpoint, written back": {"model.checkpoint_activations": "block", "cache.write_back_every": 2},
}


@pytest.mark.parametrize("name", TRACED)
def test_a_trace_replays_to_the_same_counts(name: str, configure: Make, tmp_path: Path, least: Least) -> None:
    """Promise 2: the recorded run's hits, misses, evictions and bytes are those of the native replay."""
    plain = configure(TRACED[name])
    config = configure({"host_budget": least(plain) * 3, "steps": 15, **TRACED[name]})
    trace = tmp_path / "trace"
    with open_session(config, Opening.CREATE, trace=trace) as trainer:
        for step in range(config.steps):
            trainer.step()
            if step % 5 == 4:
                trainer.commit()
                trainer.evaluate()
        trainer.commit()
        live = trainer.store.cache.residency.stats()
    assert live.misses > 0
    assert live.evictions > 0
    assert live.written_bytes > 0
    assert len(load_trace(trace)) > 0
    assert replay(trace) == live


@pytest.mark.parametrize("shape", ["dense blocks between", "odd sizes"])
def test_the_engine_moved_what_the_core_counted(shape: str, configure: Make, least: Least) -> None:
    """Bytes read and written, by the core's count and by the engine's: whole slots, padding included."""
    mode = SHAPES[shape] | {"clip_norm": 0.3, "steps": 6}
    config = configure(mode | {"host_budget": least(configure(mode)) * 2})
    with open_session(config, Opening.CREATE) as trainer:
        store = trainer.store

        def moved() -> tuple[dict[str, int], dict[str, int]]:
            while (engine := store.engine.stats())["waiting"] + engine["in_flight"]:
                time.sleep(0.001)
            core = store.cache.residency.stats()
            names = ("read_bytes", "written_bytes")
            return {name: engine[name] for name in names}, {name: getattr(core, name) for name in names}

        engine_before, core_before = moved()
        for _ in range(config.steps):
            trainer.step()
        engine, core = moved()
    assert core["read_bytes"] > core_before["read_bytes"]
    assert core["written_bytes"] > core_before["written_bytes"]
    assert delta(engine_before, engine) == delta(core_before, core)


def test_products_on_an_accelerator_are_allowed_to_be_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch refuses them on CUDA unless cuBLAS was told how to cut its workspace; what the user said stands."""
    name = "CUBLAS_WORKSPACE_CONFIG"
    monkeypatch.setenv(name, ":16:8")
    compute_deterministically(torch.device("cuda"))
    assert os.environ[name] == ":16:8"
    monkeypatch.delenv(name)
    compute_deterministically(torch.device("cpu"))
    assert name not in os.environ
    compute_deterministically(torch.device("cuda"))
    assert os.environ[name] == ":4096:8"
