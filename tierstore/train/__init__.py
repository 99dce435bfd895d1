"""Training: configuration, sessions, trainer, ranks of a job. ``Trainer`` and what runs it import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.lazy import exports

if TYPE_CHECKING:
    from tierstore.cache import CacheConfig as CacheConfig
    from tierstore.cache import Scope as Scope
    from tierstore.dense import DenseBytes as DenseBytes
    from tierstore.dense import DenseConfig as DenseConfig
    from tierstore.dense import Fusion as Fusion
    from tierstore.dense import GatherDtype as GatherDtype
    from tierstore.dense import OptimizerState as OptimizerState
    from tierstore.dense import Reshard as Reshard
    from tierstore.links import LinkConfig as LinkConfig
    from tierstore.links import LinksConfig as LinksConfig
    from tierstore.machine import MemoryAccount as MemoryAccount
    from tierstore.model import CheckpointActivations as CheckpointActivations
    from tierstore.model import ComputeDtype as ComputeDtype
    from tierstore.model import ModelConfig as ModelConfig
    from tierstore.model import ModelSpec as ModelSpec
    from tierstore.model import TieEmbeddings as TieEmbeddings
    from tierstore.moe import Activation as Activation
    from tierstore.moe import ExpertLease as ExpertLease
    from tierstore.moe import ExpertShape as ExpertShape
    from tierstore.moe import RouterNoise as RouterNoise
    from tierstore.moe import SaveActivations as SaveActivations
    from tierstore.moe.config import ExpertViews as ExpertViews
    from tierstore.moe.lora import LoraConfig as LoraConfig
    from tierstore.moe.lora import LoraTargets as LoraTargets
    from tierstore.parallel import Channel as Channel
    from tierstore.parallel import Collective as Collective
    from tierstore.parallel import CollectiveTraffic as CollectiveTraffic
    from tierstore.parallel import ExchangeMode as ExchangeMode
    from tierstore.parallel import ExpertBlocks as ExpertBlocks
    from tierstore.parallel import JobStore as JobStore
    from tierstore.parallel import Mesh as Mesh
    from tierstore.parallel import ParallelConfig as ParallelConfig
    from tierstore.parallel import RankEnvironment as RankEnvironment
    from tierstore.parallel import RankGroup as RankGroup
    from tierstore.parallel import RowPlacement as RowPlacement
    from tierstore.parallel import Work as Work
    from tierstore.parallel import launch as launch
    from tierstore.parallel.config import Elastic as Elastic
    from tierstore.prefetch import PredictorName as PredictorName
    from tierstore.prefetch import PrefetchConfig as PrefetchConfig
    from tierstore.quant.layout import CodeFormat as CodeFormat
    from tierstore.quant.layout import QuantizedLayout as QuantizedLayout
    from tierstore.store import AdamWConfig as AdamWConfig
    from tierstore.store import Capability as Capability
    from tierstore.store import Inactive as Inactive
    from tierstore.store import IoBackendName as IoBackendName
    from tierstore.store import IoConfig as IoConfig
    from tierstore.store import StripeConfig as StripeConfig
    from tierstore.store import WearConfig as WearConfig
    from tierstore.timeline import NullTimeline as NullTimeline
    from tierstore.timeline import Timeline as Timeline
    from tierstore.timeline import TimelineSink as TimelineSink
    from tierstore.timeline import Track as Track
    from tierstore.timeline import open_timeline as open_timeline
    from tierstore.train.config import FinetuneConfig as FinetuneConfig
    from tierstore.train.config import LearningRateDecay as LearningRateDecay
    from tierstore.train.config import ScheduleConfig as ScheduleConfig
    from tierstore.train.config import TrainConfig as TrainConfig
    from tierstore.train.expert_session import ExpertSession as ExpertSession
    from tierstore.train.expert_session import ExpertStep as ExpertStep
    from tierstore.train.expert_session import open_experts as open_experts
    from tierstore.train.files import DataConfig as DataConfig
    from tierstore.train.files import DataFormat as DataFormat
    from tierstore.train.files import MicroOrder as MicroOrder
    from tierstore.train.files import Packing as Packing
    from tierstore.train.ranks import Opening as Opening
    from tierstore.train.session import open_session as open_session
    from tierstore.train.stepping import NonFiniteError as NonFiniteError
    from tierstore.train.stepping import StepError as StepError
    from tierstore.train.tasks import TaskConfig as TaskConfig
    from tierstore.train.tasks import TaskHead as TaskHead
    from tierstore.train.trainer import StepResult as StepResult
    from tierstore.train.trainer import Trainer as Trainer
else:
    __all__, __getattr__, __dir__ = exports(__name__, __file__)
