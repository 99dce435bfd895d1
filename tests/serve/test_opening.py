"""Opening a store to serve it: what is refused, what the model computes, what is free at its end."""

import gc
import os
import shutil
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from refusals import refuses
from served_stores import least_budget, logits_of, mean_loss, served_store, serving, store_of, trained
from test_reading import fingerprint, reader
from tiny_families import make_config, plain_model
from transformers import AutoModelForCausalLM

from tierstore.errors import (
    BudgetError,
    ConfigError,
    StoreError,
    StoreFormatError,
    StoreInUseError,
    StoreMissingError,
)
from tierstore.hf.exporting import export
from tierstore.hf.importing import ImportOptions, import_model
from tierstore.hf.manifest import Weights
from tierstore.hf.writing import ExportDtype
from tierstore.model.config import ComputeDtype
from tierstore.model.interface import Batch
from tierstore.model.store_schema import EXPERT_SCHEMA
from tierstore.quant.layout import CodeFormat
from tierstore.serve.footprint import ExpertBudget, ServedRecords, check_memory, dense_parameter_bytes
from tierstore.serve.opening import open_served
from tierstore.store import ParameterStore, StoreConfig
from tierstore.store.config import StoreAccess
from tierstore.store.optimizer import replay_scratch_bytes
from tierstore.store.reading import read_summary
from tierstore.tiers.slots import DeviceKind
from tierstore.trace.replay import replay

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])


@dataclass(frozen=True)
class _Trained:
    """A built-in model that was trained, which no test changes; its validation batches, and the trainer's mean loss."""

    store: Path
    batches: list[Batch]
    loss: float


@pytest.fixture(scope="module")
def small(text: Path, tmp_path_factory: pytest.TempPathFactory) -> _Trained:
    store = tmp_path_factory.mktemp("small") / "store"
    return _Trained(store, *trained(text, store))


# Bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moments", ["fp32", "int8"])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_trained_store_is_served_as_its_trainer_evaluates_it(
    text: Path, tmp_path: Path, compute: str, moments: str
) -> None:
    """With missed steps, at three budgets and every predictor; the replay of each trace counts what was counted."""
    store = tmp_path / "store"
    changes = {"model.compute_dtype": compute, "adamw.moments": moments}
    batches, expected = trained(text, store, **changes)
    summary = read_summary(store)
    assert 0 < summary.missed[EXPERT_SCHEMA] < summary.records[EXPERT_SCHEMA]
    before, least = fingerprint(store), least_budget(store)
    for number, (budget, predictor) in enumerate(
        [(least, "router"), (3 * least, "all"), (least, "none"), (3 * least, "history"), (8 << 20, "router")]
    ):
        trace = tmp_path / f"trace{number}"
        config = serving(store, {"host_budget": budget, "prefetch.predictor": predictor})
        with open_served(config, trace=trace) as parts:
            assert mean_loss(parts, batches) == expected, (budget, predictor)
            live = parts.store.cache.residency.stats()
            assert live.misses > 0
        assert replay(trace) == live, (budget, predictor)
    assert fingerprint(store) == before


def test_what_missed_steps_cost_is_what_the_formula_says(small: _Trained) -> None:
    """One frame: every expert that is asked for is read, whole where it has missed steps."""
    summary = read_summary(small.store)
    schema = summary.schema(EXPERT_SCHEMA)
    with open_served(serving(small.store, {"prefetch.depth": 0})) as parts:
        for layer in parts.spec.moe_layers:
            for _ in parts.experts.forward(layer, range(12)):
                pass
        read = parts.store.cache.residency.stats().read_bytes
    weights, moments = (schema.layout(group).slot_bytes for group in schema.groups)
    assert read == 24 * weights + summary.missed[EXPERT_SCHEMA] * moments


@pytest.mark.parametrize("weights", Weights)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_an_imported_store_gives_transformers_logits(tmp_path: Path, family: str, weights: Weights) -> None:
    plain, store = store_of(tmp_path, family, torch.bfloat16, weights=weights)
    before, least = fingerprint(store), least_budget(store)
    with torch.inference_mode():
        expected = plain(input_ids=TOKENS, use_cache=False).logits
    for budget in (least, 8 << 20):
        with open_served(serving(store, {"host_budget": budget, "prefetch.predictor": "router"})) as parts:
            assert torch.equal(logits_of(parts, TOKENS), expected)
            assert not any(parameter.requires_grad for parameter in parts.model.module.parameters())
            assert not parts.model.module.training
    assert fingerprint(store) == before


