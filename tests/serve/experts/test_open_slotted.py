"""A served model in ring memory, with chosen experts and with both in turns: the bits of one that lies in memory."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import imported, save
from served_stores import damaged, leases, memory_choice, serve_config, store_of

from tierstore.errors import BudgetError, CapabilityError, ChecksumError, ConfigError
from tierstore.hf.manifest import Weights
from tierstore.quant.layout import CodeFormat
from tierstore.serve.experts import ServingPhase, SlottedExperts
from tierstore.serve.opening import ServedParts, open_served
from tierstore.store.format import Group
from tierstore.trace.replay import replay

LAYERS = 4


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_of(tmp_path_factory.mktemp("served"), "qwen3_moe", torch.bfloat16, num_hidden_layers=LAYERS)[
        1
    ]


def passes(parts: ServedParts) -> Iterator[torch.Tensor]:
    """Logits of prompts and of single tokens, of batches of 1 and 3, in an order drawn by lot."""
    lot = random.Random(7)
    for number in range(8):
        batch, length = lot.choice([1, 3]), lot.choice([1, 1, 24])
        generator = torch.Generator().manual_seed(number)
        tokens_BT = torch.randint(1, parts.spec.vocab_size, (batch, length), generator=generator)
        parts.experts.begin(ServingPhase.DECODE if length == 1 else ServingPhase.PREFILL, batch * length)
        with torch.inference_mode():
            yield parts.model.module(input_ids=tokens_BT, use_cache=False).logits


@pytest.fixture(scope="module")
def expected(store: Path) -> list[torch.Tensor]:
    with open_served(serve_config(store)) as parts:
        assert not isinstance(parts.experts, SlottedExperts), "the CPU reads the host cache directly"
        return list(passes(parts))


@pytest.mark.parametrize("layers", range(1, LAYERS + 1))
@pytest.mark.parametrize("memory", ["ring", "auto"])
def test_a_ring_of_any_size(
    store: Path, tmp_path: Path, expected: list[torch.Tensor], layers: int, memory: str
) -> None:
    trace = tmp_path / "trace"
    config = serve_config(store, ring__memory=memory, ring__layers=layers, weights_in_place="off")
    with open_served(config, trace=trace) as parts:
        found = list(passes(parts))
        assert memory_choice(parts).split()[4] in ("ring", "sparse")
        live = parts.store.cache.residency.stats()
    assert all(map(torch.equal, found, expected))
    assert replay(trace) == live


@pytest.mark.parametrize("predictor", ["none", "router", "all"])
@pytest.mark.parametrize("slots", [1, 6, 1000])
def test_chosen_experts(
    store: Path, tmp_path: Path, expected: list[torch.Tensor], slots: int, predictor: str
) -> None:
    with open_served(serve_config(store)) as parts:
        each = parts.store.extents.schemas[0].layout(Group.WEIGHTS).slot_bytes
    config = serve_config(
        store,
        ring__memory="sparse",
        weights_in_place="off",
        device_budget=slots * each,
        host_budget=(min(slots, 20) + 6) * each,
        prefetch__predictor=predictor,
    )
    with open_served(config, trace=tmp_path / "trace") as parts:
        assert all(map(torch.equal, passes(parts), expected))
        live = parts.store.cache.residency.stats()
    assert replay(tmp_path / "trace") == live


@pytest.mark.parametrize("codes", list(CodeFormat))
def test_quantised_experts(tmp_path: Path, codes: CodeFormat) -> None:
    """A slot has as many bytes as the codes and scales of an expert; what is computed with them is the same."""
    save(tmp_path / "model", "qwen3_moe", torch.bfloat16, num_hidden_layers=LAYERS, moe_intermediate_size=64)
    imported(tmp_path / "model", tmp_path / "store", weights=Weights.FROZEN, codes=codes)
    with open_served(serve_config(tmp_path / "store")) as parts:
        expected = list(passes(parts))
    for memory in ("ring", "sparse", "auto"):
        config = serve_config(tmp_path / "store", ring__memory=memory, ring__layers=2, weights_in_place="off")
        with open_served(config) as parts:
            assert all(map(torch.equal, passes(parts), expected)), memory


@pytest.mark.parametrize("memory", ["ring", "sparse"])
def test_a_damaged_expert(store: Path, tmp_path: Path, expected: list[torch.Tensor], memory: str) -> None:
    """One bit of it on disk is another for a while: its passes fail, all others, and those after, are right."""
    config = serve_config(store, ring__memory=memory, ring__layers=2, weights_in_place="off")
    with open_served(config, trace=tmp_path / "trace") as parts:
        with damaged(parts, 1, 2) as key:
            for _ in range(3):
                with pytest.raises(ChecksumError, match=f"{key!r}, section weight"):
                    leases(parts, 1, [1, 2, 3])
                assert leases(parts, 1, [1, 3]) == [1, 3]
                assert leases(parts, 0, [0, 1, 2]) == [0, 1, 2]
        assert leases(parts, 1, [1, 2, 3]) == [1, 2, 3]
        assert all(map(torch.equal, passes(parts), expected))
        live = parts.store.cache.residency.stats()
    assert replay(tmp_path / "trace") == live


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"ring__layers": 9}, ConfigError, "ring.layers: expected at most 4, the MoE layers, got 9"),
        (
            {"ring__layers": 2, "device_budget": 1 << 13, "weights_in_place": "off"},
            BudgetError,
            "device_budget: 8192 bytes .* cannot hold a ring of 2 layers .ring.layers.; the minimum is",
        ),
        (
            {"ring__memory": "ring", "ring__layers": 4, "host_budget": 1 << 16},
            BudgetError,
            "host_budget: 65536 bytes .* cannot hold a ring of 4 layers",
        ),
        (
            {"ring__memory": "ring"},
            BudgetError,
            "device_budget: 4 slots cannot hold the .* experts of a layer",
        ),
        (
            {"ring__memory": "ring", "weights_in_place": "on"},
            ConfigError,
            "weights_in_place: expected off or auto with ring.memory = ring",
        ),
        (
            {"links__copy__latency": 1e-3, "weights_in_place": "on"},
            CapabilityError,
            "weights_in_place is set to on, .*: copies are to take the time of a limited link",
        ),
    ],
)
def test_what_cannot_be(store: Path, values: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message), open_served(serve_config(store, **values)):
        raise AssertionError


def test_the_choice_by_a_profile(store: Path, tmp_path: Path) -> None:
    """Copies that cost nothing leave nothing to choose chosen experts for; a profile that is none is named."""
    bad = tmp_path / "p.json"
    bad.write_text("{}")
    config = serve_config(store, ring__profile=bad, ring__layers=1, weights_in_place="off")
    with (
        pytest.raises(Exception, match=f"{bad}: expected a machine profile of version 1"),
        open_served(config),
    ):
        raise AssertionError
    for latency, memory in ((1e-9, "ring"), (1.0, "sparse")):
        config = serve_config(store, ring__layers=2, links__copy__latency=latency)
        with open_served(config) as parts:
            parts.experts.begin(ServingPhase.DECODE, 1)
            assert memory_choice(parts).split()[4] == memory
