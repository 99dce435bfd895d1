"""Whether a plan fits, and the shortest way to make it fit.

The shortest way has the fewest changes; among equals, the one whose gravest change comes first in ``KNOBS``, which go from
harmless to grave: the same bits, sums in another order, more ranks, other rounding, another model. Each knob is turned only
as far as necessary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from tierstore.errors import BudgetError
from tierstore.model.config import CheckpointActivations, ComputeDtype, ModelConfig
from tierstore.moe.config import SaveActivations
from tierstore.plan.capacity import Capacity, Setting, capacity
from tierstore.stats import Tier
from tierstore.store.format import MomentFormat
from tierstore.tiers.slots import DeviceKind
from tierstore.train.config import TrainConfig
from tierstore.train.files import MicroOrder
from tierstore.units import format_bytes

_MIB = 1 << 20
_MOST_CHANGES = 3


class Effect(StrEnum):
    """The effect of a change on the computed result."""

    SAME_BITS = "the same bits"
    SUMS = "sums in another order"
    LAYOUT = "another number of ranks"
    ROUNDING = "other rounding"
    MODEL = "another model"


@dataclass(frozen=True)
class Limits:
    """Bytes that one rank may take. ``device``: of device memory; None: not limited. ``sharing``: ranks on one machine."""

    memory: int
    disk: int
    device: int | None = None
    sharing: int = 1


@dataclass(frozen=True)
class Shortfall:
    """``place`` has ``limit`` bytes, but ``needed`` are needed."""

    place: str
    needed: int
    limit: int

    def __str__(self) -> str:
        return f"{self.place}: {format_bytes(self.needed)} needed, {format_bytes(self.limit)} available"


@dataclass(frozen=True)
class Verdict:
    """Whether a setting fits its limits. ``capacity`` is None if the budgets are too small to start a run."""

    capacity: Capacity | None
    shortfalls: tuple[Shortfall, ...]

    @property
    def fits(self) -> bool:
        return not self.shortfalls


@dataclass(frozen=True)
class Change:
    """One change of a setting: its description, its effect, and the changed setting."""

    text: str
    effect: Effect
    setting: Setting


@dataclass(frozen=True)
class Remedy:
    """Changes that together make a setting fit."""

    changes: tuple[Change, ...]

    @property
    def setting(self) -> Setting:
        return self.changes[-1].setting


@dataclass(frozen=True)
class Hardware:
    """The smallest machine on which a setting fits. ``changes``: the smallest budgets that it can start with.

    ``memory`` and ``disk``: bytes for all ranks of the machine. ``device``: bytes of one device, None without one.
    ``shortfalls``: what a rank lacks under the limits.
    """

    changes: tuple[Change, ...]
    shortfalls: tuple[Shortfall, ...]
    memory: int
    disk: int
    device: int | None


def judge(setting: Setting, limits: Limits) -> Verdict:
    """Compare what ``setting`` takes with ``limits``."""
    try:
        taken = capacity(setting)
    except BudgetError:
        least = setting.least_host_budget
        if setting.config.host_budget < least:
            return Verdict(None, (Shortfall("host_budget", least, setting.config.host_budget),))
        return Verdict(
            None,
            (Shortfall("device_budget", _least_device_budget(setting), setting.config.device_budget),),
        )
    memory, disk, device = totals(setting, taken)
    held = [("memory", memory, limits.memory), ("disk", disk, limits.disk)]
    if device is not None and limits.device is not None:
        held.append(("device memory", device, limits.device))
    return Verdict(taken, tuple(Shortfall(*item) for item in held if item[1] > item[2]))


def totals(setting: Setting, taken: Capacity) -> tuple[int, int, int | None]:
    """Bytes of host memory, disk and device memory that one rank takes; device None: it shares the host's memory."""
    if setting.device is DeviceKind.CPU:
        return taken.total(Tier.HOST, Tier.DEVICE), taken.total(Tier.NVME), None
    return taken.total(Tier.HOST), taken.total(Tier.NVME), taken.total(Tier.DEVICE)


