"""Promise 1: where bytes live never changes what is computed.

Each mode of training is run once with everything in RAM; then the same steps under every budget, policy,
depth, backend and pattern of commits. The loss of every step and the checksum of every record must be equal.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest
from slowness import in_turns, mostly_slow

from tierstore.train.config import TrainConfig

Make = Callable[[Mapping[str, Any]], TrainConfig]

STEPS = 4

#: Ways to train: what is computed differs from one to the next.
MODES: dict[str, dict[str, Any]] = {
    "immediate": {},
    "clip": {"clip_norm": 0.5},
    "micro": {"data.micro_batches": 3},
    "micro-clip": {"data.micro_batches": 3, "clip_norm": 0.5},
    "bf16": {"model.compute_dtype": "bf16"},
    "bf16-clip": {"model.compute_dtype": "bf16", "clip_norm": 0.5},
    "checkpoint": {"model.checkpoint_activations": "block", "model.n_layers": 3},
    "moments-bf16": {"adamw.moments": "bf16"},
    "moments-int8": {"adamw.moments": "int8", "model.compute_dtype": "bf16", "data.batch_size": 1},
    "moments-int8-clip": {"adamw.moments": "int8", "data.micro_batches": 3, "clip_norm": 0.5},
    "skip": {"adamw.inactive": "skip", "model.top_k": 1, "data.batch_size": 1},
    "skip-clip": {"adamw.inactive": "skip", "model.top_k": 1, "data.batch_size": 1, "clip_norm": 0.5},
}

#: Ways to hold it: none of them changes anything. ``budget`` is a share of the records; 0 is the minimum.
HOLDS: dict[str, dict[str, Any]] = {
    "half": {"budget": 0.5},
    "tenth": {"budget": 0.1, "prefetch.depth": 3, "prefetch.predictor": "all"},
    "least": {"budget": 0.0, "prefetch.depth": 0, "io.backend": "threads", "weights_in_place": "off"},
    "least-lru-1": {
        "budget": 0.0,
        "cache.policy": "lru",
        "prefetch.depth": 1,
        "io.backend": "threads",
        "io.threads": 1,
    },
    "paper": {
        "budget": 0.25,
        "cache.policy": "lfu-decay",
        "cache.options.variant": "paper",
        "prefetch.predictor": "none",
        "commit_every": 2,
    },
    "lru-4": {
        "budget": 0.25,
        "cache.policy": "lru",
        "prefetch.depth": 3,
        "io.backend": "threads",
        "io.threads": 4,
    },
    "layer": {"budget": 0.3, "cache.scope": "layer", "prefetch.depth": 2},
    "least-layer": {"budget": 0.0, "cache.scope": "layer", "cache.policy": "lru"},
    "least-paper": {"budget": 0.0, "cache.policy": "lfu-decay", "cache.options.variant": "paper"},
    "busy": {"budget": 0.15, "cache.write_back_every": 1, "commit_every": 3, "io.compute_threads": 2},
    "uring": {"budget": 0.25, "io.backend": "uring", "io.chunk_bytes": 4096, "io.queue_depth": 3},
    "pmem": {"budget": 0.2, "io.backend": "pmem", "io.threads": 2},
}

#: Those that a mode is held in beside "least": pairs, which take turns.
SOME = dict(in_turns(MODES, [("half", "busy"), ("tenth", "least-layer")]))
#: The others, each with a mode whose turn it is.
OTHERS = in_turns(
    ["least-lru-1", "paper", "lru-4", "layer", "least-paper", "uring", "pmem"], ["immediate", "micro-clip"]
)


def held(
    make: Make, mode: Mapping[str, Any], hold: Mapping[str, Any], least: Callable[[TrainConfig], int]
) -> TrainConfig:
    """The configuration of ``mode`` under ``hold``."""
    ram = make(mode)
    changes = {**mode, **hold}
    share = changes.pop("budget")
    minimum = least(make(changes))
    return make(changes | {"host_budget": max(minimum, int(share * ram.model.architecture.sparse * 12))})


@pytest.mark.parametrize("mode", mostly_slow(MODES, "skip"))
def test_every_way_to_hold_it_gives_the_same_bits(
    mode: str, configure: Make, train: Any, least: Callable[[TrainConfig], int]
) -> None:
    expected = train(configure(MODES[mode] | {"steps": STEPS}))
    assert expected.stats.misses == 0
    assert len(set(expected.losses)) > 1
    holds = ["least", *SOME[mode], *(hold for hold, other in OTHERS if other == mode)]
    for name in holds:
        config = held(configure, MODES[mode] | {"steps": STEPS}, HOLDS[name], least)
        stops = (2,) if name in ("tenth", "least-lru-1") else ()
        found = train(config, stops=stops)
        assert found.bits == expected.bits, f"{mode} held as {name}"
        assert found.norms == expected.norms, f"{mode} held as {name}"
        assert found.stats.evictions > 0, f"{mode} held as {name}: nothing was evicted"
        if "clip" in mode and name == "least":
            assert found.stats.by_group["gradients"].misses > 0, "no gradient came back from disk"


SLEEPY: dict[str, Any] = {
    "steps": 44,
    "model.experts": 40,
    "model.top_k": 1,
    "model.seq_len": 4,
    "data.batch_size": 1,
    "schedule.warmup_steps": 15,
    "schedule.total_steps": 44,
}
RESUMED_AT = 28


def sleeps(stepped: list[frozenset[str]]) -> list[tuple[int, int]]:
    """For each expert that slept and woke: the last step before (from 0), and the step of waking."""
    found = []
    for key in frozenset().union(*stepped):
        active = [step for step, keys in enumerate(stepped) if key in keys]
        found += [(a, b) for a, b in pairwise(active) if b - a > 1]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inactive", "clip", "holds"),
    [
        ("exact", 0.0, ["tenth", "least", "paper"]),
        ("exact", 0.3, ["tenth", "busy"]),
        ("skip", 0.0, ["least", "lru-4"]),
        ("skip", 0.3, ["least", "busy"]),
    ],
    ids=["exact-immediate", "exact-clip", "skip-immediate", "skip-clip"],
)
def test_long_sleeps(
    inactive: str,
    clip: float,
    holds: list[str],
    configure: Make,
    train: Any,
    least: Callable[[TrainConfig], int],
) -> None:
    """Few tokens and many experts: replay of missed steps across the warm-up and across a resume."""
    mode = SLEEPY | {"adamw.inactive": inactive, "clip_norm": clip}
    expected = train(configure(mode))
    if inactive == "exact" and not clip:  # only there an expert's step says when it was reached
        experts = configure(mode).model.architecture.records
        pairs = experts * len(expected.stepped)
        inactive_pairs = pairs - sum(len(keys) for keys in expected.stepped)
        assert inactive_pairs >= 0.3 * pairs
        slept = [(before, woke) for before, woke in sleeps(expected.stepped) if woke - before - 1 >= 20]
        assert [s for s in slept if s[0] < SLEEPY["schedule.warmup_steps"] <= s[1]], "none across the warm-up"
        assert [s for s in slept if s[0] < RESUMED_AT <= s[1]], "none across the resume"
    for name in holds:
        found = train(held(configure, mode, HOLDS[name], least), stops=(RESUMED_AT,))
        assert found.bits == expected.bits, name
        assert found.norms == expected.norms, name
