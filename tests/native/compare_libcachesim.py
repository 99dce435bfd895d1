"""Misses and rate of the simulator against those of the libcachesim package, on the same trace in one run.

    PYTHONPATH=tests/native python -m compare_libcachesim [--requests N] [--keys N] [--skew S] [--repeats N] [--policies A,B]

For people and for the tests: libcachesim is GPL, and the product never imports it. The repeats alternate, and each
rate is the median over them. libcachesim reads an oracleGeneral file (24 bytes a request) by memory map, the
simulator two columns; neither rate includes making them.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import libcachesim
import numpy as np
from sim_columns import singles, zipf

from tierstore import _native
from tierstore._native import Contract

PAIRS = {
    "fifo": libcachesim.FIFO,
    "clock": libcachesim.Clock,
    "lru": libcachesim.LRU,
    "lfu": libcachesim.LFU,
    "sieve": libcachesim.Sieve,
    "belady": libcachesim.Belady,
}
# Of these some are other variants, so that misses differ (tests/native/test_cache_queues.py): rates alone.
RATES = {
    **PAIRS,
    "slru": libcachesim.SLRU,
    "2q": libcachesim.TwoQ,
    "arc": libcachesim.ARC,
    "lirs": libcachesim.LIRS,
    "s3-fifo": libcachesim.S3FIFO,
    "w-tinylfu": libcachesim.WTinyLFU,
}
_RECORD = np.dtype([("time", "<u4"), ("key", "<u8"), ("size", "<u4"), ("next", "<i8")])


def write_oracle_general(keys, path):
    """One request of one byte each; ``next`` is the request that asks for the key again, or -1."""
    keys = np.asarray(keys)
    order = np.argsort(keys, kind="stable")
    again = keys[order[1:]] == keys[order[:-1]]
    records = np.zeros(len(keys), _RECORD)
    records["time"] = np.arange(len(keys)) // 1000
    records["key"] = keys.astype(np.uint64) + 1
    records["size"] = 1
    records["next"] = -1
    records["next"][order[:-1][again]] = order[1:][again]
    records.tofile(path)


def open_reader(path):
    return libcachesim.TraceReader(str(path), libcachesim.TraceType.ORACLE_GENERAL_TRACE)


def their_misses(policy, reader, requests, capacity):
    """Of ``requests`` requests, those that the package's policy missed."""
    reader.reset()
    ratio, _ = RATES[policy](capacity, hashpower=20).process_trace(reader)
    return round(ratio * requests)


def our_misses(policy, offsets, entries, capacity):
    result = _native.simulate(
        offsets, entries, policy=policy, capacity_frames=capacity, contract=Contract.SEQUENTIAL
    )
    return result["misses"]


@dataclass(frozen=True)
class Comparison:
    policy: str
    capacity: int
    misses: int
    their_misses: int
    rate: float  # requests a second, median of the repeats
    their_rate: float


def compare(policies, keys, capacities, repeats, folder):
    """Yields a Comparison for each policy and capacity."""
    path = Path(folder) / "trace.bin"
    write_oracle_general(keys, path)
    reader = open_reader(path)
    offsets, entries = singles(keys)
    for policy in policies:
        for capacity in capacities:
            ours, theirs = [], []
            for _ in range(repeats):
                began = time.perf_counter()
                misses = our_misses(policy, offsets, entries, capacity)
                between = time.perf_counter()
                other = their_misses(policy, reader, len(keys), capacity)
                ours.append(len(keys) / (between - began))
                theirs.append(len(keys) / (time.perf_counter() - between))
            yield Comparison(
                policy, capacity, misses, other, statistics.median(ours), statistics.median(theirs)
            )


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=5_000_000)
    parser.add_argument("--keys", type=int, default=500_000)
    parser.add_argument("--skew", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    # The package's own aborts the process for some of them where the cache is tiny.
    parser.add_argument("--policies", default=",".join(RATES), help="names, separated by commas")
    options = parser.parse_args(arguments)
    keys = zipf(options.keys, options.requests, options.skew, seed=1)
    distinct = len(np.unique(keys))
    capacities = sorted({max(1, int(distinct * share)) for share in (0.01, 0.1, 0.5)})
    print(f"{options.requests} requests for {distinct} keys, Zipf {options.skew}; M requests/s")
    print(f"{'policy':10}{'capacity':>10}{'misses':>12}{'theirs':>12}{'rate':>8}{'theirs':>8}{'times':>7}")
    with tempfile.TemporaryDirectory() as folder:
        for row in compare(options.policies.split(","), keys, capacities, options.repeats, folder):
            print(
                f"{row.policy:10}{row.capacity:10}{row.misses:12}{row.their_misses:12}"
                f"{row.rate / 1e6:8.1f}{row.their_rate / 1e6:8.1f}{row.rate / row.their_rate:7.2f}"
            )


if __name__ == "__main__":
    main()
