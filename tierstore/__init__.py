"""tierstore: a heterogeneous memory and parameter store for Mixture-of-Experts models.

Names are imported on first use, so that ``import tierstore`` does not import torch. ``docs/API.md`` lists them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.lazy import exports

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tierstore import config, errors, lab, plan, store, trace, train
    from tierstore.cache.config import CacheConfig, Scope
    from tierstore.errors import (
        BudgetError,
        CapabilityError,
        ChecksumError,
        ConfigError,
        DataError,
        PeerError,
        StoreError,
        StoreExistsError,
        StoreFormatError,
        StoreInUseError,
        StoreMissingError,
        StorePoisonedError,
        TierstoreError,
    )
    from tierstore.lab.costs import Machine
    from tierstore.lab.importing import ImportSummary, SourceKind, import_trace
    from tierstore.lab.live import Recording
    from tierstore.lab.miss_curves import curves
    from tierstore.lab.requests import Requests, load_requests
    from tierstore.lab.results import Curve
    from tierstore.lab.simulate import Contract, PolicySpec
    from tierstore.lab.tuning import TuneOptions, Tuning, tune
    from tierstore.machine import MemoryAccount
    from tierstore.machine_profile import Profile
    from tierstore.model.config import ModelConfig
    from tierstore.parallel import Mesh, ParallelConfig, RankGroup, launch
    from tierstore.plan.capacity import Use
    from tierstore.plan.fitting import Limits
    from tierstore.plan.presets import Preset, find_preset
    from tierstore.plan.report import Plan, plan_run
    from tierstore.store import (
        AdamWConfig,
        NewRecord,
        ParameterStore,
        RecordSchema,
        StoreConfig,
        VerifyReport,
        verify_store,
    )
    from tierstore.tiers.slots import DeviceKind
    from tierstore.timeline import TimelineSink
    from tierstore.train import Opening, TrainConfig, Trainer, open_session
else:
    __getattr__, __dir__ = exports(__name__, __file__)

__all__ = [
    "AdamWConfig",
    "BudgetError",
    "CacheConfig",
    "CapabilityError",
    "ChecksumError",
    "ConfigError",
    "Contract",
    "Curve",
    "DataError",
    "DeviceKind",
    "ImportSummary",
    "Limits",
    "Machine",
    "MemoryAccount",
    "Mesh",
    "ModelConfig",
    "NewRecord",
    "Opening",
    "ParallelConfig",
    "ParameterStore",
    "PeerError",
    "Plan",
    "PolicySpec",
    "Preset",
    "Profile",
    "RankGroup",
    "RecordSchema",
    "Recording",
    "Requests",
    "Scope",
    "SourceKind",
    "StoreConfig",
    "StoreError",
    "StoreExistsError",
    "StoreFormatError",
    "StoreInUseError",
    "StoreMissingError",
    "StorePoisonedError",
    "TierstoreError",
    "TimelineSink",
    "TrainConfig",
    "Trainer",
    "TuneOptions",
    "Tuning",
    "Use",
    "VerifyReport",
    "config",
    "curves",
    "errors",
    "find_preset",
    "import_trace",
    "lab",
    "launch",
    "load_requests",
    "open_session",
    "plan",
    "plan_run",
    "store",
    "trace",
    "train",
    "tune",
    "verify_store",
]
