"""A store whose experts are kept as codes is served: as torch computes with the weights that its export has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_opening import TOKENS, least_budget
from tiny_families import make_config, plain_model
from trained_stores import logits_of, serving
from transformers import AutoModelForCausalLM

from tierstore.hf.exports.exporting import export
from tierstore.hf.exports.outline import ExportDtype
from tierstore.hf.imports.importing import ImportOptions, import_model
from tierstore.hf.manifest import Weights
from tierstore.quant.layout import CodeFormat
from tierstore.serve.opening import open_served


@pytest.mark.parametrize("codes", CodeFormat)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_logits_are_those_of_the_export(tmp_path: Path, codes: CodeFormat, family: str) -> None:
    """The same bits at the least budget and with room for all, in the host cache and copied to slots."""
    plain_model(make_config(family), torch.float32).save_pretrained(tmp_path / "m")
    store = tmp_path / "s"
    for kept, path in ((None, tmp_path / "whole"), (codes, store)):
        import_model(tmp_path / "m", path, ImportOptions(weights=Weights.FROZEN, codes=kept))
    export(store, tmp_path / "out", dtype=ExportDtype.FP32)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = plain(TOKENS, use_cache=False).logits
    least = least_budget(store)
    assert least <= least_budget(tmp_path / "whole")
    found = []
    for changes in ({"host_budget": least}, {}, {"weights_in_place": "off"}):
        with open_served(serving(store, changes)) as parts:
            found.append(logits_of(parts, TOKENS))
    assert torch.allclose(found[0], expected, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(logits, found[0]) for logits in found)
