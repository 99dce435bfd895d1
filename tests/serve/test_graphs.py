"""Dense parts of blocks as graphs: near the eager model, and eager where they cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import imported, save

from tierstore.config import load
from tierstore.errors import CapabilityError
from tierstore.hf.manifest import Weights
from tierstore.serve.config import ServeConfig
from tierstore.serve.dense import compiled_blocks
from tierstore.serve.experts import ServingPhase
from tierstore.serve.opening import ServedParts, open_served


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("graphs")
    save(directory / "model", "qwen3_moe", torch.float32, num_hidden_layers=2)
    imported(directory / "model", directory / "store", weights=Weights.FROZEN)
    return directory / "store"


def serving(store: Path, **values: Any) -> ServeConfig:
    settings = {
        "store": store,
        "device": "cpu",
        "host_budget": 8 << 20,
        "threads": 1,
        "prefetch.predictor": "history",
    }
    return load(ServeConfig, None, {**settings, **{key.replace("__", "."): v for key, v in values.items()}})


def logits(parts: ServedParts, *lengths: int) -> list[torch.Tensor]:
    found = []
    for number, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(number)
        tokens_BT = torch.randint(1, parts.spec.vocab_size, (1, length), generator=generator)
        parts.experts.begin(ServingPhase.PREFILL, length)
        with torch.inference_mode():
            found.append(parts.model.module(input_ids=tokens_BT, use_cache=False).logits)
    return found


def test_off_unless_asked_for(store: Path) -> None:
    config = serving(store)
    with open_served(config) as parts, compiled_blocks(parts.model, config) as made:
        assert made.describe() == ["graphs: off (switched off)"]


def test_a_graph_that_is_refused_is_computed_eagerly(store: Path) -> None:
    def refuse(graph: object, inputs: object) -> None:
        raise RuntimeError("no such kernel\nand more")

    config = serving(store, graphs__compile="on")
    with open_served(serving(store)) as parts:
        expected = logits(parts, 9)
        with compiled_blocks(parts.model, config, compile_graph=refuse) as made:
            assert torch.equal(logits(parts, 9)[0], expected[0])
        assert made.compiled == 0
        assert made.describe()[1:] == ["graphs: computed eagerly: RuntimeError: no such kernel"]
        assert torch.equal(logits(parts, 9)[0], expected[0])


def test_graphs_that_compute_what_the_model_does(store: Path) -> None:
    """Compiled to what they are: the experts are outside, and guesses are made as before."""
    graphs: list[str] = []

    def kept(graph: torch.fx.GraphModule, inputs: object) -> Any:
        graphs.append(graph.code)
        return graph.forward

    config = serving(store, graphs__compile="on")
    with open_served(serving(store)) as parts:
        expected = logits(parts, 9, 9, 1)
        used = parts.experts.guesses.used
        with compiled_blocks(parts.model, config, compile_graph=kept) as made:
            assert all(map(torch.equal, logits(parts, 9, 9, 1), expected))
        assert made.compiled == len(graphs) > 0
        assert any("scaled_dot_product" in code or "softmax" in code for code in graphs)
        assert parts.experts.guesses.used == 2 * used
        assert parts.experts.guesses.guessed > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when inductor is imported
def test_inductor_is_near_the_eager_model(store: Path, tmp_path: Path) -> None:
    config = serving(store, graphs__compile="on", graphs__cache=tmp_path / "kernels")
    with open_served(serving(store)) as parts:
        expected = logits(parts, 9, 17)
        with compiled_blocks(parts.model, config) as made:
            found = logits(parts, 9, 17)
        assert made.compiled > 0
        assert made.refused == []
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    assert any((tmp_path / "kernels").rglob("*.so"))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"batch__invariant": True}, "batch.invariant promises the bits of eager passes"),
        ({"prefetch__predictor": "router"}, "prefetch.predictor = router listens inside of blocks"),
    ],
)
def test_what_excludes_graphs(store: Path, values: dict[str, Any], reason: str) -> None:
    with open_served(serving(store, **values)) as parts:
        with compiled_blocks(parts.model, serving(store, graphs__compile="auto", **values)) as made:
            assert made.describe() == [f"graphs: off ({reason})"]
        asked = serving(store, graphs__compile="on", **values)
        with pytest.raises(CapabilityError, match=reason), compiled_blocks(parts.model, asked):
            raise AssertionError
    with pytest.raises(CapabilityError, match=reason), open_served(asked):
        raise AssertionError
