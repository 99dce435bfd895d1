"""A store of small experts, and device slots over it."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from tierstore._native import HugePages
from tierstore.cache.config import CacheConfig
from tierstore.machine_profile import Cost
from tierstore.plan.papers import ExpertMemorySizes, ServedLayers
from tierstore.prefetch import PredictorName, Schedule, make_predictor
from tierstore.prefetch.device_cache import DeviceCache
from tierstore.prefetch.experts import FrozenExperts
from tierstore.serve.config import ExpertMemory
from tierstore.serve.experts import MemoryChooser, Ring, ServingPhase, SlottedExperts
from tierstore.stats import StallLedger
from tierstore.store import NewRecord, ParameterStore, RecordSchema, StoreConfig, Training, WeightFormat
from tierstore.store.config import StoreAccess
from tierstore.store.core import StoreCore
from tierstore.tiers import DeviceSlots, HostDeviceTier

NUMEL, PAGE = 2048, 4096  # one frozen record is a page


def rounded(layer: int, expert: int) -> torch.Tensor:
    return torch.from_numpy(initial(layer, expert)).bfloat16()


def initial(layer: int, expert: int) -> np.ndarray:
    return np.random.default_rng([layer, expert]).normal(size=NUMEL).astype(np.float32)


def make_store(directory: Path, layers: Sequence[int], experts: int) -> None:
    """A store of frozen experts."""
    schema = RecordSchema("expert", NUMEL, WeightFormat.BF16, training=Training.FROZEN)
    config = StoreConfig(host_budget=len(layers) * experts * PAGE)
    with ParameterStore.create(directory, [schema], config) as store:
        store.register_many(
            NewRecord(f"{layer}.{expert}", "expert", layer, initial(layer, expert))
            for layer in layers
            for expert in range(experts)
        )
        store.commit()


@dataclass
class Slotted:
    """``experts`` over ``store``."""

    store: StoreCore
    slots: DeviceCache
    ring: Ring | None
    experts: SlottedExperts
    ledger: StallLedger
    said: list[str] = field(default_factory=list)

    def read(self, layer: int, asked: Iterable[int]) -> list[int]:
        """The order in which a pass gets its experts, whose weights are compared with what the store was made of."""
        order = []
        for lease in self.experts.forward(layer, tuple(asked)):
            assert torch.equal(lease.weights, rounded(layer, lease.expert)), (layer, lease.expert)
            order.append(lease.expert)
        return order

    def copied_by(self, layer: int, *asked: int) -> int:
        """How many experts are copied to the device by a pass of ``layer``."""
        before = self.slots.copies
        assert sorted(self.read(layer, asked)) == list(asked)
        return self.slots.copies - before

    def begin(self, phase: ServingPhase = ServingPhase.DECODE, tokens: int = 1) -> None:
        self.experts.begin(phase, tokens)


@contextmanager
def open_slotted(
    directory: Path,
    layers: Sequence[int],
    experts: int,
    *,
    slots: int,
    ring: int,
    memory: ExpertMemory = ExpertMemory.AUTO,
    host: int = 1000,
    top_k: int = 2,
    depth: int = 1,
    predictor: PredictorName = PredictorName.HISTORY,
    policy: str = "lru",
    copy_s: float = 0.0,
    trace: Path | None = None,
) -> Iterator[Slotted]:
    """The experts of the store in ``directory`` in so many device ``slots``, with a ring of ``ring`` layers (0: none) and
    room for ``host`` experts in the host cache. ``copy_s``: what the choice between the two takes a copy for.
    """
    total = len(layers) * experts
    host = min(host, total)
    config = StoreConfig(
        host_budget=host * PAGE, lookahead=host * PAGE // 2, cache=CacheConfig(policy=policy)
    )
    with ExitStack() as stack:
        opened = stack.enter_context(
            ParameterStore.open(directory, config, access=StoreAccess.READ, trace=trace)
        )
        store = opened.core
        device = HostDeviceTier(
            store.engine, DeviceSlots(NUMEL, torch.bfloat16, weights=slots, gradients=0), HugePages.OFF
        )
        stack.callback(device.close)
        ledger = StallLedger()
        records = {layer: {e: store.record(f"{layer}.{e}") for e in range(experts)} for layer in layers}
        guessing = make_predictor(predictor, range(experts))
        frozen = FrozenExperts(
            store,
            device,
            records,
            predictor=guessing,
            schedule=Schedule.of_layers(tuple(layers), depth=depth),
            ledger=ledger,
        )
        turning = None
        if ring:
            turning = Ring(frozen, layers, experts, count=ring, done=store.engine.done, depth=depth)
        chooser = MemoryChooser(
            asked=memory,
            model=ServedLayers(
                layers=len(layers), experts=experts, top_k=top_k, expert_numel=NUMEL, expert_bytes=PAGE
            ),
            sizes=ExpertMemorySizes(device=slots, host=host, ring_layers=ring),
            copy=Cost(copy_s, math.inf),
        )
        said: list[str] = []
        served = SlottedExperts(
            frozen, store.cache.residency, turning, predictor=guessing, chooser=chooser, say=said.append
        )
        made = Slotted(store, frozen.walk.slots, turning, served, ledger, said)
        yield made
