"""Configuration of a training run: one TOML file, or the same names as options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from importlib import import_module
from pathlib import Path

from tierstore.accelerator import accelerator_type
from tierstore.cache.config import CacheConfig
from tierstore.capabilities import Capability
from tierstore.config import as_dict, check_least, check_positive, choose_member, key
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
from tierstore.train.tasks import Assignment, TaskConfig, TaskRows, assign, check_tasks, rows_of_tasks

#: Default number of steps of a run.
RUN_STEPS = 60
_HOST_BUDGET = 256 << 20
#: The highest learning rate by default, for models up to this width and number of blocks. It falls in inverse proportion to
#: a larger width, and to more blocks.
_LR, _LR_WIDTH, _LR_BLOCKS = 2e-3, 256, 4


class LearningRateDecay(StrEnum):
    """The decay of the learning rate after the warm-up."""

    COSINE = "cosine"
    LINEAR = "linear"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """A learning rate for each step, from 0. Raises ConfigError naming the field. Rates are computed in double precision
    and rounded to float32 once, at the end: a resumed run and a replay of missed steps get the same numbers as the first
    run.

    Warm-up: ``lr * (step + 1) / warmup_steps`` for the first ``warmup_steps`` steps. Then from ``lr`` at step
    ``warmup_steps`` to ``lr * min_lr_fraction`` at step ``total_steps`` and after. ``total_steps`` None: the ``steps``
    with which the run began (``over``), or ``RUN_STEPS`` without a run. ``lr`` None: by the shape of the model, so that
    a step changes the outputs of its matrices by the same fraction at every width (Yang et al. 2022, Tensor Programs V),
    and the residual stream, in which the changes of all blocks add up, by the same fraction at every depth.
    """

    kind: LearningRateDecay = key(LearningRateDecay.COSINE, "decay of the learning rate")
    lr: float | None = key(
        None,
        f"highest learning rate (none: {_LR:g}; above width {_LR_WIDTH}, {_LR * _LR_WIDTH:g} / width; "
        f"with more than {_LR_BLOCKS} blocks, that times {_LR_BLOCKS} / blocks)",
    )
    warmup_steps: int = key(10, "steps of linear warm-up")
    total_steps: int | None = key(None, "step at which the decay ends (none: steps of the first run)")
    min_lr_fraction: float = key(0.1, "fraction of lr left after the decay")

    def __post_init__(self) -> None:
        choose_member(self, "kind", LearningRateDecay)
        check_positive(self, "lr")
        check_least(self, 1, "total_steps")
        check_least(self, 0, "warmup_steps")
        if not 0 <= self.min_lr_fraction <= 1:
            raise ConfigError(f"min_lr_fraction: expected 0 to 1, got {self.min_lr_fraction}")

    def over(
        self, steps: int, width: int, blocks: int, began: Mapping[str, object] | None = None
    ) -> ScheduleConfig:
        """This schedule with values for its fields that are None: those of ``began``, the schedule of the resumed run, else
        derived from the ``steps`` of the run and the ``width`` and ``blocks`` of its model.
        """
        total_steps, lr = self.total_steps, self.lr
        if total_steps is None:
            recorded = (began or {}).get("total_steps")
            total_steps = recorded if isinstance(recorded, int) else steps
        if lr is None:
            recorded = (began or {}).get("lr")
            by_shape = _LR * min(1.0, _LR_WIDTH / width) * min(1.0, _LR_BLOCKS / blocks)
            lr = recorded if isinstance(recorded, float) else by_shape
        return replace(self, total_steps=total_steps, lr=lr)

    @property
    def lowest_from(self) -> int | None:
        """The first step (from 0) at the lowest rate; None if the rate never decays."""
        if self.kind == LearningRateDecay.CONSTANT or self.min_lr_fraction == 1:
            return None
        return self.warmup_steps + self._span

    @property
    def _span(self) -> int:
        """The number of steps of the decay."""
        total = RUN_STEPS if self.total_steps is None else self.total_steps
        return max(1, total - self.warmup_steps)

    def lr_at(self, step: int) -> float:
        """The learning rate of ``step`` (from 0)."""
        highest = _LR if self.lr is None else self.lr
        if step < self.warmup_steps:
            return highest * (step + 1) / self.warmup_steps
        if self.kind == LearningRateDecay.CONSTANT:
            return highest
        done = min(1.0, (step - self.warmup_steps) / self._span)
        left = 1.0 - done if self.kind == LearningRateDecay.LINEAR else 0.5 * (1.0 + math.cos(math.pi * done))
        return highest * (self.min_lr_fraction + (1.0 - self.min_lr_fraction) * left)


_SEQ_LEN = 1024


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Settings for training an imported model. Raises ConfigError naming the field."""

    seq_len: int | None = key(
        None, f"tokens of a sequence (none: {_SEQ_LEN}, or the model's positions if fewer)"
    )
    checkpoint_activations: CheckpointActivations = key(
        CheckpointActivations.OFF, "what the backward pass recomputes"
    )
    expert_activations: SaveActivations = key(
        SaveActivations.SAVE, "keep experts' activations, or recompute them"
    )
    aux_loss_weight: float | None = key(None, "weight of the balance loss (none: the model's)")
    bias_update_speed: float = key(0.001, "change per step of a router's balancing bias (0: none)")

    def length(self, positions: int) -> int:
        """The sequence length for a model with ``positions`` (0: not known)."""
        return min(_SEQ_LEN, positions or _SEQ_LEN) if self.seq_len is None else self.seq_len

    def __post_init__(self) -> None:
        check_least(self, 1, "seq_len")
        check_least(self, 0, "aux_loss_weight", "bias_update_speed")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings shared by training and serving: the store, the memory for experts, and the device. Raises ConfigError
    naming the field.
    """

    store: Path = key(Path("tierstore-store"), "store directory")
    memory: int = key(0, "memory of the process; budgets that are not given follow from it", size=True)
    host_budget: int = key(
        0,
        "memory for experts: cache, CPU device tier, gradients (0: what memory leaves; without memory, 256MiB in "
        "training, 80% of what is free in serving)",
        size=True,
    )
    device_budget: int = key(
        0, "memory for experts on the device (0: all free memory; a few slots on a CPU)", size=True
    )
    device: str = key("auto", "cpu, cuda, or auto")
    weights_in_place: Capability = key(
        Capability.AUTO, "on a CPU, compute with experts in the cache, uncopied"
    )
    pinned_memory: Capability = key(Capability.AUTO, "pin the host buffers of copies")
    threads: int = key(0, "torch threads (0: one per core)")

    def __post_init__(self) -> None:
        check_least(self, 0, "threads")
        if self.device not in ("auto", "cpu") and not self.device.startswith(
            ("cuda", accelerator_type() or "cuda")
        ):
            raise ConfigError(f"device: expected auto, cpu or cuda, got {self.device!r}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """The configuration of ``tierstore train``. The defaults are the main job."""

    steps: int = key(RUN_STEPS, "optimizer steps in all")
    clip_norm: float = key(0.0, "largest global gradient norm (0: no clipping)")
    boundary_budget: int = key(
        0, "memory for block inputs in layer order; the rest is spilled (0: no limit)", size=True
    )
    commit_every: int = key(20, "steps between commits (0: only at the end)")
    snapshot_every: int = key(0, "steps between named snapshots (0: none)")
    retain: int = key(0, "snapshots kept")
    eval_every: int = key(20, "steps between validations (0: only at the end)")
    eval_batches: int = key(4, "micro-batches in each validation")
    max_skipped: int = key(10, "stop the run after N consecutive non-finite steps")
    sample_tokens: int = key(200, "tokens of sample text at the end (0: none)")
    #: The built-in model, described by a file and options; or the specification of an imported one, or of a stage.
    model: ModelConfig | ModelSpec = field(default_factory=ModelConfig, metadata={"read_as": ModelConfig})
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    adamw: AdamWConfig = field(default_factory=AdamWConfig)
    dense: DenseConfig = field(default_factory=DenseConfig)
    # next-use reads the known schedule of training (docs/CACHE_LAB.md). A plain store has no schedule.
    cache: CacheConfig = field(default_factory=lambda: CacheConfig(policy="next-use"))
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    io: IoConfig = field(default_factory=IoConfig)
    stripe: StripeConfig = field(default_factory=StripeConfig)
    tasks: Mapping[str, TaskConfig] = field(
        default_factory=dict, metadata={"help": "several tasks in one batch, each with its own data"}
    )
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    links: LinksConfig = field(default_factory=LinksConfig)
    wear: WearConfig = field(default_factory=WearConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.host_budget or self.memory):
            object.__setattr__(self, "host_budget", _HOST_BUDGET)
        check_least(self, 1, "steps", "eval_batches", "max_skipped")
        check_least(self, 0, "commit_every", "snapshot_every", "retain", "eval_every", "sample_tokens")
        check_least(self, 0, "clip_norm")
        if self.snapshot_every and not self.retain:
            raise ConfigError("snapshot_every: needs retain of at least 1, or no snapshot would be kept")
        check_tasks(self.tasks, self.data)

    @property
    def spec(self) -> ModelSpec:
        """The specification from which ``model`` is built."""
        return spec_of(self.model) if isinstance(self.model, ModelConfig) else self.model

    def import_code(self) -> None:
        """Imports the code that the model and its steps need. Raises ConfigError, CapabilityError."""
        self.spec.import_code()
        if self.spec.whole is not None:
            import_module("tierstore.train.stage_pipeline")

    def check_length(self) -> None:
        """Raises ConfigError for sequences longer than the positions of an imported model."""
        seq_len, positions = self.spec.seq_len, self.spec.positions
        if seq_len > positions > 0:
            raise ConfigError(
                f"finetune.seq_len: expected at most {positions}, the positions of the model, got {seq_len}"
            )

    def lr_at(self, step: int) -> float:
        """The learning rate at ``step`` (from 0) in a run that begins with this configuration."""
        model = self.model
        return self.schedule.over(self.steps, model.d_model, model.architecture.blocks).lr_at(step)

    def settings(self) -> dict[str, object]:
        """All settings, as JSON values."""
        return {**as_dict(replace(self, model=ModelConfig())), "model": self.spec.settings()}

    @property
    def data_by_task(self) -> dict[str, DataConfig]:
        """The data of each task by name; without tasks, the run's data under the empty name."""
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
        """Whether a forward pass over experts saves their rows and activations. In layer order blocks are recomputed."""
        return self.model.expert_activations is SaveActivations.SAVE and not self.data.layer_major

    @property
    def tokens_per_micro_batch(self) -> int:
        return self.data.batch_size * self.model.seq_len

    @property
    def tokens_per_step(self) -> int:
        return self.tokens_per_micro_batch * self.data.micro_batches


def assignment_of(config: TrainConfig, ranks: int) -> Assignment:
    """The assignment of the rows of a micro-batch of ``config``'s tasks to ``ranks`` data ranks."""
    rows = rows_of_tasks(config.tasks, config.data.batch_size)
    tasks = [
        TaskRows(name, count, config.tasks[name].cost or config.model.seq_len) for name, count in rows.items()
    ]
    return assign(tuple(tasks), ranks)
