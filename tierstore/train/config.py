"""Configuration of a training run: one TOML file, or the same names as options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path

from tierstore.cache.config import CacheConfig
from tierstore.capabilities import Capability
from tierstore.config import as_dict
from tierstore.dense.config import DenseConfig
from tierstore.errors import ConfigError
from tierstore.links import LinksConfig
from tierstore.model.config import CheckpointActivations, ModelConfig
from tierstore.model.spec import ModelSpec, spec_of
from tierstore.moe.config import SaveActivations
from tierstore.moe.lora import LoraConfig
from tierstore.parallel.config import ParallelConfig
from tierstore.prefetch.plan import PrefetchConfig, StepTiming
from tierstore.store.adamw import AdamWConfig
from tierstore.store.config import IoConfig, StripeConfig, WearConfig
from tierstore.train.files import DataConfig
from tierstore.train.schedule import RUN_STEPS, ScheduleConfig
from tierstore.train.tasks.config import TaskConfig, check_tasks

_SEQ_LEN = 1024


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """How an imported model is trained. Raises ConfigError naming the field."""

    seq_len: int | None = field(
        default=None,
        metadata={
            "help": f"tokens of a sequence (none: {_SEQ_LEN}, or as many as the model has positions for)"
        },
    )
    checkpoint_activations: CheckpointActivations = field(
        default=CheckpointActivations.OFF, metadata={"help": "what the backward pass computes again"}
    )
    expert_activations: SaveActivations = field(
        default=SaveActivations.SAVE, metadata={"help": "keep what experts computed, or compute it again"}
    )
    aux_loss_weight: float | None = field(
        default=None,
        metadata={"help": "weight of the balance loss (none: as the model's configuration has it)"},
    )
    bias_update_speed: float = field(
        default=0.001,
        metadata={
            "help": "change of a router's bias in one step, where a bias balances its experts (0: none)"
        },
    )

    def length(self, positions: int) -> int:
        """``seq_len`` of a model with ``positions`` (0: not known)."""
        return min(_SEQ_LEN, positions or _SEQ_LEN) if self.seq_len is None else self.seq_len

    def __post_init__(self) -> None:
        if self.seq_len is not None and self.seq_len < 1:
            raise ConfigError(f"seq_len: expected at least 1, got {self.seq_len}")
        for name in ("aux_loss_weight", "bias_update_speed"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name}: expected a number of at least 0, got {value}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What ``tierstore train`` does. The defaults are the main job."""

    store: Path = field(default=Path("tierstore-store"), metadata={"help": "store directory"})
    steps: int = field(default=RUN_STEPS, metadata={"help": "optimizer steps in all"})
    clip_norm: float = field(default=0.0, metadata={"help": "largest global gradient norm (0: no clipping)"})
    host_budget: int = field(
        default=256 << 20,
        metadata={"size": True, "help": "memory for experts: cache, gradients, CPU device tier"},
    )
    device_budget: int = field(
        default=0, metadata={"size": True, "help": "memory for experts on the device (0: a few slots)"}
    )
    boundary_budget: int = field(
        default=0,
        metadata={
            "size": True,
            "help": "memory for block inputs in layer order; what it cannot hold is spilled (0: all)",
        },
    )
    device: str = field(default="auto", metadata={"help": "cpu, cuda, or auto"})
    weights_in_place: Capability = field(
        default=Capability.AUTO,
        metadata={"help": "on the CPU, compute with experts where they lie in the cache, without a copy"},
    )
    threads: int = field(default=0, metadata={"help": "torch's threads (0: one for each core)"})
    commit_every: int = field(default=20, metadata={"help": "steps between commits (0: only at the end)"})
    snapshot_every: int = field(default=0, metadata={"help": "steps between named snapshots (0: none)"})
    retain: int = field(default=0, metadata={"help": "snapshots kept"})
    eval_every: int = field(default=20, metadata={"help": "steps between validations (0: only at the end)"})
    eval_batches: int = field(default=4, metadata={"help": "micro-batches of one validation"})
    max_skipped: int = field(default=10, metadata={"help": "non-finite steps in a row that stop the run"})
    sample_tokens: int = field(default=200, metadata={"help": "tokens of sample text at the end (0: none)"})
    #: The built-in model, which a file and options describe; or what describes an imported one, or a pipeline stage.
    model: ModelConfig | ModelSpec = field(default_factory=ModelConfig, metadata={"read_as": ModelConfig})
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    adamw: AdamWConfig = field(default_factory=AdamWConfig)
    dense: DenseConfig = field(default_factory=DenseConfig)
    # Training walks a known schedule, and next-use knows it: docs/CACHE_LAB.md. A store by itself knows nothing of its user.
    cache: CacheConfig = field(default_factory=lambda: CacheConfig(policy="next-use"))
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    io: IoConfig = field(default_factory=IoConfig)
    stripe: StripeConfig = field(default_factory=StripeConfig)
    tasks: Mapping[str, TaskConfig] = field(
        default_factory=dict, metadata={"help": "several tasks in one batch, each with data of its own"}
    )
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    links: LinksConfig = field(default_factory=LinksConfig)
    wear: WearConfig = field(default_factory=WearConfig)

    def __post_init__(self) -> None:
        for name in ("steps", "eval_batches", "max_skipped"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("commit_every", "snapshot_every", "retain", "eval_every", "threads", "sample_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: expected at least 0, got {getattr(self, name)}")
        if not (math.isfinite(self.clip_norm) and self.clip_norm >= 0):
            raise ConfigError(f"clip_norm: expected at least 0, got {self.clip_norm}")
        if self.snapshot_every and not self.retain:
            raise ConfigError("snapshot_every: needs retain of at least 1, or no snapshot would be kept")
        if self.device not in ("auto", "cpu") and not self.device.startswith("cuda"):
            raise ConfigError(f"device: expected auto, cpu or cuda, got {self.device!r}")
        check_tasks(self.tasks, self.data)

    @property
    def spec(self) -> ModelSpec:
        """What the run knows of ``model`` before it is built."""
        return spec_of(self.model) if isinstance(self.model, ModelConfig) else self.model

    def import_code(self) -> None:
        """Imports what the model and its steps need. Raises ConfigError, CapabilityError."""
        self.spec.import_code()
        if self.spec.whole is not None:
            import_module("tierstore.train.stages.pipeline")

    def check_length(self) -> None:
        """Raises ConfigError for sequences that are longer than the positions of an imported model."""
        seq_len, positions = self.spec.seq_len, self.spec.positions
        if seq_len > positions > 0:
            raise ConfigError(
                f"finetune.seq_len: expected at most {positions}, the positions of the model, got {seq_len}"
            )

    def lr_at(self, step: int) -> float:
        """The learning rate of ``step`` (from 0) of a run that begins with this configuration."""
        return self.schedule.over(self.steps).lr_at(step)

    def settings(self) -> dict[str, object]:
        """Everything, as JSON can hold it."""
        return {**as_dict(replace(self, model=ModelConfig())), "model": self.spec.settings()}

    @property
    def data_by_task(self) -> dict[str, DataConfig]:
        """What each task trains on; under the empty name what a run without tasks does."""
        return {name: task.data(self.data) for name, task in self.tasks.items()} or {"": self.data}

    @property
    def step_timing(self) -> StepTiming:
        return StepTiming.DEFERRED if self.clip_norm else StepTiming.IMMEDIATE

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients of experts (or their pairs) outlive their backward pass, and may spill to disk."""
        if self.lora.enabled and not self.lora.experts:
            return False
        return self.step_timing is StepTiming.DEFERRED or self.data.passes > 1

    @property
    def keeps_activations(self) -> bool:
        """Whether a forward pass over experts keeps their rows and what feeds their activations, or neither: in layer order
        blocks are computed again.
        """
        return self.model.expert_activations is SaveActivations.SAVE and not self.data.layer_major

    @property
    def tokens_per_micro_batch(self) -> int:
        return self.data.batch_size * self.model.seq_len

    @property
    def tokens_per_step(self) -> int:
        return self.tokens_per_micro_batch * self.data.micro_batches
