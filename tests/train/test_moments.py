"""Narrow moments in training: what a step reads and writes, what a store refuses, and conversion between the formats."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import object_of
from refusals import refuses

from tierstore import _native
from tierstore.errors import ConfigError
from tierstore.hf.stored_weights import open_weights
from tierstore.model.store_schema import expert_key
from tierstore.parallel.layout import Layout
from tierstore.store import Group, MomentFormat, ParameterStore, StoreConfig
from tierstore.store.format import MOMENT_BLOCK
from tierstore.store.reading import read_schemas
from tierstore.trace.replay import replay
from tierstore.train.budgets import expert_schema
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.resharding import reshard
from tierstore.train.session import open_session

Make = Callable[[Mapping[str, Any]], TrainConfig]

#: Records large enough that padding is small beside them, and every expert reached.
WIDE: dict[str, Any] = {
    "model.d_model": 128,
    "model.d_ff": 256,
    "model.seq_len": 32,
    "model.experts": 4,
    "data.batch_size": 8,
    "prefetch.depth": 0,
}
#: Bytes a parameter: read by a forward pass, by a backward pass, and written.
FORMULA = {MomentFormat.FP32: (4, 12, 12), MomentFormat.BF16: (4, 8, 8), MomentFormat.INT8: (4, 6, 6)}


def test_blocks_are_those_of_the_kernels() -> None:
    assert _native.MOMENT_BLOCK == MOMENT_BLOCK


def settled(engine: _native.Engine) -> dict[str, Any]:
    """What the engine has done when all that was queued is done."""
    while (found := engine.stats())["waiting"] or found["in_flight"]:
        time.sleep(0.001)
    return found


@pytest.mark.parametrize("moments", MomentFormat)
def test_bytes_of_a_step_are_the_formula(
    moments: MomentFormat, configure: Make, least: Callable[[TrainConfig], int], tmp_path: Path
) -> None:
    """With the least memory; a pass that finds the last expert of the one before reads its weights' 4 bytes less."""
    changes = WIDE | {"adamw.moments": moments.value}
    config = configure(changes | {"host_budget": least(configure(changes))})
    schema, experts = expert_schema(config), config.model.architecture.records
    assert schema.record_bytes <= (sum(FORMULA[moments][1:]) / 2 + 0.05) * schema.numel
    trace, steps = tmp_path / "trace", 3
    with open_session(config, Opening.CREATE, trace=trace) as trainer:
        trainer.step()
        before = trainer.store.cache.residency.stats()
        engine = settled(trainer.store.engine)
        for _ in range(steps):
            assert trainer.step().active_experts == experts
        after = trainer.store.cache.residency.stats()
        moved = settled(trainer.store.engine)
        trainer.commit()
        live = trainer.store.cache.residency.stats()
    found = after.by_group["weights"].hits - before.by_group["weights"].hits
    forward, backward, written = FORMULA[moments]
    expected = steps * experts * schema.numel * (forward + backward)
    read = after.read_bytes - before.read_bytes
    assert found <= 2 * steps * len(config.model.moe_layers)
    assert read == pytest.approx(expected - 4 * schema.numel * found, rel=0.03)
    assert after.written_bytes - before.written_bytes == pytest.approx(
        steps * experts * schema.numel * written, rel=0.03
    )
    assert moved["read_bytes"] - engine["read_bytes"] == read
    replayed = replay(trace)
    assert (replayed.read_bytes, replayed.written_bytes) == (live.read_bytes, live.written_bytes)


def test_a_store_keeps_the_moments_that_it_was_made_with(configure: Make, train: Any) -> None:
    config = configure({"adamw.moments": "bf16", "steps": 2})
    train(config)
    other = replace(config, adamw=replace(config.adamw, moments=MomentFormat.INT8))
    with (
        refuses(
            ConfigError, "adamw.moments:", "bf16", f"tierstore reshard {config.store} --to NEW --moments int8"
        ),
        open_session(other, Opening.RESUME),
    ):
        pass


