"""What the rivals of training train: the same model, first weights and batches, and the loop that libraries share.

The built-in model serves them as it is; its mixtures are replaced by ordinary parameters (``Mixture``), and the objective
is its own. Or it is a Mixtral of transformers of the same sizes: a checkpoint of random weights, which tierstore imports
and wraps, and the others load. ``module`` may be called where a library allocates parameters as it likes: what it
initialises does not count, and every parameter is filled from ``first_weights`` afterwards.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from process import Opened
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tierstore.bench.probes import process_bytes
from tierstore.errors import ConfigError
from tierstore.hf.describing import transformers
from tierstore.machine import keep_freed_memory, peak_resident_bytes
from tierstore.model.config import ModelConfig
from tierstore.model.transformer import Transformer
from tierstore.moe import FeedForward, InMemoryExperts, NoiseKey, RouterNoise, initial_expert
from tierstore.moe.config import Activation, ExpertShape
from tierstore.store.adamw import Inactive
from tierstore.train.config import FinetuneConfig, TrainConfig
from tierstore.train.data import TrainingData
from tierstore.train.tokens.data import open_data

#: The values of a parameter by its name in ``module``.
FirstWeights = Callable[[str], Tensor]
#: In the checkpoint's directory: every parameter of the module, as ``torch.save`` writes it.
_WEIGHTS = "rivals-first-weights.pt"
#: With one expert a token its normalised weight is 1, and the router would learn nothing from the loss.
_LEAST_TOP_K = 2
_SECTOR = 512  # the unit of /sys/dev/block/*/stat, whatever the device's


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Some steps of a rival. Bytes are those that the process caused, and those of the whole disk (None: not known)."""

    step_s: list[float]
    losses: list[float]
    cpu_s: float
    peak_resident_bytes: int
    read_bytes: int
    written_bytes: int
    disk_read_bytes: int | None
    disk_written_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class TrainTask:
    """What a rival is to train.

    ``module``: of this directory; its ``opened(task)`` gives the rival's description and its step. ``directory``: the
    rival's own, for what it keeps on disk. ``checkpoint``: the Mixtral to train; None for the built-in model. ``trace``:
    where tierstore records its accesses. ``settings``: JSON that is laid over a library's own configuration.
    """

    config: TrainConfig
    rival: str = ""
    module: str = ""
    directory: Path = Path()
    checkpoint: Path | None = None
    trace: Path | None = None
    settings: Path | None = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[Opened]:
        """The rival; it answers a number of steps by its ``Steps``."""
        keep_freed_memory()
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        with importlib.import_module(self.module).opened(self) as (description, step):
            yield description, lambda count: measured_steps(step, count, self.directory)

    def workload(self) -> BuiltIn:
        """Raises ConfigError, CapabilityError."""
        return BuiltIn(self.config) if self.checkpoint is None else Mixtral(self.config, self.checkpoint)

    def overlaid(self, library: Mapping[str, Any]) -> dict[str, Any]:
        """``library`` with ``settings`` over it, table by table."""
        return overlaid(library, json.loads(self.settings.read_text()) if self.settings else {})


