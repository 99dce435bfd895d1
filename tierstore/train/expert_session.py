"""Experts of any MoE model in a store: an expert source for plain torch modules, which keep the dense parameters.

::

    with open_experts("runs/e", shape, layers=range(2), experts=16, host_budget="1GiB") as tiered:
        for batch in loader:
            with tiered.step(lr=1e-3) as step:
                model(batch).backward()             # its layers call tiered.compute(layer, x, chosen, weights)
                step.clip(model.parameters(), 1.0)  # dense and expert gradients together
            optimizer.step()                        # the dense ones

Experts are fp32, flat in the order of ``ExpertShape``. They do not change before the end of a step.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tierstore._native import HugePages
from tierstore.accelerator import has_own_memory, pinned, read
from tierstore.capabilities import Capability
from tierstore.errors import BudgetError, StoreFormatError
from tierstore.model.store_schema import EXPERT_SCHEMA, expert_key
from tierstore.moe.computing import ExpertPass, Weighting, compute_experts
from tierstore.moe.config import ExpertShape, SaveActivations
from tierstore.moe.dispatch import count_experts, dispatch
from tierstore.moe.exchange import LocalRows
from tierstore.moe.experts import initial_expert
from tierstore.moe.source import ExpertLease
from tierstore.prefetch import Schedule, StepTiming, TieredExperts, make_predictor
from tierstore.prefetch.device_cache import find_records
from tierstore.prefetch.predictor import PredictorName
from tierstore.stats import StallLedger
from tierstore.store.adamw import AdamWConfig
from tierstore.store.config import StoreConfig
from tierstore.store.disk.home import IDENTITY
from tierstore.store.format import RecordSchema
from tierstore.store.opening import minimum_host_budget
from tierstore.store.parameter_store import ParameterStore
from tierstore.store.registering import NewRecord, register_many
from tierstore.tiers import DeviceSlots, WeightLoads, open_device_tier
from tierstore.train.stepping import NonFiniteError, StepError, clip_scale
from tierstore.units import parse_size

_SLOTS = 2
#: The entry of a commit's state that describes the store's experts.
_DESCRIPTION = "experts"


@contextlib.contextmanager
def open_experts(
    store: Path | str,
    shape: ExpertShape,
    *,
    layers: Iterable[int],
    experts: int,
    host_budget: int | str = "1GiB",
    adamw: AdamWConfig | None = None,
    first_weights: Callable[[int, int], npt.NDArray[np.float32]] | None = None,
    device: torch.device | str = "cpu",
    device_budget: int | str = 0,
) -> Iterator[ExpertSession]:
    """Opens the experts in ``store`` at their last commit, or creates them: ``experts`` of ``shape`` in each of
    ``layers``, with ``first_weights(layer, expert)`` or random ones. ``device`` computes; on the CPU ``host_budget``
    includes its slots. An accelerator keeps as many experts as ``device_budget`` holds (0: two, for overlap).

    Raises StoreFormatError for a store of other experts, BudgetError, StoreError, OSError.
    """
    store, layers, device = Path(store), tuple(layers), torch.device(device)
    adamw = adamw or AdamWConfig()
    schema = RecordSchema(EXPERT_SCHEMA, shape.numel, moments=adamw.moments)
    slots = DeviceSlots(shape.numel, torch.float32, _SLOTS, _SLOTS)
    if kept := parse_size(device_budget, name="device_budget"):
        if not has_own_memory(device):
            raise BudgetError(
                f"device_budget: a {device.type} computes with experts where the host cache has them"
            )
        count = slots.weights + (kept - slots.nbytes) // slots.weight_bytes
        if count < 1:
            raise BudgetError(
                f"device_budget: {kept} bytes cannot hold an expert and {_SLOTS} gradients; the minimum is "
                f"{replace(slots, weights=1).nbytes} bytes"
            )
        slots = replace(slots, weights=min(count, len(layers) * experts))
    budget = parse_size(host_budget, name="host_budget") - (0 if has_own_memory(device) else slots.nbytes)
    spare = max(0, budget - minimum_host_budget([schema], None, len(layers)))
    config = StoreConfig(host_budget=budget, lookahead=min(int(budget * 0.45), spare), layers=layers)
    described = _description(shape, layers, experts)

    def initial(layer: int, expert: int) -> npt.NDArray[np.float32]:
        made = initial_expert(shape, seed=0, layer=layer, expert=expert, layers=len(layers))
        return np.asarray(made.numpy())

    opened = (
        ParameterStore.open(store, config, adamw=adamw)
        if (store / IDENTITY).exists()
        else ParameterStore.create(store, [schema], config, adamw=adamw)
    )
    with opened, contextlib.ExitStack() as stack:
        core = opened.core
        if not core.records:  # new, or created by a process that was killed before its first commit
            first = first_weights or initial
            core.reserve({EXPERT_SCHEMA: len(layers) * experts})
            keys = ((layer, expert) for layer in layers for expert in range(experts))
            register_many(
                core,
                (NewRecord(expert_key(*key), EXPERT_SCHEMA, key[0], partial(first, *key)) for key in keys),
            )
            opened.commit({_DESCRIPTION: described})
        else:
            _check(store, opened.last_commit.state.get(_DESCRIPTION, described), described)
            core.reserve()
        core.reserve_scratch(EXPERT_SCHEMA)
        records = find_records(core, layers, range(experts), expert_key)
        _check_schema(store, shape, opened.info(expert_key(layers[0], 0)).schema, expected=schema)
        stack.enter_context(pinned(core.arena, device, Capability.AUTO))
        tier = open_device_tier(core.engine, slots, device, HugePages.AUTO, WeightLoads.IN_PLACE)
        stack.callback(tier.close)
        source = TieredExperts(
            core,
            tier,
            records,
            timing=StepTiming.DEFERRED,
            predictor=make_predictor(PredictorName.HISTORY, range(experts)),
            schedule=Schedule.of_layers(layers, depth=1),
            ledger=StallLedger(),
        )
        yield ExpertSession(opened, source, shape, experts, described, device)


def _description(shape: ExpertShape, layers: Sequence[int], experts: int) -> bytes:
    """Describes the store's experts: experts of another shape may have the same number of parameters."""
    named = {key: getattr(value, "value", value) for key, value in asdict(shape).items()}
    return json.dumps({"shape": named, "layers": sorted(layers), "experts": experts}, sort_keys=True).encode()


