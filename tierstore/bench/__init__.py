"""Benchmarks: each measures one thing, in one file; ``harness.py`` says how they are made.

Where one has a second file (the process of its ranks, say), that file's name begins with the benchmark's; ``soak`` is the
soak of ``tiers``. ``documents``, ``comparing``, ``report`` and ``plots`` have what was found; ``probes``, ``processes`` and
``namespaces`` are what several measure with. Tests lie at the same path below ``tests``.
"""

import re
from pathlib import Path

_DECLARED = re.compile(r"^class (\w+)\(Benchmark\):", re.MULTILINE)


def benchmarks() -> dict[str, str]:
    """All benchmarks: by the name of the command, which is that of the module, the class in it. None is imported."""
    sources = {path.stem: path.read_text("utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))}
    return {name: found[1] for name, source in sources.items() if (found := _DECLARED.search(source))}
