"""Published parameter counts, to the last digit that is printed."""

from typing import Any

import pytest
from plain_reference import PlainMixture

from tierstore.config import load
from tierstore.errors import ConfigError
from tierstore.model import ModelConfig, Transformer
from tierstore.model.architecture import Architecture
from tierstore.plan.presets import PRESETS, find_preset
from tierstore.train.config import TrainConfig

# SE-MoE Table 1: experts, and parameters in units of 10^9.
TABLE_1 = {8: 13.9, 16: 26.8, 32: 52.6, 64: 104.1, 128: 207.2}


@pytest.mark.parametrize("experts", TABLE_1)
def test_se_moe_table_1(experts: int) -> None:
    counted = PRESETS[f"se-moe-{TABLE_1[experts]}b"].architecture
    assert counted.experts == experts
    assert len(counted.moe_layers) == 12
    assert round(counted.parameters / 1e9, 1) == TABLE_1[experts]


def test_the_sequence_length_that_the_paper_leaves_out_does_not_matter() -> None:
    for experts, printed in TABLE_1.items():
        for positions in (512, 1024, 2048, 4096):
            counted = Architecture.gpt(
                layers=12, d_model=4096, vocab=50304, positions=positions, experts=experts, moe_every=1
            )
            assert round(counted.parameters / 1e9, 1) == printed


def test_pipeline_moe_table_2() -> None:
    """6.7 B is reproduced, 143 B is not: no vocabulary gives both."""
    assert round(PRESETS["ppmoe-6.7b"].architecture.parameters / 1e9, 1) == 6.7
    assert round(PRESETS["ppmoe-143b"].architecture.parameters / 1e9) == 142

    def counted(layers: int, d_model: int, vocab: int) -> float:
        return (
            Architecture.gpt(
                layers=layers, d_model=d_model, vocab=vocab, positions=2048, experts=64, moe_every=2
            ).parameters
            / 1e9
        )

    assert counted(32, 4096, 178_501) < 142.5 <= counted(32, 4096, 178_502)
    assert counted(24, 1024, 96_822) < 6.75 <= counted(24, 1024, 96_823)


def test_pipeline_moe_backbones() -> None:
    """GPT-3 Medium, "350M", and GPT-3 6.7B."""
    medium = Architecture.gpt(layers=24, d_model=1024, vocab=50257, positions=2048, experts=1, moe_every=2)
    large = Architecture.gpt(layers=32, d_model=4096, vocab=50257, positions=2048, experts=1, moe_every=2)
    assert round(medium.parameters / 1e6) == 356  # the paper's 350M is GPT-3's own rounding of it
    assert medium.sparse == 0
    assert round(large.parameters / 1e9, 1) == 6.7


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset(name: str) -> None:
    """Each agrees with what is printed, or says why not; its settings are a configuration of the same shape."""
    preset = find_preset(name)
    counted = preset.architecture
    agrees = abs(counted.parameters - preset.published) <= preset.unit / 2
    assert agrees == (name != "ppmoe-143b")
    model = load(TrainConfig, None, dict(preset.settings)).model
    assert model.experts == counted.experts
    assert model.top_k == counted.top_k
    assert len(counted.units) == model.n_layers + 2
    # tierstore's own blocks have neither biases nor grouped queries, but are otherwise these.
    assert abs(model.expert_shape.numel / counted.expert_numel - 1) < 1e-3


def test_active_parameters() -> None:
    """As the models' names and papers have them: 3.3 B of 30.5 B, 12.9 B of 46.7 B, 1.3 B of 6.9 B."""
    active = {name: round(find_preset(name).architecture.active / 1e9, 1) for name in PRESETS}
    assert active["mixtral-8x7b"] == 12.9
    assert active["olmoe-1b-7b"] == 1.3
    assert round(find_preset("qwen3-30b-a3b").architecture.active / 1e9, 2) == 3.35


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_layers": 5, "moe_every": 2},
        {"shared_expert_d_ff": 24, "tie_embeddings": "tied"},
        {"activation": "gelu", "d_ff_dense": 40, "n_layers": 4, "moe_every": 4},
        {"moe_every": 0},
    ],
    ids=["plain", "dense between", "shared, tied", "gelu", "no experts"],
)
def test_the_built_in_model_counts_as_torch_does(changes: dict[str, Any]) -> None:
    small: dict[str, Any] = {"d_model": 16, "n_heads": 2, "seq_len": 8, "d_ff": 32, "experts": 6}
    config = ModelConfig(**(small | changes))
    counted = config.architecture
    model = Transformer(config, None, mixture=lambda layer: PlainMixture(config, layer))
    units = [[p.numel() for p in unit] for _, unit in model.dense_units()]
    assert len(units) == len(counted.units)
    assert sum(p.numel() for p in model.parameters()) == counted.parameters
    # The plain model's experts are parameters of its blocks.
    here = counted.expert_numel * counted.experts
    moe = set(counted.moe_layers)
    expected = [sum(unit) - (here if i - 1 in moe else 0) for i, unit in enumerate(units)]
    assert [unit.numel for unit in counted.units] == expected


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match="mixtral-8x7b"):
        find_preset("mixtral")
