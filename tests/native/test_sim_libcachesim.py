"""Miss counts identical to those of the libcachesim package (a test-only dependency), request by request."""

import compare_libcachesim
import libcachesim
import numpy as np
import pytest
from compare_libcachesim import PAIRS, open_reader, our_misses, their_misses, write_oracle_general
from sim_columns import singles, zipf

from tierstore import _native
from tierstore._native import Oversized


def mixed(length, seed):
    """What block traces are made of: popular keys, scans that come once, loops, and phases that change."""
    random = np.random.default_rng(seed)
    pieces, made = [], 0
    while made < length:
        kind, size = random.integers(4), int(random.integers(50, 800))
        begin = int(random.integers(1000))
        if kind == 0:
            piece = begin + np.arange(size)
        elif kind == 1:
            piece = begin + np.arange(size) % int(random.integers(5, 200))
        else:
            piece = begin // 500 * 500 + zipf(
                500, size, random.uniform(0.4, 1.3), int(random.integers(2**32))
            )
        pieces.append(piece)
        made += size
    return np.concatenate(pieces)[:length]


TRACES = {
    "zipf": lambda: zipf(700, 15_000, 0.9, 3),
    "scan": lambda: np.arange(15_000) % 5_000,
    "loop": lambda: np.arange(15_000) % 230,
    "mixed": lambda: mixed(15_000, 5),
    "other": lambda: mixed(15_000, 6),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACES)
def test_misses_are_those_of_libcachesim(name, tmp_path):
    keys = TRACES[name]()
    write_oracle_general(keys, tmp_path / "trace")
    reader = open_reader(tmp_path / "trace")
    columns = singles(keys)
    capacities = [1, 2, 7, 40, 229, 300, 1200]
    ours = {(p, c): our_misses(p, *columns, c) for p in PAIRS for c in capacities}
    assert ours == {(p, c): their_misses(p, reader, len(keys), c) for p in PAIRS for c in capacities}


@pytest.mark.parametrize("policy", [policy for policy in PAIRS if policy != "belady"])
def test_sizes_and_what_is_larger_than_the_cache_are_those_of_libcachesim(policy):
    random = np.random.default_rng(0)
    keys = zipf(60, 3000, 0.7, 1)
    sizes = random.integers(1, 9, 60).astype(np.uint32)
    sizes[[3, 7]] = 100, 45
    for capacity in (44, 45, 99, 100):
        theirs, missed = PAIRS[policy](capacity), 0
        for key in keys.tolist():
            request = libcachesim.Request()
            request.obj_id, request.obj_size = key + 1, int(sizes[key])
            missed += not theirs.get(request)
        ours = _native.simulate(
            np.arange(len(keys) + 1, dtype=np.uint64),
            keys,
            sizes=sizes,
            policy=policy,
            capacity_frames=capacity,
            oversized=Oversized.BYPASS,
        )
        assert ours["misses"] == missed
        assert ours["not_admitted"] == int((sizes[keys] > capacity).sum())


def test_the_comparison_prints_a_row_for_each_policy_and_capacity(capsys):
    chosen = ["--policies", ",".join(PAIRS)]
    compare_libcachesim.main(["--requests", "3000", "--keys", "300", "--repeats", "1", *chosen])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == [policy for policy in PAIRS for _ in range(3)]
    assert [row[2] for row in rows] == [row[3] for row in rows]
