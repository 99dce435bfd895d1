"""Plans of serving: a pass by hand, even routing, and a trace's replay with the very counts of the run that was recorded."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from served_stores import served_store, store_of

from tierstore.errors import ConfigError, DataError
from tierstore.hf.spec import HfSpec
from tierstore.machine_profile import ASSUMED, Cost, Evidence
from tierstore.plan.foreign import model_of
from tierstore.plan.serving import ServedWork, plan_serving, replayed_passes
from tierstore.trace.reader import read_header
from tierstore.train.config import FinetuneConfig

SEQUENCES, TOP_K = 2, 2
#: One byte or operation a second, but for the disk's four bytes.
SLOW = replace(
    ASSUMED,
    process_bytes=1000,
    disk_read=Cost(0.0, 4.0),
    copy=Cost(0.0, 1.0),
    dense_flops=Cost(0.0, 1.0),
    expert_flops=Cost(0.0, 1.0),
)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return store_of(tmp_path, "qwen3_moe")[1]


@pytest.fixture
def spec(store: Path) -> HfSpec:
    return model_of(store, FinetuneConfig())


def test_even_routing_by_hand(spec: HfSpec) -> None:
    model = spec.architecture
    layers, numel, dense = len(model.moe_layers), model.expert_numel, model.dense
    assert (layers, model.experts, model.top_k) == (2, 8, TOP_K)
    each = 4 * numel  # fp32
    half = 8 * each  # of 16 experts
    made = plan_serving(spec, ServedWork(prompt_tokens=2, context=10), SLOW, budgets=[half])
    (one,) = made.budgets
    assert one.share == 0.5
    # One token: two experts of each layer, half of them in memory.
    assert (one.decode.asked, one.decode.missed) == (4.0, 2.0)
    assert one.decode.read_bytes == 2 * each
    # Reading the weights (4 B a parameter) takes longer than their two operations a token.
    seconds = 4 * dense + layers * max(2 * each, each / 4)
    assert one.decode.seconds == seconds
    assert one.decode.tokens_per_s == 1 / seconds
    # Two tokens: 8 (1 - (6/8)^2) = 3.5 experts of a layer.
    assert one.prefill is not None
    assert one.prefill.asked == 7.0
    assert made.evidence is Evidence.ASSUMED
    assert made.memory(one) == half + made.dense + made.keys_and_values + 1000
    assert made.as_json()["budgets"][0]["decode"]["pass_s"] == seconds


def test_each_expert_that_is_read_takes_a_latency(spec: HfSpec) -> None:
    model, latency = spec.architecture, 1e9
    half = 8 * 4 * model.expert_numel
    profile = replace(SLOW, disk_read=Cost(latency, math.inf))
    (one,) = plan_serving(spec, ServedWork(prompt_tokens=2, context=10), profile, budgets=[half]).budgets
    assert one.prefill is not None
    # 3.5 of a pass's seven experts are missed, and two of a decode pass's four.
    assert one.prefill.seconds == 4 * model.dense + 3.5 * latency
    assert one.decode.seconds == 4 * model.dense + 2 * latency


def test_a_larger_budget_is_never_slower(spec: HfSpec) -> None:
    made = plan_serving(spec, ServedWork(), ASSUMED)
    speeds = [one.decode.tokens_per_s for one in made.budgets]
    assert speeds == sorted(speeds)
    assert made.budgets[-1].decode.read_bytes == 0


@pytest.mark.parametrize("budget", [1, 100])
def test_a_budget_without_an_expert_is_refused(spec: HfSpec, budget: int) -> None:
    with pytest.raises(ConfigError, match="--budgets"):
        plan_serving(spec, ServedWork(), ASSUMED, budgets=[budget])


def test_a_replay_has_the_counts_of_the_run(store: Path, spec: HfSpec, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    numel = spec.architecture.expert_numel
    with served_store(store, trace=trace, host_budget=10 * 4 * numel + (64 << 10)) as (parts, runner):
        joined = runner.join([[5, 9, 77, 3, 120, 14], [8, 21, 33, 6, 90, 2]])
        stats = parts.store.cache.residency.stats
        before = stats()
        for step in range(6):
            runner.step({one.number: (31 * step + 7 * one.number) % 128 for one in joined})
        after = stats()
        parts.store.end_trace()
    with trace.open("rb") as file:
        header = read_header(file)
    held = header.capacity_frames // int(header.table.frames[:, 0].max())
    prefill, decode = replayed_passes(trace, held, sequences=SEQUENCES, top_k=TOP_K)
    assert decode is not None
    assert decode.missed * 6 == after.misses - before.misses
    assert decode.asked * 6 == after.hits + after.misses - before.hits - before.misses
    assert decode.read_bytes * 6 == after.read_bytes - before.read_bytes
    assert prefill is not None
    planned = plan_serving(spec, ServedWork(sequences=2, trace=trace), ASSUMED)
    assert planned.budgets[-1].decode.missed <= planned.budgets[0].decode.missed


def test_a_trace_without_decoding_is_refused(store: Path, spec: HfSpec, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    with served_store(store, trace=trace) as (parts, runner):
        runner.join([list(range(3, 30))])
        parts.store.end_trace()
    with pytest.raises(DataError, match="no decode pass"):
        plan_serving(spec, ServedWork(trace=trace), ASSUMED)
