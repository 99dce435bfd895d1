"""Bytes of several ranks and of low-rank pairs."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
from dense_cases import since
from launcher import Ranks
from slowness import mostly_slow
from small_config import SMALL_QWEN3_MOE

from tierstore.config import as_dict, from_dict, load
from tierstore.hf.describing import describe_config
from tierstore.hf.spec import hf_spec
from tierstore.machine_profile import ASSUMED
from tierstore.model.config import ComputeDtype
from tierstore.moe.lora import LoraConfig, LoraTargets
from tierstore.parallel import Mesh
from tierstore.plan.capacity import Setting, Use, capacity, usage_of
from tierstore.plan.order import choose_order, in_order
from tierstore.plan.traffic import step_traffic
from tierstore.plan.workload import StepWorkload
from tierstore.prefetch.operations import Kind, operations
from tierstore.stats import Tier
from tierstore.tiers.slots import DeviceKind
from tierstore.train.budgets import budgets, expert_schema, least_host_budget, pair_schema
from tierstore.train.config import TrainConfig
from tierstore.train.files import MicroOrder
from tierstore.train.footprint import fixed_cost
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session

# Plans of several ranks against real ones: what each has on disk and on its device, reads, writes and -------


def trained(mesh: Mesh, config: dict[str, object]) -> dict[str, int]:
    """What one rank took: bytes of its extents, of its dense parameters, and of eight steps after six."""
    with open_session(from_dict(TrainConfig, config), Opening.CREATE, mesh=mesh) as trainer:
        moved = []
        for steps in (6, 8):
            for _ in range(steps):
                trainer.step()
            stats = trainer.store.cache.residency.stats()
            moved.append([getattr(stats, key) for key in ("read_bytes", "written_bytes")])
        trainer.commit()
        directory = trainer.store.directory
        return {
            "extents": sum(path.stat().st_size for path in (directory / "extents").iterdir()),
            "index": (directory / "index" / "data.mdb").stat().st_size,
            "dense": trainer.dense.nbytes.total,
            "read": (moved[1][0] - moved[0][0]) // 8,
            "written": (moved[1][1] - moved[0][1]) // 8,
        }


def sent(mesh: Mesh, config: dict[str, object]) -> dict[str, int]:
    """Collectives of dense parameters in three steps of one rank, after two, and bytes that it sent in them."""
    with open_session(from_dict(TrainConfig, config), Opening.CREATE, mesh=mesh) as trainer:
        trainer.step()
        trainer.step()
        before = replace(trainer.dense.traffic)
        for _ in range(3):
            trainer.step()
        return asdict(since(trainer.dense.traffic, before))


SENT: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped micro-batches": {"clip_norm": 0.3, "data.micro_batches": 2},
    "nothing ahead": {"prefetch.gather_depth": 0},
    "far ahead, few buffers": {"prefetch.gather_depth": 4, "dense.buffers": 2},
    "kept gathered": {"dense.reshard": "after-backward", "dense.buffers": 4},
    "bf16": {"model.compute_dtype": "bf16"},
    "bf16, gathered in fp32": {"model.compute_dtype": "bf16", "dense.gather": "fp32"},
}


@pytest.mark.parametrize(
    ("name", "count"),
    # One rank sends nothing, however it gathers.
    mostly_slow([*((name, 2) for name in SENT), ("plain", 1)], ("plain", 2), ("far ahead, few buffers", 2)),
)
def test_what_is_simulated_is_what_is_sent(
    name: str, count: int, setting: Callable[..., Setting], ranks: Ranks
) -> None:
    """Gathers and reductions of three settled steps, and their bytes: embedding and head are gathered once a step."""
    planned = setting({"model.n_layers": 4} | SENT[name], ranks=count)
    taken = capacity(planned)
    workload = StepWorkload(planned, taken, step_traffic(planned, taken), ASSUMED)

    def listed(steps: int) -> Counter[Kind]:
        moved: Counter[Kind] = Counter()
        for operation in operations(workload.schedule, workload.sizes, steps=steps):
            moved[operation.kind] += operation.nbytes
        return moved

    late, early = listed(5), listed(2)
    for found in ranks.run(count, sent, as_dict(planned.config)):
        assert found["gather_bytes"] == late[Kind.GATHER] - early[Kind.GATHER]
        assert found["reduction_bytes"] == late[Kind.REDUCE] - early[Kind.REDUCE]
        assert (found["gather_bytes"] > 0) == (count > 1)


TAKEN: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16, clipped": {"model.compute_dtype": "bf16", "clip_norm": 0.3},
    "nothing guessed, far ahead": {"prefetch.depth": 6, "prefetch.predictor": "none"},
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [*((kind, 2) for kind in TAKEN), ("fp32", 4)])
def test_each_rank_takes_what_its_plan_says(
    kind: str, count: int, setting: Callable[..., Setting], ranks: Ranks
) -> None:
    planned = setting({"host_budget": 120 << 10, "model.n_layers": 4} | TAKEN[kind], ranks=count)
    taken = capacity(planned)
    by_name = {term.name: term.nbytes for term in taken.terms}
    traffic = step_traffic(planned, taken)
    for found in ranks.run(count, trained, as_dict(planned.config)):
        assert found["extents"] == by_name["expert extents"] + by_name["dense extents"]
        assert found["index"] == by_name["index"]
        assert found["dense"] == sum(
            by_name.get(name, 0) for name in ("dense state", "fusion buffers", "gradient buffers")
        )
        assert found["read"] == pytest.approx(traffic.read_bytes, abs=1)
        assert found["written"] == pytest.approx(traffic.written_bytes, abs=1)


# A plan for LoRA divides budgets as a run with LoRA does ----------------------------------------------------


@pytest.mark.parametrize("compute", ComputeDtype)
@pytest.mark.parametrize("device", DeviceKind)
@pytest.mark.parametrize(
    ("use", "targets"), [(Use.LORA, LoraTargets.BOTH), (Use.LORA_ATTENTION, LoraTargets.ATTENTION)]
)
def test_the_same_division(compute: ComputeDtype, device: DeviceKind, use: Use, targets: LoraTargets) -> None:
    lora = LoraConfig(rank=4, targets=targets)
    manifest = describe_config(SMALL_QWEN3_MOE, compute)
    spec, adapted = hf_spec(manifest, SMALL_QWEN3_MOE), hf_spec(manifest, SMALL_QWEN3_MOE, lora=lora)
    run = replace(load(TrainConfig, None, {"data.batch_size": 2}), model=adapted, lora=lora)
    usage = usage_of(spec, use, rank=4)
    setting = Setting(
        config=replace(run, model=spec, lora=LoraConfig()),
        model=spec.architecture,
        device=device,
        usage=usage,
    )
    assert setting.schema == expert_schema(run)
    assert usage.pairs == pair_schema(run)
    assert list(usage.attention) == list(adapted.adapter_units)
    least = least_host_budget(run, device)
    assert setting.least_host_budget == least
    for budget in (least, 2 * least, 20 * least):
        setting = replace(setting, config=replace(setting.config, host_budget=budget))
        planned = capacity(setting).divided
        divided = budgets(replace(run, host_budget=budget), device, experts=setting.records)
        assert (planned.cache, planned.device, planned.lookahead) == (
            divided.cache,
            divided.device,
            divided.lookahead,
        )
        assert planned.slots == divided.slots


@pytest.mark.parametrize("use", [Use.SERVE, Use.LORA])
def test_experts_leave_room_on_a_device_for_all_else_there(use: Use) -> None:
    """Keys and values, and a pass's pairs, included: the reserve of a tenth stays."""
    spec = hf_spec(describe_config(SMALL_QWEN3_MOE, ComputeDtype.FP32), SMALL_QWEN3_MOE)
    run = replace(load(TrainConfig, None, {"data.batch_size": 2}), model=spec)
    setting = Setting(
        config=run, model=spec.architecture, device=DeviceKind.CUDA, usage=usage_of(spec, use, rank=4)
    )
    taken = capacity(setting)
    each = taken.divided.slots.weight_bytes + (taken.divided.pairs.weight_bytes if taken.divided.pairs else 0)
    memory = (taken.total(Tier.DEVICE) + 3 * each) * 10 // 9 + 2
    filled = capacity(replace(setting, device_memory=memory))
    assert filled.divided.slots.weights == taken.divided.slots.weights + 3
    assert filled.total(Tier.DEVICE) <= memory - memory // 10 < filled.total(Tier.DEVICE) + each


def test_layer_order_of_pairs() -> None:
    """A layer's pairs have gradients for each micro-batch; AUTO weighs the orders of the use that the run has."""
    lora = LoraConfig(rank=4)
    spec = hf_spec(describe_config(SMALL_QWEN3_MOE, ComputeDtype.FP32), SMALL_QWEN3_MOE, lora=lora)
    settings = {"data.batch_size": 2, "data.micro_batches": 3, "links.disk.bandwidth": "1KiB"}
    run = replace(load(TrainConfig, None, settings), model=spec, lora=lora)
    run = replace(run, host_budget=least_host_budget(run, DeviceKind.CPU))
    choice = choose_order(run)
    assert choice.value is MicroOrder.LAYER
    assert choice.facts["layer"].moved_bytes < choice.facts["micro"].moved_bytes
    pairs = pair_schema(run)
    for config, gradients in ((run, 1), (in_order(run, choice), 3)):
        cost = fixed_cost(config, 0, units=spec.architecture.units, text=0)
        assert cost.pairs == 4 * (1 + gradients) * pairs.numel * 8
        setting = Setting(config=config, model=spec.architecture, usage=usage_of(spec, Use.LORA, rank=4))
        assert capacity(setting).term("pairs of a pass").nbytes == cost.pairs