def overlaid(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``under`` with ``over`` laid over it, table by table."""
    return {**under, **over} | {
        key: overlaid(under[key], value)
        for key, value in over.items()
        if isinstance(value, Mapping) and isinstance(under.get(key), Mapping)
    }


def measured_steps(step: Callable[[], float], count: int, directory: Path) -> Steps:
    """Takes ``count`` steps."""
    own, disk, cpu = process_bytes(), disk_bytes(directory), time.process_time()
    seconds, losses = [], []
    for _ in range(count):
        begun = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - begun)
    cpu, own_after, disk_after = time.process_time() - cpu, process_bytes(), disk_bytes(directory)
    known = disk is not None and disk_after is not None
    return Steps(
        step_s=seconds,
        losses=losses,
        cpu_s=cpu,
        peak_resident_bytes=peak_resident_bytes(),
        read_bytes=own_after[0] - own[0],
        written_bytes=own_after[1] - own[1],
        disk_read_bytes=disk_after[0] - disk[0] if known else None,
        disk_written_bytes=disk_after[1] - disk[1] if known else None,
    )


def disk_bytes(directory: Path, sys: Path = Path("/sys")) -> tuple[int, int] | None:
    """Bytes that the block device under ``directory`` has read and written, for any process; None without one."""
    number = os.stat(directory).st_dev
    try:
        fields = (sys / f"dev/block/{os.major(number)}:{os.minor(number)}/stat").read_text().split()
    except OSError:
        return None
    return int(fields[2]) * _SECTOR, int(fields[6]) * _SECTOR


# The loop of libraries --------------------------------------------------------------------------------------


class TorchLoop:
    """Steps of ``module``: batches, learning rate and clipping are those of the task's configuration.

    ``optimizer`` needs param_groups, step and zero_grad; None is torch's fused AdamW.
    """

    def __init__(self, task: TrainTask, workload: BuiltIn, module: nn.Module, optimizer: Any = None) -> None:
        self.config, self.module, self.steps = task.config, module, 0
        adamw = self.config.adamw
        self.optimizer = optimizer or torch.optim.AdamW(
            module.parameters(),
            lr=self.config.lr_at(0),
            betas=adamw.betas,
            eps=adamw.eps,
            weight_decay=adamw.weight_decay,
            fused=True,
        )
        self._data = workload.data(task.directory)

    def step(self) -> float:
        """One optimizer step; its loss in nats, the mean over micro-batches."""
        parts, total = self.config.data.micro_batches, 0.0
        for micro in range(parts):
            batch = self._data.batch(self.steps, micro)
            total += self.micro(batch.tokens_BT, batch.targets_BT) / parts
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr_at(self.steps)
        self.update()
        self.steps += 1
        return total

    def micro(self, tokens_BT: Tensor, targets_BT: Tensor) -> float:
        """Forward and backward of a micro-batch; its loss."""
        objective, loss = self.module(tokens_BT, targets_BT)
        (objective / self.config.data.micro_batches).backward()
        return float(loss.detach())

    def update(self) -> None:
        """Clips and steps."""
        if self.config.clip_norm:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def fill(module: nn.Module, first: FirstWeights) -> None:
    """Gives every parameter of ``module`` its first weights."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(first(name))


@contextlib.contextmanager
def alone_on_gloo() -> Iterator[None]:
    """A process group of this process alone, which needs no port."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


# The built-in model -----------------------------------------------------------------------------------------


def check_workload(config: TrainConfig) -> ModelConfig:
    """The built-in model of ``config``. Raises ConfigError for what is not part of the comparison."""
    model = config.model
    if not isinstance(model, ModelConfig):
        raise ConfigError("model: the rivals train the built-in model, or a Mixtral of its sizes")
    if model.router_noise is not RouterNoise.NONE or model.capacity_factor is not None:
        raise ConfigError("model.router_noise, model.capacity_factor: the rivals have neither")
    if config.adamw.inactive is not Inactive.EXACT:
        raise ConfigError("adamw.inactive: the rivals step every parameter in every step; expected exact")
    if config.lora.enabled:
        raise ConfigError("lora.rank: the rivals train every parameter")
    return model


class Seen(NamedTuple):
    """What a model sees of a mixture's routing. A tuple, in which libraries find the tensors."""

    aux_loss: Tensor
    z_loss: Tensor
    load_E: Tensor


class Mixture(nn.Module):
    """A mixture of ordinary parameters. Every expert is called, with or without tokens: some libraries expect the same
    modules in every pass, and AdamW steps experts without a gradient as if it were zero.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(config.d_model, config.experts, bias=False)
        self.shared: FeedForward | None = None
        if config.shared_expert_d_ff:
            shape = ExpertShape(config.d_model, config.shared_expert_d_ff, config.activation)
            self.shared = FeedForward(shape)
        self.experts = nn.ModuleList(FeedForward(config.expert_shape) for _ in range(config.experts))

    def forward(self, x_TD: Tensor, _key: NoiseKey) -> tuple[Tensor, Seen]:
        config = self.config
        logits_TE = self.router(x_TD.float())
        probability_TE = logits_TE.softmax(dim=-1)
        weight_TK, expert_TK = torch.topk(probability_TE, config.top_k, dim=-1)
        if config.router.normalized:
            weight_TK = weight_TK / weight_TK.sum(dim=-1, keepdim=True)
        y_TD = torch.zeros_like(x_TD)
        for number, expert in enumerate(self.experts):
            token_M, choice_M = torch.where(expert_TK == number)
            y_MD = expert(x_TD.index_select(0, token_M)) * weight_TK[token_M, choice_M, None]
            y_TD = y_TD.index_add(0, token_M, y_MD.to(x_TD.dtype))
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD)
        first_E = torch.bincount(expert_TK[:, 0], minlength=config.experts) / x_TD.shape[0]
        aux_loss = config.experts * torch.dot(first_E.to(probability_TE), probability_TE.mean(dim=0))
        z_loss = logits_TE.logsumexp(dim=-1).square().mean()
        load_E = torch.bincount(expert_TK.flatten(), minlength=config.experts)
        return y_TD, Seen(aux_loss, z_loss, load_E)


class PlainTransformer(Transformer):
    """The built-in model as an ordinary module, whose forward pass gives a tuple of tensors."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, None, mixture=lambda layer: Mixture(config))

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        output = super().forward(tokens_BT, targets_BT)
        assert output.objective is not None
        assert output.loss is not None
        return output.objective, output.loss


class BuiltIn:
    """What all rivals train: the built-in model of a configuration."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.model = config, check_workload(config)

    def module(self) -> nn.Module:
        """``(tokens_BT, targets_BT)`` to ``(objective, loss)``: what to differentiate, and the mean cross entropy."""
        return PlainTransformer(self.model)

    def blocks(self, module: nn.Module) -> Iterable[nn.Module]:
        """The parts of ``module`` that a library may gather and release one after another."""
        return module.get_submodule("blocks").children()

    def first_weights(self) -> FirstWeights:
        """The weights that tierstore begins with."""
        model, shape = self.model, self.model.expert_shape
        dense = dict(Transformer(model, InMemoryExperts(shape, layers=(), experts=0)).named_parameters())
        made: dict[tuple[int, int], Tensor] = {}

        def first(name: str) -> Tensor:
            if ".experts." not in name:
                return dense[name].detach()
            _, layer, _, _, expert, part = name.split(".")
            key = int(layer), int(expert)
            if key not in made:
                made.clear()  # an expert's parameters are asked for together
                made[key] = initial_expert(
                    shape, seed=model.seed, layer=key[0], expert=key[1], layers=model.n_layers
                )
            flat, size = made[key], shape.inner_rows * shape.d_model
            if part == "inner":
                return flat[:size].view(-1, shape.d_model)
            return flat[size:].view(shape.d_model, shape.d_ff)

        return first

    def data(self, store: Path) -> TrainingData:
        """The batches. ``store``: a directory for tokens."""
        model = self.model
        return open_data(
            self.config.data, seq_len=model.seq_len, vocab_size=model.vocab_size, tokenizer=None, store=store
        )


# A Mixtral --------------------------------------------------------------------------------------------------


def _transformers() -> Any:
    library = transformers()
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


def mixtral_config(model: ModelConfig) -> Any:
    """The configuration of a Mixtral with about as many parameters as ``model`` has, whose tokens are bytes."""
    gated = model.activation is not Activation.GELU
    # Three matrices an expert where an expert of GELU has two.
    width = model.d_ff if gated else -(-2 * model.d_ff // (3 * 16)) * 16
    return _transformers().MixtralConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.d_model,
        intermediate_size=width,
        num_hidden_layers=model.n_layers,
        num_attention_heads=model.n_heads,
        num_key_value_heads=model.n_heads,
        num_local_experts=model.experts,
        num_experts_per_tok=min(max(model.top_k, _LEAST_TOP_K), model.experts),
        max_position_embeddings=model.seq_len,
        router_aux_loss_coef=model.aux_loss_weight,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
        dtype="float32",
    )


def make_mixtral(config: TrainConfig, directory: Path) -> int:
    """Writes the checkpoint, and the rivals' weights beside it; returns its number of parameters.

    Raises CapabilityError, ConfigError, OSError.
    """
    sizes = check_workload(config)
    if sizes.compute_dtype.torch != torch.float32:
        raise ConfigError("model.compute_dtype: a Mixtral is raced in fp32")
    described = mixtral_config(sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.model.seed)
        model = _transformers().MixtralForCausalLM(described)
    model.save_pretrained(directory)
    named = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    torch.save(named, directory / _WEIGHTS)
    return sum(parameter.numel() for parameter in named.values())


class _Objective(nn.Module):
    """A causal language model with its objective."""

    def __init__(self, model: nn.Module, aux_loss_weight: float) -> None:
        super().__init__()
        self.model = model
        self._weight = aux_loss_weight

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        output = self.model(input_ids=tokens_BT, use_cache=False, output_router_logits=self._weight > 0)
        loss = cross_entropy(output.logits.float().flatten(0, 1), targets_BT.flatten())
        return (loss + self._weight * output.aux_loss if self._weight else loss), loss


class Mixtral(BuiltIn):
    """The Mixtral of ``checkpoint``, with the batches of the built-in model."""

    def __init__(self, config: TrainConfig, checkpoint: Path) -> None:
        super().__init__(config)
        self.checkpoint = checkpoint

    def module(self) -> nn.Module:
        library = _transformers()
        described = library.AutoConfig.from_pretrained(self.checkpoint)
        model = library.AutoModelForCausalLM.from_config(
            described, dtype=torch.float32, experts_implementation="grouped_mm"
        )
        return _Objective(model.train(), self.model.aux_loss_weight)

    def blocks(self, module: nn.Module) -> Iterable[nn.Module]:
        return module.get_submodule("model.model.layers").children()

    def first_weights(self) -> FirstWeights:
        weights: dict[str, Tensor] = torch.load(self.checkpoint / _WEIGHTS, mmap=True, weights_only=True)
        return weights.__getitem__

    def imported(self, store: Path) -> TrainConfig:
        """Imports the checkpoint into ``store``; the configuration of a run of it."""
        from tierstore.hf.importing import ImportOptions, import_model
        from tierstore.hf.spec import stored_spec
        from tierstore.parallel import launch
        from tierstore.parallel.config import ParallelConfig

        with launch(ParallelConfig(), device="cpu") as mesh:
            import_model(self.checkpoint, store, ImportOptions(), mesh=mesh)
        finetune = FinetuneConfig(seq_len=self.model.seq_len, aux_loss_weight=self.model.aux_loss_weight)
        spec = stored_spec(store, finetune)
        assert spec is not None
        return replace(self.config, store=store, model=spec, finetune=finetune)
