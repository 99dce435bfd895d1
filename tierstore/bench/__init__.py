"""Benchmarks: each measures one thing, in one file; ``harness.py`` describes how to write one.

If a benchmark needs a second file (say, for the process of its ranks), that file's name begins with the benchmark's;
``soak`` is the soak of ``tiers``. ``documents``, ``comparing`` and ``report`` handle results; ``probes``,
``processes`` and ``namespaces`` are tools that several benchmarks share. Tests have the same path below ``tests``.
"""

import re
from pathlib import Path

_DECLARED = re.compile(r"^class (\w+)\(Benchmark\):", re.MULTILINE)


def benchmarks() -> dict[str, str]:
    """The class name of each benchmark by the command's name, which is the module's. Imports none of them."""
    sources = {path.stem: path.read_text("utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))}
    return {name: found[1] for name, source in sources.items() if (found := _DECLARED.search(source))}
