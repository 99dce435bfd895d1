"""Random programs of a store at random budgets hold, bit for bit, what arrays in memory hold."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest_store import ArrayModel, small_store, weights
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore import _native
from tierstore.cache.config import CacheConfig, Scope
from tierstore.store import (
    AdamWConfig,
    Group,
    Inactive,
    MomentFormat,
    ParameterStore,
    RecordSchema,
    StoreConfig,
    WeightFormat,
)
from tierstore.store.format import TRAINED_FORMATS, moment_sections
from tierstore.store.opening import minimum_host_budget

NUMEL = 2100  # not a whole number of pages
LAYERS = 2

keys = st.integers(0, 6)
operation = st.one_of(
    st.tuples(st.just("update"), st.frozensets(keys, max_size=5)),
    st.tuples(st.just("update"), st.frozensets(keys, max_size=2)),
    st.tuples(st.just("fetch"), st.frozensets(keys, min_size=1, max_size=2)),
    st.tuples(st.just("prefetch"), st.frozensets(keys, max_size=4)),
    st.tuples(st.just("register"), st.just(frozenset[int]())),
    st.tuples(st.just("commit"), st.just(frozenset[int]())),
    st.tuples(st.just("snapshot"), st.just(frozenset[int]())),
    st.tuples(st.just("reopen"), st.just(frozenset[int]())),
)


def weight_of(store: ParameterStore, key: str, split: WeightFormat) -> np.ndarray:
    groups = [Group.WEIGHTS, Group.MOMENTS]
    with store.fetch([key], groups) as lease:
        if split is WeightFormat.FP32:
            return lease[key].copy("weight")
        merged = np.empty(NUMEL, np.float32)
        _native.merge_bf16(merged, lease[key].copy("weight_hi"), lease[key].copy("weight_lo"))
        return merged


@settings(max_examples=share(40))
@given(
    program=st.lists(operation, min_size=3, max_size=18),
    frames=st.integers(0, 24),
    inactive=st.sampled_from(Inactive),
    weight_format=st.sampled_from(TRAINED_FORMATS),
    moments=st.sampled_from(MomentFormat),
    cache=st.sampled_from(
        [
            CacheConfig(),
            CacheConfig(policy="lru"),
            CacheConfig(options={"variant": "paper"}),
            CacheConfig(scope=Scope.LAYER, policy="arc"),
            CacheConfig(policy="next-use"),
            CacheConfig(policy="w-tinylfu"),
        ]
    ),
    lookahead=st.sampled_from([0, 20_000, 60_000]),
    seed=st.integers(0, 99),
)
def test_random_programs(
    program: list[tuple[str, frozenset[int]]],
    frames: int,
    inactive: Inactive,
    weight_format: WeightFormat,
    moments: MomentFormat,
    cache: CacheConfig,
    lookahead: int,
    seed: int,
) -> None:
    schema = RecordSchema("expert", NUMEL, weight_format, moments=moments)
    layers = tuple(range(LAYERS))
    budget = minimum_host_budget([schema], cache, LAYERS) + 4096 * frames
    config = StoreConfig(
        host_budget=budget, retain=2, cache=cache, layers=layers, lookahead=min(lookahead, budget // 2)
    )
    adamw = AdamWConfig(inactive=inactive)
    rng = np.random.default_rng(seed)
    model = ArrayModel(adamw, moments)
    names = [section.name for section in moment_sections(moments, NUMEL)]
    initial = weights(8, NUMEL, seed)
    snapshots = 0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as made:
        path = Path(made) / "store"
        store = ParameterStore.create(path, [schema], config, adamw=adamw)

        def register(index: int) -> None:
            key = f"e{index}"
            store.register(key, "expert", layer=index % LAYERS, weight=initial[key])
            model.register(key, initial[key])
            model.counts[key] = 0

        try:
            for index in range(6):
                register(index)
            store.commit()
            committed = model.copy()
            for name, chosen in program:
                known = sorted(f"e{i}" for i in chosen if f"e{i}" in model.records)
                if name == "update":
                    gradients = {k: rng.standard_normal(NUMEL).astype(np.float32) for k in known}
                    lr = float(rng.uniform(1e-4, 1e-1))
                    store.update(gradients, lr=lr)
                    model.update(gradients, lr)
                elif name == "fetch":
                    for key in known:
                        assert np.array_equal(weight_of(store, key, weight_format), model.records[key][0])
                elif name == "prefetch":
                    store.prefetch(known)
                elif name == "register" and "e6" not in model.records:
                    register(6)
                elif name == "commit":
                    store.commit({"position": bytes([len(model.records)])})
                    committed = model.copy()
                elif name == "snapshot":
                    snapshots += 1
                    store.commit(snapshot=f"s{snapshots}")
                    committed = model.copy()
                    assert store.last_commit.snapshots == [
                        f"s{i}" for i in range(max(1, snapshots - 1), snapshots + 1)
                    ]
                elif name == "reopen":
                    store.close()
                    store = ParameterStore.open(path, config, adamw=adamw)
                    model = committed.copy()
            for key, (weight, *arrays) in model.records.items():
                assert np.array_equal(weight_of(store, key, weight_format), weight)
                with store.fetch([key], [Group.MOMENTS]) as lease:
                    for name, array in zip(names, arrays, strict=True):
                        assert np.array_equal(lease[key].copy(name), array), name
            store.commit()
            crc = store.records_crc32c()
            report = store.verify()
            assert report.failures == []
            store.close()
            # Whatever the budget, the reopened content is the same.
            with ParameterStore.open(path, StoreConfig(host_budget=1 << 22)) as store:
                assert store.records_crc32c() == crc
        finally:
            store.close()


@pytest.mark.parametrize("inactive", Inactive)
def test_torch_agrees(tmp_path: Path, inactive: Inactive) -> None:
    initial = weights(4, 3000)
    tensors = {key: torch.tensor(weight, requires_grad=True) for key, weight in initial.items()}
    config = AdamWConfig(inactive=inactive)
    optimizer = torch.optim.AdamW(
        list(tensors.values()), lr=1.0, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
    )
    rng = np.random.default_rng(5)
    with small_store(tmp_path / "store", budget=60_000, inactive=inactive) as store:
        for step in range(12):
            chosen = [key for key in initial if rng.random() < 0.5]
            gradients = {key: rng.standard_normal(3000).astype(np.float32) for key in chosen}
            lr = 1e-2 / (1 + step)
            for key, tensor in tensors.items():
                if key in gradients:
                    tensor.grad = torch.from_numpy(gradients[key])
                else:
                    tensor.grad = torch.zeros_like(tensor) if inactive is Inactive.EXACT else None
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
            store.update(gradients, lr=lr)
        for key, tensor in tensors.items():
            with store.fetch([key]) as lease:
                np.testing.assert_allclose(
                    lease[key].copy("weight"), tensor.detach().numpy(), rtol=1e-5, atol=1e-6
                )
