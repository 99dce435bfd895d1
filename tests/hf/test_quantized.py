"""FP8 by blocks and MXFP4, against what the models' own code makes of the same bytes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import (
    change_config,
    dense_of,
    experts_of,
    fused_experts,
    imported,
    rewrite,
    save,
    tensors_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.hf.manifest import Manifest, Quantization
from tierstore.hf.matching import copy_companions
from tierstore.hf.weights import fp8_to_bf16, mxfp4_to_bf16, round_bf16, scale_shape
from tierstore.model.config import ComputeDtype

_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}


def _quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix as F8_E4M3 and its scales, block by block."""
    rows, columns = weight.shape
    scales = torch.empty(scale_shape(rows, columns))
    made = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = weight[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128].float()
            scales[i, j] = block.abs().max() / 448
            made[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128] = (block / scales[i, j]).to(made.dtype)
    return made, scales


def _dequantised(made: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """One product in fp32 a value, then rounded: the definition."""
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: made.shape[0], : made.shape[1]]
    return (made.float() * wide).to(torch.bfloat16)


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 300), columns=st.integers(1, 300), seed=st.integers(0, 99))
def test_fp8_is_multiplied_in_fp32_and_rounded_once(rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    made, scales = _quantise(torch.randn(rows, columns, generator=generator))
    out = np.empty((rows, columns), np.uint16)
    fp8_to_bf16(made.view(torch.uint8).numpy(), scales.numpy(), out)
    assert np.array_equal(out, _dequantised(made, scales).view(torch.int16).numpy().view(np.uint16))


def test_every_fp8_value() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(1, 256)
    out = np.empty((1, 256), np.uint16)
    fp8_to_bf16(every.view(torch.uint8).numpy(), np.ones((1, 2), np.float32), out)
    theirs = every.float().to(torch.bfloat16)
    ours = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours[~ours.isnan()], theirs[~theirs.isnan()])


def test_against_transformers_where_the_blocks_are_whole() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    made, scales = _quantise(torch.randn(256, 384))
    theirs = Fp8Dequantize(None)._dequantize_one(made, scales, torch.bfloat16)
    out = np.empty((256, 384), np.uint16)
    fp8_to_bf16(made.view(torch.uint8).numpy(), scales.numpy(), out)
    assert np.array_equal(out.view(np.int16), theirs.view(torch.int16).numpy())


def test_rounding_is_to_even() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F800000, 0xBF808000], np.uint32)
    out = np.empty(5, np.uint16)
    round_bf16(bits.view(np.float32), out)
    assert [hex(value) for value in out] == ["0x3f80", "0x3f82", "0x3f81", "0x7f80", "0xbf80"]


@pytest.mark.parametrize("shape", [(3, 32, 2), (2, 6, 5), (1, 64, 90)])
def test_mxfp4_has_the_bits_of_transformers(shape: tuple[int, int, int]) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    experts, rows, groups = shape
    generator = torch.Generator().manual_seed(groups)
    blocks = torch.randint(0, 256, (experts, rows, groups, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 250, (experts, rows, groups), dtype=torch.uint8, generator=generator)
    theirs = convert_moe_packed_tensors(blocks, scales)
    for expert in range(experts):
        out = np.empty((groups * 32, rows), np.uint16)
        mxfp4_to_bf16(blocks[expert].numpy(), scales[expert].numpy(), out)
        assert np.array_equal(out.view(np.int16), theirs[expert].view(torch.int16).numpy())


def _fp8_checkpoint(directory: Path) -> dict[str, torch.Tensor]:
    """Makes a tiny DeepSeek-V3 whose matrices are FP8, as the real one's; returns the weights that it means."""
    save(directory, "deepseek_v3", torch.bfloat16, hidden_size=160, moe_intermediate_size=144)
    meant, written = {}, {}
    for name, value in tensors_of(directory).items():
        if value.dim() == 2 and ("mlp.experts" in name or "o_proj" in name or "kv_a_proj" in name):
            written[name], written[f"{name}_scale_inv"] = _quantise(value - value.float().mean())
            meant[name] = _dequantised(written[name], written[f"{name}_scale_inv"])
        else:
            meant[name] = written[name] = value
    rewrite(directory, written)
    change_config(directory, quantization_config=_FP8)
    return meant


def test_an_fp8_checkpoint_is_imported_as_bf16(tmp_path: Path) -> None:
    meant = _fp8_checkpoint(tmp_path / "m")
    imported(tmp_path / "m", tmp_path / "s")
    manifest = Manifest.read(tmp_path / "s")
    assert manifest.quantization is Quantization.FP8_BLOCKS
    assert manifest.compute is ComputeDtype.BF16
    assert manifest.experts.source_dtype == "F8_E4M3"
    for (layer, expert), flat in experts_of(tmp_path / "s").items():
        names = [f"model.layers.{layer}.mlp.experts.{expert}.{n}_proj.weight" for n in ("gate", "up", "down")]
        assert torch.equal(flat, torch.cat([meant[name].flatten() for name in names]).float())
    for name, value in dense_of(tmp_path / "s").items():
        assert torch.equal(value, meant[name].float()), name
    assert "quantization_config" not in (tmp_path / "s/model/config.json").read_text()


def _mxfp4_checkpoint(directory: Path) -> Any:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = save(directory, "gpt_oss", torch.bfloat16, hidden_size=64)
    state, tensors = dict(model.named_parameters()), tensors_of(directory)
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(
            0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator
        )
        scales = torch.randint(
            110, 130, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator
        )
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        with torch.no_grad():
            state[name].copy_(convert_moe_packed_tensors(blocks, scales))
    rewrite(directory, tensors)
    change_config(directory, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": []})
    return model


@pytest.mark.parametrize("compute", list(ComputeDtype))
def test_an_mxfp4_checkpoint_is_imported(compute: ComputeDtype, tmp_path: Path) -> None:
    model = _mxfp4_checkpoint(tmp_path / "m")
    imported(tmp_path / "m", tmp_path / "s", compute=compute)
    assert Manifest.read(tmp_path / "s").quantization is Quantization.MXFP4
    wanted, found = fused_experts(model), experts_of(tmp_path / "s")
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_a_stored_configuration_escapes_what_is_not_ascii(tmp_path: Path) -> None:
    """As earlier stores have it."""
    source, target = tmp_path / "m", tmp_path / "s"
    source.mkdir()
    target.mkdir()
    config = {"quantization_config": {"quant_method": "fp8"}, "_name_or_path": "Modèle"}
    (source / "config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    copy_companions(source, target, ["config.json"], Quantization.FP8_BLOCKS)
    assert (target / "config.json").read_bytes() == b'{\n  "_name_or_path": "Mod\\u00e8le"\n}\n'
