"""Benchmarks: each measures one thing, in one file; ``harness.py`` says how they are made.

Where one has a second file (the process of its ranks, say), that file's name begins with the benchmark's. ``results/``
has what was found as documents, their comparison and the report. Tests lie at the same path below ``tests``.
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
