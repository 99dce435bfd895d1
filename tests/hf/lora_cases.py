"""What ranks run in tests of LoRA, and how one process runs the same."""

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tierstore.hf.importing import ImportOptions, import_model
from tierstore.hf.manifest import Weights
from tierstore.hf.spec import stored_spec
from tierstore.model.interface import Batch
from tierstore.model.store_schema import STATE_KEY
from tierstore.moe.lora import LoraConfig
from tierstore.parallel import Mesh
from tierstore.store.adamw import AdamWConfig
from tierstore.store.committing import Keep
from tierstore.store.config import IoConfig
from tierstore.store.format import MomentFormat
from tierstore.train.config import FinetuneConfig, TrainConfig
from tierstore.train.files import DataConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_parts
from tierstore.train.setup import Loop
from tierstore.train.stepping import SessionParts, Stepper, means

LR = 2e-3
ADAMW = AdamWConfig(betas=(0.9, 0.95), weight_decay=0.01)


@contextlib.contextmanager
def quiet_peft() -> Iterator[None]:
    """peft asks transformers for names that transformers warns of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield


def configured(
    store: Path,
    lora: LoraConfig,
    *,
    budget: int = 4 << 20,
    clip: float = 0.0,
    moments: MomentFormat = MomentFormat.FP32,
    io: IoConfig | None = None,
) -> TrainConfig:
    spec = stored_spec(store, FinetuneConfig(seq_len=12, aux_loss_weight=0.0), lora)
    assert spec is not None
    return TrainConfig(
        store=store,
        model=spec,
        lora=lora,
        adamw=replace(ADAMW, moments=moments),
        host_budget=budget,
        io=io or IoConfig(),
        clip_norm=clip,
        device="cpu",
        data=DataConfig(batch_size=2),
    )


@contextlib.contextmanager
def session(
    store: Path, lora: LoraConfig, *, mesh: Mesh | None = None, **options: Any
) -> Iterator[SessionParts]:
    config = configured(store, lora, **options)
    with open_parts(config, Opening.RESUME, loop=Loop.EXTERNAL, mesh=mesh) as parts:
        yield parts


def batch(step: int) -> Batch:
    draw = torch.Generator().manual_seed(50 + step)
    tokens = torch.randint(128, (2, 13), generator=draw)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def take(parts: SessionParts, step: int) -> float:
    """One step on this rank's part of the batch; the mean loss of all."""
    world = parts.mesh.world
    with Stepper(parts).step(LR, passes=1) as opened:
        opened.begin_pass()
        output = parts.model.run(batch(step).of_rank(world.rank, world.size))
        opened.backward(output.objective)
    (loss,) = means([float(output.loss.detach())], world, parts.ledger)
    return loss


def train_ranks(mesh: Mesh, source: Path, store: Path, lora: LoraConfig, steps: int, cut: int) -> list[float]:
    """Imports ``source`` frozen, trains ``steps`` steps, opened anew after ``cut`` of them; the losses."""
    import_model(source, store, ImportOptions(weights=Weights.FROZEN), mesh=mesh)
    losses = []
    for part in (range(cut), range(cut, steps)):
        with session(store, lora, mesh=mesh, clip=0.2) as parts:
            losses += [take(parts, step) for step in part]
            Stepper(parts).commit()
    return losses


def ahead_then_on(mesh: Mesh, source: Path, store: Path, lora: LoraConfig, steps: int) -> list[float]:
    """As ``train_ranks``, where the first run ended when rank 1 had prepared its first commit, and rank 0 had not."""
    import_model(source, store, ImportOptions(weights=Weights.FROZEN), mesh=mesh)
    with session(store, lora, mesh=mesh, clip=0.2) as parts:
        take(parts, 0)
        parts.experts.gradients.step_pending()
        parts.dense.save(parts.store, parts.store.history.applied)
        if mesh.world.rank == 1:
            parts.store.committer.commit({STATE_KEY: parts.state.pack()}, keep=Keep.PREVIOUS)
        mesh.world.barrier()
    with session(store, lora, mesh=mesh, clip=0.2) as parts:
        return [take(parts, step) for step in range(steps)]
