"""Published models by their config.json alone: totals to the last digit, and the shares of experts."""

import json
from functools import cache
from pathlib import Path

import pytest
from published import COUNTS, PUBLISHED

from tierstore.hf.describing import describe_config
from tierstore.hf.manifest import Manifest
from tierstore.hf.spec import HfSpec, attention_sizes, hf_spec, pair_parameters, stored_spec
from tierstore.model.config import CheckpointActivations, ComputeDtype
from tierstore.moe.lora import LoraConfig
from tierstore.train.config import FinetuneConfig


@cache
def _manifest(name: str) -> Manifest:
    return describe_config(PUBLISHED[name])


def _spec(name: str, **finetune: object) -> HfSpec:
    return hf_spec(_manifest(name), PUBLISHED[name], FinetuneConfig(**finetune))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_and_shares(name: str) -> None:
    total, share, billions = COUNTS[name]
    architecture = _spec(name).architecture
    assert architecture.parameters == total
    assert f"{architecture.sparse / architecture.parameters:.1%}" == share
    assert f"{architecture.parameters / 1e9:.3f}" == billions


def test_what_the_sizes_of_attention_are() -> None:
    """By hand. Mixtral: 32 heads of 128, 8 of keys and values. V3: 128 heads of 128 + 64, values of 128; 512 + 64 cached."""
    found = {name: attention_sizes(_spec(name), _spec(name).manifest.units[1]) for name in PUBLISHED}
    assert (found["Mixtral-8x7B"].queries, found["Mixtral-8x7B"].cached) == (4096, 2 * 1024)
    v3 = found["DeepSeek-V3"]
    assert (v3.queries, v3.values, v3.cached, v3.products) == (24576, 16384, 576, 20480)
    assert (found["gpt-oss-20b"].queries, found["gpt-oss-20b"].cached) == (4096, 2 * 512)
    assert _spec("Mixtral-8x7B").cache_bytes(1000) == 1000 * 32 * 2048 * 2


def test_pairs_of_attention() -> None:
    """Rank 16 on Mixtral: q and o of 4096 x 4096, k and v of 1024 x 4096, in each of 32 layers."""
    by_unit = pair_parameters(_spec("Mixtral-8x7B").manifest, LoraConfig(rank=16))
    assert by_unit[0] == by_unit[-1] == 0
    assert set(by_unit[1:-1]) == {16 * (2 * 8192 + 2 * 5120)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_activations_grow_with_tokens_and_shrink_with_checkpointing(name: str) -> None:
    spec = _spec(name)
    block = _spec(name, checkpoint_activations=CheckpointActivations.BLOCK)
    assert block.activation_bytes(1024) < spec.activation_bytes(1024) < spec.activation_bytes(2048)
    assert spec.forward_bytes(1024) < block.activation_bytes(1024)


def test_the_compute_type_is_the_configurations() -> None:
    config = {**PUBLISHED["OLMoE-1B-7B"], "torch_dtype": "float32"}
    assert describe_config(config).compute is ComputeDtype.FP32
    assert describe_config(PUBLISHED["gpt-oss-20b"]).compute is ComputeDtype.BF16


def test_a_spec_may_be_trained_otherwise_but_not_be_another_model() -> None:
    spec = _spec("OLMoE-1B-7B")
    other = spec.vary("checkpoint_activations", CheckpointActivations.BLOCK)
    assert other.checkpoint_activations is CheckpointActivations.BLOCK
    assert other.architecture == spec.architecture
    assert spec.vary("d_ff", 8) is None
    kept = {key: value for key, value in spec.settings().items() if key != "tuning"}
    assert kept == {key: value for key, value in other.settings().items() if key != "tuning"}
    assert json.loads(json.dumps(spec.settings())) == spec.settings()


def test_a_directory_without_a_manifest_holds_no_imported_model(tmp_path: Path) -> None:
    assert stored_spec(tmp_path) is None
