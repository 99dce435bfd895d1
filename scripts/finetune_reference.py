#!/usr/bin/env python3
"""The fine-tuning run of a configuration as plain transformers does it: torch.optim.AdamW, everything in memory.

    tierstore import CHECKPOINT --store runs/q
    tierstore train run.toml --store runs/q --data train.jsonl --metrics run.jsonl
    scripts/finetune_reference.py run.toml CHECKPOINT runs/q reference.json --data train.jsonl

Takes steps, batches, schedule and hyperparameters from the configuration, and the tokens that ``tierstore train`` has
left in the store. All parameters are one group, as tierstore has them, in fp32. Writes the losses, the held-out loss
before and after, and tokens that the trained model adds, greedily, to the beginning of a held-out sequence.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy

from tierstore.config import load
from tierstore.model.interface import Batch
from tierstore.train.config import TrainConfig
from tierstore.train.data import TrainingData
from tierstore.train.tokens.data import open_data

PROMPT, ADDED = 32, 64  # tokens


def losses_of(model: Any, batch: Batch, *, aux_loss_weight: float = 0.0) -> tuple[Tensor, Tensor]:
    """The batch's share of the mean cross entropy of a step, and what is differentiated."""
    output = model(
        input_ids=batch.tokens_BT,
        position_ids=batch.positions_BT,
        use_cache=False,
        output_router_logits=aux_loss_weight > 0,
    )
    loss = cross_entropy(output.logits.float().flatten(0, 1), batch.targets_BT.flatten()) * batch.share
    return loss, loss + aux_loss_weight * output.aux_loss if aux_loss_weight else loss


def reference(
    config: TrainConfig, checkpoint: Path, store: Path, *, fused: bool | None = None
) -> tuple[Any, TrainingData, Callable[[int], float]]:
    """The model, the data, and what takes step number n of the run and gives its loss. ``fused``: torch's AdamW."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, experts_implementation="grouped_mm"
    ).train()
    data = open_data(
        config.data,
        seq_len=config.finetune.length(0),
        vocab_size=model.config.vocab_size,
        tokenizer=checkpoint,
        store=store,
    )
    aux_loss_weight = config.finetune.aux_loss_weight
    if aux_loss_weight is None:
        aux_loss_weight = getattr(model, "router_aux_loss_coef", 0.0)
    adamw, parts = config.adamw, config.data.micro_batches
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=adamw.betas, eps=adamw.eps, weight_decay=adamw.weight_decay, fused=fused
    )

    def step(number: int) -> float:
        optimizer.param_groups[0]["lr"] = config.lr_at(number)
        total = 0.0
        for micro in range(parts):
            loss, objective = losses_of(model, data.batch(number, micro), aux_loss_weight=aux_loss_weight)
            (objective / parts).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach()) / parts
        optimizer.step()
        optimizer.zero_grad()
        return total

    return model, data, step


def held_out(model: Any, batches: list[Batch]) -> float:
    """The mean loss of their counted targets, in nats a token."""
    with torch.no_grad():
        losses = [float(losses_of(model, replace(batch, step_targets=0))[0]) for batch in batches]
    counted = [batch.counted for batch in batches]
    return sum(loss * count for loss, count in zip(losses, counted, strict=True)) / sum(counted)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, help="of the run, as tierstore train takes it")
    parser.add_argument("checkpoint", type=Path, help="what the store was imported from")
    parser.add_argument("store", type=Path, help="where the run has left its tokens")
    parser.add_argument("target", type=Path, help="the JSON to write")
    parser.add_argument("--data", nargs="+", help="files, if the configuration does not name them")
    options = parser.parse_args()
    config = load(
        TrainConfig, options.config, {} if options.data is None else {"data.paths": tuple(options.data)}
    )
    if config.threads:
        torch.set_num_threads(config.threads)
    model, data, take_step = reference(config, options.checkpoint, options.store)
    validation = list(data.validation_batches(config.eval_batches))
    before = held_out(model.eval(), validation)
    print(f"held out: {before:.6f}", flush=True)

    losses, seconds = [], []
    model.train()
    for step in range(config.steps):
        begun = time.perf_counter()
        losses.append(take_step(step))
        seconds.append(time.perf_counter() - begun)
        print(f"step {step + 1}: loss {losses[-1]:.6f}, {seconds[-1]:.1f} s", flush=True)

    after = held_out(model.eval(), validation)
    print(f"held out: {after:.6f}, {before - after:.6f} lower", flush=True)
    prompt = validation[0].tokens_BT[:1, :PROMPT]
    added = model.generate(prompt, max_new_tokens=ADDED, min_new_tokens=ADDED, do_sample=False)
    document = {
        "losses": losses,
        "held_out": [[0, before], [config.steps, after]],
        "prompt": prompt[0].tolist(),
        "greedy": added[0, PROMPT:].tolist(),
        "text": data.decode(added[0].tolist()),
        "step_median_s": statistics.median(seconds),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    options.target.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
