"""What configurations say: the totals that were published, to the last digit; and names, without any weights."""

import json
from pathlib import Path

import pytest
from published import COUNTS, PUBLISHED
from tiny_families import make_config

from tierstore.hf.describing import describe_config, read_config
from tierstore.hf.families import FAMILIES
from tierstore.hf.manifest import ExpertLayout, Quantization
from tierstore.model.config import ComputeDtype


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_published_totals(name: str) -> None:
    config, (total, share, _) = PUBLISHED[name], COUNTS[name]
    described = describe_config(config)
    assert described.total_parameters == total
    assert f"{round(100 * described.expert_parameters / total, 1)}%" == share
    quantised = "quantization_config" in config
    assert (described.quantization is not Quantization.NONE) == quantised
    assert not quantised or described.compute is ComputeDtype.BF16


@pytest.mark.parametrize("family", list(FAMILIES))
def test_units_cover_the_model_in_the_order_of_the_forward_pass(family: str, tmp_path: Path) -> None:
    config = make_config(family)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    described = describe_config(read_config(tmp_path), ComputeDtype.BF16)
    layers = config.num_hidden_layers
    assert [unit.name for unit in described.units] == [
        "embedding",
        *(f"block.{layer}" for layer in range(layers)),
        "head",
    ]
    assert [entry.name for entry in described.units[0].parameters] == ["model.embed_tokens.weight"]
    assert described.units[-1].parameters[0].name == "model.norm.weight"
    assert all(unit.parameters for unit in described.units)
    assert {entry.dtype for entry in described.parameters()} == {"bfloat16"}
    assert {entry.dtype for entry in described.buffers} <= {"float32"}
    biased = described.experts.layout is ExpertLayout.INTERLEAVED_BIASED
    assert biased == (family == "gpt_oss")
    assert describe_config(read_config(tmp_path / "config.json"), ComputeDtype.BF16) == described


def test_the_type_of_computing_follows_the_configuration() -> None:
    config = {"model_type": "olmoe", "num_hidden_layers": 1, "num_experts": 2, "num_experts_per_tok": 2}
    assert describe_config(config).compute is ComputeDtype.FP32
    assert describe_config({**config, "torch_dtype": "bfloat16"}).compute is ComputeDtype.BF16
    assert describe_config({**config, "dtype": "float32"}).compute is ComputeDtype.FP32
