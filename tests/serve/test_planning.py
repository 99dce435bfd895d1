"""Plans of serving: a pass by hand, even routing, and a trace's replay with the very counts of the run that was recorded."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import object_of
from refusals import refuses
from served_cases import drawn, greedy
from served_stores import served_store, store_of
from tiny_families import make_config, plain_model

from tierstore.cli.main import cli
from tierstore.errors import BudgetError, ConfigError, DataError
from tierstore.hf.importing import ImportOptions, import_model
from tierstore.hf.manifest import Weights
from tierstore.hf.spec import HfSpec, model_of
from tierstore.links import LinkConfig, LinksConfig
from tierstore.machine_profile import ASSUMED, Cost, Evidence
from tierstore.quant.layout import CodeFormat
from tierstore.serve.config import ServeConfig
from tierstore.serve.footprint import batch_bytes, dense_parameter_bytes
from tierstore.serve.planning import ServedWork, plan_serving
from tierstore.tiers.slots import DeviceKind

TOP_K = 2
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
    return model_of(store)


def test_even_routing_by_hand(spec: HfSpec) -> None:
    model = spec.architecture
    layers, numel, dense = len(model.moe_layers), model.expert_numel, model.dense
    assert (layers, model.experts, model.top_k) == (2, 8, TOP_K)
    each = 4 * numel  # fp32
    slot = -(-each // 4096) * 4096
    half = (1 + 8) * slot  # a slot of the device, and eight of 16 experts
    made = plan_serving(spec, ServedWork(prompt_tokens=2, context=10), SLOW, budgets=[half])
    (one,) = made.budgets
    assert one.experts_ratio == 0.5
    # One token: two experts of each layer, half of them in memory.
    assert (one.decode.asked_count, one.decode.missed_count) == (4.0, 2.0)
    assert one.decode.read_bytes == 2 * each
    # Reading the weights (4 B a parameter) takes longer than their two operations a token.
    seconds = 4 * dense + layers * max(2 * each, each / 4)
    assert one.decode.pass_s == seconds
    assert one.decode.tokens_per_s == 1 / seconds
    # Two tokens: 8 (1 - (6/8)^2) = 3.5 experts of a layer.
    assert one.prefill.asked_count == 7.0
    assert made.evidence is Evidence.ASSUMED
    # Keys and values: 2 x 2 heads of 8 values, fp32, of 10 tokens and two layers, one of which is there twice.
    assert made.keys_and_values_bytes == 3 * 10 * 2 * 2 * 8 * 4
    assert one.memory_bytes == half + made.dense_bytes + made.keys_and_values_bytes + 1000


def test_the_context_is_what_the_model_allows(spec: HfSpec) -> None:
    """128 positions, where 4096 tokens are planned for otherwise."""
    assert plan_serving(spec, ServedWork(), ASSUMED).context_tokens_count == 128
    longer = replace(spec, config={**spec.config, "max_position_embeddings": 8192})
    assert plan_serving(longer, ServedWork(), ASSUMED).context_tokens_count == 4096
    assert plan_serving(longer, ServedWork(prompt_tokens=5000), ASSUMED).context_tokens_count == 5000
    for work in (ServedWork(context=129), ServedWork(prompt_tokens=129)):
        with refuses(ConfigError, 128, "got 129"):
            plan_serving(spec, work, ASSUMED)


def test_a_device_by_hand(spec: HfSpec) -> None:
    """Ten of 16 experts have a slot; eight of them are in the host cache. Nothing reads weights from memory to compute."""
    model = spec.architecture
    slot = -(-4 * model.expert_numel // 4096) * 4096
    beside = dense_parameter_bytes(spec) + batch_bytes(spec, 1, 10)
    # Of the memory a tenth is kept free; one byte less, and nine slots fit.
    for free, slots in ((10 * slot, 10), (10 * slot - 1, 9)):
        memory = next(
            size for size in range(beside + free, 2 * (beside + free)) if size - size // 10 == beside + free
        )
        profile = replace(SLOW, disk_read=Cost(0.0, 1e9), copy=Cost(3.0, 0.5))
        work = ServedWork(prompt_tokens=2, context=10)
        (one,) = plan_serving(
            spec, work, profile, budgets=[8 * slot], device=DeviceKind.CUDA, device_memory=memory
        ).budgets
        assert (one.slots_count, one.experts_ratio, one.memory_bytes) == (slots, 0.5, 8 * slot + 1000)
        # One token requests two experts of each layer.
        copied = 4 * (16 - slots) / 16
        decode = one.decode
        assert (decode.asked_count, decode.copied_count, decode.missed_count) == (4, copied, copied / 2)
        copies_s = copied * (3.0 + 2 * 4 * model.expert_numel)
        assert one.decode.pass_s == pytest.approx(2 * model.dense + copies_s)


def test_a_device_that_is_too_small_is_refused(spec: HfSpec) -> None:
    with refuses(BudgetError, "--device-memory: 100000 bytes", "--context"):
        plan_serving(spec, ServedWork(), ASSUMED, device=DeviceKind.CUDA, device_memory=100_000)


def test_each_expert_that_is_read_takes_a_latency(spec: HfSpec) -> None:
    model, latency = spec.architecture, 1e9
    half = (1 + 8) * (-(-4 * model.expert_numel // 4096) * 4096)  # as above
    profile = replace(SLOW, disk_read=Cost(latency, math.inf))
    (one,) = plan_serving(spec, ServedWork(prompt_tokens=2, context=10), profile, budgets=[half]).budgets
    # 3.5 of a pass's seven experts are missed, and two of a decode pass's four.
    assert one.prefill.pass_s == 4 * model.dense + 3.5 * latency
    assert one.decode.pass_s == 4 * model.dense + 2 * latency

    # A limited disk, of which half the rate is left.
    slow = ServeConfig(links=LinksConfig(disk=LinkConfig(bandwidth=2, latency=latency)))
    work = ServedWork(prompt_tokens=2, context=10)
    (limited,) = plan_serving(spec, work, SLOW, budgets=[half], config=slow).budgets
    each = 4 * model.expert_numel  # fp32
    assert limited.decode.pass_s == 4 * model.dense + 2 * (latency + each / 2)


@pytest.mark.parametrize(("key", "option"), [("batch.sequences", "--batch"), ("batch.context", "--context")])
def test_a_key_that_an_option_replaces_is_refused(
    store: Path, capsys: pytest.CaptureFixture[str], key: str, option: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "--model", str(store), "--serve", "--set", f"{key}=2"])
    assert ended.value.code == 2
    assert f"{key}: expected {option} instead" in capsys.readouterr().err


def test_a_larger_budget_is_never_slower(spec: HfSpec) -> None:
    made = plan_serving(spec, ServedWork(), ASSUMED)
    speeds = [one.decode.tokens_per_s for one in made.budgets]
    assert speeds == sorted(speeds)
    assert made.budgets[-1].decode.read_bytes == 0
    assert made.budgets[-2].decode.read_bytes > 0


@pytest.mark.parametrize("budget", [1, 100])
def test_a_budget_without_an_expert_is_refused(spec: HfSpec, budget: int) -> None:
    with refuses(BudgetError, "--budgets:", "host_budget:", "minimum"):
        plan_serving(spec, ServedWork(), ASSUMED, budgets=[budget])


_RUNS: dict[str, dict[str, Any]] = {
    "slots": {},
    "no guesses": {"prefetch.depth": 0},
    "copied": {"weights_in_place": "off"},
    "many slots": {"device_budget": 40 << 10, "prefetch.predictor": "none"},
    "ring": {"ring.memory": "ring", "ring.layers": 1},
    "layers": {"cache.scope": "layer", "cache.policy": "lru"},
}


@pytest.mark.parametrize("run", _RUNS)
@pytest.mark.parametrize("store_kind", ["fp32", "int8", "trainable"])
def test_a_plan_by_the_runs_own_trace_has_its_counts(store_kind: str, run: str, tmp_path: Path) -> None:
    """As the run counted them, of all its passes: what was asked for, missed and read."""
    plain_model(make_config("qwen3_moe", num_hidden_layers=3)).save_pretrained(tmp_path / "model")
    options = {
        "fp32": ImportOptions(weights=Weights.FROZEN),
        "int8": ImportOptions(weights=Weights.FROZEN, codes=CodeFormat.INT8),
        "trainable": ImportOptions(),
    }
    store = tmp_path / "store"
    import_model(tmp_path / "model", store, options[store_kind])
    settings = _RUNS[run]
    for number, budget in enumerate((90 << 10, 120 << 10)):
        trace = tmp_path / f"trace{number}"
        given = {name.replace(".", "__"): value for name, value in settings.items()}
        with served_store(store, trace=trace, host_budget=budget, **given) as (parts, runner):
            greedy(runner, drawn([7, 4]), 6)
            live = parts.store.cache.residency.stats()
            parts.store.end_trace()
        asked = ["plan", "--model", store, "--serve", "--batch", 2, "--trace", trace, "--budgets", budget]
        asked += [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        (made,) = object_of(*asked)["budgets"]
        passes = [made[name] for name in ("prefill", "decode") if made[name] is not None]

        def total(name: str, passes: list[dict[str, float]] = passes) -> int:
            return round(sum(each["passes_count"] * each[name] for each in passes))

        assert live.misses > 0
        assert total("missed_count") == live.misses
        assert total("asked_count") == live.hits + live.misses
        assert total("read_bytes") == live.read_bytes
        # Every request of the host cache fills a slot; in place nothing is copied.
        assert total("copied_count") == (0 if made["slots_count"] == 0 else live.hits + live.misses)
        if (
            made["slots_count"] == 0
        ):  # of the same requests, slots would have held their share of the 24 experts
            (with_slots,) = object_of(*asked, "--set", "weights_in_place=off")["budgets"]
            decode, held = with_slots["decode"], with_slots["slots_count"] / 24
            assert 0 < held < 1
            assert decode["copied_count"] == pytest.approx(decode["asked_count"] * (1 - held))


def test_a_trace_of_another_model_is_refused(store: Path, spec: HfSpec, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    trace, other = tmp_path / "trace", store_of(tmp_path / "other", "qwen3_moe", num_hidden_layers=3)[1]
    with served_store(other, trace=trace) as (parts, runner):
        greedy(runner, drawn([5]), 2)
        parts.store.end_trace()
    with refuses(DataError, f"{trace}:", "experts"):
        plan_serving(spec, ServedWork(trace=trace), ASSUMED)


def test_a_trace_without_decoding_is_refused(store: Path, spec: HfSpec, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    with served_store(store, trace=trace) as (parts, runner):
        runner.join([list(range(3, 30))])
        parts.store.end_trace()
    with refuses(DataError, f"{trace}:", "decode"):
        plan_serving(spec, ServedWork(trace=trace), ASSUMED)
