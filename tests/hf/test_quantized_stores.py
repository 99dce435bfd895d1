"""Imports whose experts are kept as codes: what their records hold, what they leave as, what they refuse."""

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import imported, save, tensors_of

from tierstore.errors import StoreFormatError
from tierstore.hf.exporting import ExportDtype, export
from tierstore.hf.manifest import Manifest, Weights
from tierstore.hf.spec import stored_spec
from tierstore.hf.stored_weights import open_weights
from tierstore.model.store_schema import EXPERT_SCHEMA, quantized_layout
from tierstore.quant.layout import CodeFormat, dequantize, quantize
from tierstore.store import WeightFormat
from tierstore.store.parameter_store import verify_store
from tierstore.store.reading import read_schemas


@pytest.mark.parametrize("codes", CodeFormat)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_records_are_the_checkpoints_quantised(
    tmp_path: Path, codes: CodeFormat, family: str, dtype: torch.dtype
) -> None:
    save(tmp_path / "m", family, dtype)
    imported(tmp_path / "m", tmp_path / "plain", weights=Weights.FROZEN)
    report = imported(tmp_path / "m", tmp_path / "s", weights=Weights.FROZEN, codes=codes)
    assert report.manifest.codes is codes
    spec = stored_spec(tmp_path / "s")
    layout = quantized_layout(spec)
    (schema,) = [s for s in read_schemas(tmp_path / "s") if s.name == EXPERT_SCHEMA]
    assert (schema.weight_format, schema.quantized) == (WeightFormat(codes.value), layout)
    assert schema.record_bytes == layout.nbytes
    experts = report.manifest.experts
    with open_weights(tmp_path / "plain") as plain, open_weights(tmp_path / "s") as stored:
        for layer in experts.layers:
            for expert in range(experts.count):
                data = np.empty(layout.nbytes, np.uint8)
                quantize(layout, plain.expert_fp32(layer, expert), data, name="x")
                found = stored.expert_fp32(layer, expert)
                np.testing.assert_array_equal(found, dequantize(layout, data))
                rounded = torch.from_numpy(found).bfloat16().view(torch.uint16).numpy()
                np.testing.assert_array_equal(stored.expert_bf16(layer, expert), rounded)
    assert verify_store(tmp_path / "s").failures == []
    again = imported(tmp_path / "m", tmp_path / "s", weights=Weights.FROZEN, codes=codes)
    assert again.records == 0
    with pytest.raises(StoreFormatError, match=f"frozen as {codes.value}, .*; now .* frozen, moments"):
        imported(tmp_path / "m", tmp_path / "s", weights=Weights.FROZEN)


def test_an_export_is_dequantised(tmp_path: Path) -> None:
    save(tmp_path / "m", "qwen3_moe", torch.bfloat16)
    imported(tmp_path / "m", tmp_path / "s", weights=Weights.FROZEN, codes=CodeFormat.INT8)
    export(tmp_path / "s", tmp_path / "wide", dtype=ExportDtype.FP32)
    wide, source = tensors_of(tmp_path / "wide"), tensors_of(tmp_path / "m")
    assert wide.keys() == source.keys()
    for name, value in source.items():
        if ".experts." in name:
            least = value.float().abs().max() / 254
            assert 0 < (wide[name] - value.float()).abs().max() <= least * 1.001
        else:
            assert torch.equal(wide[name], value.float())


def test_manifests_without_codes_are_as_they_were(tmp_path: Path) -> None:
    save(tmp_path / "m", "mixtral")
    report = imported(tmp_path / "m", tmp_path / "s")
    assert "codes" not in report.manifest.as_json()
    assert Manifest.read(tmp_path / "s").codes is None
