"""A packed document has the logits of the document alone, in each family that is said to keep documents apart."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_families import FAMILIES, make_config
from token_cases import conversation, save_tokenizer, write_lines

from tierstore.hf.model import attention_masks
from tierstore.hf.spec import _LINEAR
from tierstore.train.files import DataConfig, Packing
from tierstore.train.tokens.data import open_data

pytestmark = pytest.mark.filterwarnings("ignore")

#: One is longer than the tiny gpt-oss's sliding window.
_LENGTHS = (7, 1, 23, 4)


def _model(family: str, attention: str, **options: Any) -> Any:
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = make_config(family, **options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)  # as made, what is seen hardly changes what is said
    return model


def _difference(model: Any, call: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
    """The largest difference between packed documents and each alone, of the largest logit."""
    documents = [torch.randint(0, 128, (1, length)) for length in _LENGTHS]
    tokens = torch.cat(documents, dim=1)
    positions = torch.cat([torch.arange(length) for length in _LENGTHS])[None]
    with torch.no_grad():
        packed = call(model, tokens, positions)
        alone = torch.cat(
            [model(input_ids=document, use_cache=False).logits for document in documents], dim=1
        )
    return float((packed - alone).abs().max() / alone.abs().max())


def _as_said(model: Any, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    output = model(
        input_ids=tokens,
        position_ids=positions,
        attention_mask=attention_masks(model.config, positions, torch.float32),
        use_cache=False,
    )
    return output.logits


@pytest.mark.parametrize(
    ("name", "attention"),
    # transformers has no sdpa for gpt-oss: its sinks.
    [
        (name, way)
        for name in FAMILIES
        for way in ("eager", "sdpa")
        if name not in _LINEAR and (name, way) != ("gpt_oss", "sdpa")
    ],
)
def test_a_packed_document_is_alone(name: str, attention: str) -> None:
    assert _difference(_model(name, attention), _as_said) < 2e-6


def test_why_a_cache_is_refused() -> None:
    """Beside a cache, which transformers makes unasked, documents see each other: whoever runs a model must say no."""
    model = _model("mixtral", "sdpa")

    def with_cache(model: Any, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return model(input_ids=tokens, position_ids=positions).logits

    assert _difference(model, with_cache) > 0.1


@pytest.mark.parametrize("name", _LINEAR)
def test_linear_attention_is_named(name: str) -> None:
    assert _difference(_model(name, "sdpa"), _as_said) > 0.1


def test_no_masks_without_documents() -> None:
    assert attention_masks(make_config("gpt_oss"), None, torch.float32) is None


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_packed_documents_have_the_losses_of_separate_ones(name: str, tmp_path: Path) -> None:
    """From chats on disk to the loss: every answer's tokens, packed with others or alone in a sequence."""
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    turns = [(f"two {i}?", f"expert {i}", "and " * (i % 5), "the store") for i in range(12)]
    path = write_lines(tmp_path / "chats.jsonl", [conversation(*chat) for chat in turns])
    model = _model(name, "eager", vocab_size=300, max_position_embeddings=256)
    found = {}
    for packing in (Packing.DOCUMENTS, Packing.SEPARATE):
        config = DataConfig(paths=(str(path),), batch_size=1, packing=packing, validation_fraction=0.08)
        data = open_data(config, seq_len=160, vocab_size=300, tokenizer=tokenizer, store=tmp_path / "store")
        total, rows = 0.0, len(data.packed.train)
        for step in range(rows):
            batch = data.batch(step)
            positions = batch.positions_BT
            with torch.no_grad():
                logits = model(
                    input_ids=batch.tokens_BT,
                    position_ids=positions,
                    attention_mask=attention_masks(model.config, positions, torch.float32),
                    use_cache=False,
                ).logits
            total += float(torch.nn.functional.cross_entropy(logits[0], batch.targets_BT[0], reduction="sum"))
        found[packing] = rows, total
    assert found[Packing.DOCUMENTS][0] < found[Packing.SEPARATE][0]
    assert found[Packing.DOCUMENTS][1] == pytest.approx(found[Packing.SEPARATE][1], rel=1e-5)
