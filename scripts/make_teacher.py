#!/usr/bin/env python3
"""Makes a Mixtral whose experts differ from a dense model upcycled to identical experts, and fine-tunes it.

    scripts/make_teacher.py upcycled teacher --text docs/*.txt --minutes 25

Each layer's tokens are clustered by the direction of what the router sees; the clusters' centres become the
rows of the router, and each expert keeps the columns of the dense network that its own cluster uses most. So
experts are narrow and know different things, and a part of them cannot be left out for nothing. Fine-tuning
on the text then brings back what the other columns did. What is written is a checkpoint of transformers with its
tokenizer; it is saved every few minutes. Used by the measurements of docs/SERVING.md.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM

HELD_OUT = 16  # every so many windows of the text one is held out
SAVE_SECONDS = 240.0
ROUTER_SCALE = 6.0  # of a unit vector's product with a centre: how sharply tokens are told apart
CLUSTER_ROUNDS = 12


def windows(paths: list[Path], tokenizer: object, length: int) -> tuple[Tensor, Tensor]:
    """Token windows to train on and held out, each int64 (N, length)."""
    text = "\n\n".join(path.read_text(errors="ignore") for path in paths)
    tokens = torch.tensor(tokenizer(text)["input_ids"])  # type: ignore[operator]
    every_WT = tokens[: len(tokens) // length * length].view(-1, length)
    held = torch.arange(len(every_WT)) % HELD_OUT == HELD_OUT - 1
    return every_WT[~held], every_WT[held]


def clusters(hidden_TH: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Unit centres (count, H) of the directions of tokens, and each token's cluster (T,): spherical k-means."""
    unit_TH = functional.normalize(hidden_TH, dim=-1)
    centres = unit_TH[torch.randperm(len(unit_TH))[:count]]
    mean_H = unit_TH.mean(0)
    unit_TH = functional.normalize(unit_TH - mean_H, dim=-1)
    centres = functional.normalize(centres - mean_H, dim=-1)
    for _ in range(CLUSTER_ROUNDS):
        own_T = (unit_TH @ centres.T).argmax(-1)
        for index in range(count):
            members = unit_TH[own_T == index]
            if len(members):
                centres[index] = functional.normalize(members.mean(0), dim=-1)
    return centres, (unit_TH @ centres.T).argmax(-1)


def specialised(source: Any, calibration: Tensor, width: int) -> MixtralForCausalLM:
    """A Mixtral with experts of ``width`` columns each, chosen by the use of each cluster of tokens."""
    seen: dict[int, list[Tensor]] = {}
    layers = source.model.layers
    hooks = [
        layer.mlp.register_forward_pre_hook(
            lambda _, inputs, at=at: seen.setdefault(at, []).append(inputs[0].flatten(0, -2))
        )
        for at, layer in enumerate(layers)
    ]
    with torch.no_grad():
        for row in calibration:
            source(row[None])
    for hook in hooks:
        hook.remove()
    settings = source.config.to_dict()
    settings["intermediate_size"] = width
    made = MixtralForCausalLM(MixtralConfig(**settings))
    state = {name: value for name, value in source.state_dict().items() if ".mlp." not in name}
    for at, layer in enumerate(layers):
        gate_up, down = layer.mlp.experts.gate_up_proj[0], layer.mlp.experts.down_proj[0]
        gate_FH, up_FH = gate_up.chunk(2)
        hidden_TH = torch.cat(seen[at])
        count = settings["num_local_experts"]
        centres, own_T = clusters(hidden_TH, count)
        inner_TF = (functional.silu(hidden_TH @ gate_FH.T) * (hidden_TH @ up_FH.T)).abs() * down.norm(dim=0)
        total_F = inner_TF.mean(0)
        gates, downs = [], []
        for expert in range(count):
            use_F = inner_TF[own_T == expert].mean(0) if (own_T == expert).any() else total_F
            kept = use_F.topk(width).indices.sort().values
            gates.append(torch.cat([gate_FH[kept], up_FH[kept]]))
            downs.append(down[:, kept] * 1.3)
        length = hidden_TH.norm(dim=-1).mean()
        state[f"model.layers.{at}.mlp.gate.weight"] = centres * ROUTER_SCALE / length
        state[f"model.layers.{at}.mlp.experts.gate_up_proj"] = torch.stack(gates)
        state[f"model.layers.{at}.mlp.experts.down_proj"] = torch.stack(downs)
    missing, unexpected = made.load_state_dict(state, strict=False)
    if unexpected or any("lm_head" not in name for name in missing):
        raise SystemExit(f"names differ: {missing} {unexpected}")
    made.tie_weights()
    return made


@torch.no_grad()
def held_out_loss(model: Any, held: Tensor) -> float:
    with torch.autocast("cpu", torch.bfloat16):
        losses = [float(model(rows, labels=rows).loss) for rows in torch.split(held, 4)]
    return sum(losses) / len(losses)


def save(model: Any, tokenizer_of: Path, directory: Path) -> None:
    """The checkpoint replaces an earlier one whole."""
    fresh = directory.with_name(directory.name + ".new")
    model.save_pretrained(fresh)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tokenizer_of / name).exists():
            shutil.copy(tokenizer_of / name, fresh / name)
    if directory.exists():
        shutil.rmtree(directory)
    fresh.rename(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "upcycled", type=Path, help="a Mixtral checkpoint with identical experts, or one to go on"
    )
    parser.add_argument("directory", type=Path, help="where the checkpoint goes")
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--width", type=int, default=512, help="columns of an expert")
    parser.add_argument("--rate", type=float, default=4e-4)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.upcycled)
    train, held = windows(args.text, tokenizer, args.length)
    held = held[torch.randperm(len(held))[:16]]
    order = torch.randperm(len(train))
    source: Any = AutoModelForCausalLM.from_pretrained(
        args.upcycled, dtype=torch.float32, experts_implementation="eager"
    )
    print(f"{len(train)} windows; held-out loss before: {held_out_loss(source, held):.4f}", flush=True)
    if source.config.intermediate_size == args.width:
        model = source
    else:
        model = specialised(source, train[order[:16]], args.width)
        model.set_experts_implementation("eager")
        del source
    print(f"specialised: {held_out_loss(model, held):.4f}", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=0.0)
    began = saved = time.monotonic()
    limit, step = args.minutes * 60, 0
    while (passed := time.monotonic() - began) < limit:
        rows = train[order[torch.arange(step * args.rows, (step + 1) * args.rows) % len(order)]]
        rate = args.rate * min(1.0, (step + 1) / 8) * max(0.05, 1 - passed / limit)
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(rows, labels=rows).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        print(f"step {step} at {passed:.0f} s: {loss.item():.4f}", flush=True)
        if time.monotonic() - saved > SAVE_SECONDS:
            save(model, args.upcycled, args.directory)
            saved = time.monotonic()
            print(f"saved; held out {held_out_loss(model, held):.4f}", flush=True)
    save(model, args.upcycled, args.directory)
    print(f"done; held out {held_out_loss(model, held):.4f}", flush=True)


if __name__ == "__main__":
    main()
