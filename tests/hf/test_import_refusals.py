"""Checkpoints that are refused: one line each, before anything is written, or with nothing left of what was."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import change_config, imported, rewrite, save, tensors_of, write_tokenizer
from click.testing import CliRunner

from tierstore import capabilities
from tierstore.cli.checkpoints import import_
from tierstore.cli.main import cli
from tierstore.errors import CapabilityError, ConfigError, DataError, StoreFormatError
from tierstore.hf.describing import describe_config
from tierstore.hf.importing import ImportPlan, import_model
from tierstore.hf.manifest import Manifest
from tierstore.model.config import ComputeDtype


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save(tmp_path / "m", "qwen3_moe", torch.bfloat16)
    return tmp_path / "m"


_EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"
_DENSE = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize("name", [_EXPERT, _DENSE, "lm_head.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_weights_that_are_not_finite(
    name: str, value: float, dtype: torch.dtype, source: Path, tmp_path: Path
) -> None:
    tensors = tensors_of(source)
    tensors[name] = tensors[name].to(dtype)
    tensors[name][2, 3] = value
    rewrite(source, tensors)
    index = 2 * tensors[name].shape[1] + 3
    with pytest.raises(DataError, match=rf"tensor '{name}': weight {index} of .* is NaN or infinite"):
        imported(source, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_everything_that_is_wrong_is_named_at_once(source: Path, tmp_path: Path) -> None:
    tensors = tensors_of(source)
    del tensors[_EXPERT], tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.experts.0.extra.weight"] = torch.zeros(2)
    tensors["model.layers.2.input_layernorm.weight"] = torch.zeros(32)
    tensors["two\nlines"] = torch.zeros(2)
    tensors[_DENSE] = tensors[_DENSE].t().contiguous()[:7]
    tensors["lm_head.weight"] = torch.zeros(128, 32, dtype=torch.int32)
    rewrite(source, tensors)
    with pytest.raises(DataError) as caught:
        imported(source, tmp_path / "s")
    assert str(caught.value) == (
        f"{source}: not the model of its config.json: "
        f"2 tensors missing: {_EXPERT}, model.norm.weight; "
        "3 tensors unexpected: model.layers.0.mlp.experts.0.extra.weight, model.layers.2.input_layernorm.weight, "
        "'two\\nlines'; "
        f"1 tensor of another shape: {_DENSE} (7, 32), expected (32, 32); "
        "1 tensor of a type that is not a weight's: lm_head.weight I32, expected F32 or F16 or BF16"
    )
    assert not (tmp_path / "s").exists()


def test_swapped_shapes_of_an_expert(source: Path, tmp_path: Path) -> None:
    """gate and down have the same number of weights: only the shape tells that they were exchanged."""
    tensors = tensors_of(source)
    down = _EXPERT.replace("up_proj", "down_proj")
    tensors[_EXPERT], tensors[down] = tensors[down], tensors[_EXPERT]
    rewrite(source, tensors)
    with pytest.raises(DataError, match=r"2 tensors of another shape"):
        imported(source, tmp_path / "s")


def test_a_tied_head_that_differs(tmp_path: Path) -> None:
    save(tmp_path / "m", "qwen3_moe", tie_word_embeddings=True)
    tensors = tensors_of(tmp_path / "m")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    rewrite(tmp_path / "m", tensors)
    with pytest.raises(DataError, match=r"'lm_head.weight' differs from 'model.embed_tokens.weight'"):
        imported(tmp_path / "m", tmp_path / "s")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("model_type", ["dbrx", "llama", None, 3])
def test_an_unknown_family(model_type: Any, source: Path, tmp_path: Path) -> None:
    change_config(source, model_type=model_type)
    with pytest.raises(
        ConfigError, match=r"expected one of the known families .*mixtral, .* needs a description of how"
    ):
        imported(source, tmp_path / "s")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": "wide"}, "transformers cannot build this model"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: expected 1 to 8, got 9"),
        ({"mlp_only_layers": [0, 1]}, "no layer of this model has experts"),
    ],
)
def test_configurations_that_cannot_be(
    values: dict[str, Any], message: str, source: Path, tmp_path: Path
) -> None:
    change_config(source, **values)
    with pytest.raises(ConfigError, match=message) as caught:
        imported(source, tmp_path / "s")
    assert "\n" not in str(caught.value)


def test_a_config_that_is_no_json(source: Path, tmp_path: Path) -> None:
    (source / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json: not JSON"):
        imported(source, tmp_path / "s")


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ({"model": {"vocab": {"a": 128}}}, "token 128 is beyond the model's vocabulary of 128"),
        ({"model": {"vocab": {"a": 1}}, "added_tokens": [{"id": 130}]}, "token 130 is beyond"),
        ({"model": {"vocab": [["a", 0.0]] * 129}}, "token 128 is beyond"),
        ([], "not a tokenizer"),
        ({"model": {"vocab": {"a": "one"}}}, "not a tokenizer"),
    ],
)
def test_a_tokenizer_of_another_vocabulary(
    tokenizer: Any, message: str, source: Path, tmp_path: Path
) -> None:
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(DataError, match=message):
        imported(source, tmp_path / "s")


def test_a_full_disk(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found out before the first write, and nothing is left."""
    from tierstore.store.disk.extents import Extent

    def full(self: Extent, slots: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device: 4096 more bytes are needed", str(self.path))

    monkeypatch.setattr(Extent, "reserve", full)
    with pytest.raises(OSError, match="more bytes are needed"):
        imported(source, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_without_the_extra(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(capabilities.importlib, "import_module", missing)
    with pytest.raises(
        CapabilityError, match=r'needs the package transformers .*pip install "tierstore\[hf\]"'
    ):
        imported(source, tmp_path / "s")


@pytest.mark.parametrize("release", ["5.6.2", "6.0.0", "4.57.1"])
def test_another_release_of_transformers(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    monkeypatch.setattr(transformers, "__version__", release)
    with pytest.raises(CapabilityError, match=f"needs transformers >= 5.7, < 6, and {release} is installed"):
        describe_config({"model_type": "mixtral"})


# The manifest -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 9}, "version 9, expected 1"),
        ({"compute": "fp8"}, "'fp8' is not a valid ComputeDtype"),
        ({"surprise": 1}, "unexpected keyword argument 'surprise'"),
        ({"units": 3}, "not a manifest"),
        ({"experts": []}, r"experts: unexpected value \[\]"),
    ],
)
def test_a_damaged_manifest(change: dict[str, Any], message: str, source: Path, tmp_path: Path) -> None:
    imported(source, tmp_path / "s")
    path = tmp_path / "s/model/manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(StoreFormatError, match=message) as caught:
        Manifest.read(tmp_path / "s")
    assert str(path) in str(caught.value)


# The command ------------------------------------------------------------------------------------------------


def test_the_command(source: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke(import_, [str(source), "--store", str(tmp_path / "s"), "--json"])
    assert run.exit_code == 0, run.output
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["total_parameters"] == Manifest.read(tmp_path / "s").total_parameters
    assert result["compute"] == ComputeDtype.BF16.value
    assert result["records"] == 16 + 4
    assert "moments start at zero and are not written" in run.stderr


def test_the_command_refuses_in_one_line(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (source / "model.safetensors").unlink()
    with pytest.raises(SystemExit) as ended:
        cli.main(["import", str(source), "--store", str(tmp_path / "s")])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("asked", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn"])
def test_an_attention_that_is_not_to_be_had_is_ignored(asked: str, source: Path, tmp_path: Path) -> None:
    """The same manifest as without it, and one line."""
    plain, _ = describe_lines(source, tmp_path / "plain")
    change_config(source, _attn_implementation=asked)
    found, lines = describe_lines(source, tmp_path / "asked")
    assert found.units == plain.units
    assert [line for line in lines if asked in line] == lines
    assert len(lines) == 1


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", '{"a": ', "[1]", "version https://git-lfs.github.com/spec/v1\n"])
def test_a_damaged_companion_is_no_reason_to_refuse(
    name: str, content: str, source: Path, tmp_path: Path
) -> None:
    write_tokenizer(source)
    (source / name).write_text(content)
    _, lines = describe_lines(source, tmp_path / "s")
    assert len(lines) == 1
    assert str(source) in lines[0]


def describe_lines(source: Path, store: Path) -> tuple[Manifest, list[str]]:
    """The manifest of an import, and what it says is ignored."""
    plans: list[ImportPlan] = []
    import_model(source, store, planned=plans.append)
    return plans[0].manifest, list(plans[0].notes)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("pad_token_id", 128), ("num_attention_heads", 0), ("num_key_value_heads", -1), ("vocab_size", 0)),
        *(("num_hidden_layers", 10**12), ("num_experts", 10**12), ("max_position_embeddings", 0)),
        *(
            ("head_dim", -8),
            ("moe_intermediate_size", "many"),
            ("rms_norm_eps", None),
            ("hidden_act", "none such"),
        ),
    ],
)
def test_numbers_of_no_model_are_one_line(key: str, value: object, source: Path, tmp_path: Path) -> None:
    change_config(source, **{key: value})
    result = CliRunner().invoke(cli, ["import", str(source), "--store", str(tmp_path / "s")])
    assert result.exit_code == 2, result.exception
    assert len(result.stderr.strip().splitlines()) == 1
    assert str(source / "config.json") in result.stderr or str(source) in result.stderr
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer.model", "chat_template.jinja"]
)
def test_a_pointer_of_git_lfs_is_named(name: str, source: Path, tmp_path: Path) -> None:
    oid = "0" * 64
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize 12345\n"
    (source / name).write_text(pointer)
    with pytest.raises(DataError, match=rf"{name}: a git-lfs pointer"):
        imported(source, tmp_path / "s")
    assert not (tmp_path / "s").exists()
