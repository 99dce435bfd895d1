"""Stores to serve: of a built-in model that was trained, and of a wrapped one that was imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tiny_families import make_config, plain_model

from tierstore.config import load
from tierstore.hf.imports.importing import ImportOptions, import_model
from tierstore.hf.manifest import Weights
from tierstore.model.interface import Batch
from tierstore.prefetch.predictor import PredictorName
from tierstore.serve.config import ServeConfig
from tierstore.serve.experts import ServingPhase
from tierstore.serve.opening import ServedParts
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session

#: Twelve experts of 2 layers, of which a step of 16 tokens leaves some out.
_TINY: dict[str, Any] = {
    "device": "cpu",
    "threads": 1,
    "host_budget": 8 << 20,
    "steps": 6,
    "commit_every": 0,
    "eval_every": 0,
    "eval_batches": 2,
    "sample_tokens": 0,
    "model.d_model": 16,
    "model.n_layers": 2,
    "model.n_heads": 2,
    "model.seq_len": 8,
    "model.d_ff": 32,
    "model.experts": 12,
    "model.top_k": 2,
    "data.batch_size": 1,
    "schedule.lr": 5e-3,
    "schedule.warmup_steps": 4,
    "schedule.total_steps": 40,
    "io.huge_pages": "off",
}


def trained(text: Path, store: Path, **changes: Any) -> tuple[list[Batch], float]:
    """Trains a built-in model in ``store``; its validation batches, and their mean loss by the trainer opened again."""
    config = load(TrainConfig, None, {"data.paths": (str(text),), "store": store} | _TINY | changes)
    with open_session(config, Opening.CREATE) as trainer:
        for _ in range(config.steps):
            trainer.step()
        trainer.commit()
    with open_session(config, Opening.RESUME) as trainer:
        return list(trainer.data.validation_batches(config.eval_batches)), trainer.evaluate()


def imported(
    root: Path, family: str = "qwen3_moe", dtype: torch.dtype = torch.float32, *, frozen: bool = True
) -> tuple[Any, Path]:
    """transformers' own tiny model, and the store that it was imported to."""
    model = plain_model(make_config(family), dtype).eval()
    model.save_pretrained(root / "checkpoint")
    weights = Weights.FROZEN if frozen else Weights.TRAINABLE
    import_model(root / "checkpoint", root / "store", ImportOptions(weights=weights))
    return model, root / "store"


def serving(store: Path, changes: Mapping[str, Any] | None = None) -> ServeConfig:
    """One thread on the CPU, memory for everything."""
    given = {"store": store, "device": "cpu", "threads": 1, "host_budget": 8 << 20, "io.huge_pages": "off"}
    return load(ServeConfig, None, {**given, "prefetch.predictor": PredictorName.HISTORY, **(changes or {})})


def mean_loss(parts: ServedParts, batches: list[Batch]) -> float:
    """As ``Trainer.evaluate`` computes it."""
    total, counted = 0.0, 0
    for batch in batches:
        parts.experts.begin(ServingPhase.PREFILL, batch.tokens_BT.numel())
        with torch.inference_mode():
            loss = parts.model.run(batch).loss
        assert loss is not None
        total += float(loss) * batch.counted
        counted += batch.counted
    return total / counted


def logits_of(parts: ServedParts, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Of a wrapped model, by one pass without a cache."""
    parts.experts.begin(ServingPhase.PREFILL, tokens_BT.numel())
    with torch.inference_mode():
        logits: torch.Tensor = parts.model.module(input_ids=tokens_BT, use_cache=False).logits
    return logits
