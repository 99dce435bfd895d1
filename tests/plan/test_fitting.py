"""Whether it fits, and the shortest way to make it fit."""

from dataclasses import replace

import pytest
from traffic_cases import Make

from tierstore.plan.capacity import Setting, capacity
from tierstore.plan.fitting import Effect, Hardware, Limits, hardware_for, judge, shortest_remedy
from tierstore.plan.presets import find_preset
from tierstore.stats import Tier
from tierstore.tiers.slots import DeviceKind
from tierstore.train.budgets import budgets

MANY = 1 << 40


def _taken(setting: Setting) -> tuple[int, int]:
    found = capacity(setting)
    return found.total(Tier.HOST, Tier.DEVICE), found.total(Tier.NVME)


def _texts(setting: Setting, limits: Limits) -> list[str]:
    remedy = shortest_remedy(setting, limits)
    assert judge(remedy.setting, limits).fits
    return [change.text for change in remedy.changes]


def test_what_fits_to_the_byte(setting: Make) -> None:
    planned = setting()
    memory, disk = _taken(planned)
    assert judge(planned, Limits(memory, disk)).fits
    less = judge(planned, Limits(memory - 1, disk - 1))
    assert [(s.place, s.needed - s.limit) for s in less.shortfalls] == [("memory", 1), ("disk", 1)]


def test_the_host_budget_gives_way_first(setting: Make) -> None:
    """3 MiB too many: it is cut by as much, to the MiB, and nothing else is touched."""
    planned = setting({"host_budget": 64 << 20})
    memory, disk = _taken(planned)
    assert _texts(planned, Limits(memory - (3 << 20), disk)) == ['host_budget = "61MiB"']


def test_each_knob_in_its_turn(setting: Make) -> None:
    """Where the budget has nothing to give: kept activations, then smaller micro-batches."""
    planned = setting({"model.seq_len": 512, "model.d_ff": 256, "host_budget": "1MiB"})
    memory, _ = _taken(planned)
    recomputed = _with(planned, "expert_activations", "recompute")
    saved = memory - _taken(recomputed)[0]
    assert saved > 2 << 20
    limit = memory - (2 << 20)
    assert _texts(planned, Limits(limit, MANY)) == ['model.expert_activations = "recompute"']
    tight = Limits(_taken(_with(planned, "checkpoint_activations", "block"))[0] - 1, MANY)
    remedy = shortest_remedy(planned, tight)
    assert {change.effect for change in remedy.changes} <= {Effect.SAME_BITS, Effect.SUMS}


def _with(setting: Setting, name: str, value: str) -> Setting:
    model = replace(setting.config.model, **{name: value})  # type: ignore[arg-type]
    return replace(setting, config=replace(setting.config, model=model))


def test_snapshots_are_given_up_for_disk(setting: Make) -> None:
    planned = setting({"retain": 3, "snapshot_every": 5})
    two_left = _taken(setting({"retain": 2}))[1]
    assert _texts(planned, Limits(MANY, two_left)) == ["retain = 2"]
    none_left = _taken(setting({"retain": 0}))[1]
    assert _texts(planned, Limits(MANY, none_left)) == ["retain = 0"]


def test_narrow_moments_before_a_smaller_model(setting: Make) -> None:
    """Only as narrow as they must be: bf16 for a quarter of the disk less, int8 for up to a half."""
    planned = setting({"model.d_model": 128, "model.d_ff": 256, "data.batch_size": 1, "host_budget": "8MiB"})
    experts = capacity(planned).term("expert extents").nbytes
    rest = _taken(planned)[1] - experts
    for share, moments in ((0.7, "bf16"), (0.52, "int8")):
        limits = Limits(MANY, rest + int(share * experts))
        remedy = shortest_remedy(planned, limits)
        assert [(change.text, change.effect) for change in remedy.changes] == [
            (f'adamw.moments = "{moments}"', Effect.ROUNDING)
        ]


def test_two_changes_where_one_is_not_enough(setting: Make) -> None:
    planned = setting({"retain": 1, "host_budget": 64 << 20})
    memory, disk = _taken(planned)
    wanted = _texts(planned, Limits(memory - (1 << 20), disk - 1))
    assert sorted(wanted) == ['host_budget = "63MiB"', "retain = 0"]


