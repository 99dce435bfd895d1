"""Eight experts, a memory budget for two: fetch, update, commit, and find all of it after reopening.

Run it with a directory that does not exist yet:  python examples/parameter_store.py /tmp/experts
"""

import sys

import numpy as np

from tierstore.store import ParameterStore, RecordSchema, StoreConfig

path = sys.argv[1]
rng = np.random.default_rng(0)
schema = RecordSchema("expert", numel=256 * 256)
config = StoreConfig(
    host_budget=8 * schema.numel * 4
)  # bytes; with its gradient a record takes 4 numbers a parameter

with ParameterStore.create(path, [schema], config) as store:
    for i in range(8):
        store.register(f"expert.{i}", "expert", weight=rng.standard_normal(schema.numel, np.float32) / 16)
    store.commit()

    x = rng.standard_normal((4, 256), np.float32)
    for _ in range(20):
        key = f"expert.{rng.integers(8)}"
        with store.fetch([key]) as lease:  # pinned in memory, caught up with every step so far
            y = x @ lease[key].copy("weight").reshape(256, 256)
        gradient = (x.T @ y / x.shape[0]).ravel()  # of half the mean of y squared
        store.update(
            {key: gradient}, lr=1e-2
        )  # one AdamW step; experts without a gradient decay as they should
    generation = store.commit({"step": b"20"})
    checksum = store.records_crc32c()

with ParameterStore.open(path, config) as store:
    assert (store.last_commit.generation, store.last_commit.state["step"]) == (generation, b"20")
    assert store.records_crc32c() == checksum
    assert not store.verify().failures
    print(f"{len(store.keys)} experts at commit {generation}, checksum {checksum:08x}")
