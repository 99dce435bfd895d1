"""What a step computes and sends, and in how many chunks."""

import math
from dataclasses import fields, replace
from typing import Any

import pytest
from pipemoe_solvers import simulate_chunks
from traffic_cases import Make, workload_of

from tierstore.cache.access import Phase
from tierstore.config import load
from tierstore.errors import ConfigError
from tierstore.machine_profile import ASSUMED, Cost, Profile
from tierstore.parallel.chunk_degree import ChunkCosts, Share, best_degree, pass_seconds
from tierstore.plan.capacity import Setting
from tierstore.plan.fitting import Limits
from tierstore.plan.predict import Prediction, predict
from tierstore.plan.report import plan_run
from tierstore.plan.workload import LayerDegrees, StepWorkload, layer_degrees, modelled
from tierstore.prefetch.schedule import Pass
from tierstore.train.config import TrainConfig

# The chunks of a planned run's layers: costs and work by hand, and the best number of chunks ----------------


PROFILE = replace(
    ASSUMED,
    exchanges={2: Cost(0.001, 1e6), 4: Cost(0.003, 2e6)},
    expert_forward=Cost(0.0002, 1e9),
    expert_backward=Cost(0.0004, 1e9),
)


def _found(setting: Setting, profile: Profile = PROFILE) -> LayerDegrees | None:
    return layer_degrees(workload_of(setting, profile))


def test_one_rank_sends_nothing(setting: Make) -> None:
    assert _found(setting()) is None


def test_work_by_hand(setting: Make) -> None:
    """2 ranks, 16 tokens each of 12 experts: 192 rows of 16 x 4 B, half of which stay. 6 experts a rank, each of 32 rows and
    3 x 16 x 32 parameters: 2 operations for each forward.
    """
    found = _found(setting({"model.compute_dtype": "fp32"}, ranks=2))
    assert found.most == 6
    forward, backward = found.passes
    assert (forward.phase, backward.phase) == (Phase.FORWARD, Phase.BACKWARD)
    assert forward.costs == ChunkCosts(0.001, 1 / 1e6, 0.0002, 1.0)
    assert forward.work.dispatch == forward.work.combine == Share(1, 96 * 64)
    flops = 2 * 32 * 3 * 16 * 32
    assert forward.work.experts.amount == pytest.approx(6 * (0.0002 + flops / 1e9))
    assert backward.work.dispatch == backward.work.combine == Share(2, 96 * 64 + 96 * 4)
    assert backward.work.experts.amount == pytest.approx(6 * (0.0004 + 2 * flops / 1e9))


