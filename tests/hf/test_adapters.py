"""Adapters as files: the commands that make and merge them, and those that do not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import imported, rewrite, save, tensors_of, write_tokenizer
from click.testing import CliRunner
from lora_cases import quiet_peft, session, take
from tiny_families import make_config, plain_model

from tierstore.cli.main import cli
from tierstore.errors import ConfigError, DataError
from tierstore.hf.adapters import load_adapter
from tierstore.hf.exporting import export
from tierstore.hf.manifest import Weights
from tierstore.moe.lora import LoraConfig, LoraTargets
from tierstore.train.stepping import Stepper


def call(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``model``, ``store`` with pairs that two steps have trained, and ``adapter`` of them."""
    here = tmp_path_factory.mktemp("adapters")
    plain_model(make_config("mixtral")).save_pretrained(here / "model")
    write_tokenizer(here / "model")
    imported(here / "model", here / "store", weights=Weights.FROZEN)
    with session(here / "store", LoraConfig(rank=2)) as parts:
        for step in range(2):
            take(parts, step)
        Stepper(parts).commit()
    text = call("export", here / "store", "--to", here / "adapter", "--adapter", "--json")
    found = json.loads(text.splitlines()[-1])
    values = tensors_of(here / "adapter").values()
    assert found["written_bytes"] == sum(value.nbytes for value in values)
    assert (found["step"], found["tensors"]) == (2, len(values))
    return here


def broken(made: Path, tmp_path: Path, **changes: Any) -> Path:
    """A copy of the adapter with other settings."""
    shutil.copytree(made / "adapter", tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return tmp_path / "adapter"


def test_an_adapter_merges_where_it_was_not_trained(made: Path, tmp_path: Path) -> None:
    """Into a store of the same model: the same bytes as an export of the store with the pairs."""
    imported(made / "model", tmp_path / "fresh", weights=Weights.FROZEN)
    notes = export(made / "store", tmp_path / "own").notes
    assert any("merged" in note for note in notes)
    call("export", tmp_path / "fresh", "--to", tmp_path / "other", "--merge", made / "adapter")
    own, other, plain = (tensors_of(path) for path in (tmp_path / "own", tmp_path / "other", made / "model"))
    assert own.keys() == other.keys() == plain.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)
    changed = {name for name in own if not torch.equal(own[name], plain[name])}
    assert any(".w1." in name for name in changed)
    assert any(".q_proj." in name for name in changed)
    assert not any("norm" in name or "gate" in name or "embed" in name for name in changed)
    with pytest.raises(ConfigError, match="no other adapter can be merged"):
        export(made / "store", tmp_path / "twice", adjustment=load_adapter(made / "adapter", made / "store"))


