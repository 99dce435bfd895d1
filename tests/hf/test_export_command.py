"""``tierstore export`` as a user sees it, and what other commands make of an imported store: reshard, verify, gc."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import imported, rewrite, save, tensors_of
from command_line import done, invoke, object_of
from conftest_store import flip_bit
from stored_runs import configuration
from transformers import AutoModelForCausalLM

from tierstore.hf.manifest import Weights
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session


def test_the_object_and_the_text(tmp_path: Path) -> None:
    save(tmp_path / "m", "mixtral", torch.bfloat16)
    imported(tmp_path / "m", tmp_path / "s")
    found = object_of("export", tmp_path / "s", "--to", tmp_path / "out", "--max-shard-size", "40kB")
    seconds, speed = found.pop("elapsed_s"), found.pop("written_bytes_per_s")
    parts = {part["part"]: part["held_bytes"] for part in found.pop("memory")["parts"]}
    assert parts["reads ahead"] == 16 * parts["an expert, converted"], "the whole of a small store"
    assert found.pop("peak_resident_bytes") > parts["process"]
    assert 0 < seconds < 60
    assert speed > 0
    assert found == {
        "store": str(tmp_path / "s"),
        "model_directory": str(tmp_path / "out"),
        "model_type": "mixtral",
        "dtype": "bf16",
        "step": 0,
        "ranks": 1,
        "tensors": len(tensors_of(tmp_path / "m")),
        "files": len(list((tmp_path / "out").glob("*.safetensors"))),
        "experts": 16,
        "written_bytes": sum(value.nbytes for value in tensors_of(tmp_path / "m").values()),
        "notes": [],
    }
    text = done("export", tmp_path / "s", "--to", tmp_path / "wide", "--dtype", "fp32").stdout
    assert "mixtral at step 0; wrote" in text
    assert "tensors as fp32" in text
    assert "announced" in text


def test_a_damaged_record_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    save(tmp_path / "m", "olmoe", torch.bfloat16)
    imported(tmp_path / "m", tmp_path / "s")
    flip_bit(tmp_path / "s" / "extents" / "expert.weights", 8 * 4100)
    result = invoke("export", tmp_path / "s", "--to", tmp_path / "out")
    assert result.exit_code == 1
    assert "record 'expert." in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "s"]


def test_what_came_quantised_is_said_to_leave_in_bf16(tmp_path: Path) -> None:
    from test_quantized import _FP8, _quantise

    save(tmp_path / "m", "deepseek_v3", torch.bfloat16)
    tensors = tensors_of(tmp_path / "m")
    wanted = dict(tensors)
    for name, value in list(tensors.items()):
        if ".experts." in name:
            tensors[name], tensors[f"{name}_scale_inv"] = _quantise(value)
            scales = tensors[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            rows, columns = value.shape
            wanted[name] = (tensors[name].float() * scales[:rows, :columns]).bfloat16()
    rewrite(tmp_path / "m", tensors)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, "quantization_config": _FP8}))
    imported(tmp_path / "m", tmp_path / "s")
    found = object_of("export", tmp_path / "s", "--to", tmp_path / "out")
    assert found["notes"] == [
        "the model came as FP8 and leaves as bf16; quantization_config is removed from config.json"
    ]
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    made = tensors_of(tmp_path / "out")
    assert made.keys() == wanted.keys()
    assert all(torch.equal(made[name], wanted[name]) for name in wanted)
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


# An imported store and other commands -----------------------------------------------------------------------


@pytest.mark.parametrize("weights", list(Weights))
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_resharded_and_back(family: str, weights: Weights, tmp_path: Path) -> None:
    """One rank to three, to two that each have all experts; the checkpoint that leaves is the same, byte for byte."""
    save(tmp_path / "m", family, torch.bfloat16)
    tensors = tensors_of(tmp_path / "m")
    if family == "deepseek_v3":
        tensors["model.layers.2.enorm.weight"] = torch.randn(32).bfloat16()
        rewrite(tmp_path / "m", tensors)
    imported(tmp_path / "m", tmp_path / "s1", weights=weights)
    done("reshard", tmp_path / "s1", "--to", tmp_path / "s3", "--ranks", 3)
    done("reshard", tmp_path / "s3", "--to", tmp_path / "s2", "--ranks", 2, "--expert-ranks", 1)
    for name in ("s1", "s2", "s3"):
        store = tmp_path / name
        done("verify", store)
        assert object_of("gc", store)["left"] == []
        out = tmp_path / f"out-{name}"
        found = object_of("export", store, "--to", out)
        assert found["ranks"] == int(name[1])
        made = tensors_of(out)
        assert made.keys() == tensors.keys()
        assert all(torch.equal(made[key], value) for key, value in tensors.items())
    assert sorted(path.name for path in (tmp_path / "s3").iterdir()) == [
        "model",
        *(f"rank-000{rank}" for rank in range(3)),
    ]


def train(directory: Path, store: Path, steps: int) -> torch.Tensor:
    """Trains the imported model in ``store``; returns its logits of some tokens."""
    text = directory / "text"
    text.write_text("".join(chr(33 + number * number % 90) for number in range(4000)))
    given = {
        "store": store,
        "host_budget": 8 << 20,
        "finetune.seq_len": 8,
        "finetune.bias_update_speed": 0.5,  # bf16 shows it
        "data.batch_size": 1,
        "data.paths": (str(text),),
        "schedule.lr": 1e-2,
        "schedule.warmup_steps": 1,
        "schedule.total_steps": 40,
    }
    with open_session(configuration(given), Opening.RESUME) as trainer:
        while trainer.state.position < steps:
            trainer.step()
        trainer.commit()
        module: Any = trainer.model.module
        module.eval()
        with torch.no_grad():
            return module(torch.arange(8)[None] * 5 % 128, use_cache=False).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_trained_model_leaves_as_it_is(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """transformers, with the weights that left, computes the logits that the wrapped model has: bit for bit."""
    save(tmp_path / "m", family, dtype)
    imported(tmp_path / "m", tmp_path / "s")
    wanted = train(tmp_path, tmp_path / "s", 4)
    found = object_of("export", tmp_path / "s", "--to", tmp_path / "out")
    assert found["step"] == 4
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", experts_implementation="grouped_mm").eval()
    assert model.dtype == dtype
    with torch.no_grad():
        logits = model(torch.arange(8)[None] * 5 % 128, use_cache=False).logits
    assert torch.equal(logits, wanted)
    before, after = tensors_of(tmp_path / "m"), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys()
    assert sum(not torch.equal(before[name], after[name]) for name in before) > len(before) / 2
    if family == "deepseek_v3":
        biases = [name for name in before if name.endswith("e_score_correction_bias")]
        assert biases
        assert not any(torch.equal(before[name], after[name]) for name in biases)
    done("reshard", tmp_path / "s", "--to", tmp_path / "s2", "--ranks", 2)
    done("export", tmp_path / "s2", "--to", tmp_path / "out2")
    assert all(torch.equal(value, after[name]) for name, value in tensors_of(tmp_path / "out2").items())


def test_training_goes_on_from_a_store_that_was_resharded(tmp_path: Path) -> None:
    """There and back: weights, moments, buffers and what a run has begun with are those of the store as it was."""
    save(tmp_path / "m", "deepseek_v3", torch.bfloat16)
    imported(tmp_path / "m", tmp_path / "s")
    for steps in (0, 2):
        if steps:
            train(tmp_path, tmp_path / "s", steps)
        done("reshard", tmp_path / "s", "--to", tmp_path / f"two{steps}", "--ranks", 2)
        done("reshard", tmp_path / f"two{steps}", "--to", tmp_path / f"one{steps}", "--ranks", 1)
    wanted = train(tmp_path, tmp_path / "s", 4)
    assert torch.equal(train(tmp_path, tmp_path / "one0", 4), wanted)
    assert torch.equal(train(tmp_path, tmp_path / "one2", 4), wanted)