def records(store: Path) -> dict[str, dict[str, np.ndarray]]:
    with ParameterStore.open(store, StoreConfig(host_budget=8 << 20)) as opened:
        found = {}
        for key in opened.keys:
            if key.startswith("expert"):
                with opened.fetch([key], [Group.WEIGHTS, Group.MOMENTS]) as lease:
                    found[key] = {name: lease[key].copy(name) for name in lease[key].sections}
        return found


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_conversion_between_the_formats(compute: str, configure: Make, train: Any, tmp_path: Path) -> None:
    """Weights stay, moments are rounded once and to nearest; what is wider holds what was narrow exactly."""
    config = configure({"model.compute_dtype": compute, "steps": 4})
    train(config)
    wide, crc = records(config.store), contents(config.store)
    reshard(config.store, tmp_path / "bf16", moments=MomentFormat.BF16)
    reshard(config.store, tmp_path / "int8", moments=MomentFormat.INT8)
    assert contents(config.store) == crc
    for name, bound in (("bf16", 2.0**-8), ("int8", 2.0**-4)):
        reshard(tmp_path / name, tmp_path / f"{name}-wide", moments=MomentFormat.FP32)
        for key, sections in records(tmp_path / f"{name}-wide").items():
            for section, values in sections.items():
                if not section.startswith("exp_avg"):
                    assert (values == wide[key][section]).all()
                    continue
                assert ((values == 0) == (wide[key][section] == 0)).all() or section == "exp_avg"
                large = np.abs(wide[key][section]) > 2.0**-6 * np.abs(wide[key][section]).max()
                np.testing.assert_allclose(values[large], wide[key][section][large], rtol=bound)
        # Rounded again, what was rounded stays (its scale may be another).
        reshard(tmp_path / f"{name}-wide", tmp_path / f"{name}-again", moments=MomentFormat(name))
        reshard(tmp_path / f"{name}-again", tmp_path / f"{name}-wide-again", moments=MomentFormat.FP32)
        assert contents(tmp_path / f"{name}-wide-again") == contents(tmp_path / f"{name}-wide")
    moved = replace(
        config, store=tmp_path / "int8", steps=6, adamw=replace(config.adamw, moments=MomentFormat.INT8)
    )
    with (
        pytest.warns(UserWarning, match=r"adamw.moments: was fp32, is int8$"),
        open_session(moved, Opening.RESUME) as trainer,
    ):
        trainer.step()


def test_an_export_is_caught_up(configure: Make, train: Any) -> None:
    """Few tokens: most experts have missed steps, which are replayed on copies."""
    config = configure({"adamw.moments": "int8", "steps": 4, "data.batch_size": 1, "model.top_k": 1})
    train(config)
    expected = records(config.store)
    with open_weights(config.store) as stored:
        records_of = stored.stores[0].records
        steps = {record.step for record in map(records_of.live, records_of.keys) if record.cached}
        assert len(steps) > 1
        for layer in config.model.moe_layers:
            for expert in range(config.model.experts):
                found = stored.expert_fp32(layer, expert)
                assert (found == expected[expert_key(layer, expert)]["weight"]).all()


def test_the_command(configure: Make, train: Any, tmp_path: Path) -> None:
    config = configure({"steps": 1})
    train(config)
    result = object_of("reshard", config.store, "--to", tmp_path / "new", "--moments", "int8")
    assert (result["moments"], result["ranks"], result["step"]) == ("int8", 1, 1)
    assert {schema.moments for schema in read_schemas(tmp_path / "new")} == {
        MomentFormat.INT8,
        MomentFormat.FP32,  # of dense slices
    }


def test_layouts_agree_on_narrow_moments(configure: Make, train: Any, tmp_path: Path) -> None:
    """One rank to two and back: the same bytes, from where training goes on as if nothing had been."""
    config = configure({"adamw.moments": "int8", "steps": 6, "data.batch_size": 1})
    straight = train(replace(config, store=tmp_path / "straight"))
    train(replace(config, steps=3))
    before = contents(config.store)
    done = reshard(config.store, tmp_path / "two", Layout(1, 1, 2, 1))
    assert done.moments is MomentFormat.INT8
    reshard(tmp_path / "two", tmp_path / "one", Layout(1, 1, 1, 1))
    assert contents(tmp_path / "one") == before
    with open_session(replace(config, store=tmp_path / "one"), Opening.RESUME) as trainer:
        while trainer.state.position < 6:
            trainer.step()
        trainer.commit()
        assert trainer.store.records_crc32c() == straight.crc


def contents(store: Path) -> int:
    with ParameterStore.open(store, StoreConfig(host_budget=8 << 20)) as opened:
        assert not opened.verify().failures
        return opened.records_crc32c()


def test_what_is_recorded_of_fp32_moments_is_what_it_was(configure: Make, train: Any) -> None:
    for moments, mentioned in (("fp32", False), ("bf16", True)):
        config = configure({"adamw.moments": moments, "steps": 1})
        train(config)
        with ParameterStore.open(config.store, StoreConfig(host_budget=8 << 20)) as opened:
            recorded = json.loads(opened.last_commit.state["train"])["conditions"]["adamw"]
        assert ("moments" in recorded) is mentioned
