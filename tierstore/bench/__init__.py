"""Benchmarks: each measures one thing, in one file; ``harness.py`` says how they are made.

Where one has a second file (the process of its ranks, say), that file's name begins with the benchmark's; ``soak`` is the
soak of ``tiers``. ``documents``, ``comparing``, ``report`` and ``plots`` have what was found; ``probes``, ``processes`` and
``namespaces`` are what several measure with. Tests lie at the same path below ``tests``.
"""

#: All benchmarks: the module, and the class in it, by the name of the command.
BENCHMARKS = {
    "io": "IoBench",
    "tiers": "TiersBench",
    "train": "TrainBench",
    "overlap": "OverlapBench",
    "machine": "MachineBench",
    "scale": "ScaleBench",
    "adamw": "AdamWBench",
    "commit": "CommitBench",
    "cache": "CacheBench",
}
