"""Training: configuration, sessions, the trainer, and the ranks of a job. ``Trainer`` and what runs it import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.lazy import exports

if TYPE_CHECKING:
    from tierstore.cache import CacheConfig, Scope
    from tierstore.dense import DenseBytes, DenseConfig, Fusion, GatherDtype, OptimizerState, Reshard
    from tierstore.links import LinkConfig, LinksConfig
    from tierstore.machine import MemoryAccount
    from tierstore.model import CheckpointActivations, ComputeDtype, ModelConfig, ModelSpec, TieEmbeddings
    from tierstore.moe import Activation, ExpertLease, ExpertShape, RouterNoise, SaveActivations
    from tierstore.moe.config import ExpertViews
    from tierstore.moe.lora import LoraConfig, LoraTargets
    from tierstore.parallel import (
        Channel,
        Collective,
        CollectiveTraffic,
        ExchangeMode,
        ExpertBlocks,
        JobStore,
        Mesh,
        ParallelConfig,
        RankEnvironment,
        RankGroup,
        RowPlacement,
        Work,
        launch,
    )
    from tierstore.parallel.config import Elastic
    from tierstore.prefetch import PredictorName, PrefetchConfig
    from tierstore.quant.layout import CodeFormat, QuantizedLayout
    from tierstore.store import (
        AdamWConfig,
        Capability,
        Inactive,
        IoBackendName,
        IoConfig,
        StripeConfig,
        WearConfig,
    )
    from tierstore.timeline import NullTimeline, Timeline, TimelineSink, Track, open_timeline
    from tierstore.train.config import FinetuneConfig, LearningRateDecay, ScheduleConfig, TrainConfig
    from tierstore.train.expert_session import ExpertSession, ExpertStep, open_experts
    from tierstore.train.files import DataConfig, DataFormat, MicroOrder, Packing
    from tierstore.train.ranks import Opening
    from tierstore.train.session import open_session
    from tierstore.train.stepping import NonFiniteError, StepError
    from tierstore.train.tasks import TaskConfig, TaskHead
    from tierstore.train.trainer import StepResult, Trainer
else:
    __getattr__, __dir__ = exports(__name__, __file__)

__all__ = [
    "Activation",
    "AdamWConfig",
    "CacheConfig",
    "Capability",
    "Channel",
    "CheckpointActivations",
    "CodeFormat",
    "Collective",
    "CollectiveTraffic",
    "ComputeDtype",
    "DataConfig",
    "DataFormat",
    "DenseBytes",
    "DenseConfig",
    "Elastic",
    "ExchangeMode",
    "ExpertBlocks",
    "ExpertLease",
    "ExpertSession",
    "ExpertShape",
    "ExpertStep",
    "ExpertViews",
    "FinetuneConfig",
    "Fusion",
    "GatherDtype",
    "Inactive",
    "IoBackendName",
    "IoConfig",
    "JobStore",
    "LearningRateDecay",
    "LinkConfig",
    "LinksConfig",
    "LoraConfig",
    "LoraTargets",
    "MemoryAccount",
    "Mesh",
    "MicroOrder",
    "ModelConfig",
    "ModelSpec",
    "NonFiniteError",
    "NullTimeline",
    "Opening",
    "OptimizerState",
    "Packing",
    "ParallelConfig",
    "PredictorName",
    "PrefetchConfig",
    "QuantizedLayout",
    "RankEnvironment",
    "RankGroup",
    "Reshard",
    "RouterNoise",
    "RowPlacement",
    "SaveActivations",
    "ScheduleConfig",
    "Scope",
    "StepError",
    "StepResult",
    "StripeConfig",
    "TaskConfig",
    "TaskHead",
    "TieEmbeddings",
    "Timeline",
    "TimelineSink",
    "Track",
    "TrainConfig",
    "Trainer",
    "WearConfig",
    "Work",
    "launch",
    "open_experts",
    "open_session",
    "open_timeline",
]
