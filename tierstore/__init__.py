"""tierstore: a heterogeneous memory and parameter store for Mixture-of-Experts models.

Names are imported on first use, so that ``import tierstore`` does not import torch. ``docs/API.md`` lists them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.lazy import exports

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tierstore import config as config
    from tierstore import errors as errors
    from tierstore import lab as lab
    from tierstore import plan as plan
    from tierstore import store as store
    from tierstore import trace as trace
    from tierstore import train as train
    from tierstore.cache.config import CacheConfig as CacheConfig
    from tierstore.cache.config import Scope as Scope
    from tierstore.errors import BudgetError as BudgetError
    from tierstore.errors import CapabilityError as CapabilityError
    from tierstore.errors import ChecksumError as ChecksumError
    from tierstore.errors import ConfigError as ConfigError
    from tierstore.errors import DataError as DataError
    from tierstore.errors import PeerError as PeerError
    from tierstore.errors import StoreError as StoreError
    from tierstore.errors import StoreExistsError as StoreExistsError
    from tierstore.errors import StoreFormatError as StoreFormatError
    from tierstore.errors import StoreInUseError as StoreInUseError
    from tierstore.errors import StoreMissingError as StoreMissingError
    from tierstore.errors import StorePoisonedError as StorePoisonedError
    from tierstore.errors import TierstoreError as TierstoreError
    from tierstore.lab.costs import Machine as Machine
    from tierstore.lab.importing import ImportSummary as ImportSummary
    from tierstore.lab.importing import SourceKind as SourceKind
    from tierstore.lab.importing import import_trace as import_trace
    from tierstore.lab.miss_curves import curves as curves
    from tierstore.lab.requests import Requests as Requests
    from tierstore.lab.requests import load_requests as load_requests
    from tierstore.lab.results import Curve as Curve
    from tierstore.lab.simulate import Contract as Contract
    from tierstore.lab.simulate import PolicySpec as PolicySpec
    from tierstore.lab.simulate import Recording as Recording
    from tierstore.lab.tuning import TuneOptions as TuneOptions
    from tierstore.lab.tuning import Tuning as Tuning
    from tierstore.lab.tuning import tune as tune
    from tierstore.machine import MemoryAccount as MemoryAccount
    from tierstore.machine_profile import Profile as Profile
    from tierstore.model.config import ModelConfig as ModelConfig
    from tierstore.parallel import Mesh as Mesh
    from tierstore.parallel import ParallelConfig as ParallelConfig
    from tierstore.parallel import RankGroup as RankGroup
    from tierstore.parallel import launch as launch
    from tierstore.plan.capacity import Use as Use
    from tierstore.plan.fitting import Limits as Limits
    from tierstore.plan.presets import Preset as Preset
    from tierstore.plan.presets import find_preset as find_preset
    from tierstore.plan.report import Plan as Plan
    from tierstore.plan.report import plan_run as plan_run
    from tierstore.store import AdamWConfig as AdamWConfig
    from tierstore.store import NewRecord as NewRecord
    from tierstore.store import ParameterStore as ParameterStore
    from tierstore.store import RecordSchema as RecordSchema
    from tierstore.store import StoreConfig as StoreConfig
    from tierstore.store import VerifyReport as VerifyReport
    from tierstore.store import verify_store as verify_store
    from tierstore.tiers.slots import DeviceKind as DeviceKind
    from tierstore.timeline import TimelineSink as TimelineSink
    from tierstore.train import Opening as Opening
    from tierstore.train import TrainConfig as TrainConfig
    from tierstore.train import Trainer as Trainer
    from tierstore.train import open_session as open_session
else:
    __all__, __getattr__, __dir__ = exports(__name__, __file__)
