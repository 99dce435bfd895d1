"""Settings that the smallest runs have in common, by dotted names; what differs, each test sets itself."""

from typing import Any

RUN: dict[str, Any] = {"device": "cpu", "threads": 1, "commit_every": 0, "io.huge_pages": "off"}
#: Validation and a sample at the end alone, as short as they can be.
QUIET: dict[str, Any] = {"eval_every": 0, "eval_batches": 1, "sample_tokens": 0}
MODEL: dict[str, Any] = {
    "model.d_model": 16,
    "model.n_layers": 2,
    "model.n_heads": 2,
    "model.seq_len": 8,
    "model.d_ff": 32,
    "model.top_k": 2,
}
SCHEDULE: dict[str, Any] = {"schedule.lr": 5e-3, "schedule.warmup_steps": 4, "schedule.total_steps": 40}
