"""A store of two layers of four small experts, and an expert source over it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from tierstore._native import Buffer, GroupOrder, HugePages
from tierstore.cache import CacheConfig
from tierstore.model.config import ComputeDtype
from tierstore.model.store_schema import expert_record
from tierstore.prefetch import PredictorName, Schedule, StepTiming, TieredExperts, make_predictor
from tierstore.stats import StallLedger
from tierstore.store import AdamWConfig, Group, Inactive, ParameterStore, StoreConfig
from tierstore.store.core import StoreCore
from tierstore.tiers import DeviceSlots, HostDeviceTier, WeightLoads
from tierstore.tiers.slots import SlotGradient

NUMEL, LAYERS, EXPERTS = 1024, (0, 2), 4
RECORD = 4 * 4096 + 4096  # weights, two moments, gradient (4,096 bytes each), and as much again to spare


class CountingTier(HostDeviceTier):
    """Counts the copies of weights to its slots."""

    uploads = 0

    def load(self, slot: int, source: Buffer, after: Sequence[int]) -> int:
        self.uploads += 1
        return super().load(slot, source, after)


@dataclass
class Rig:
    """``experts`` over ``store``, the core of ``opened``, driven as the trainer drives it."""

    opened: ParameterStore
    store: StoreCore
    experts: TieredExperts
    ledger: StallLedger
    tier: CountingTier

    def forward(self, layer: int, *experts: int) -> dict[int, torch.Tensor]:
        """The weights that a forward pass of ``layer`` sees."""
        return {lease.expert: lease.weights.clone() for lease in self.experts.forward(layer, experts)}

    def backward(self, layer: int, gradients: Mapping[int, torch.Tensor]) -> None:
        for lease in self.experts.backward(layer, sorted(gradients)):
            lease.gradients.copy_(gradients[lease.expert])

    def weight(self, layer: int, expert: int) -> torch.Tensor:
        key = f"{layer}.{expert}"
        with self.opened.fetch([key], [Group.WEIGHTS]) as lease:
            return torch.from_numpy(lease[key].copy("weight").copy())

    def initial(self, layer: int, expert: int) -> torch.Tensor:
        return torch.from_numpy(initial(layer, expert))


def initial(layer: int, expert: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.random.default_rng([layer, expert]).normal(size=NUMEL).astype(np.float32)


MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[MakeRig]:
    """Makes rigs over stores of their own, with room for ``room`` whole records. ``slots``: of a device to which weights are
    copied; None: they are computed with in the host cache.
    """
    with ExitStack() as stack:
        made = 0

        def make(
            timing: StepTiming = StepTiming.IMMEDIATE,
            *,
            room: float = 8,
            depth: int = 0,
            predictor: PredictorName = PredictorName.NONE,
            lookahead: int = 0,
            inactive: Inactive = Inactive.EXACT,
            slots: int | None = None,
            cache: CacheConfig | None = None,
            order: GroupOrder = GroupOrder.RESIDENT_FIRST,
            trace: Path | None = None,
            compute: ComputeDtype = ComputeDtype.FP32,
            gradient: SlotGradient = SlotGradient.SUM,
        ) -> Rig:
            nonlocal made
            made += 1
            opened = ParameterStore.create(
                tmp_path / str(made),
                [expert_record(NUMEL, compute)],
                StoreConfig(
                    host_budget=int(room * RECORD),
                    lookahead=lookahead,
                    cache=cache or CacheConfig(),
                    group_order=order,
                ),
                adamw=AdamWConfig(inactive=inactive),
                trace=trace,
            )
            stack.callback(opened.close)
            for layer in LAYERS:
                for expert in range(EXPERTS):
                    opened.register(f"{layer}.{expert}", "expert", layer=layer, weight=initial(layer, expert))
            store = opened.core
            store.reserve()
            store.reserve_scratch("expert")
            store.committer.commit()
            tier = CountingTier(
                store.engine,
                DeviceSlots(NUMEL, compute.torch, weights=slots or 2, gradients=2, gradient=gradient),
                HugePages.OFF,
                WeightLoads.IN_PLACE if slots is None else WeightLoads.COPIED,
            )
            stack.callback(tier.close)
            ledger = StallLedger()
            records = {
                layer: {expert: store.record(f"{layer}.{expert}") for expert in range(EXPERTS)}
                for layer in LAYERS
            }
            experts = TieredExperts(
                store,
                tier,
                records,
                timing=timing,
                predictor=make_predictor(predictor, range(EXPERTS)),
                schedule=Schedule.of_layers(LAYERS, depth=depth),
                ledger=ledger,
            )
            return Rig(opened, store, experts, ledger, tier)

        yield make
