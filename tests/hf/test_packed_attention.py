"""A packed document has the logits of the document alone, in each family that is said to keep documents apart."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from token_cases import conversation, save_tokenizer, write_lines

from tierstore.hf.model import attention_masks
from tierstore.train.files import DataConfig, Packing
from tierstore.train.tokens.data import open_data

pytestmark = pytest.mark.filterwarnings("ignore")

_COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_LATENT = {
    **_COMMON,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {**_COMMON, "intermediate_size": 48, "num_local_experts": 8},
    "qwen2_moe": {
        **_COMMON,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "num_experts": 8,
    },
    "qwen3_moe": {**_COMMON, "moe_intermediate_size": 16, "num_experts": 8, "head_dim": 8},
    "olmoe": {**_COMMON, "intermediate_size": 16, "num_experts": 8},
    "deepseek_v2": {**_LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "deepseek_v3": {**_LATENT, "q_lora_rank": 24, "n_group": 2, "topk_group": 1},
    "glm4_moe": {
        **_COMMON,
        "head_dim": 8,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {
        **_COMMON,
        "intermediate_size": 32,
        "head_dim": 8,
        "num_local_experts": 8,
        "sliding_window": 4,
    },
    "granitemoe": {**_COMMON, "intermediate_size": 16, "num_local_experts": 8},
    "phimoe": {**_COMMON, "intermediate_size": 48, "num_local_experts": 8},
}
_LENGTHS = (7, 1, 13, 4)


def _model(name: str, attention: str, **options: Any) -> Any:
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)  # as made, what is seen hardly changes what is said
    return model


def _difference(model: Any, call: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
    """The largest difference between packed documents and each alone, of the largest logit."""
    documents = [torch.randint(0, 64, (1, length)) for length in _LENGTHS]
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
        for name in sorted(_FAMILIES)
        for way in ("eager", "sdpa")
        if (name, way) != ("gpt_oss", "sdpa")
    ],
)
def test_a_packed_document_is_alone(name: str, attention: str) -> None:
    assert _difference(_model(name, attention, **_FAMILIES[name]), _as_said) < 2e-6


def test_why_a_cache_is_refused() -> None:
    """Beside a cache, which transformers makes unasked, documents see each other: whoever runs a model must say no."""
    model = _model("mixtral", "sdpa", **_FAMILIES["mixtral"])

    def with_cache(model: Any, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return model(input_ids=tokens, position_ids=positions).logits

    assert _difference(model, with_cache) > 0.1


def test_linear_attention_is_named() -> None:
    options = {
        **_COMMON,
        "num_hidden_layers": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    assert _difference(_model("qwen3_next", "sdpa", **options), _as_said) > 0.1


def test_no_masks_without_documents() -> None:
    config = transformers.AutoConfig.for_model("gpt_oss", **_FAMILIES["gpt_oss"])
    assert attention_masks(config, None, torch.float32) is None


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_packed_documents_have_the_losses_of_separate_ones(name: str, tmp_path: Path) -> None:
    """From chats on disk to the loss: every answer's tokens, packed with others or alone in a sequence."""
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    turns = [(f"two {i}?", f"expert {i}", "and " * (i % 5), "the store") for i in range(12)]
    path = write_lines(tmp_path / "chats.jsonl", [conversation(*chat) for chat in turns])
    model = _model(name, "eager", **{**_FAMILIES[name], "vocab_size": 300, "max_position_embeddings": 256})
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
