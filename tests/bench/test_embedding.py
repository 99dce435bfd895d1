"""bench embedding: figures of real ranks beside the formulas'. Nothing here asserts a speed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tierstore import machine
from tierstore.bench.embedding import EmbeddingBench, EmbeddingResult, measurements, run
from tierstore.cli.bench.ranks.embedding import show_embedding
from tierstore.cli.output import Output
from tierstore.errors import ConfigError


@pytest.fixture(scope="module")
def result() -> EmbeddingResult:
    bench = EmbeddingBench(ranks=2, vocab=9000, d_model=128, tokens=16, small_tokens=128, rounds=1, steps=1)
    return run(bench)


@pytest.mark.slow
def test_bytes_are_the_calculated_ones(result: EmbeddingResult) -> None:
    for table in (result.large, result.small):
        assert abs(table.gathered.sent_error) < 0.001
        assert abs(table.partitioned.sent_error) < 0.05
        assert table.gathered.first_loss == pytest.approx(table.partitioned.first_loss, rel=1e-5)
        for way in (table.gathered, table.partitioned):
            assert way.step_s > 0
            assert way.risen_bytes > 0
    assert result.large.sent_ratio < 1 < result.small.sent_ratio
    # Beside slices, alike in both: gathered on two ranks, tied, the table in a buffer, its gradients twice, and once each as
    # the head, as the embedding and as their sum; partitioned, half of those three. 1 + 2 + 3 - 3/2.
    whole = 9000 * 128 * 4
    assert result.large.calculated_saved_bytes == pytest.approx(4.5 * whole, rel=0.02)
    assert (result.large.auto, result.small.auto) == ("partitioned", "gathered")


@pytest.mark.slow
def test_what_is_shown_and_kept(result: EmbeddingResult, capsys: pytest.CaptureFixture[str]) -> None:
    show_embedding(result, Output.for_option(False))
    out = capsys.readouterr().out
    assert "9,000 rows of 128, tied, 2 ranks on gloo" in out
    assert "AUTO: partitioned (auto: a step sends" in out
    assert {m.name for m in measurements(result)} >= {"step", "sent a step", "resident rise"}


@pytest.mark.slow
def test_failures_name_what_is_not_as_calculated(result: EmbeddingResult) -> None:
    more = replace(result.large.gathered, sent_bytes=2 * result.large.gathered.sent_bytes)
    wrong = replace(result, large=replace(result.large, gathered=more, auto="gathered"))
    assert any("sent +100.0% of the calculated" in each for each in wrong.failures)
    assert any("AUTO is gathered, which sends more" in each for each in wrong.failures)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="ranks: expected at least 2, got 1"):
        EmbeddingBench(ranks=1)
    with pytest.raises(ConfigError, match="d_model: expected a multiple of 8, got 12"):
        EmbeddingBench(d_model=12)
    rows = machine.memory().total_bytes // 4096
    with pytest.raises(ConfigError, match=r"vocab: 4 ranks that gather .* need .* of memory"):
        run(EmbeddingBench(vocab=rows, d_model=4096))
