"""LoRA of an imported model: peft on transformers' own model is the oracle, from the first step to the exported adapter."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import imported
from torch import Tensor

from tierstore.hf.lora import target_modules
from tierstore.hf.manifest import Weights
from tierstore.hf.stored import stored_spec
from tierstore.model.interface import Batch
from tierstore.moe.lora import LoraConfig, PairShape
from tierstore.store.adamw import AdamWConfig
from tierstore.train.config import TrainConfig
from tierstore.train.experts import pair_key
from tierstore.train.files import DataConfig
from tierstore.train.finetune import FinetuneConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import Loop, open_parts
from tierstore.train.stepping import SessionParts, Stepper

RANK, LR, LAYERS, EXPERTS = 3, 2e-3, 2, 8
ADAMW = AdamWConfig(betas=(0.9, 0.95), weight_decay=0.01)
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "granitemoe", "deepseek_v3", "qwen3_next")


def configured(store: Path, lora: LoraConfig, *, budget: int = 4 << 20, clip: float = 0.0) -> TrainConfig:
    spec = stored_spec(store, FinetuneConfig(seq_len=12, aux_loss_weight=0.0), lora)
    assert spec is not None
    return TrainConfig(
        store=store,
        model=spec,
        lora=lora,
        adamw=ADAMW,
        host_budget=budget,
        clip_norm=clip,
        device="cpu",
        data=DataConfig(batch_size=2),
    )


@contextlib.contextmanager
def session(store: Path, lora: LoraConfig, **options: Any) -> Iterator[SessionParts]:
    config = configured(store, lora, **options)
    with open_parts(config, Opening.RESUME, loop=Loop.FOREIGN) as parts:
        yield parts


def batch(step: int) -> Batch:
    draw = torch.Generator().manual_seed(50 + step)
    tokens = torch.randint(128, (2, 13), generator=draw)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def take(parts: SessionParts, step: int) -> float:
    with Stepper(parts).step(LR, passes=1) as opened:
        opened.begin_pass()
        output = parts.model.run(batch(step))
        opened.backward(output.objective)
    assert output.loss is not None
    return float(output.loss.detach())


class Oracle:
    """The same adapter by peft on transformers' own model, stepped by torch."""

    def __init__(self, directory: Path, lora: LoraConfig, parts: SessionParts) -> None:
        import peft
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        experts = {name.split(".", 3)[3] for name, _ in model.named_modules() if name.endswith(".experts")}
        (path,) = experts
        config = peft.LoraConfig(
            r=lora.rank,
            lora_alpha=lora.scaled_alpha,
            target_modules=target_modules(model, lora) if lora.attention else [],
            target_parameters=[f"{path}.{name}" for name in ("gate_up_proj", "down_proj")]
            if lora.experts
            else None,
            task_type="CAUSAL_LM",
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model = peft.get_peft_model(model, config)
        self.model.eval()
        self._begin_as(parts, lora)
        own = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            own, lr=LR, betas=ADAMW.betas, eps=ADAMW.eps, weight_decay=ADAMW.weight_decay
        )
        self.clip = parts.config.clip_norm
        self._own = own

    @torch.no_grad()
    def _begin_as(self, parts: SessionParts, lora: LoraConfig) -> None:
        values = dict(parts.model.module.named_parameters())
        for name, parameter in self.model.named_parameters():
            ours = name.removeprefix("base_model.model.")
            if parameter.requires_grad and ".experts." not in name:
                parameter.copy_(values[ours])
        if lora.experts:
            shape = PairShape.of(parts.config.model.expert_shape, lora)
            for layer in parts.config.model.moe_layers:
                stacked = stack_pairs(parts, shape, layer)
                for name, parameter in self.model.named_parameters():
                    if f"layers.{layer}." in name and ".experts." in name and ".lora_" in name:
                        which = "inner" if ".base_layer." in name else "down"
                        parameter.copy_(stacked[which, "a" if "lora_A" in name else "b"])

    def step(self, number: int) -> float:
        given = batch(number)
        self.optimizer.zero_grad()
        for parameter in self._own:
            parameter.grad = torch.zeros_like(parameter)
        logits = self.logits(given.tokens_BT)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), given.targets_BT.flatten())
        loss.backward()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self._own, self.clip)
        self.optimizer.step()
        return float(loss.detach())

    def logits(self, tokens_BT: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens_BT, use_cache=False).logits.float()
        return logits


