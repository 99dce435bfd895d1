"""How long a text may be by a config.json: worked by hand, by the rules that vLLM and the model cards have."""

import json
from typing import Any

import pytest
from tiny_families import make_config

from tierstore.hf.describing import cached_positions, parse_config, text_positions

_FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["rope_type", "type"])
@pytest.mark.parametrize(
    ("rope", "most", "positions", "cached"),
    [
        ({}, 100, 100, 100),
        ({"kind": "default"}, 100, 100, 100),
        # Qwen's recipe, DeepSeek-V3 (multiplied already), no original positions, no factor.
        ({"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}, 100, 400, 400),
        ({"kind": "yarn", "factor": 40, "original_max_position_embeddings": 100}, 4000, 4000, 4000),
        ({"kind": "yarn", "factor": 4.0}, 100, 400, 400),
        ({"kind": "yarn", "factor": None, "original_max_position_embeddings": 100}, 400, 400, 400),
        ({"kind": "linear", "factor": 2.5}, 100, 250, 250),
        ({"kind": "linear", "factor": 4, "original_max_position_embeddings": 100}, 400, 400, 400),
        # One cache holds the keys of one set of frequencies; those of "dynamic" change with the length of a text.
        ({"kind": "dynamic", "factor": 2.0}, 100, 200, 100),
        # Llama 3.2: 32 x 8192 is not 131072.
        (
            {"kind": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192},
            131072,
            131072,
            131072,
        ),
        # Phi-3.5.
        ({"kind": "longrope", **_FACTORS, "original_max_position_embeddings": 100}, 3200, 3200, 100),
    ],
)
def test_positions(key: str, kind: str, rope: dict[str, Any], most: int, positions: int, cached: int) -> None:
    given = {kind if name == "kind" else name: value for name, value in rope.items()}
    config = {"max_position_embeddings": most, key: given}
    assert (text_positions(config), cached_positions(config)) == (positions, cached)


def test_positions_beside_the_embedding() -> None:
    """Phi-MoE names its original positions at the top; kinds of layers have embeddings of their own; nothing is said."""
    long = {"type": "longrope", **_FACTORS}
    config = {"max_position_embeddings": 800, "original_max_position_embeddings": 200, "rope_scaling": long}
    assert (text_positions(config), cached_positions(config)) == (800, 200)
    kinds = {
        "sliding_attention": {"rope_type": "default"},
        "full_attention": {"rope_type": "linear", "factor": 8.0},
    }
    assert text_positions({"max_position_embeddings": 100, "rope_parameters": kinds}) == 800
    assert text_positions({"max_position_embeddings": 100, "rope_scaling": None}) == 100
    assert text_positions({"rope_scaling": None}) == 0


@pytest.mark.parametrize("original", [{}, {"original_max_position_embeddings": 64}])
@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic"])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_the_file_and_what_transformers_makes_of_it_agree(
    kind: str, key: str, original: dict[str, int]
) -> None:
    values = json.loads(make_config("qwen3_moe", max_position_embeddings=64).to_json_string())
    del values["rope_parameters"]
    values[key] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **original}
    assert text_positions(values) == text_positions(parse_config(values).to_dict()) == 256
