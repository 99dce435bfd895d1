"""What was imported leaves as it came: the same bytes in every tensor, files that transformers loads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, imported, rewrite, save, tensors_of
from transformers import AutoModelForCausalLM

from tierstore.errors import StoreFormatError
from tierstore.hf.exporting import config_with, export
from tierstore.hf.importing import ImportOptions, import_model
from tierstore.hf.stored_weights import StoredWeights
from tierstore.hf.writing import ExportDtype
from tierstore.store.format import GroupLayout
from tierstore.store.parameter_store import verify_all


@pytest.fixture(autouse=True)
def _reads_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every expert is read ahead, in the order of the tensors: none is read when it is asked for."""

    def refused(self: StoredWeights, layout: GroupLayout) -> None:
        raise AssertionError("an expert was not read ahead")

    monkeypatch.setattr(StoredWeights, "_own_scratch", refused)


def logits_of(directory: Path, **options: Any) -> torch.Tensor:
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, **options)
    assert not any(info.values()), info
    with torch.no_grad():
        return model.eval()(torch.arange(24)[None] * 5 % 128).logits


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """The same names, types, shapes and bytes."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        assert value.shape == other[name].shape, name
        flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (value, other[name])]
        assert torch.equal(*flat), name


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in ("lease", "lock.mdb")
    }


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_same_bytes_leave(family: str, tmp_path: Path) -> None:
    source, store, target = tmp_path / "m", tmp_path / "s", tmp_path / "out"
    save(source, family, torch.bfloat16)
    (source / "tokenizer_config.json").write_text('{"model_max_length": 7}')
    imported(source, store)
    before = contents(store)
    done = export(store, target, max_shard_bytes=60_000)
    assert contents(store) == before
    assert not verify_all(store).failures
    tensors = tensors_of(source)
    same(tensors_of(target), tensors)
    assert (done.dtype, done.tensors, done.step) == (ExportDtype.BF16, len(tensors), 0)
    assert done.nbytes == sum(value.nbytes for value in tensors.values())
    assert done.shards > 1
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert torch.equal(logits_of(target), logits_of(source))


@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoe", "gpt_oss", "deepseek_v3"])
def test_fp32_there_and_back(family: str, tmp_path: Path) -> None:
    """What came in bf16 leaves in fp32 as transformers would widen it, and what came in fp32 leaves so by itself."""
    save(tmp_path / "m", family, torch.bfloat16)
    imported(tmp_path / "m", tmp_path / "s")
    done = export(tmp_path / "s", tmp_path / "wide", dtype=ExportDtype.FP32)
    same(tensors_of(tmp_path / "wide"), {k: v.float() for k, v in tensors_of(tmp_path / "m").items()})
    assert done.dtype is ExportDtype.FP32
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"
    imported(tmp_path / "wide", tmp_path / "s2")
    assert export(tmp_path / "s2", tmp_path / "again").dtype is ExportDtype.FP32
    same(tensors_of(tmp_path / "again"), tensors_of(tmp_path / "wide"))
    assert (tmp_path / "again" / "config.json").read_bytes() == (
        tmp_path / "wide" / "config.json"
    ).read_bytes()
    export(tmp_path / "s2", tmp_path / "narrow", dtype=ExportDtype.BF16)
    narrow = tensors_of(tmp_path / "narrow")
    for name, value in tensors_of(tmp_path / "m").items():
        assert torch.equal(narrow[name].float(), value.float()), name


def test_frozen_experts_leave_too(tmp_path: Path) -> None:
    from tierstore.hf.manifest import Weights

    save(tmp_path / "m", "qwen3_moe", torch.bfloat16)
    imported(tmp_path / "m", tmp_path / "s", weights=Weights.FROZEN)
    export(tmp_path / "s", tmp_path / "out")
    same(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "m"))
    export(tmp_path / "s", tmp_path / "wide", dtype=ExportDtype.FP32)
    same(tensors_of(tmp_path / "wide"), {k: v.float() for k, v in tensors_of(tmp_path / "m").items()})


def test_rounding_is_torchs(tmp_path: Path) -> None:
    """Halfway cases go to even, in records and in dense parameters."""
    save(tmp_path / "m", "mixtral", torch.float32)
    tensors = tensors_of(tmp_path / "m")
    halves = torch.arange(0x3F80, 0x3F80 + 48, dtype=torch.int32) * 65536 + 0x8000
    for name in (
        "model.layers.0.block_sparse_moe.experts.1.w1.weight",
        "model.layers.0.self_attn.q_proj.weight",
    ):
        tensors[name].view(-1)[:48] = halves.view(torch.float32)
    rewrite(tmp_path / "m", tensors)
    imported(tmp_path / "m", tmp_path / "s")
    export(tmp_path / "s", tmp_path / "out", dtype=ExportDtype.BF16)
    same(tensors_of(tmp_path / "out"), {name: value.bfloat16() for name, value in tensors.items()})


def test_what_the_family_ignores_and_what_is_wide(tmp_path: Path) -> None:
    """DeepSeek-V3: a layer for next-token prediction in fp8, fp32 biases of the router among weights in bf16."""
    save(tmp_path / "m", "deepseek_v3", torch.bfloat16)
    tensors = tensors_of(tmp_path / "m")
    for name, value in list(tensors.items()):
        if name.endswith("e_score_correction_bias"):
            tensors[name] = torch.randn(value.shape)
    tensors["model.layers.2.eh_proj.weight"] = torch.randn(32, 64).to(torch.float8_e4m3fn)
    tensors["model.layers.2.embed_tokens.weight"] = torch.randn(128, 32).bfloat16()
    tensors["model.layers.2.odd"] = torch.arange(5, dtype=torch.uint8)
    tensors["model.layers.0.input_layernorm.weight"] = (
        tensors["model.layers.0.input_layernorm.weight"].float() / 3
    )
    rewrite(tmp_path / "m", tensors)
    imported(tmp_path / "m", tmp_path / "s")
    export(tmp_path / "s", tmp_path / "out", max_shard_bytes=50_000)
    same(tensors_of(tmp_path / "out"), tensors)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_what_is_wide_in_experts(family: str, tmp_path: Path) -> None:
    """gpt-oss: fp32 biases of experts whose matrices are bf16; elsewhere one matrix of one expert."""
    save(tmp_path / "m", family, torch.bfloat16)
    tensors = tensors_of(tmp_path / "m")
    ending = "_bias" if family == "gpt_oss" else "layers.1.mlp.experts.2.down_proj.weight"
    wide = [name for name in tensors if ".experts." in name and name.endswith(ending)]
    tensors |= {name: tensors[name].float() / 3 for name in wide}
    assert wide
    rewrite(tmp_path / "m", tensors)
    imported(tmp_path / "m", tmp_path / "s")
    export(tmp_path / "s", tmp_path / "out", max_shard_bytes=50_000)
    same(tensors_of(tmp_path / "out"), tensors)


def test_every_directory_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tierstore.hf import writing

    save(tmp_path / "m", "mixtral", torch.bfloat16)
    (tmp_path / "m" / "additional_chat_templates").mkdir()
    (tmp_path / "m" / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}")
    imported(tmp_path / "m", tmp_path / "s")
    synced: list[str] = []
    monkeypatch.setattr(writing, "fsync_directory", lambda path: synced.append(path.name))
    export(tmp_path / "s", tmp_path / "out")
    assert (tmp_path / "out" / "additional_chat_templates" / "tool.jinja").read_text() == "{{ messages }}"
    assert "additional_chat_templates" in synced


@pytest.mark.parametrize("both", [False, True])
def test_tied_names_as_in_the_source(both: bool, tmp_path: Path) -> None:
    save(tmp_path / "m", "qwen3_moe", torch.bfloat16, tie_word_embeddings=True)
    tensors = tensors_of(tmp_path / "m")
    assert "lm_head.weight" not in tensors
    if both:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        rewrite(tmp_path / "m", tensors)
    imported(tmp_path / "m", tmp_path / "s")
    export(tmp_path / "s", tmp_path / "out")
    same(tensors_of(tmp_path / "out"), tensors)


def test_an_adjustment_changes_weights_on_their_way_out(tmp_path: Path) -> None:
    """What merges adapters: it sees every expert and every dense parameter whole, in fp32."""
    save(tmp_path / "m", "granitemoe", torch.bfloat16)
    imported(tmp_path / "m", tmp_path / "s")

    class Twice:
        def __init__(self) -> None:
            self.seen: set[object] = set()

        def expert(self, layer: int, expert: int, weights: Any) -> None:
            self.seen.add((layer, expert))
            weights *= 2

        def dense(self, name: str, weights: Any) -> None:
            self.seen.add(name)
            weights += 1

    adjustment = Twice()
    export(tmp_path / "s", tmp_path / "out", adjustment=adjustment)
    assert {(1, 0), (1, 7), "model.norm.weight"} < adjustment.seen
    wanted = {
        name: (value.float() * 2 if "_linear" in name else value.float() + 1).bfloat16()
        for name, value in tensors_of(tmp_path / "m").items()
    }
    same(tensors_of(tmp_path / "out"), wanted)


def test_fp16_leaves_as_bf16_and_this_is_said(tmp_path: Path) -> None:
    save(tmp_path / "m", "olmoe", torch.float16)
    imported(tmp_path / "m", tmp_path / "s")
    done = export(tmp_path / "s", tmp_path / "out")
    assert done.notes == ("the model came as fp16 and leaves as bf16",)
    tensors = tensors_of(tmp_path / "m")
    export(tmp_path / "s", tmp_path / "wide", dtype=ExportDtype.FP32)
    same(tensors_of(tmp_path / "wide"), {name: value.float() for name, value in tensors.items()})
    for name, value in tensors_of(tmp_path / "out").items():
        assert value.dtype == torch.bfloat16
        nearest = (value.float() - tensors[name].float()).abs()
        assert torch.equal(nearest, (tensors[name].bfloat16().float() - tensors[name].float()).abs()), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_import_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise Stop

    save(tmp_path / "m", "olmoe", torch.bfloat16)
    with pytest.raises(Stop):
        import_model(tmp_path / "m", tmp_path / "s", ImportOptions(commit_bytes=1), progress=stop)
    with pytest.raises(
        StoreFormatError, match="the import was cut short; run the same tierstore import again"
    ):
        export(tmp_path / "s", tmp_path / "out")
    imported(tmp_path / "m", tmp_path / "s")
    export(tmp_path / "s", tmp_path / "out")
    same(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "m"))


# Configuration ----------------------------------------------------------------------------------------------


def test_config_says_what_the_weights_are() -> None:
    given = b'{"dtype": "bfloat16",   "x": 1}'
    assert config_with(given, ExportDtype.BF16) == given
    assert json.loads(config_with(given, ExportDtype.FP32)) == {"dtype": "float32", "x": 1}
    old = json.dumps({"torch_dtype": "float16", "quantization_config": {"quant_method": "fp8"}}).encode()
    assert json.loads(config_with(old, ExportDtype.BF16)) == {"torch_dtype": "bfloat16"}
    assert json.loads(config_with(b"{}", ExportDtype.BF16)) == {"dtype": "bfloat16"}
