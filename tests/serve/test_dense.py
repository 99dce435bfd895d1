"""Dense parts of a served model: quick products of few rows, and compiled blocks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from served_stores import serve_config, store_of
from torch import nn

from tierstore.errors import CapabilityError
from tierstore.serve.config import ServeConfig
from tierstore.serve.dense import FewRowsLinear, compiled_blocks, quicken_linears
from tierstore.serve.experts import ServingPhase
from tierstore.serve.opening import ServedParts, open_served


def _linear(
    inputs: int, outputs: int, *, bias: bool = False, dtype: torch.dtype = torch.bfloat16
) -> nn.Linear:
    torch.manual_seed(inputs + outputs)
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype)


@given(
    shape=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    inputs=st.integers(1, 400),
    outputs=st.integers(1, 400),
    whole=st.booleans(),
)
def test_bits_are_those_of_linear(shape: list[int], inputs: int, outputs: int, whole: bool) -> None:
    if whole:  # as tiles are
        inputs, outputs = inputs * 32, outputs // 16 * 16 or 16
    layer = nn.Sequential(_linear(inputs, outputs))
    x = torch.randn(*shape, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad():
        expected = layer(x)
        assert quicken_linears(layer) == 1
        got = layer(x)
    assert got.shape == expected.shape
    assert torch.equal(got.view(torch.int16), expected.view(torch.int16))


def test_rows_that_do_not_lie_together() -> None:
    layer = nn.Sequential(_linear(64, 32))
    x = torch.randn(3, 128, 5).bfloat16().transpose(1, 2)[:, :, ::2]
    with torch.no_grad():
        expected = layer(x)
        quicken_linears(layer)
        assert torch.equal(layer(x), expected)


def test_what_is_left_as_it_was() -> None:
    class Other(nn.Linear):
        pass

    other = Other(8, 8, bias=False, dtype=torch.bfloat16)
    model = nn.Sequential(
        _linear(8, 8, bias=True), _linear(8, 8, dtype=torch.float32), other, nn.LayerNorm(8)
    )
    assert quicken_linears(model) == 0
    assert not any(isinstance(layer, FewRowsLinear) for layer in model)


def test_names_parameters_and_hooks_stay() -> None:
    model = nn.ModuleDict({"head": _linear(64, 32)})
    model.register_module("tied", model["head"])
    weight, calls = model["head"].weight, []
    model["head"].register_forward_hook(lambda *_: calls.append(1))
    names = list(model.state_dict())
    assert quicken_linears(model) == 1
    assert list(model.state_dict()) == names
    assert model["tied"].weight is weight
    with torch.no_grad():
        model["head"](torch.zeros(1, 64, dtype=torch.bfloat16))
    assert calls == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_input_of_another_type_is_refused_as_ever(dtype: torch.dtype) -> None:
    layer = nn.Sequential(_linear(64, 32))
    quicken_linears(layer)
    with torch.no_grad(), pytest.raises(RuntimeError, match="dtype"):
        layer(torch.zeros(1, 64, dtype=dtype))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_of(tmp_path_factory.mktemp("graphs"), "qwen3_moe", num_hidden_layers=2)[1]


def serving(store: Path, **values: Any) -> ServeConfig:
    return serve_config(store, **{"prefetch__predictor": "history", **values})


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
        assert made.compiling.reason == "switched off"


def test_a_graph_that_is_refused_is_computed_eagerly(store: Path) -> None:
    def refuse(graph: object, inputs: object) -> None:
        raise RuntimeError("no such kernel\nand more")

    config = serving(store, graphs__compile="on")
    with open_served(serving(store)) as parts:
        expected = logits(parts, 9)
        with compiled_blocks(parts.model, config, compile_graph=refuse) as made:
            assert torch.equal(logits(parts, 9)[0], expected[0])
        assert made.compiled == 0
        assert made.refused == ["RuntimeError: no such kernel"]
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
def test_inductor_is_near_the_eager_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Compiled headers would stay in the system's temporary directory, wherever kernels are kept.
    monkeypatch.setattr("torch._inductor.config.cpp_cache_precompile_headers", False)
    # Each instruction set of the processor would be tried by compiling something for it.
    monkeypatch.setattr("torch._inductor.config.cpp.vec_isa_ok", True)
    _, store = store_of(tmp_path, "qwen3_moe", num_hidden_layers=1)
    config = serving(store, graphs__compile="on", graphs__cache=tmp_path / "kernels")
    with open_served(serving(store)) as parts:
        expected = logits(parts, 9)
        with compiled_blocks(parts.model, config) as made:
            found = logits(parts, 9)
        assert made.compiled > 0
        assert made.refused == []
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    assert any((tmp_path / "kernels").rglob("*.so"))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"batch__invariant": True}, "batch.invariant promises the bits of eager passes"),
        ({"prefetch__predictor": "router"}, "prefetch.predictor = router has hooks inside blocks"),
    ],
)
def test_what_excludes_graphs(store: Path, values: dict[str, Any], reason: str) -> None:
    with open_served(serving(store, **values)) as parts:
        with compiled_blocks(parts.model, serving(store, graphs__compile="auto", **values)) as made:
            assert made.compiling.reason == reason
        asked = serving(store, graphs__compile="on", **values)
        with refuses(CapabilityError, "graphs.compile", reason), compiled_blocks(parts.model, asked):
            raise AssertionError
    with refuses(CapabilityError, "graphs.compile", reason), open_served(asked):
        raise AssertionError
