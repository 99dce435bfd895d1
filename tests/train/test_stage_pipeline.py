"""Pipeline stages: the bits of one process, resumes, refusals, and the death of a stage. Kills: test_rank_kills."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launcher import Ranks
from rank_cases import Make, Settings, alone
from stage_cases import configured, drawn, dying, graphs_alive, spoiled, staged
from stage_runs import merged, same
from test_rank_kills import check_death

from tierstore.errors import StoreFormatError
from tierstore.parallel import ParallelConfig
from tierstore.parallel.layout import local_environments
from tierstore.plan.order import choose_order
from tierstore.train.files import MicroOrder
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session
from tierstore.train.stages import one_forward_one_backward

TIGHT: Settings = {"host_budget": 60_000}
#: In what all stages together differ from one process, if in anything: name, settings.
MODES: dict[str, Settings] = {
    "tight": {**TIGHT, "prefetch.depth": 3},
    "clipped": {**TIGHT, "clip_norm": 0.3, "model.compute_dtype": "bf16"},
    "computed again": {
        "model.checkpoint_activations": "block",
        "model.shared_expert_d_ff": 16,
        "data.micro_batches": 3,
        "model.router_noise": "jitter",
        "model.router_noise_std": 0.1,
    },
    "moments on disk": {**TIGHT, "dense.optimizer_state": "nvme", "parallel.stage_blocks": (1, 3)},
}


@pytest.mark.parametrize(
    "mode", ["tight", *(pytest.param(mode, marks=pytest.mark.slow) for mode in [*MODES][1:])]
)
def test_two_stages_have_the_bits_of_one_process(ranks: Ranks, settings: Make, mode: str) -> None:
    one = staged(alone(), {**settings(MODES[mode]), "parallel.stage_blocks": ()}, 3)
    two = ranks.run(2, staged, settings({**MODES[mode], "parallel.stages": 2}), 3, stages=2)
    same(two, one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "expert", "changes"),
    [
        (4, 0, {"clip_norm": 0.3}),
        (2, 0, TIGHT),
        (2, 1, {**TIGHT, "clip_norm": 0.3}),
        (2, 0, {"dense.reshard": "after-backward", "prefetch.gather_depth": 3}),
        (2, 0, {"parallel.embedding": "partitioned"}),
    ],
    ids=["four stages", "experts shared", "replicas", "kept to the backward pass", "embedding divided"],
)
def test_four_ranks_in_stages_have_the_bits_of_their_data_ranks(
    ranks: Ranks, settings: Make, stages: int, expert: int, changes: Settings
) -> None:
    """Each stage has 4 / stages ranks, with pieces of the batch and with groups of experts as a run without stages has."""
    each = 4 // stages
    if each == 1:
        one = staged(alone(), settings(changes), 3)
    else:
        one, other = ranks.run(each, staged, settings(changes), 3, expert=expert)
        one.weights = dict(merged([one, other]))
    several = ranks.run(
        4, staged, settings({**changes, "parallel.stages": stages}), 3, expert=expert, stages=stages
    )
    same(several, one)


def test_passes_come_in_the_derived_order_and_activations_are_held_for_no_more(
    ranks: Ranks, settings: Make
) -> None:
    """The log of what torch's schedule called, and the graphs that were alive. Each message has 16 bytes beside it."""
    changes = {"parallel.stages": 2, "data.micro_batches": 5}
    runs = ranks.run(2, staged, settings(changes), 2, stages=2)
    for stage, run in enumerate(runs):
        assert tuple(run.log) == one_forward_one_backward(stage, 2, 5)
        assert run.most_held == min(5, 2 - stage)
        stream = 4 * 8 * 16 * 4  # 4 sequences of 8 positions, 16 wide, fp32
        assert run.sends == (2 * 5, 2 * 5 * (stream + 16))
    assert ranks.run(2, graphs_alive, settings(changes), stages=2) == [2, 1]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["loss", "balance"])
@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_a_loss_that_is_not_finite_skips_the_step_in_all_stages(
    ranks: Ranks, settings: Make, where: str, clip: float
) -> None:
    """Whichever stage has it, of the last micro-batch too, and where experts are stepped in their last backward pass."""
    one = spoiled(alone(), settings({"clip_norm": clip}), where, 3)
    two = ranks.run(2, spoiled, settings({"clip_norm": clip, "parallel.stages": 2}), where, 3, stages=2)
    assert one.skipped == 1
    assert math.isnan(one.losses[1])
    for run in (one, *two):
        run.losses[1] = run.norms[1] = 0.0  # NaN is not equal to itself
    same(two, one)


