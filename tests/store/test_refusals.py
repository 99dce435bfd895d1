"""What an open store refuses: the type of each error, what it names, and that nothing has changed."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from refusals import Refusal, refuses

from tierstore._native import Arena, Buffer, HugePages
from tierstore.cache.access import Need, Phase
from tierstore.errors import ConfigError, StoreError
from tierstore.store import (
    Group,
    GroupOrder,
    NewRecord,
    ParameterStore,
    Placement,
    RecordSchema,
    StoreConfig,
    Training,
    WeightFormat,
)
from tierstore.store.registering import RecordLoader

NUMEL = 3000
SCHEMAS = [
    RecordSchema("expert", NUMEL),
    RecordSchema("half", NUMEL, WeightFormat.SPLIT_BF16),
    RecordSchema("frozen", NUMEL, WeightFormat.BF16, training=Training.FROZEN),
    RecordSchema("owned", NUMEL, placement=Placement.DIRECT),
]
ONES = np.ones(NUMEL, np.float32)
BUFFER = Buffer(Arena(12288, HugePages.OFF), [(0, 12288)], 4 * NUMEL)
Act = Callable[[ParameterStore], object]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ParameterStore]:
    """Trained ``e0`` and ``e1``, frozen ``f``, and ``d`` of an owner; one commit."""
    config = StoreConfig(host_budget=1 << 20)
    with ParameterStore.create(tmp_path_factory.mktemp("refusals") / "s", SCHEMAS, config) as made:
        made.register_many([NewRecord(key, "expert", weight=ONES) for key in ("e0", "e1")])
        made.register("f", "frozen", weight=ONES)
        made.register("d", "owned")
        made.core.write_through("d", {Group.WEIGHTS: [BUFFER], Group.MOMENTS: [BUFFER, BUFFER]}, step=0)
        made.commit()
        yield made


def state(store: ParameterStore) -> tuple[Any, ...]:
    """Everything that a later reservation, step or commit depends on."""
    core = store.core
    return (
        store.records_crc32c(),
        store.keys,
        store.last_commit,
        store.status().steps,
        core.records.counts(),
        +core.extents.promised,
        core.extents.allocated_bytes,
        core.live.changed,
        +core.records.leased,
        core.cache.residency.stats().creates,
    )


def update(**gradients: Any) -> Act:
    return lambda store: store.update(gradients, lr=0.1)


def register(key: str = "new", schema: str = "expert", before: int = 0, **options: Any) -> Act:
    """Registers a record behind ``before`` good ones."""
    good = [NewRecord(f"good{number}", "expert", weight=ONES) for number in range(before)]
    return lambda store: store.register_many([*good, NewRecord(key, schema, **options)])


def load(key: str, schema: str, *sections: Buffer | None) -> Act:
    return lambda store: RecordLoader(store.core).add(key, schema, 0, sections)


def fetch(key: str, *groups: Any) -> list[tuple[str, Act]]:
    """The three ways to ask for ``groups``."""
    return [
        ("fetch", lambda store: store.fetch([key], groups)),
        ("prefetch", lambda store: store.prefetch([key], groups)),
        ("fetch_async", lambda store: asyncio.run(store.fetch_async([key], groups))),
    ]


def leased(store: ParameterStore) -> None:
    with store.fetch(["e0"]):
        store.update({"e0": ONES}, lr=0.1)


def commit_in_an_access(store: ParameterStore) -> None:
    for _ in store.core.access(Phase.USER, 0, [store.core.record("e0")], Need.WEIGHTS):
        store.commit()


def commit_in_a_step(store: ParameterStore) -> None:
    with store.optimizer_step(0.1):
        store.commit()


def step_in_a_step(store: ParameterStore) -> None:
    with store.optimizer_step(0.1):
        update(e0=ONES)(store)


def step_of_a_frozen_record(store: ParameterStore) -> None:
    record = store.core.record("f")
    with store.fetch(["f"]), store.optimizer_step(0.1):
        store.core.optimizer.step(record, store.core.cache.sections(record.entry(Group.WEIGHTS))[0])


FIVE, DOUBLES = np.ones(5, np.float32), np.ones(NUMEL)
BAD_GROUPS = {"gradients": (Group.GRADIENTS,), "both": (Group.WEIGHTS, Group.GRADIENTS), "word": ("weights",)}
BAD_RECORDS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "shape": ({"weight": FIVE}, ValueError, "'new': weight"),
    "type": ({"weight": DOUBLES}, ValueError, "float64"),
    "layer": ({"layer": 1 << 16}, ValueError, "layer"),
    "empty": ({"key": ""}, ValueError, "record"),
    "long": ({"key": "é" * 256}, ValueError, "511"),
    "key": ({"key": "e0"}, StoreError, "'e0'"),
    "schema": ({"schema": "dense"}, StoreError, "'dense'"),
}
FETCHES = [
    *(
        (f"groups-{name}", way, "groups")
        for name, groups in BAD_GROUPS.items()
        for way in fetch("e0", *groups)
    ),
    *(("frozen-moments", way, "'f'") for way in fetch("f", Group.WEIGHTS, Group.MOMENTS)),
]
REFUSALS = [
    Refusal("update-unknown", update(e0=ONES, nobody=ONES), KeyError, ("nobody",)),
    Refusal("update-shape", update(e0=ONES, e1=FIVE), ValueError, ("'e1'", "float32 (5,)")),
    Refusal("update-type", update(e1=DOUBLES), ValueError, ("'e1'", "float64")),
    Refusal("update-leased", leased, StoreError, ("'e0'",)),
    Refusal("update-frozen", update(e0=ONES, f=ONES), StoreError, ("'f'",)),
    Refusal("update-in-a-step", step_in_a_step, StoreError, ("step 1",)),
    Refusal("step-frozen", step_of_a_frozen_record, StoreError, ("'f'",)),
    Refusal("commit-in-an-access", commit_in_an_access, StoreError, ("access",)),
    Refusal("commit-in-a-step", commit_in_a_step, StoreError, ("step 1",)),
    Refusal(
        "state-own", lambda store: store.commit({"adamw-history": b""}), ValueError, ("'adamw-history'",)
    ),
    Refusal("state-empty", lambda store: store.commit({"": b""}), ValueError, ("state", "511")),
    Refusal("snapshot", lambda store: store.commit(snapshot="s"), StoreError, ("retain",)),
    Refusal("write-cached", lambda store: store.core.write_through("e0", {}, step=1), KeyError, ("e0",)),
    Refusal("read-cached", lambda store: store.core.read_through("e0", {}), KeyError, ("e0",)),
    Refusal("scratch-frozen", lambda store: store.core.reserve_scratch("frozen"), StoreError, ("'frozen'",)),
    *(
        Refusal(f"register-{name}-{before}", register(before=before, **options), error, (named,))
        for name, (options, error, named) in BAD_RECORDS.items()
        for before in (0, 2)
    ),
    *(Refusal(f"{way}-{name}", act, ValueError, (named,)) for name, (way, act), named in FETCHES),
    Refusal("load-again", load("e0", "expert", BUFFER, None, None), StoreError, ("'e0'",)),
    Refusal("load-fewer", load("y", "expert", BUFFER, None), StoreError, ("'y'", "[12000, None]")),
    Refusal("load-size", load("y", "half", BUFFER, None, None, None), StoreError, ("'y'", "[12000, None")),
    Refusal("load-schema", load("y", "other", BUFFER), StoreError, ("'other'",)),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: str(refusal.name))
def test_a_refusal_changes_nothing(store: ParameterStore, refusal: Refusal) -> None:
    before = state(store)
    with refuses(refusal.error, *refusal.named):
        refusal.act(store)
    assert state(store) == before


def test_the_store_goes_on(store: ParameterStore) -> None:
    """After all of them: records are registered, stepped and committed."""
    generation = store.last_commit.generation
    store.register("new", "expert", weight=ONES)
    store.update({"e0": ONES, "new": ONES}, lr=0.1)
    assert store.commit() == generation + 1
    assert store.verify().failures == []


@pytest.mark.parametrize("use", ["commit", "verify", "fetch", "update"])
def test_a_closed_store_says_so(tmp_path_factory: pytest.TempPathFactory, use: str) -> None:
    path = tmp_path_factory.mktemp("closed") / "s"
    closed = ParameterStore.create(path, SCHEMAS[:1], StoreConfig(host_budget=1 << 20))
    closed.close()
    closed.close()
    arguments: dict[str, Any] = {"fetch": {"keys": ["e0"]}, "update": {"gradients": {}, "lr": 1.0}}.get(
        use, {}
    )
    with pytest.raises(StoreError, match="closed"):
        getattr(closed, use)(**arguments)


def test_the_order_of_a_devices_slots_is_refused() -> None:
    with pytest.raises(ConfigError, match="group_order: expected RESIDENT_FIRST or KEY, got GIVEN"):
        StoreConfig(group_order=GroupOrder.GIVEN)