def _least_device_budget(setting: Setting) -> int:
    unlimited = replace(setting, config=replace(setting.config, device_budget=1 << 62, host_budget=1 << 62))
    slots = capacity(unlimited).divided.slots
    return slots.weight_bytes + slots.gradient_bytes


def shortest_remedy(setting: Setting, limits: Limits) -> Remedy | None:
    """The shortest way to make ``setting`` fit; None if no set of up to three changes does."""
    for count in range(1, _MOST_CHANGES + 1):
        choices = itertools.combinations(range(len(KNOBS)), count)
        for choice in sorted(choices, key=lambda places: places[::-1]):
            knobs = [KNOBS[place] for place in choice]
            # If all knobs turned fully do not make it fit, no smaller turn does.
            furthest = _furthest(setting, limits, knobs)
            if furthest is None or not judge(furthest, limits).fits:
                continue
            for remedy in _turned(setting, limits, knobs):
                if judge(remedy.setting, limits).fits:
                    return remedy
    return None


def hardware_for(setting: Setting, limits: Limits) -> Hardware:
    """The machine that ``setting`` needs with the smallest budgets that it can start with, and what ``limits`` lack."""
    changes: list[Change] = []
    least = setting.least_host_budget
    if setting.config.host_budget != least:
        changes.append(_with_host_budget(setting, least))
        setting = changes[-1].setting
    for change in _device_budget(setting, limits):
        changes.append(change)
        setting = change.setting
    memory, disk, device = totals(setting, capacity(setting))
    return Hardware(
        changes=tuple(changes),
        shortfalls=judge(setting, limits).shortfalls,
        memory=memory * limits.sharing,
        disk=disk * limits.sharing,
        device=device,
    )


def _furthest(setting: Setting, limits: Limits, knobs: Sequence[Knob]) -> Setting | None:
    for knob in reversed(knobs):
        changes = list(knob(setting, limits))
        if not changes:
            return None
        setting = changes[-1].setting
    return setting


Knob = Callable[[Setting, Limits], Iterator[Change]]


def _turned(setting: Setting, limits: Limits, knobs: Sequence[Knob]) -> Iterator[Remedy]:
    """Every way to turn ``knobs``. The first, which may be the host budget, is turned last: it closes the remaining gap."""
    first, *others = knobs
    stack = (
        [((), setting)] if not others else [(r.changes, r.setting) for r in _turned(setting, limits, others)]
    )
    for changes, reached in stack:
        for change in first(reached, limits):
            yield Remedy((*changes, change))