@pytest.mark.slow
def test_a_resume_goes_on_with_the_same_bits(ranks: Ranks, settings: Make) -> None:
    changes = {**TIGHT, "clip_norm": 0.3, "parallel.stages": 2}
    whole = ranks.run(2, staged, settings(changes), 4, stages=2)
    cut = settings(changes)
    first = ranks.run(2, staged, cut, 2, stages=2)
    second = ranks.run(2, staged, cut, 4, Opening.RESUME, stages=2)
    for rank in range(2):
        assert first[rank].losses + second[rank].losses == whole[rank].losses
        assert second[rank].weights == whole[rank].weights


def test_stages_that_were_cut_otherwise_are_not_resumed(ranks: Ranks, settings: Make) -> None:
    made = settings({"parallel.stages": 2})
    ranks.run(2, staged, made, 1, stages=2)
    found = ranks.run(2, refused, {**made, "parallel.stage_blocks": (1, 3)}, stages=2)
    assert all("parallel.layers: was [0, 2], is [0, 1]" in message for message in found[:1])
    assert all("reshard" in message for message in found)


def refused(mesh: Any, settings: Settings) -> str:
    with (
        pytest.raises(StoreFormatError) as error,
        open_session(configured(settings), Opening.RESUME, mesh=mesh),
    ):
        pass
    return str(error.value)


def test_a_timeline_shows_each_pass_of_a_stage(ranks: Ranks, settings: Make, tmp_path: Path) -> None:
    ranks.run(2, drawn, settings({"parallel.stages": 2}), tmp_path / "line", stages=2)
    for stage in range(2):
        events = json.loads((tmp_path / f"line.{stage}").read_text())
        spans = [event for event in events if event["ph"] in "XB" and " 1." in event["name"]]
        order = [
            f"{turn.phase.name.lower()} 1.{turn.micro}" for turn in one_forward_one_backward(stage, 2, 4)
        ]
        assert [event["name"] for event in spans] == order


# What is refused --------------------------------------------------------------------------------------------


PROGRAM = """
import json, sys
from pathlib import Path
from tierstore.config import load
from tierstore.parallel import launch
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session

config = load(TrainConfig, None, json.loads(sys.argv[1]))
with (
    launch(config.parallel, device="cpu") as mesh,
    open_session(config, Opening.CREATE, mesh=mesh) as trainer,
):
    trainer.step()
left = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
assert not any("gloo" in name for name in left), left
"""


@pytest.mark.slow
def test_no_thread_of_a_communicator_outlives_it(settings: Make) -> None:
    """One that still frees a tensor while the interpreter ends aborts the process. These processes start afresh: torch keeps
    the world's communicator if what stages use of it is imported after the world was made.
    """
    given = json.dumps(settings({"parallel.stages": 2, "data.micro_batches": 2}), default=str)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, given],
            env={**os.environ, **place, "PYTHONHASHSEED": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for place in local_environments(2)
    ]
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said


def test_auto_takes_micro_order(settings: Make) -> None:
    asked = {"data.micro_order": "auto", "parallel.stages": 2}
    choice = choose_order(configured({**settings(), **asked}))
    assert choice.value is MicroOrder.MICRO
    assert "1F1B" in choice.reason


# The death of a stage ---------------------------------------------------------------------------------------


QUICK = {"timeout_s": 30.0, "grace_s": 2.0}


@pytest.mark.slow
@pytest.mark.parametrize("victim", range(3))
def test_the_death_of_a_stage_ends_all_with_its_cause(
    ranks: Ranks, settings: Make, tmp_path: Path, victim: int
) -> None:
    """The first, a middle or the last one, in a pass of the second step, while others wait for what it would send."""
    changes = settings({"parallel.stages": 3, "model.n_layers": 3})
    with ranks.fresh(3, ParallelConfig(stages=3, **QUICK), tmp_path / "stderr") as world:
        for rank in range(3):
            world.send(rank, dying, changes, victim, 3)
        check_death(world, victim, tmp_path / "stderr")
