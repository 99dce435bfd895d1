"""A small study, made by hand."""

from tierstore.lab.results import (
    Curve,
    HalfLifeMap,
    LayerOutcome,
    Outcome,
    RegimeStudy,
    ReplayWindow,
    Role,
    Study,
    TraceInfo,
    TuneResult,
    TuneVerdict,
)

SHA = "0123456789abcdef" * 4


def outcome(policy, fraction, misses, *, role=Role.POLICY, written=0, stall=None, **more):
    return Outcome(
        policy=policy,
        role=role,
        capacity_frames=round(1000 * fraction),
        capacity_fraction=fraction,
        scope="global",
        contract="event-atomic",
        steps=10,
        requests=1000,
        hits=1000 - misses,
        misses=misses,
        write_backs=written,
        read_bytes=misses << 20,
        written_bytes=written << 20,
        stall_s_per_step=stall,
        **more,
    )


def curve(policy, misses, **more):
    """Misses at 20, 40 and 60%; layers and windows at each."""
    return Curve(
        tuple(
            outcome(
                policy,
                fraction,
                count,
                layers=(LayerOutcome(0, 400, count // 2), LayerOutcome(3, 600, count - count // 2)),
                windows=(
                    ReplayWindow(0, 500, 500 - count // 2),
                    ReplayWindow(5, 500, 500 - count + count // 2),
                ),
                **more,
            )
            for fraction, count in zip((0.2, 0.4, 0.6), misses, strict=True)
        )
    )


def trace_info(name="a trace"):
    return TraceInfo(
        name=name,
        sha256=SHA,
        steps=10,
        events=60,
        requests=1000,
        records=1000,
        layers=2,
        total_frames=1000,
        total_bytes=1000 << 20,
    )


def small_study(writes=50):
    regime = RegimeStudy(
        name="training, <16> tokens",
        trace=trace_info(),
        contract="event-atomic",
        scope="global",
        active_per_layer=12.5,
        records_per_layer=64,
        curves=(
            curve("lru", (700, 500, 300), written=2 * writes, stall=0.5, policy_s=1e-4),
            curve("lfu-decay", (650, 450, 250), written=writes, stall=0.25, drive_writes_per_day=3.5),
            curve("belady", (500, 300, 100), role=Role.BOUND, written=writes, stall=0.125),
        ),
        half_lives=HalfLifeMap((1.0, 8.0, float("inf")), (0.2, 0.4), ((0.5, 0.4), (0.45, 0.35), (0.6, 0.5))),
        advice="Tuning may be worth it.",
        tuned=TuneResult(
            chosen=outcome("lfu-decay", 0.4, 225, written=10),
            baseline=outcome("lru", 0.4, 250, written=20),
            best=outcome("lfu", 0.4, 220, written=12),
            gain=0.025,
            gain_low=0.01,
            gain_high=0.04,
            confidence=0.95,
            verdict=TuneVerdict.BETTER,
            tuned_steps=5,
            advice="Tuning may be worth it.",
            configuration='[cache]\npolicy = "lfu-decay"\n',
        ),
    )
    return Study(
        title="A study of <caches>",
        regimes=(regime,),
        assumptions={"read bandwidth": "3 GB/s"},
        version="9.9",
    )
