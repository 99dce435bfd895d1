"""The cache lab: traces as requests, policies at any capacity, tuning. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.lazy import exports

if TYPE_CHECKING:
    from tierstore.cache.config import Scope as Scope
    from tierstore.lab.candidates import Candidate as Candidate
    from tierstore.lab.costs import Machine as Machine
    from tierstore.lab.costs import Objective as Objective
    from tierstore.lab.costs import Overlap as Overlap
    from tierstore.lab.generators import KeySource as KeySource
    from tierstore.lab.generators import KeyStream as KeyStream
    from tierstore.lab.generators import KeyWorkload as KeyWorkload
    from tierstore.lab.generators import RoutingWorkload as RoutingWorkload
    from tierstore.lab.generators import Scan as Scan
    from tierstore.lab.generators import Tenants as Tenants
    from tierstore.lab.generators import Workload as Workload
    from tierstore.lab.generators import Zipf as Zipf
    from tierstore.lab.generators import in_memory as in_memory
    from tierstore.lab.importing import ImportSummary as ImportSummary
    from tierstore.lab.importing import SourceKind as SourceKind
    from tierstore.lab.importing import import_trace as import_trace
    from tierstore.lab.importing import import_trace_async as import_trace_async
    from tierstore.lab.importing import options_of as options_of
    from tierstore.lab.miss_curves import curves as curves
    from tierstore.lab.report import write_report as write_report
    from tierstore.lab.requests import Requests as Requests
    from tierstore.lab.requests import load_requests as load_requests
    from tierstore.lab.requests import trace_requests as trace_requests
    from tierstore.lab.results import Curve as Curve
    from tierstore.lab.results import HalfLifeMap as HalfLifeMap
    from tierstore.lab.results import Outcome as Outcome
    from tierstore.lab.results import OutcomeEvidence as OutcomeEvidence
    from tierstore.lab.results import RegimeStudy as RegimeStudy
    from tierstore.lab.results import Role as Role
    from tierstore.lab.results import Study as Study
    from tierstore.lab.results import TraceInfo as TraceInfo
    from tierstore.lab.results import TuneResult as TuneResult
    from tierstore.lab.routing import Passes as Passes
    from tierstore.lab.routing import Sections as Sections
    from tierstore.lab.simulate import Contract as Contract
    from tierstore.lab.simulate import PolicySpec as PolicySpec
    from tierstore.lab.simulate import Recording as Recording
    from tierstore.lab.simulate import Replayed as Replayed
    from tierstore.lab.simulate import ReplaySetting as ReplaySetting
    from tierstore.lab.simulate import known_policies as known_policies
    from tierstore.lab.simulate import recording_of as recording_of
    from tierstore.lab.tuning import Hindsight as Hindsight
    from tierstore.lab.tuning import TuneOptions as TuneOptions
    from tierstore.lab.tuning import Tuning as Tuning
    from tierstore.lab.tuning import half_life_map as half_life_map
    from tierstore.lab.tuning import regime_study as regime_study
    from tierstore.lab.tuning import tune as tune
    from tierstore.plan import Profile as Profile
    from tierstore.trace import EventColumns as EventColumns
    from tierstore.trace import RecordTable as RecordTable
    from tierstore.trace import Trace as Trace
    from tierstore.train import TrainConfig as TrainConfig
else:
    __all__, __getattr__, __dir__ = exports(__name__, __file__)