def stack_pairs(parts: SessionParts, shape: PairShape, layer: int) -> dict[tuple[str, str], Tensor]:
    """The pairs of a layer as peft stacks them: A of all experts one below another, B's columns expert by expert."""
    parts.experts.gradients.step_pending()
    every = []
    for expert in range(parts.config.model.experts):
        record = parts.store.record(pair_key(layer, expert))
        parts.store.optimizer.behind(record)
        (section,) = read_weights(parts, pair_key(layer, expert))
        every.append(shape.views(section))
    return {
        ("inner", "a"): torch.cat([views.inner_a for views in every]),
        ("inner", "b"): torch.stack([views.inner_b for views in every], dim=-1).flatten(1),
        ("down", "a"): torch.cat([views.down_a for views in every]),
        ("down", "b"): torch.stack([views.down_b for views in every], dim=-1).flatten(1),
    }


def read_weights(parts: SessionParts, key: str) -> list[Tensor]:
    from tierstore.store.fetching import begin_fetch
    from tierstore.store.format import Group

    with begin_fetch(parts.store, [key], [Group.WEIGHTS]) as lease:
        parts.store.wait(lease.tickets)
        return [torch.from_numpy(lease[key].copy("weight"))]


@pytest.fixture(scope="module")
def frozen_stores(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes stores of frozen tiny models: the directory of the model, and of a fresh store."""
    saved: dict[str, Path] = {}
    made = 0

    def make(family: str, **options: Any) -> tuple[Path, Path]:
        nonlocal made
        made += 1
        if family not in saved:
            saved[family] = tmp_path_factory.mktemp(family)
            save_reasonable(saved[family], family)
        store = tmp_path_factory.mktemp("stores") / str(made)
        imported(saved[family], store, weights=Weights.FROZEN, **options)
        return saved[family], store

    return make


def save_reasonable(directory: Path, family: str) -> None:
    """A model whose experts matter, and whose logits are no larger than those of a trained one."""
    from tiny_families import make_config, plain_model

    plain_model(make_config(family)).save_pretrained(directory)


@pytest.mark.parametrize("family", FAMILIES)
def test_five_steps_follow_peft(frozen_stores: Any, family: str) -> None:
    directory, store = frozen_stores(family)
    lora = LoraConfig(rank=RANK, seed=4)
    with session(store, lora) as parts:
        oracle = Oracle(directory, lora, parts)
        for step in range(5):
            assert take(parts, step) == pytest.approx(oracle.step(step), rel=2e-5)
        compare(parts, oracle, lora, 2e-5)


def compare(parts: SessionParts, oracle: Oracle, lora: LoraConfig, tolerance: float) -> None:
    """Every parameter of every pair."""
    wanted = dict(oracle.model.named_parameters())
    for unit, (_, parameters) in enumerate(parts.model.dense_units()):
        for parameter, value in zip(parameters, parts.dense.whole(unit), strict=True):
            parameter.data = value
    for name, parameter in parts.model.module.named_parameters():
        if parameter.requires_grad:
            difference = (parameter - wanted[f"base_model.model.{name}"]).abs().max()
            assert difference <= tolerance, name
    if lora.experts:
        shape = PairShape.of(parts.config.model.expert_shape, lora)
        for layer in parts.config.model.moe_layers:
            stacked = stack_pairs(parts, shape, layer)
            for name, parameter in wanted.items():
                if f"layers.{layer}." in name and ".experts." in name and ".lora_" in name:
                    which = "inner" if ".base_layer." in name else "down"
                    found = stacked[which, "a" if "lora_A" in name else "b"]
                    assert (found - parameter).abs().max() <= tolerance, name