def test_dense_parameters_are_held_in_the_type_that_passes_need(text: Path, tmp_path: Path) -> None:
    """The built-in model casts the matrices of its blocks before their only use; all else is fp32."""
    trained(text, tmp_path / "store", **{"model.compute_dtype": "bf16"})
    with open_served(serving(tmp_path / "store")) as parts:
        types = {name: parameter.dtype for name, parameter in parts.model.module.named_parameters()}
        assert parts.spec.compute_dtype is ComputeDtype.BF16
        units = parts.spec.architecture.units
        held = sum(parameter.nbytes for parameter in parts.model.module.parameters())
    assert types["blocks.0.attention.qkv"] == torch.bfloat16
    assert types["embedding"] == torch.float32
    assert held == sum(2 * unit.matrices + 4 * unit.others for unit in units)


# Who may open it --------------------------------------------------------------------------------------------


def test_several_serve_and_a_trainer_is_told_who(small: _Trained, tmp_path: Path) -> None:
    store = shutil.copytree(small.store, tmp_path / "store")  # it is opened to write, too
    with open_served(serving(store)) as one, open_served(serving(store)) as other, reader(store) as (pid, _):
        assert mean_loss(one, small.batches) == mean_loss(other, small.batches) == small.loss
        with refuses(StoreInUseError, store, "pid") as refused:
            ParameterStore.open(store, StoreConfig())
        assert any(f"pid {one})" in str(refused.value) for one in (pid, os.getpid()))
    with (
        ParameterStore.open(store, StoreConfig()),
        refuses(StoreInUseError, f"pid {os.getpid()}"),
        open_served(serving(store)),
    ):
        pass


def test_an_opening_that_fails_leaves_the_store_to_others(small: _Trained, tmp_path: Path) -> None:
    store = shutil.copytree(small.store, tmp_path / "store")
    extent = next((store / "extents").glob("dense*.weights"))
    kept = extent.read_bytes()
    extent.write_bytes(bytes(len(kept)))
    with refuses(StoreError, "record 'dense"), open_served(serving(store)):
        pass
    extent.write_bytes(kept)
    ParameterStore.open(store, StoreConfig()).close()


@pytest.mark.parametrize(
    ("path", "kind", "named"),
    [
        ("nothing", StoreMissingError, "nothing"),
        ("empty", StoreMissingError, "tierstore.json"),
        ("ranks", ConfigError, "tierstore reshard"),
        ("ranks/rank-0000", StoreFormatError, "index"),
    ],
)
def test_what_cannot_be_served_is_named(
    small: _Trained, tmp_path: Path, path: str, kind: type[Exception], named: str
) -> None:
    (tmp_path / "empty").mkdir()
    shutil.copytree(small.store, tmp_path / "ranks" / "rank-0000", ignore=shutil.ignore_patterns("data.mdb"))
    with refuses(kind, path, named), open_served(serving(tmp_path / path)):
        pass


# Budgets ----------------------------------------------------------------------------------------------------


def test_how_the_budgets_are_divided(small: _Trained) -> None:
    """fp32 experts of 3 x 16 x 32 = 1,536 parameters: 6,144 bytes, two pages with padding; moments 2 x 8,192."""
    store = small.store
    schema = read_summary(store).schema(EXPERT_SCHEMA)
    assert schema is not None
    slot, weights, scratch = 8_192, 8_192, 2 * 2 * 8_192
    assert replay_scratch_bytes(schema) == scratch
    records = ServedRecords(experts=schema, scratch=scratch)
    assert least_budget(store) == slot + weights + scratch
    with open_served(serving(store)) as parts:
        served = ExpertBudget(config=parts.config, spec=parts.spec, records=records, device=DeviceKind.CPU)

    def divided(**changes: object) -> tuple[int, int, int]:
        found = replace(served, config=serving(store, changes)).divided()
        assert found.cache + found.slots.nbytes == changes.get("host_budget", 8 << 20)
        return found.slots.weights, found.cache, found.lookahead

    assert divided(host_budget=slot + weights + scratch) == (1, weights + scratch, 0)
    assert divided() == (4, (8 << 20) - 4 * slot, int(((8 << 20) - 4 * slot - scratch) * 0.45))
    assert divided(device_budget=2 * slot)[0] == 2
    with refuses(BudgetError, "device_budget: 1 bytes", f"{slot} bytes"):
        divided(device_budget=1)
    config = serving(store, {"device_budget": 9 * slot})
    on_device = replace(served, config=config, device=DeviceKind.CUDA).divided()
    assert (on_device.slots.weights, on_device.cache) == (9, 8 << 20)