def _host_budget(setting: Setting, limits: Limits) -> Iterator[Change]:
    least = setting.least_host_budget
    verdict = judge(setting, limits)
    if verdict.capacity is None:
        wanted = least
    else:
        over = max((s.needed - s.limit for s in verdict.shortfalls if s.place == "memory"), default=0)
        if over == 0:
            return
        wanted = max((setting.config.host_budget - over) // _MIB * _MIB, least)
        if wanted >= setting.config.host_budget:
            return
    yield _with_host_budget(setting, wanted)


def _with_host_budget(setting: Setting, nbytes: int) -> Change:
    size = f"{nbytes // _MIB}MiB" if nbytes % _MIB == 0 else str(nbytes)
    return _configured(setting, f'host_budget = "{size}"', Effect.SAME_BITS, host_budget=nbytes)


def _device_budget(setting: Setting, limits: Limits) -> Iterator[Change]:
    verdict = judge(setting, limits)
    if verdict.shortfalls and verdict.shortfalls[0].place == "device_budget":
        wanted = verdict.shortfalls[0].needed
        yield _configured(setting, f"device_budget = {wanted}", Effect.SAME_BITS, device_budget=wanted)


def _retain(setting: Setting, limits: Limits) -> Iterator[Change]:
    for retain in range(setting.config.retain - 1, -1, -1):
        every = setting.config.snapshot_every if retain else 0
        yield _configured(
            setting, f"retain = {retain}", Effect.SAME_BITS, retain=retain, snapshot_every=every
        )


def _boundary_budget(setting: Setting, limits: Limits) -> Iterator[Change]:
    kept = setting.boundaries
    if kept is None:
        return
    wanted = setting.together * kept.slot_bytes
    if wanted < kept.memory_bytes:
        yield _configured(setting, f"boundary_budget = {wanted}", Effect.SAME_BITS, boundary_budget=wanted)


def _micro_order(setting: Setting, limits: Limits) -> Iterator[Change]:
    data = setting.config.data
    if data.layer_major:
        micro = replace(data, micro_order=MicroOrder.MICRO)
        yield _configured(setting, 'data.micro_order = "micro"', Effect.SAME_BITS, data=micro)


def _micro_batches(setting: Setting, limits: Limits) -> Iterator[Change]:
    data = setting.config.data
    parts = 2
    while data.batch_size % (parts * setting.ranks) == 0:
        cut = replace(data, batch_size=data.batch_size // parts, micro_batches=data.micro_batches * parts)
        text = f"data.micro_batches = {cut.micro_batches}, data.batch_size = {cut.batch_size}"
        yield _configured(setting, text, Effect.SUMS, data=cut)
        parts *= 2


def _ranks(setting: Setting, limits: Limits) -> Iterator[Change]:
    count = setting.ranks * 2
    while count <= setting.model.experts and setting.config.data.batch_size % count == 0:
        yield Change(
            f"--ranks {count}, each with the same limits",
            Effect.LAYOUT,
            replace(setting, ranks=count),
        )
        count *= 2


def _moments(setting: Setting, limits: Limits) -> Iterator[Change]:
    if setting.usage.frozen:  # pairs are small, and their store keeps its format
        return
    formats, adamw = list(MomentFormat), setting.config.adamw
    for moments in formats[formats.index(adamw.moments) + 1 :]:
        text = f'adamw.moments = "{moments.value}"'
        yield _configured(setting, text, Effect.ROUNDING, adamw=replace(adamw, moments=moments))


def _switched(name: str, value: StrEnum, effect: Effect) -> Knob:
    """A knob that sets ``model.name`` to ``value``."""

    def turn(setting: Setting, limits: Limits) -> Iterator[Change]:
        if getattr(setting.config.model, name) is not value:
            section = "model" if isinstance(setting.config.model, ModelConfig) else "finetune"
            yield from _modelled(setting, f'{section}.{name} = "{value.value}"', effect, name, value)

    return turn


def _halved(name: str, least: Callable[[Setting], int]) -> Knob:
    """A knob that halves ``model.name``, down to ``least``, where the model may change."""

    def turn(setting: Setting, limits: Limits) -> Iterator[Change]:
        value = getattr(setting.config.model, name, 0) // 2
        while value >= least(setting) and _own(setting):
            yield from _modelled(setting, f"model.{name} = {value}", Effect.MODEL, name, value)
            value //= 2

    return turn


KNOBS: tuple[Knob, ...] = (
    _host_budget,
    _device_budget,
    _retain,
    _boundary_budget,
    _micro_order,
    _switched("expert_activations", SaveActivations.RECOMPUTE, Effect.SAME_BITS),
    _switched("checkpoint_activations", CheckpointActivations.BLOCK, Effect.SAME_BITS),
    _micro_batches,
    _ranks,
    _moments,
    _switched("compute_dtype", ComputeDtype.BF16, Effect.ROUNDING),
    _halved("d_ff", lambda setting: 64),
    _halved("experts", lambda setting: max(setting.model.top_k, 2)),
)


def _own(setting: Setting) -> bool:
    """Whether the counts are the configured model's; a preset's dimensions cannot change."""
    return setting.model == setting.config.model.architecture


def _configured(setting: Setting, text: str, effect: Effect, **fields: object) -> Change:
    config: TrainConfig = replace(setting.config, **fields)  # type: ignore[arg-type]
    return Change(text, effect, replace(setting, config=config))


def _modelled(setting: Setting, text: str, effect: Effect, name: str, value: object) -> Iterator[Change]:
    model = setting.config.model.vary(name, value)
    if model is not None:
        counts = model.architecture if _own(setting) else setting.model
        config = replace(setting.config, model=model)
        yield Change(text, effect, replace(setting, config=config, model=counts))
