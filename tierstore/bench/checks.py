"""What benchmarks refuse before they measure: ``tierstore.bench.harness`` has it."""

from tierstore.bench.harness import at_least, more_than_0, refuse_existing, require_free, work_directory

__all__ = ["at_least", "more_than_0", "refuse_existing", "require_free", "work_directory"]
