"""Sources to import, and what came of them."""

import pytest

from tierstore.lab.importing import import_trace
from tierstore.trace.files import load_trace
from tierstore.trace.format import TraceKind


@pytest.fixture
def imported(tmp_path):
    """Imports bytes; the accesses as (step, phase, layer, records, flags), and the trace."""

    def run(data, kind=None, *, name="source", **options):
        source, target = tmp_path / name, tmp_path / "target.trace"
        source.write_bytes(data)
        summary = import_trace(source, target, kind=kind, options=options, keys=tmp_path / "keys")
        trace = load_trace(target)
        accesses = []
        for event in range(len(trace)):
            span = slice(int(trace.offsets[event]), int(trace.offsets[event + 1]))
            if trace.kinds[event] == TraceKind.ACCESS:
                accesses.append(
                    (
                        int(trace.steps[event]),
                        int(trace.phases[event]),
                        int(trace.layers[event]),
                        trace.records[span].tolist(),
                        sorted(set(trace.flags[span].tolist())),
                    )
                )
        assert summary.requests == len(trace.records)
        assert summary.steps == int((trace.kinds == TraceKind.END_STEP).sum())
        return accesses, trace, (tmp_path / "keys").read_text().splitlines()

    return run
