"""Stress a disk through the store: random reads and updates at several budgets, each byte checked, with latencies.

    python examples/stress_tiers.py /mnt/nvme/stress [SECONDS]

Give it a directory that does not exist yet. ``tierstore bench tiers --minutes 30`` does this for hours, with kills.
"""

import sys
import time
import zlib
from pathlib import Path

import numpy as np

from tierstore.store import ParameterStore, RecordSchema, StoreConfig
from tierstore.units import format_bytes

RECORDS, NUMEL, AT_ONCE = 24, 1 << 19, 3
SCHEMA = RecordSchema("expert", NUMEL)  # 6 MiB: a weight and two moments in fp32


def stress(directory: Path, host_budget: int, seconds: float) -> None:
    """Fetches and updates random records for ``seconds``, commits, and checks all of it after reopening."""
    rng = np.random.default_rng(0)
    config = StoreConfig(host_budget=host_budget)
    keys = [f"expert.{i}" for i in range(RECORDS)]
    crcs: dict[str, int] = {}
    latencies = []
    with ParameterStore.create(directory, [SCHEMA], config) as store:
        for key in keys:
            store.register(key, "expert", weight=rng.standard_normal(NUMEL, np.float32))
        store.commit()
        ends = time.perf_counter() + seconds
        while time.perf_counter() < ends:
            chosen = [keys[i] for i in rng.choice(RECORDS, AT_ONCE, replace=False)]
            begun = time.perf_counter()
            # Reads the weights that the cache lacks, and checks the CRC-32C of each.
            with store.fetch(chosen) as lease:
                latencies.append(time.perf_counter() - begun)
                for key in chosen:
                    crc = zlib.crc32(lease[key].view("weight"))
                    assert crcs.setdefault(key, crc) == crc, f"{key} changed without an update"
            if len(latencies) % 4 == 0:
                store.update({chosen[0]: rng.standard_normal(NUMEL, np.float32)}, lr=1e-3)
                crcs.clear()  # a step changes every record: those without a gradient decay
        before = store.records_crc32c()
        store.commit()
        engine = store.core.engine.stats()
    with ParameterStore.open(directory, config) as store:
        assert not store.verify().failures
        assert store.records_crc32c() == before
    p50, p99 = np.percentile(latencies, [50, 99]) * 1e3
    print(
        f"{format_bytes(host_budget)}: {len(latencies)} fetches of {AT_ONCE}, {p50:.1f} ms (p99 {p99:.1f} ms), "
        f"{format_bytes(engine['read_bytes'])} read, {format_bytes(engine['written_bytes'])} written, all checked"
    )


def main(directory: Path, seconds: float) -> None:
    directory.mkdir(parents=True)
    for budget in (32 << 20, 96 << 20, 256 << 20):  # of 144 MiB of records
        stress(directory / str(budget), budget, seconds)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 5.0)
