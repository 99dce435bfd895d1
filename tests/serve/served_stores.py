"""Stores of tiny models to be served, and what opens them. As a program, a tiny store with a tokenizer and a chat template:

PYTHONPATH=tests:tests/hf:tests/store:tests/train python tests/serve/served_stores.py DIRECTORY
"""

import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from checkpoints import imported
from conftest_store import flip_bit
from refusals import refuses
from tiny_families import make_config, plain_model
from tiny_runs import MODEL, QUIET, RUN, SCHEDULE
from token_cases import save_tokenizer

from tierstore.config import load
from tierstore.errors import BudgetError
from tierstore.hf.manifest import Weights
from tierstore.model.interface import Batch
from tierstore.model.store_schema import expert_key
from tierstore.serve.batch import BatchRunner
from tierstore.serve.config import ServeConfig
from tierstore.serve.experts import ServingPhase
from tierstore.serve.opening import ServedParts, open_runner, open_served
from tierstore.store.format import Group
from tierstore.timeline import TimelineSink
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session

#: One thread, as in ``tiny_families``; a tiny machine.
_TINY: dict[str, Any] = {"device": "cpu", "threads": 1, "io.huge_pages": "off", "host_budget": 8 << 20}


def store_of(
    directory: Path,
    family: str,
    dtype: torch.dtype = torch.float32,
    *,
    weights: Weights = Weights.FROZEN,
    **options: Any,
) -> tuple[Any, Path]:
    """transformers' own model, and a store that it was imported into."""
    plain = plain_model(make_config(family, **options), dtype).eval()
    plain.save_pretrained(directory / "model")
    imported(directory / "model", directory / "store", weights=weights)
    return plain, directory / "store"


def serve_config(store: Path, changes: Mapping[str, Any] | None = None, **settings: Any) -> ServeConfig:
    """``changes`` by dotted name, ``settings`` with ``__`` for dots."""
    given = {name.replace("__", "."): value for name, value in settings.items()}
    return load(ServeConfig, None, {**_TINY, "store": store, **given, **(changes or {})})


@contextmanager
def served_store(
    store: Path, *, trace: Path | None = None, timeline: TimelineSink | None = None, **settings: Any
) -> Iterator[tuple[ServedParts, BatchRunner]]:
    """The store opened, and a runner over it."""
    with open_served(serve_config(store, **settings), trace=trace, timeline=timeline) as parts:
        yield parts, open_runner(parts)


def least_budget(store: Path) -> int:
    """The smallest host budget, as a refusal names it."""
    return _named_minimum(store, "host_budget", host_budget=1)


def least_ring(store: Path) -> int:
    """The smallest device budget of a ring of one layer: the few slots that there are without one are too few."""
    return _named_minimum(store, "device_budget", ring__memory="ring")


def _named_minimum(store: Path, key: str, **settings: Any) -> int:
    with refuses(BudgetError, f"{key}:") as refusal, served_store(store, **settings):
        pass
    found = re.search(r"minimum is (\d+) bytes", str(refusal.value))
    return int(found[1])


def chain_store(
    directory: Path,
    tokenizer: Any,
    scripts: Sequence[Sequence[int]],
    *,
    generation: dict[str, Any] | None = None,
) -> tuple[Any, Path]:
    """transformers' own Mixtral, and a store that it was imported into. ``scripts``: tokens that follow each other; behind
    all others comes ``</s>``. ``generation``: values of its generation_config.json.
    """
    from transformers import GenerationConfig

    size, end = len(tokenizer), tokenizer.eos_token_id
    follows = dict.fromkeys(range(size), end)
    for script in scripts:
        follows.update(itertools.pairwise(script))
    width = -(-size // 32) * 32
    plain = plain_model(
        make_config("mixtral", vocab_size=size, hidden_size=width, max_position_embeddings=256), torch.float32
    ).eval()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
        plain.model.embed_tokens.weight.copy_(torch.eye(size, width))
        plain.lm_head.weight.zero_()
        for last, token in follows.items():
            plain.lm_head.weight[token, last] = 1.0
    plain.generation_config = GenerationConfig(**{"eos_token_id": end, **(generation or {})})
    plain.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    imported(directory / "model", directory / "store", weights=Weights.FROZEN)
    return plain, directory / "store"


TOKENS = 280


def make_tiny_store(directory: Path, *, context: int = 512, **options: Any) -> Path:
    """A frozen store of a Mixtral with random weights, in ``directory``; its checkpoint is beside it."""
    source = directory.with_name(f"{directory.name}.source")
    config = make_config("mixtral", vocab_size=TOKENS, max_position_embeddings=context, **options)
    plain_model(config, torch.float32).save_pretrained(source)
    save_tokenizer(source, size=TOKENS)
    imported(source, directory, weights=Weights.FROZEN)
    return directory


#: Twelve experts of 2 layers, of which a step of 16 tokens leaves some out.
_TRAINED: dict[str, Any] = {
    **RUN,
    **QUIET,
    **MODEL,
    **SCHEDULE,
    "host_budget": 8 << 20,
    "steps": 6,
    "eval_batches": 2,
    "model.experts": 12,
    "data.batch_size": 1,
}


def trained(text: Path, store: Path, **changes: Any) -> tuple[list[Batch], float]:
    """Trains a built-in model in ``store``; its validation batches, and their mean loss by the trainer opened again."""
    config = load(TrainConfig, None, {"data.paths": (str(text),), "store": store} | _TRAINED | changes)
    with open_session(config, Opening.CREATE) as trainer:
        for _ in range(config.steps):
            trainer.step()
        trainer.commit()
    with open_session(config, Opening.RESUME) as trainer:
        return list(trainer.data.validation_batches(config.eval_batches)), trainer.evaluate()


def serving(store: Path, changes: Mapping[str, Any] | None = None) -> ServeConfig:
    """Guesses by history, memory for everything."""
    return serve_config(store, changes, prefetch__predictor="history")


def mean_loss(parts: ServedParts, batches: list[Batch]) -> float:
    """As ``Trainer.evaluate`` computes it."""
    total, counted = 0.0, 0
    for batch in batches:
        parts.experts.begin(ServingPhase.PREFILL, batch.tokens_BT.numel())
        with torch.inference_mode():
            loss = parts.model.run(batch).loss
        total += float(loss) * batch.counted
        counted += batch.counted
    return total / counted


def logits_of(parts: ServedParts, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Of a wrapped model, by one pass without a cache."""
    parts.experts.begin(ServingPhase.PREFILL, tokens_BT.numel())
    with torch.inference_mode():
        return parts.model.module(input_ids=tokens_BT, use_cache=False).logits


@contextmanager
def damaged(parts: ServedParts, layer: int, expert: int) -> Iterator[str]:
    """One bit of an expert's weights on disk is another for as long as this; its key."""
    key = expert_key(layer, expert)
    slot = parts.store.records.live(key).slot(Group.WEIGHTS)
    bit = 8 * (slot.number * slot.extent.slot_bytes + 77) + 2
    flip_bit(slot.extent.path, bit)
    try:
        yield key
    finally:
        flip_bit(slot.extent.path, bit)


def memory_choice(parts: ServedParts) -> str:
    """What the device holds now, and why."""
    return parts.experts.choice.describe()


def leases(parts: ServedParts, layer: int, experts: Sequence[int]) -> list[int]:
    """The experts that a pass of one token is given."""
    parts.experts.begin(ServingPhase.DECODE, 1)
    return sorted(lease.expert for lease in parts.experts.forward(layer, experts))


if __name__ == "__main__":
    print(make_tiny_store(Path(sys.argv[1])))
