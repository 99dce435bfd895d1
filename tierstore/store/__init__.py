"""The parameter store: record format, extents, index, commits and snapshots. Imports no torch."""

from tierstore._native import GroupOrder, StepClock
from tierstore.cache.config import CacheConfig, Scope
from tierstore.capabilities import Capability
from tierstore.links import LinkConfig
from tierstore.store.adamw import AdamWConfig, Inactive
from tierstore.store.config import IoBackendName, IoConfig, StoreAccess, StoreConfig, StripeConfig, WearConfig
from tierstore.store.core import OptimizerStep
from tierstore.store.disk.drives import DriveReport
from tierstore.store.fetching import Lease, RecordView
from tierstore.store.format import (
    Group,
    GroupLayout,
    MomentFormat,
    Placement,
    RecordSchema,
    Section,
    Training,
    WeightFormat,
)
from tierstore.store.parameter_store import LastCommit, ParameterStore, StoreStatus, verify_store
from tierstore.store.reading import OpenAt
from tierstore.store.records import RecordInfo
from tierstore.store.registering import NewRecord
from tierstore.store.verify import VerifyReport

__all__ = [
    "AdamWConfig",
    "CacheConfig",
    "Capability",
    "DriveReport",
    "Group",
    "GroupLayout",
    "GroupOrder",
    "Inactive",
    "IoBackendName",
    "IoConfig",
    "LastCommit",
    "Lease",
    "LinkConfig",
    "MomentFormat",
    "NewRecord",
    "OpenAt",
    "OptimizerStep",
    "ParameterStore",
    "Placement",
    "RecordInfo",
    "RecordSchema",
    "RecordView",
    "Scope",
    "Section",
    "StepClock",
    "StoreAccess",
    "StoreConfig",
    "StoreStatus",
    "StripeConfig",
    "Training",
    "VerifyReport",
    "WearConfig",
    "WeightFormat",
    "verify_store",
]