def test_more_ranks_before_another_model(setting: Make) -> None:
    planned = setting()
    disk = _taken(setting(ranks=4))[1]
    assert _texts(planned, Limits(MANY, disk)) == ["--ranks 4, each with the same limits"]


def test_a_budget_too_small_to_start(setting: Make) -> None:
    planned = setting({"host_budget": 4096})
    verdict = judge(planned, Limits(MANY, MANY))
    assert verdict.capacity is None
    assert [s.place for s in verdict.shortfalls] == ["host_budget"]
    remedy = shortest_remedy(planned, Limits(MANY, MANY))
    assert len(remedy.changes) == 1
    config = remedy.setting.config
    assert config.host_budget == verdict.shortfalls[0].needed
    budgets(
        config, DeviceKind.CPU, experts=1
    )  # and with a byte less, as the verdict said, it could not start
    less = replace(remedy.setting, config=replace(config, host_budget=config.host_budget - 1))
    assert not judge(less, Limits(MANY, MANY)).fits


def test_device_memory_is_held_against_a_device_only(setting: Make) -> None:
    planned = replace(setting(), device=DeviceKind.CUDA)
    needed = capacity(planned).total(Tier.DEVICE)
    assert judge(planned, Limits(MANY, MANY)).fits
    assert judge(planned, Limits(MANY, MANY, device=needed)).fits
    short = judge(planned, Limits(MANY, MANY, device=needed - 1))
    assert [s.place for s in short.shortfalls] == ["device memory"]


def test_what_nothing_helps(setting: Make) -> None:
    assert shortest_remedy(setting(), Limits(1 << 20, 4096)) is None


def test_a_published_model_is_never_made_another(setting: Make) -> None:
    preset = find_preset("olmoe-1b-7b")
    planned = replace(setting(dict(preset.settings) | {"host_budget": "4GiB"}), model=preset.architecture)
    remedy = shortest_remedy(planned, Limits(64 << 30, 150 << 30))
    effects = set() if remedy is None else {change.effect for change in remedy.changes}
    assert effects
    assert Effect.MODEL not in effects


@pytest.mark.parametrize("share", [0.9, 0.6, 0.3])
def test_a_remedy_always_fits(share: float, setting: Make) -> None:
    planned = setting({"host_budget": 300 << 20, "retain": 2, "model.seq_len": 256})
    memory, disk = _taken(planned)
    limits = Limits(int(memory * share) + (500 << 20), int(disk * share))
    remedy = shortest_remedy(planned, limits)
    if remedy is not None:
        assert judge(remedy.setting, limits).fits
        assert 1 <= len(remedy.changes) <= 3


# Hardware ----------------------------------------------------------------------------------------------------


def _on(hardware: Hardware, ranks: int, **less: int) -> Limits:
    """A rank's limits on that machine, short of ``less``."""
    return Limits(
        hardware.memory // ranks - less.get("memory", 0),
        hardware.disk // ranks - less.get("disk", 0),
        None if hardware.device is None else hardware.device - less.get("device", 0),
    )


@pytest.mark.parametrize("device", DeviceKind)
@pytest.mark.parametrize("budget", [{"host_budget": 64 << 20}, {"host_budget": 4096}, {"device_budget": 64}])
def test_the_hardware_that_would_do_does_to_the_byte(
    device: DeviceKind, budget: dict[str, int], setting: Make
) -> None:
    planned = replace(setting(budget, ranks=2), device=device)
    found = hardware_for(planned, Limits(1 << 20, 4096, 1 << 10, sharing=2))
    changed = found.changes[-1].setting
    assert {change.effect for change in found.changes} == {Effect.SAME_BITS}
    assert judge(changed, _on(found, 2)).fits
    places = {"memory": "memory", "disk": "disk", "device": "device memory"}
    for short in ("memory", "disk", *(["device"] if device is DeviceKind.CUDA else [])):
        verdict = judge(changed, _on(found, 2, **{short: 1}))
        assert [(s.place, s.needed - s.limit) for s in verdict.shortfalls] == [(places[short], 1)]
    assert {s.place for s in found.shortfalls} == {places[name] for name in places if name != "device"} | (
        {"device memory"} if device is DeviceKind.CUDA else set()
    )