def test_another_base(made: Path, tmp_path: Path) -> None:
    """By its fingerprint; and by its shapes, where an adapter does not say whose it is."""
    save(tmp_path / "wide", "mixtral", torch.bfloat16, hidden_size=48)
    imported(tmp_path / "wide", tmp_path / "store", weights=Weights.FROZEN)
    with pytest.raises(ConfigError, match=r"another model: MixtralForCausalLM \w{12}, not Mix"):
        load_adapter(made / "adapter", tmp_path / "store")
    adapter = broken(made, tmp_path)
    (adapter / "tierstore_base.json").unlink()
    with pytest.raises(DataError, match=r"lora_A\.weight: expected shape \(2, 48\), found \(2, 32\)"):
        load_adapter(adapter, tmp_path / "store")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora: True is not supported"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"peft_type": "IA3"}, "peft_type: 'IA3' is not supported"),
        ({"r": "many"}, "r, lora_alpha"),
        ({"lora_alpha": 0}, "expected more than 0"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: 'pissa_niter_4' is not supported"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
    ],
    ids=str,
)
def test_what_is_not_plain_lora(made: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_adapter(broken(made, tmp_path, **changes), made / "store")


def test_tensors_that_are_missing_and_that_nobody_knows(made: Path, tmp_path: Path) -> None:
    adapter = broken(made, tmp_path)
    tensors = tensors_of(adapter)
    some = next(name for name in tensors if name.endswith("lora_B.weight"))

    def written(values: dict[str, torch.Tensor]) -> Path:
        rewrite(adapter, {})
        (adapter / "model.safetensors").unlink()
        from safetensors.torch import save_file

        save_file(values, adapter / "adapter_model.safetensors")
        return adapter

    without = {name: value for name, value in tensors.items() if name != some}
    with pytest.raises(DataError, match="is missing"):
        load_adapter(written(without), made / "store")
    extra = {"base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": torch.zeros(2, 32)}
    adapter = written(tensors | extra)
    with pytest.raises(DataError, match=r"layers\.9\..*no such layer"):
        load_adapter(adapter, made / "store")


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_layers_that_cannot_be_merged(made: Path, tmp_path: Path, target: str) -> None:
    """As peft saves them. The model has these layers, so that cannot be the reason."""
    import peft

    with quiet_peft():
        model = peft.get_peft_model(
            plain_model(make_config("mixtral")), peft.LoraConfig(r=2, target_modules=["q_proj", target])
        )
        model.save_pretrained(tmp_path / "theirs", save_embedding_layers=True)
    with pytest.raises(
        DataError, match="only pairs on attention's linear layers and on experts can be merged"
    ):
        load_adapter(tmp_path / "theirs", made / "store")


def test_a_damaged_adapter(made: Path, tmp_path: Path) -> None:
    """One error that names the file, and nothing is written."""
    from safetensors.torch import save_file

    adapter = broken(made, tmp_path)
    tensors, path = tensors_of(adapter), adapter / "adapter_model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    merge = ("export", made / "store", "--to", tmp_path / "out", "--merge", adapter)
    assert f"{path}: truncated" in call(*merge, status=2)
    name = next(iter(tensors))
    save_file(tensors | {name: torch.full_like(tensors[name], torch.nan)}, path)
    assert f"{path}: {name}: a weight is NaN" in call(*merge, status=2)
    save_file(tensors | {name: tensors[name].to(torch.int8)}, path)
    assert f"{name}: expected F32 or F16 or BF16, found I8" in call(*merge, status=2)
    assert not (tmp_path / "out").exists()


def test_options_that_exclude_one_another(made: Path, tmp_path: Path) -> None:
    for option in (("--dtype", "fp32"), ("--max-shard-size", "1GB")):
        text = call("export", made / "store", "--to", tmp_path / "x", "--adapter", *option, status=2)
        assert "--adapter cannot be combined with --dtype, --merge or --max-shard-size" in text


def test_pairs_are_not_lost_in_a_reshard(made: Path, tmp_path: Path) -> None:
    """Also where attention alone has them: then they lie in slices."""
    imported(made / "model", tmp_path / "store", weights=Weights.FROZEN)
    with session(tmp_path / "store", LoraConfig(rank=2, targets=LoraTargets.ATTENTION)) as parts:
        take(parts, 0)
        Stepper(parts).commit()
    for store in (tmp_path / "store", made / "store"):
        text = call("reshard", store, "--to", tmp_path / "two", "--ranks", 2, status=2)
        assert "lora" in text
        assert "be resharded" in text
    assert not (tmp_path / "two").exists()


def test_the_commands_one_after_another(made: Path, tmp_path: Path) -> None:
    """Text in, an adapter out; LoRA goes on with the same rank alone, and nothing else trains a frozen store."""
    import peft
    from transformers import AutoModelForCausalLM

    store, data = tmp_path / "store", tmp_path / "data.txt"
    call("import", made / "model", "--store", store, "--frozen")
    data.write_text("some words of a text that says nothing at all\n" * 200)
    tiny = ("--host-budget", "4MB", "--set", "finetune.seq_len=16", "--set", "data.batch_size=2")
    train = ("train", "--store", store, "--data", data, *tiny, "--set", "threads=1")
    assert "only LoRA trains beside them" in call(*train, "--steps", "2", status=2)
    assert not (store / "tokens").exists()  # refused before anything is tokenised
    call(*train, "--lora", "2", "--steps", "3")
    assert "have rank 2, not 3" in call(*train, "--lora", "3", "--steps", "4", "--resume", status=2)
    call(*train, "--lora", "2", "--steps", "4", "--resume")
    call("verify", store)
    call("export", store, "--to", tmp_path / "adapter", "--adapter")
    model = AutoModelForCausalLM.from_pretrained(made / "model")
    with quiet_peft():
        peft.PeftModel.from_pretrained(model, str(tmp_path / "adapter"))
