"""The cache lab: traces as requests, policies at any capacity, tuning. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.lazy import exports

if TYPE_CHECKING:
    from tierstore.cache.config import Scope
    from tierstore.lab.candidates import Candidate
    from tierstore.lab.costs import Machine, Objective, Overlap
    from tierstore.lab.generators import (
        KeySource,
        KeyStream,
        KeyWorkload,
        RoutingWorkload,
        Scan,
        Tenants,
        Workload,
        Zipf,
        in_memory,
    )
    from tierstore.lab.importing import (
        ImportSummary,
        SourceKind,
        import_trace,
        import_trace_async,
        options_of,
    )
    from tierstore.lab.live import Recording, recording_of
    from tierstore.lab.miss_curves import curves
    from tierstore.lab.report import write_report
    from tierstore.lab.requests import Requests, load_requests, trace_requests
    from tierstore.lab.results import (
        Curve,
        HalfLifeMap,
        Outcome,
        OutcomeEvidence,
        RegimeStudy,
        Role,
        Study,
        TraceInfo,
        TuneResult,
    )
    from tierstore.lab.routing import Passes, Sections
    from tierstore.lab.simulate import Contract, PolicySpec, Replayed, ReplaySetting, known_policies
    from tierstore.lab.tuning import Hindsight, TuneOptions, Tuning, half_life_map, regime_study, tune
    from tierstore.plan import Profile
    from tierstore.trace import EventColumns, RecordTable, Trace
    from tierstore.train import TrainConfig
else:
    __getattr__, __dir__ = exports(__name__, __file__)

__all__ = [
    "Candidate",
    "Contract",
    "Curve",
    "EventColumns",
    "HalfLifeMap",
    "Hindsight",
    "ImportSummary",
    "KeySource",
    "KeyStream",
    "KeyWorkload",
    "Machine",
    "Objective",
    "Outcome",
    "OutcomeEvidence",
    "Overlap",
    "Passes",
    "PolicySpec",
    "Profile",
    "RecordTable",
    "Recording",
    "RegimeStudy",
    "ReplaySetting",
    "Replayed",
    "Requests",
    "Role",
    "RoutingWorkload",
    "Scan",
    "Scope",
    "Sections",
    "SourceKind",
    "Study",
    "Tenants",
    "Trace",
    "TraceInfo",
    "TrainConfig",
    "TuneOptions",
    "TuneResult",
    "Tuning",
    "Workload",
    "Zipf",
    "curves",
    "half_life_map",
    "import_trace",
    "import_trace_async",
    "in_memory",
    "known_policies",
    "load_requests",
    "options_of",
    "recording_of",
    "regime_study",
    "trace_requests",
    "tune",
    "write_report",
]