def _check(store: Path, found: bytes, expected: bytes) -> None:
    """Raises StoreFormatError naming the entry of ``found`` that differs from ``expected``."""
    held, asked = json.loads(found), json.loads(expected)
    for name, value in asked.items():
        if held.get(name) != value:
            raise StoreFormatError(
                f"{store}: {name}: the store has {held.get(name)}, and {value} is requested"
            )


def _check_schema(store: Path, shape: ExpertShape, held: RecordSchema, *, expected: RecordSchema) -> None:
    """Raises StoreFormatError if the records' schema ``held`` is not ``expected``, that of experts of ``shape``."""
    if held.moments is not expected.moments:
        raise StoreFormatError(
            f"{store}: the store keeps moments as {held.moments.value}, and {expected.moments.value} is requested "
            "(AdamWConfig.moments)"
        )
    if held != expected:
        raise StoreFormatError(f"{store}: the store holds experts of another shape than {shape}")


class ExpertSession:
    """Open experts, made by ``open_experts``: the ``ExpertSource`` of the model's layers."""

    def __init__(
        self,
        store: ParameterStore,
        experts: TieredExperts,
        shape: ExpertShape,
        per_layer: int,
        description: bytes,
        device: torch.device,
    ) -> None:
        self.store = store
        self.device = device
        self._experts = experts
        self._shape = shape
        self._per_layer = per_layer
        self._description = description
        self._step: ExpertStep | None = None
        #: Layers that the current training pass has reached, forward and backward.
        self._used: set[int] = set()
        self._reached: set[int] = set()

    # Layers -------------------------------------------------------------------------------------------------

    def compute(self, layer: int, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """``y[t] = sum_k weight[t, k] * expert[t, k](x[t])``, differentiable; ``expert_TK`` is int64.

        With gradients enabled the call is part of a training pass, and raises StepError outside of a step; otherwise it
        is part of an evaluation.
        """
        if torch.is_grad_enabled():
            self._train(layer)
        elif self._pending:
            raise StepError(f"layer {layer}: an evaluation while a backward pass is due")
        else:
            self._experts.begin_evaluation()
            self._used.clear()
            self._reached.clear()
        if x_TD.device.type != self.device.type:
            raise ValueError(
                f"layer {layer}: its inputs are on {x_TD.device}, its experts on {self.device} (open_experts: device)"
            )
        (load_E,) = read(count_experts(expert_TK.reshape(-1), self._per_layer))
        plan = dispatch(expert_TK, load_E)
        rows = LocalRows(plan, plan.experts)
        call = ExpertPass(layer, self._shape, self, plan, rows, Weighting.BY_EXPERT, SaveActivations.SAVE)
        return compute_experts(x_TD, weight_TK, call)

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        """Leases for a forward pass."""
        return self._experts.forward(layer, experts)

    def backward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        """Leases with gradients. Raises StepError for a pass without a forward pass in the open step."""
        if self._step is None or layer not in self._used or layer in self._reached:
            raise StepError(f"layer {layer}: a backward pass without a forward pass in an open step")
        self._reached.add(layer)
        return self._experts.backward(layer, experts)

    @property
    def _pending(self) -> bool:
        return bool(self._used - self._reached)

    def _train(self, layer: int) -> None:
        if self._step is None:
            raise StepError(
                f"layer {layer}: a pass with gradients outside of a step; evaluate under torch.no_grad()"
            )
        if not self._pending:  # the last pass has gone back through all of its layers
            self._experts.begin_micro(index=self._step.begin_pass(), count=None)
            self._used.clear()
            self._reached.clear()
        self._used.add(layer)

    # Steps --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self, lr: float) -> Iterator[ExpertStep]:
        """One optimizer step of the experts, of any number of passes, taken at the end of the block.

        If the block raises, the last commit stands. Raises StepError if a backward pass is missing, and NonFiniteError
        for non-finite gradients that ``ExpertStep.clip`` has not found; then nothing has changed.
        """
        if self._step is not None:
            raise StepError("a step is open already: end it before beginning the next one")
        core = self.store.core
        self._used.clear()
        self._reached.clear()
        with core.failures.poisoning("a step was cut short"), core.optimizer_step(lr) as taken:
            step = self._step = ExpertStep(self._experts)
            try:
                yield step
            finally:
                self._step = None
            problem = self._problem(step)
            gradients = self._experts.gradients
            if problem is None and not step.abandoned:
                gradients.apply(step.scale)
            else:
                gradients.step_pending()  # those of the previous step
                gradients.discard()
                taken.abandon()
        if problem is not None:
            raise problem

    def _problem(self, step: ExpertStep) -> Exception | None:
        if step.abandoned:
            return None
        if not step.passes or self._pending:
            return StepError("the step ends without a backward pass of its last forward pass")
        if not math.isfinite(step.squares):
            return NonFiniteError("a gradient of an expert is not finite: the step is not taken")
        return None

    def commit(self, state: Mapping[str, bytes] | None = None) -> int:
        """Makes the experts durable, with ``state`` beside them; returns the generation. Raises StepError in a step."""
        if self._step is not None:
            raise StepError("commit: a step is open")
        self._experts.gradients.step_pending()
        return self.store.commit({**(state or {}), _DESCRIPTION: self._description})


class ExpertStep:
    """A step of experts in progress."""

    def __init__(self, experts: TieredExperts) -> None:
        self._experts = experts
        self.passes = 0
        #: The factor that gradients are multiplied by.
        self.scale = 1.0
        self.abandoned = False
        self._squares: float | None = None

    def begin_pass(self) -> int:
        """Counts a pass; returns its number. Raises StepError once the gradients have been clipped."""
        if self._squares is not None:
            raise StepError("another pass begins after the step's gradients were clipped")
        self.passes += 1
        return self.passes - 1

    @property
    def squares(self) -> float:
        """The sum of squares of the experts' gradients, after the last backward pass."""
        if self._squares is None:
            self._experts.end_passes()
            self._squares = self._experts.gradients.sum_of_squares()
        return self._squares

    def clip(self, parameters: Iterable[Tensor], max_norm: float) -> float:
        """Clips the gradients of the experts and of ``parameters`` together, as ``clip_grad_norm_`` does, after the last
        backward pass; returns their norm. If the norm is not finite, the step is abandoned and the parameters' gradients
        become None: their optimizer skips them.
        """
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        squares = self.squares
        for parameter in parameters:
            squares += float(torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)) ** 2
        norm = math.sqrt(squares) if math.isfinite(squares) else math.nan
        if not math.isfinite(norm):
            self.abandon()
            for parameter in parameters:
                parameter.grad = None
            return norm
        self.scale = clip_scale(norm, max_norm)
        for parameter in parameters if self.scale < 1.0 else ():
            assert parameter.grad is not None
            parameter.grad.mul_(self.scale)
        return norm

    def abandon(self) -> None:
        """Marks the step as not to be taken."""
        self.abandoned = True