def test_what_is_held_fits_this_machine(small: _Trained) -> None:
    """8 MiB of experts; dense parameters of the built-in model, 4 bytes each: embedding and head of 256 x 16, a norm of 16,
    and two blocks of 4 x 16 x 16 attention, two norms of 16 and a router of 12 x 16.
    """
    dense = 4 * (2 * 256 * 16 + 16 + 2 * (4 * 16 * 16 + 2 * 16 + 12 * 16))
    with open_served(serving(small.store)) as parts:
        assert dense_parameter_bytes(parts.spec) == dense
        assert sum(parameter.nbytes for parameter in parts.model.module.parameters()) == dense
    held = 8 << 20, 2 << 20
    check_memory(*held, DeviceKind.CPU, usable=10 << 20)
    check_memory(*held, DeviceKind.CUDA, usable=8 << 20)
    asked = {"host_budget": 1 << 60}
    with refuses(BudgetError, "host_budget:"), open_served(serving(small.store, asked)):
        pass


def test_nothing_is_left_open(small: _Trained) -> None:
    """Descriptors and leases of a server that has ended."""
    store = small.store

    def descriptors() -> list[str]:
        return sorted(
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.lexists(f"/proc/self/fd/{fd}")
        )

    with open_served(serving(store)):
        pass
    before = [name for name in descriptors() if str(store) in name]
    with open_served(serving(store)) as parts:
        assert parts.store.opened_to is StoreAccess.READ
        assert any(str(store) in name for name in descriptors())
    assert [name for name in descriptors() if str(store) in name] == before == []


@pytest.mark.parametrize("codes", CodeFormat)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_logits_are_those_of_the_export(tmp_path: Path, codes: CodeFormat, family: str) -> None:
    """The same bits at the least budget and with room for all, in the host cache and copied to slots."""
    plain_model(make_config(family), torch.float32).save_pretrained(tmp_path / "m")
    store = tmp_path / "s"
    for kept, path in ((None, tmp_path / "whole"), (codes, store)):
        import_model(tmp_path / "m", path, ImportOptions(weights=Weights.FROZEN, codes=kept))
    export(store, tmp_path / "out", dtype=ExportDtype.FP32)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = plain(TOKENS, use_cache=False).logits
    least = least_budget(store)
    assert least <= least_budget(tmp_path / "whole")
    found = []
    for changes in ({"host_budget": least}, {}, {"weights_in_place": "off"}):
        with open_served(serving(store, changes)) as parts:
            found.append(logits_of(parts, TOKENS))
    assert torch.allclose(found[0], expected, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(logits, found[0]) for logits in found)


def test_guesses_end_with_the_first_pass_that_reads_nothing(tmp_path: Path) -> None:
    model, store = store_of(tmp_path, "qwen3_moe")
    with torch.inference_mode():
        expected = model(input_ids=TOKENS[:1], use_cache=False).logits
    options = {"prefetch.predictor": "router", "prefetch.depth": 1}
    with open_served(serving(store, options)) as parts:
        first = parts.spec.moe_layers[0]
        reads, reached = [], []
        for _ in range(5):
            before = parts.store.cache.residency.stats().read_bytes
            torch.testing.assert_close(logits_of(parts, TOKENS[:1]), expected)
            reads.append(parts.store.cache.residency.stats().read_bytes - before)
            reached.append(parts.experts.reach(first))
    assert reads[0] > 0
    assert reads[-2:] == [0, 0]
    # A pass is judged by what the one before it has read.
    assert [not layers for layers in reached[1:]] == [read == 0 for read in reads[:-1]]


PROMPTS = [[3, 1, 4, 1], [5, 9]]


@pytest.fixture
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _still_there(store: Path, *, invariant: bool) -> list[str]:
    """Which parts are there still after a prefill, a step and the end."""
    with served_store(store, batch__invariant=invariant) as (parts, runner):
        joined = runner.join(PROMPTS)
        runner.step(dict.fromkeys(joined, 7))
        kept: dict[str, weakref.ref[object]] = {
            "runner": weakref.ref(runner),
            "module": weakref.ref(parts.model.module),
            "parameter": weakref.ref(next(parts.model.module.parameters())),
            "experts": weakref.ref(parts.experts),
            "store": weakref.ref(parts.store),
            "cache": weakref.ref(parts.store.cache),
        }
    del parts, runner, joined
    return [name for name, reference in kept.items() if reference() is not None]


@pytest.mark.usefixtures("_no_collection")
@pytest.mark.parametrize("invariant", [False, True])
def test_a_wrapped_model_is_free_at_its_end(tmp_path: Path, invariant: bool) -> None:
    _, store = store_of(tmp_path, "mixtral", torch.bfloat16)
    assert _still_there(store, invariant=invariant) == []


@pytest.mark.usefixtures("_no_collection")
def test_a_trained_model_is_free_at_its_end(small: _Trained) -> None:
    assert _still_there(small.store, invariant=False) == []
