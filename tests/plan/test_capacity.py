"""Bytes by hand, and against real runs: a plan and a run share their arithmetic, and must not disagree."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from slowness import mostly_slow
from traffic_cases import Make

from tierstore.errors import BudgetError, ConfigError
from tierstore.machine_profile import ASSUMED
from tierstore.plan.capacity import capacity
from tierstore.plan.traffic import step_traffic
from tierstore.stats import Tier
from tierstore.store.index.database import index_bytes
from tierstore.tiers.slots import DeviceKind
from tierstore.train.footprint import fixed_cost
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session

RUNS: dict[str, dict[str, Any]] = {
    "a few frames": {},
    "all in memory": {"host_budget": 8 << 20},
    "little": {"host_budget": 130 << 10},
    "lru": {"cache.policy": "lru"},
    "no lookahead": {"prefetch.depth": 0},
    "far ahead": {"prefetch.depth": 3},
    "clipped": {"clip_norm": 0.3},
    "micro-batches": {"data.micro_batches": 2},
    "both": {"clip_norm": 0.3, "data.micro_batches": 3},
    "checkpointed": {"model.checkpoint_activations": "block"},
    "bf16, a snapshot kept": {"model.compute_dtype": "bf16", "retain": 1},
    "moments in bf16": {"adamw.moments": "bf16"},
    "moments in int8": {"adamw.moments": "int8", "model.compute_dtype": "bf16", "retain": 1},
    "written back early": {"cache.write_back_every": 2},
    "a quota for each layer": {"cache.scope": "layer"},
    "dense between": {"model.n_layers": 5, "model.moe_every": 2},
    "no experts": {"model.moe_every": 0},
    "no experts, layer order, spilled": {
        "model.moe_every": 0,
        "data.micro_batches": 3,
        "data.micro_order": "layer",
        "boundary_budget": 4 * 4096,
    },
    "layer order": {"data.micro_batches": 3, "data.micro_order": "layer"},
    "layer order, clipped, spilled": {
        "data.micro_batches": 3,
        "data.micro_order": "layer",
        "clip_norm": 0.3,
        "boundary_budget": 4 * 4096,
        "model.checkpoint_activations": "block",
    },
}


@pytest.mark.parametrize("name", mostly_slow(RUNS, "all in memory", "lru", "clipped", "moments in int8"))
def test_a_run_takes_what_its_plan_says(name: str, setting: Make) -> None:
    """Records, extents, index, host budget; and with every expert active, the bytes read and written a step: exactly."""
    planned = setting(RUNS[name])
    taken = capacity(planned)
    window = (4, 4)
    traffic = step_traffic(planned, taken, window)
    with open_session(planned.config, Opening.CREATE) as trainer:
        store = trainer.store
        for layer in planned.model.moe_layers[:1]:
            assert store.records.info(f"expert.{layer:04d}.00000").schema == planned.schema
        assert sum(key.startswith("expert") for key in store.records.keys) == planned.records
        moved = []
        for steps in window:
            for _ in range(steps):
                trainer.step()
            stats = store.cache.residency.stats()
            moved.append([getattr(stats, key) for key in ("read_bytes", "written_bytes", "hits", "misses")])
        trainer.commit()
        arena = store.cache.residency.capacity_frames
        held = sum(path.stat().st_size for path in planned.config.store.rglob("*") if path.is_file())
        scratch = store.extents.allocated_bytes - _extents(planned.config.store)
    step = [(after - before) / window[1] for before, after in zip(*moved, strict=True)]
    assert step[:2] == pytest.approx([traffic.read_bytes, traffic.written_bytes], abs=1)
    assert step[2:] == [traffic.hits, traffic.misses]
    moved_for = traffic.moved_for.values()
    assert sum(moved.read for moved in moved_for) == pytest.approx(traffic.read_bytes, abs=len(moved_for))
    assert sum(moved.written for moved in moved_for) == pytest.approx(
        traffic.written_bytes, abs=len(moved_for)
    )
    assert arena > 0
    by_name = {term.name: term.nbytes for term in taken.terms}
    assert by_name.get("expert extents", 0) + by_name["dense extents"] == _extents(planned.config.store)
    assert by_name.get("gradient scratch", 0) + by_name.get("block input scratch", 0) == scratch
    assert by_name["index"] == (planned.config.store / "index" / "data.mdb").stat().st_size
    assert held == pytest.approx(taken.total(Tier.NVME) - scratch, abs=4096)  # the lease and the identity


def _extents(store: Path) -> int:
    return sum(path.stat().st_size for path in (store / "extents").iterdir())


def test_by_hand(setting: Make) -> None:
    """2 layers of 12 experts of 3 x 16 x 32 = 1,536 parameters: 6 KiB a section, padded to 8.

    Embedding 256 x 16 = 4,096 dense parameters; a block 4 x 16^2 + 2 x 16 + 12 x 16 = 1,248; norm and head 4,112.
    """
    taken = capacity(setting({"retain": 1, "clip_norm": 1.0}))
    by_name = {term.name: term.nbytes for term in taken.terms}
    assert by_name["dense state"] == 16 * (4096 + 2 * 1248 + 4112)
    assert by_name["expert extents"] == 24 * 3 * 8192 * 3
    # 16,384, 4,992 and 16,448 bytes a section, padded to 16,384, 8,192 and 20,480.
    assert by_name["dense extents"] == (3 * 16384 + 2 * 3 * 8192 + 3 * 20480) * 3
    assert by_name["gradient scratch"] == 24 * 8192
    assert by_name["index"] == index_bytes(24 + 4, 1)
    assert by_name["expert cache"] + by_name["expert slots"] == 200 << 10


@pytest.mark.parametrize("changes", [{}, {"model.compute_dtype": "bf16"}, {"dense.optimizer_state": "nvme"}])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_plan_has_the_fixed_cost_that_training_announces(
    count: int, changes: dict[str, Any], setting: Make
) -> None:
    planned = setting(changes, ranks=count)
    announced = fixed_cost(planned.config, ASSUMED.process_bytes, ranks=count).nbytes
    in_budget = ("expert cache", "expert slots")
    taken = capacity(planned)
    assert announced == sum(
        term.nbytes for term in taken.terms if term.tier is not Tier.NVME and term.name not in in_budget
    )


@pytest.mark.parametrize("count", [2, 4])
def test_dense_state_is_cut_and_gathered_units_are_not(count: int, setting: Make) -> None:
    alone, together = setting(), setting(ranks=count)
    one, each = capacity(alone), capacity(together)
    assert each.term("dense state").nbytes == pytest.approx(one.term("dense state").nbytes / count, rel=0.02)
    assert each.term("expert extents").nbytes == one.term("expert extents").nbytes // count
    assert not {"fusion buffers", "gradient buffers"} & {term.name for term in one.terms}
    # Embedding, head, and all of the two blocks; on four ranks Gloo sends from a copy.
    gathered = {2: 4096 + 4128 + 2 * 1248, 4: 2 * (4096 + 4160 + 2 * 1280)}[count] * 4
    assert each.term("fusion buffers").nbytes == gathered


def test_fusion_buffers_do_not_grow_with_depth(setting: Make) -> None:
    sizes = {
        capacity(setting({"model.n_layers": layers}, ranks=2)).term("fusion buffers").nbytes
        for layers in (3, 4, 16)
    }
    assert len(sizes) == 1


def test_a_cuda_device_has_memory_of_its_own(setting: Make) -> None:
    for budget, spare in ((400_000, 0), (1 << 24, 12)):
        here = setting({"host_budget": budget})
        taken = capacity(replace(here, device=DeviceKind.CUDA))
        assert taken.term("expert cache").nbytes == budget - taken.divided.landing
        slots = taken.divided.slots
        assert taken.term("expert slots").nbytes == slots.nbytes
        assert slots.spare == spare
        assert taken.term("gradient landing").nbytes == (slots.gradients + spare) * slots.gradient_bytes


def test_experts_take_what_is_free_on_a_device(setting: Make) -> None:
    here = replace(setting(), device=DeviceKind.CUDA)
    least = capacity(here).total(Tier.DEVICE) - capacity(here).divided.device
    for slots in (4, 9, 24):
        # A tenth is kept.
        taken = capacity(replace(here, device_memory=-(-(least + (slots + 3) * 8192) * 10 // 9)))
        assert taken.divided.slots.weights == slots
    assert capacity(replace(here, device_memory=1 << 40)).divided.slots.weights == here.records == 24


def test_budgets_that_cannot_be(setting: Make) -> None:
    with pytest.raises(BudgetError, match="minimum"):
        capacity(setting({"host_budget": 4096}))
    with pytest.raises(ConfigError, match="--ranks"):
        replace(setting(), ranks=0)
    with pytest.raises(ConfigError, match=r"parallel\.expert"):
        replace(setting(), ranks=4, expert=3)
    with pytest.raises(ConfigError, match=r"data\.batch_size"):
        setting(ranks=3)
