"""What a plan says of tables over the vocabulary: the choice of a run, and the bytes of both ways."""

from __future__ import annotations

from typing import Any

import pytest

from tierstore.config import load
from tierstore.plan.report import plan_run
from tierstore.train.config import TrainConfig

LARGE = {"model.vocab_size": 151_936, "model.d_model": 512, "data.batch_size": 4}


def planned(changes: dict[str, Any]) -> dict[str, Any]:
    return plan_run(load(TrainConfig, None, LARGE | changes), ranks=4).as_json()


def term(plan: dict[str, Any], name: str) -> int:
    found: int = next((each["term_bytes"] for each in plan["terms"] if each["name"] == name), 0)
    return found


def test_auto_takes_what_sends_fewer_bytes() -> None:
    auto = planned({})
    gathered = planned({"parallel.embedding": "gathered", "parallel.head": "gathered"})
    assert (auto["vocabulary"]["embedding"], auto["vocabulary"]["head"]) == ("partitioned", "partitioned")
    assert auto["vocabulary"]["sent"] == gathered["vocabulary"]["sent"]
    # 37,984 rows of 512 in fp32 to three others, gathered once and reduced once.
    assert auto["vocabulary"]["sent"]["gathered_table_bytes"] == 2 * 3 * 37_984 * 512 * 4
    table = 151_936 * 512 * 4
    # Both ends in buffers of their own, and as much to send from; one pair of gradient buffers for both.
    saved = term(gathered, "fusion buffers") - term(auto, "fusion buffers")
    assert saved == pytest.approx(4 * table, rel=0.01)
    saved = term(gathered, "gradient buffers") - term(auto, "gradient buffers")
    assert saved == pytest.approx(2 * table, rel=0.01)
    assert term(auto, "dense state") == pytest.approx(term(gathered, "dense state"), rel=0.01)
    assert auto["prediction"]["step_s"] < gathered["prediction"]["step_s"]


def test_a_vocabulary_of_bytes_stays_gathered() -> None:
    plan = planned({"model.vocab_size": 256, "data.batch_size": 16})
    assert (plan["vocabulary"]["embedding"], plan["vocabulary"]["head"]) == ("gathered", "gathered")
    sent = plan["vocabulary"]["sent"]
    assert sent["gathered_table_bytes"] < sent["partitioned_embedding_bytes"]
