"""Gradients summed over replicas: the order of completion, and stores that step to the same bits."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launcher import Ranks
from torch import Tensor

from tierstore._native import HugePages
from tierstore.errors import ConfigError
from tierstore.parallel import Mesh, RankEnvironment, RankGroup, Work
from tierstore.prefetch import PredictorName, StepTiming, TieredExperts, make_predictor
from tierstore.prefetch.gradients import ReplicaSums
from tierstore.prefetch.plan import group_order
from tierstore.prefetch.schedule import Schedule
from tierstore.stats import Cause, StallLedger, Tier
from tierstore.store import AdamWConfig, ParameterStore, RecordSchema, StoreConfig
from tierstore.store import Group as Sections
from tierstore.store.format import COMMITTED_GROUPS
from tierstore.tiers import DeviceSlots, open_device_tier

NUMEL, LAYER, FIRST, EXPERTS = 1024, 1, 4, 6
HOST_BUDGET = 3 * 16 * NUMEL  # three experts with their gradients: backward passes take several groups


class _Doubling(RankGroup):
    """Two ranks of which the other has the same gradients."""

    def __init__(self) -> None:
        super().__init__(0, (0, 1), {})
        self.messages: list[int] = []

    def all_reduce(self, *tensors: Tensor, **options: Any) -> Work:
        self.messages.append(len(tensors))

        def finish() -> None:
            for tensor in tensors:
                tensor.mul_(2)

        return Work(finish=finish)


@pytest.mark.parametrize(
    ("slots", "numel", "messages", "late"),
    [
        (1, 8, [1, 1, 1, 1, 1], 0),
        (2, 8, [1, 1, 1, 1, 1], 1),
        (3, 8, [1, 1, 1, 1, 1], 1),
        (4, 8, [2, 2, 1], 3),
        (4, 300_000, [1, 1, 1, 1, 1], 1),  # more than a message should carry: one by one
    ],
)
def test_what_travels_together(slots: int, numel: int, messages: list[int], late: int) -> None:
    group = _Doubling()
    sums = ReplicaSums(group, DeviceSlots(numel, torch.float32, gradients=slots), ledger=StallLedger())
    gradients = [torch.full((numel,), float(i)) for i in range(5)]
    done: list[int] = []
    most = 0
    for i, gradient in enumerate(gradients):
        sums.add(gradient, lambda i=i: done.append(i), layer=0)
        most = max(most, i + 1 - len(done))
    sums.flush(layer=0)
    assert done == list(range(5))
    assert group.messages == messages
    assert [gradient[0].item() for gradient in gradients] == [0, 2, 4, 6, 8]
    # What waits while the next one is computed leaves it a slot.
    assert most == late <= max(slots - 1, 0)


def test_alone_they_are_complete_at_once() -> None:
    sums = ReplicaSums(RankGroup.alone(), DeviceSlots(8, torch.float32), ledger=StallLedger())
    done: list[int] = []
    gradient = torch.ones(8)
    sums.add(gradient, lambda: done.append(1), layer=0)
    assert done == [1]
    sums.flush(layer=0)
    assert gradient.tolist() == [1.0] * 8


def _gradient(rank: int, step: int, micro: int, expert: int) -> Tensor:
    generator = torch.Generator().manual_seed(((rank * 7 + step) * 7 + micro) * 7 + expert)
    return torch.randn(NUMEL, generator=generator)


def _train(mesh: Mesh, path: Path, timing: StepTiming, slots: int, ranks: int) -> dict[str, Any]:
    """Three steps of two micro-batches on a store of this rank's; ``ranks`` replicas' gradients are added up here
    where there is only one process.
    """
    with ExitStack() as stack:
        opened = ParameterStore.create(
            path / f"{mesh.world.size}.{mesh.world.rank}.{slots}",
            [RecordSchema("expert", NUMEL)],
            StoreConfig(host_budget=HOST_BUDGET, group_order=group_order(replicas=mesh.replicas, chunks=1)),
            adamw=AdamWConfig(),
        )
        stack.callback(opened.close)
        keys = [f"expert.{FIRST + i}" for i in range(EXPERTS)]
        for i, key in enumerate(keys):
            weight = np.random.default_rng(i).normal(size=NUMEL).astype(np.float32)
            opened.register(key, "expert", layer=LAYER, weight=weight)
        store = opened.core
        store.reserve()
        store.reserve_scratch("expert")
        opened.commit()
        shape = DeviceSlots(NUMEL, torch.float32, weights=2, gradients=slots)
        tier = open_device_tier(store.engine, shape, torch.device("cpu"), HugePages.OFF)
        stack.callback(tier.close)
        ledger = StallLedger()
        experts = TieredExperts(
            store,
            tier,
            {LAYER: {FIRST + i: store.record(key) for i, key in enumerate(keys)}},
            timing=timing,
            predictor=make_predictor(PredictorName.NONE, range(FIRST, FIRST + EXPERTS)),
            schedule=Schedule.of_layers([LAYER], depth=1),
            ledger=ledger,
            replicas=mesh.replica,
        )
        squares = [_step(mesh, opened, experts, timing, step, ranks) for step in range(3)]
        experts.gradients.step_pending()
        opened.commit()
        with opened.fetch(keys, [Sections.WEIGHTS]) as lease:
            weights = [torch.from_numpy(lease[key].copy("weight").copy()) for key in keys]
        stalls = {(stall.key.tier, stall.key.cause) for stall in ledger.rows()}
    return {"weights": weights, "squares": squares, "stalls": stalls}


def _step(
    mesh: Mesh, store: ParameterStore, experts: TieredExperts, timing: StepTiming, step: int, ranks: int
) -> float:
    with store.optimizer_step(0.01):
        for micro in range(2):
            asked = [e for e in range(FIRST, FIRST + EXPERTS) if (e + step + micro) % 4]
            experts.begin_micro(index=micro, count=2)
            for _ in experts.forward(LAYER, asked):
                pass
            # Replicas need not have the same experts in memory when they begin.
            with store.fetch([f"expert.{FIRST + mesh.world.rank % EXPERTS}"], list(COMMITTED_GROUPS)):
                pass
            for lease in experts.backward(LAYER, asked):
                if mesh.world.size > 1:
                    lease.gradients.copy_(_gradient(mesh.world.rank, step, micro, lease.expert))
                else:
                    lease.gradients.copy_(_gradient(0, step, micro, lease.expert))
                    for rank in range(1, ranks):
                        lease.gradients.add_(_gradient(rank, step, micro, lease.expert))
        squares = experts.gradients.sum_of_squares()
        if timing is StepTiming.DEFERRED:
            experts.gradients.apply(0.5)
    return squares


@pytest.mark.parametrize("timing", list(StepTiming))
@pytest.mark.parametrize("size", [2, 4])
def test_replicas_step_as_one_store_with_all_gradients(
    ranks: Ranks, tmp_path: Path, size: int, timing: StepTiming
) -> None:
    one = _train(Mesh.alone(RankEnvironment(), torch.device("cpu")), tmp_path, timing, 2, size)
    for slots in (1, 2, 5):
        for found in ranks.run(size, _train, tmp_path, timing, slots, size, expert=1):
            assert found["squares"] == one["squares"]
            for ours, theirs in zip(found["weights"], one["weights"], strict=True):
                assert torch.equal(ours, theirs)
            assert (Tier.RANKS, Cause.REDUCE) in found["stalls"]


def test_replicas_need_a_store_whose_groups_are_in_key_order(tmp_path: Path) -> None:
    schema, budget = RecordSchema("expert", NUMEL), StoreConfig(host_budget=HOST_BUDGET)
    with ParameterStore.create(tmp_path / "store", [schema], budget, adamw=AdamWConfig()) as store:
        tier = open_device_tier(
            store.core.engine, DeviceSlots(NUMEL, torch.float32), torch.device("cpu"), HugePages.OFF
        )
        with pytest.raises(ConfigError, match=r"GroupOrder\.KEY"):
            TieredExperts(
                store.core,
                tier,
                {},
                timing=StepTiming.IMMEDIATE,
                predictor=make_predictor(PredictorName.NONE, range(1)),
                schedule=Schedule.of_layers([LAYER], depth=1),
                ledger=StallLedger(),
                replicas=_Doubling(),
            )
        tier.close()
