"""Benchmarks: each measures one thing, and gives a result type that the command shows, saves and compares.

::

    adamw, cache, collectives, commit    benchmarks of one file
    io/, machine/, overlap/, soak/       larger ones: ``run.py`` is the benchmark
    tiers/, training/
    results/     result types as JSON, documents, their comparison, plots and the report
    probes/      what several measure with: the disk's speed, latencies, memory and descriptors
    processes/   ranks and workers in processes of their own
    checks.py    what is refused before the work

A new benchmark is a module with ``run``, which returns its ``Figures``, and ``measurements``, which lists them for a
document; and a command in ``tierstore/cli/bench``. Its tests lie at the same path below ``tests``.
"""
