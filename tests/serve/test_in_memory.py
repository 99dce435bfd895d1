"""A served model that lies in memory takes no guesses; one that must be read does."""

from __future__ import annotations

from pathlib import Path

import torch
from trained_stores import imported, logits_of, serving

from tierstore.serve.opening import open_served

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def test_guesses_end_with_the_first_pass_that_reads_nothing(tmp_path: Path) -> None:
    model, store = imported(tmp_path)
    with torch.inference_mode():
        expected = model(input_ids=TOKENS, use_cache=False).logits
    options = {"prefetch.predictor": "router", "prefetch.depth": 1}
    with open_served(serving(store, options)) as parts:
        first = parts.spec.moe_layers[0]
        reads, reached = [], []
        for _ in range(5):
            before = parts.store.cache.residency.stats().read_bytes
            torch.testing.assert_close(logits_of(parts, TOKENS), expected)
            reads.append(parts.store.cache.residency.stats().read_bytes - before)
            reached.append(parts.experts.reach(first))
    assert reads[0] > 0
    assert reads[-2:] == [0, 0]
    # A pass is judged by what the one before it has read.
    assert [not layers for layers in reached[1:]] == [read == 0 for read in reads[:-1]]