def test_rows_are_sent_again_where_none_are_kept(setting: Make) -> None:
    kept = _found(setting(ranks=2))
    again = _found(setting({"model.expert_activations": "recompute"}, ranks=2))
    assert again.passes[1].work.dispatch.starts == 3
    assert again.passes[1].work.dispatch.amount > 1.5 * kept.passes[1].work.dispatch.amount
    assert again.passes[0] == kept.passes[0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_best_number_is_the_least_of_all(setting: Make, ranks: int) -> None:
    found = _found(setting(ranks=ranks))
    for one in found.passes:
        seconds = [pass_seconds(one.costs, one.work, degree) for degree in range(1, found.most + 1)]
        assert one.best.seconds == min(seconds)
        assert one.best.degree == 1 + seconds.index(min(seconds))
        told: dict[str, Any] = found.as_json()[one.phase.name.lower()]
        assert (told["chunks_count"], told["one_chunk_s"]) == (one.best.degree, seconds[0])


def test_a_limited_link_is_the_slower_of_two(setting: Make) -> None:
    """As fast as 10 kB/s after 50 ms: dear to start, so fewer chunks than over the machine's own."""
    limits = {"links.exchange.bandwidth": 10_000, "links.exchange.latency": 0.05}
    found = _found(setting(limits, ranks=2))
    assert found.passes[0].costs.alpha_a == 0.05
    assert found.passes[0].costs.beta_a == pytest.approx(1e-4)


# A step whose rows travel to experts in chunks: by hand, and against the simulation of chunks alone ---------


_FREE = Cost(0.0, math.inf)
_NAMES = [field.name for field in fields(Profile) if isinstance(getattr(ASSUMED, field.name), Cost)]
#: Nothing takes time but exchanges and experts.
ALONE = replace(ASSUMED, **dict.fromkeys(_NAMES, _FREE))
ROOMY = Limits(1 << 40, 1 << 40)
LAYERS = 2


def _profile(exchange: Cost, forward: Cost, backward: Cost) -> Profile:
    return replace(ALONE, exchanges={2: exchange}, expert_forward=forward, expert_backward=backward)


def _chunked(found: Prediction) -> dict[Phase, int]:
    return found.degrees.taken


def test_a_step_by_hand(setting: Make) -> None:
    """One rank of two sends 96 rows of 64 bytes to the experts, 6,144 bytes, and back; 6 experts of 32 rows and 1,536
    parameters take 98,304 operations each forward. At 1 kB/s after nothing a dispatch takes 6.144 s; at 9,600 operations a
    second the experts 61.44 s. In 3 chunks the network is idle between dispatch and combine: 2.048 + 61.44 + 2.048 s,
    instead of 6.144 + 61.44 + 6.144 s. The backward pass computes twice as much, and sends 96 weights of 4 bytes besides.
    """
    told = setting({"model.compute_dtype": "fp32", "parallel.pipeline_degree": 3}, ranks=2)
    found = predict(told, _profile(Cost(0.0, 1e3), Cost(0.0, 9600.0), Cost(0.0, 9600.0)))
    assert _chunked(found) == {Phase.FORWARD: 3, Phase.BACKWARD: 3}
    back = (6144 + 4 * 96) / 1e3
    assert found.step_s == pytest.approx(LAYERS * (61.44 + 2 * 6.144 / 3 + 2 * 61.44 + 2 * back / 3))
    assert found.one_chunk_s == pytest.approx(LAYERS * (61.44 + 2 * 6.144 + 2 * 61.44 + 2 * back))
    assert found.chunks_save_s == pytest.approx(LAYERS * 2 / 3 * (2 * 6.144 + 2 * back))


@pytest.mark.parametrize("chunks", [1, 2, 3, 6])
@pytest.mark.parametrize(
    "exchange", [Cost(0.001, 1e6), Cost(0.05, 2e5), Cost(2.0, 1e9)], ids=["fast", "even", "dear to start"]
)
def test_a_step_is_its_passes_simulated_alone(setting: Make, chunks: int, exchange: Cost) -> None:
    """A further chunk takes one more start of an expert."""
    told = setting({"parallel.pipeline_degree": chunks}, ranks=2)
    profile = _profile(exchange, Cost(0.002, 4e7), Cost(0.004, 4e7))
    found = predict(told, profile)
    expected = 0.0
    for one in found.degrees.passes:
        computed = one.work.experts.amount + (chunks - 1) * one.costs.alpha_e
        times = (
            one.work.dispatch.starts * exchange.latency_s
            + one.work.dispatch.amount / chunks / exchange.per_s,
            computed / chunks,
            one.work.combine.starts * exchange.latency_s + one.work.combine.amount / chunks / exchange.per_s,
        )
        expected += LAYERS * simulate_chunks([times] * chunks).seconds
    assert found.step_s == pytest.approx(expected, rel=1e-3)  # bytes are whole numbers


def test_auto_takes_the_exact_solvers_numbers(setting: Make) -> None:
    """Each pass its own; and one chunk where more save less than 2%."""
    profile = _profile(Cost(1e-4, 1e6), Cost(0.0, 4e7), Cost(0.0, 1e9))
    found = predict(setting(ranks=2), profile)
    for one in found.degrees.passes:
        assert one.taken == best_degree(one.costs, one.work, most=6).degree
    forward, backward = (one.taken for one in found.degrees.passes)
    assert forward > backward > 1
    assert found.chunks_save_s > 0
    dear = predict(setting(ranks=2), _profile(Cost(10.0, 1e6), Cost(0.0, 4e7), Cost(0.0, 4e7)))
    assert _chunked(dear) == {Phase.FORWARD: 1, Phase.BACKWARD: 1}
    assert dear.chunks_save_s == 0
    slight = predict(setting(ranks=2), _profile(Cost(0.0, 1e9), Cost(0.0, 1e6), Cost(0.0, 1e6)))
    assert [one.best.degree for one in slight.degrees.passes] == [6, 6]
    assert _chunked(slight) == {Phase.FORWARD: 1, Phase.BACKWARD: 1}


def test_what_the_plan_says(setting: Make) -> None:
    profile = _profile(Cost(1e-4, 1e6), Cost(0.0, 4e7), Cost(0.0, 1e9))
    made = plan_run(setting({"parallel.pipeline_degree": 2}).config, ROOMY, ranks=2, profile=profile)
    told = made.as_json()["pipeline_degree"]
    assert told["chosen_by"] == "parallel.pipeline_degree"
    assert told["forward"]["taken_chunks_count"] == told["backward"]["taken_chunks_count"] == 2
    assert told["step_s"] == made.prediction.step_s
    assert told["one_chunk_step_s"] - told["saved_s"] == pytest.approx(told["step_s"])
    auto = plan_run(setting().config, ROOMY, ranks=2, profile=profile).as_json()["pipeline_degree"]
    assert auto["chosen_by"] == "auto"
    assert plan_run(setting().config, ROOMY, profile=profile).as_json()["pipeline_degree"] is None


def test_too_many_chunks_are_refused_as_by_a_run(setting: Make) -> None:
    with pytest.raises(ConfigError, match=r"auto-split or at most 96, 16 parts of an expert .*\(12 experts"):
        predict(setting({"parallel.pipeline_degree": 97}, ranks=2), ASSUMED)


def test_more_chunks_than_experts_where_they_are_asked_for(setting: Make) -> None:
    """By number, or by AUTO: 6 experts of a rank, each divided into parts, hide more of a slow network."""
    profile = _profile(Cost(1e-4, 1e3), Cost(1e-6, 9600.0), Cost(1e-6, 9600.0))
    seconds = []
    for degree, most, taken in (("auto", 6, 6), ("8", 96, 8), ("auto-split", 96, 96)):
        found = predict(setting({"parallel.pipeline_degree": degree}, ranks=2), profile)
        assert (found.degrees.most, found.degrees.auto) == (most, degree.startswith("auto"))
        assert _chunked(found) == {Phase.FORWARD: taken, Phase.BACKWARD: taken}
        seconds.append(found.step_s)
    assert seconds == sorted(seconds, reverse=True)


def test_a_repeated_forward_pass_sends_its_rows_once_more(setting: Make) -> None:
    """With blocks computed again the backward pass sends what the forward one does, before its own, which AUTO weighs."""

    def workload(changes: dict[str, str]) -> StepWorkload:
        told = setting(changes, ranks=2)
        made = plan_run(told.config, ROOMY, ranks=2)
        assert made.verdict.capacity is not None
        return StepWorkload(told, made.verdict.capacity, made.prediction.traffic, ASSUMED)

    kept, again = workload({}), workload({"model.checkpoint_activations": "block"})
    forward, backward = Pass(Phase.FORWARD, 1, 0), Pass(Phase.BACKWARD, 1, 0)
    assert again.sizes(forward).dispatch == kept.sizes(forward).dispatch
    assert again.sizes(backward).dispatch == kept.sizes(backward).dispatch + kept.sizes(forward).dispatch
    assert again.sizes(backward).combine == kept.sizes(backward).combine + kept.sizes(forward).combine
    costs, work = modelled(again, backward)
    assert (costs, work) == modelled(kept, backward)
    assert isinstance(costs, ChunkCosts)


# What a plan says of tables over the vocabulary: the choice of a run, and the bytes of both ways ------------


LARGE = {"model.vocab_size": 151_936, "model.d_model": 512, "data.batch_size": 4}


def planned(changes: dict[str, Any]) -> dict[str, Any]:
    return plan_run(load(TrainConfig, None, LARGE | changes), ranks=4).as_json()


def term(plan: dict[str, Any], name: str) -> int:
    return next((each["term_bytes"] for each in plan["terms"] if each["name"] == name), 0)


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
