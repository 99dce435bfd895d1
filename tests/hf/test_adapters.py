"""Adapters as files: the commands that make and merge them."""

from pathlib import Path

import pytest
import torch
from checkpoints import imported, tensors_of
from command_line import done, object_of, refused
from lora_cases import quiet_peft, session, take

from tierstore.errors import ConfigError
from tierstore.hf.adapters import load_adapter
from tierstore.hf.exporting import export
from tierstore.hf.manifest import Weights
from tierstore.moe.lora import LoraConfig, LoraTargets
from tierstore.train.stepping import Stepper


def test_what_the_export_of_pairs_says(made: Path, tmp_path: Path) -> None:
    found = object_of("export", made / "store", "--to", tmp_path / "adapter", "--adapter")
    values = tensors_of(tmp_path / "adapter").values()
    assert found["written_bytes"] == sum(value.nbytes for value in values)
    assert (found["step"], found["tensors"]) == (2, len(values))


def test_an_adapter_merges_where_it_was_not_trained(made: Path, tmp_path: Path) -> None:
    """Into a store of the same model: the same bytes as an export of the store with the pairs."""
    imported(made / "model", tmp_path / "fresh", weights=Weights.FROZEN)
    notes = export(made / "store", tmp_path / "own").notes
    assert any("merged" in note for note in notes)
    done("export", tmp_path / "fresh", "--to", tmp_path / "other", "--merge", made / "adapter")
    own, other, plain = (tensors_of(path) for path in (tmp_path / "own", tmp_path / "other", made / "model"))
    assert own.keys() == other.keys() == plain.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)
    changed = {name for name in own if not torch.equal(own[name], plain[name])}
    assert any(".w1." in name for name in changed)
    assert any(".q_proj." in name for name in changed)
    assert not any("norm" in name or "gate" in name or "embed" in name for name in changed)
    with pytest.raises(ConfigError, match="no other adapter can be merged"):
        export(made / "store", tmp_path / "twice", adjustment=load_adapter(made / "adapter", made / "store"))


def test_pairs_are_not_lost_in_a_reshard(made: Path, tmp_path: Path) -> None:
    """Also where attention alone has them: then they lie in slices."""
    imported(made / "model", tmp_path / "store", weights=Weights.FROZEN)
    with session(tmp_path / "store", LoraConfig(rank=2, targets=LoraTargets.ATTENTION)) as parts:
        take(parts, 0)
        Stepper(parts).commit()
    for store in (tmp_path / "store", made / "store"):
        said = refused("reshard", store, "--to", tmp_path / "two", "--ranks", 2)
        assert "lora" in said
        assert "be resharded" in said
    assert not (tmp_path / "two").exists()


def test_the_commands_one_after_another(made: Path, tmp_path: Path) -> None:
    """Text in, an adapter out; LoRA goes on with the same rank alone, and nothing else trains a frozen store."""
    import peft
    from transformers import AutoModelForCausalLM

    store, data = tmp_path / "store", tmp_path / "data.txt"
    done("import", made / "model", "--store", store, "--frozen")
    data.write_text("some words of a text that says nothing at all\n" * 200)
    tiny = ("--host-budget", "4MB", "--set", "finetune.seq_len=16", "--set", "data.batch_size=2")
    train = ("train", "--store", store, "--data", data, *tiny, "--set", "threads=1")
    assert "only LoRA trains beside them" in refused(*train, "--steps", "2")
    assert not (store / "tokens").exists()  # refused before anything is tokenised
    done(*train, "--lora", "2", "--steps", "3")
    assert "have rank 2, not 3" in refused(*train, "--lora", "3", "--steps", "4", "--resume")
    done(*train, "--lora", "2", "--steps", "4", "--resume")
    done("verify", store)
    done("export", store, "--to", tmp_path / "adapter", "--adapter")
    model = AutoModelForCausalLM.from_pretrained(made / "model")
    with quiet_peft():
        peft.PeftModel.from_pretrained(model, str(tmp_path / "adapter"))
