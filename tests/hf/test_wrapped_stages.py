"""Pipeline stages of imported models on real ranks: the bits of the same data ranks without stages."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import imported, tensors_of
from command_line import object_of
from launcher import Ranks
from rank_cases import alone
from stage_runs import merged, same
from stored_runs import configuration
from test_export import same as same_tensors
from test_rank_kills import check_death
from tiny_families import make_config, plain_model
from wrapped_stage_cases import dying_wrapped, wrapped

from tierstore.errors import ConfigError, StoreError
from tierstore.hf.adapters import export_adapter
from tierstore.hf.exporting import export
from tierstore.hf.importing import ImportOptions, plan_import
from tierstore.hf.manifest import Weights
from tierstore.hf.spec import stored_spec
from tierstore.model.config import ComputeDtype
from tierstore.parallel import Mesh, ParallelConfig
from tierstore.parallel.layout import Layout
from tierstore.train.ranks import Opening
from tierstore.train.resharding import reshard
from tierstore.train.session import open_session
from tierstore.train.stages import one_forward_one_backward
from tierstore.train.stored_model import open_stored

Whole = Callable[..., Path]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Imports of tiny models by one rank, each made once, with their checkpoints beside them."""
    root = tmp_path_factory.mktemp("imports")

    def make(family: str, dtype: ComputeDtype = ComputeDtype.FP32, **options: Any) -> Path:
        layers = {"num_hidden_layers": 4 if family == "gpt_oss" else 3}
        directory = root / f"{family}-{dtype.value}-{len(options)}"
        if not directory.exists():
            model = plain_model(make_config(family, vocab_size=256, **{**layers, **options}))
            model.save_pretrained(directory / "model")
            imported(directory / "model", directory / "store", compute=dtype)
            imported(directory / "model", directory / "frozen", compute=dtype, weights=Weights.FROZEN)
        return directory / "store"

    return make


@pytest.fixture
def settings(text: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    made = 0

    def make(**changes: Any) -> dict[str, Any]:
        nonlocal made
        made += 1
        return {
            "store": tmp_path / f"store{made}",
            "data.paths": (str(text),),
            "data.batch_size": 4,
            "data.micro_batches": 3,
            "finetune.seq_len": 12,
            "clip_norm": 0.5,
            **changes,
        }

    return make


MakeSettings = Callable[..., dict[str, Any]]


#: Family, type, and in what its run differs from the plainest.
CASES = {
    "a loss of all layers": ("qwen3_moe", ComputeDtype.BF16, {"finetune.aux_loss_weight": 0.3}),
    "routers that draw": ("phimoe", ComputeDtype.FP32, {"finetune.aux_loss_weight": 0.3}),
    "masks by layer": (
        "gpt_oss",
        ComputeDtype.FP32,
        {"finetune.checkpoint_activations": "block", "parallel.stage_blocks": (3, 1), "data.batch_size": 2},
    ),
    "a bias on the choice": ("deepseek_v3", ComputeDtype.BF16, {"finetune.bias_update_speed": 0.01}),
    "a stream that is scaled": ("granitemoe", ComputeDtype.FP32, {"clip_norm": 0.0}),
    "experts computed again": (
        "mixtral",
        ComputeDtype.BF16,
        {"finetune.expert_activations": "recompute", "host_budget": 400 << 10},
    ),
    "norms of queries": ("olmoe", ComputeDtype.FP32, {"finetune.checkpoint_activations": "block"}),
}
QUICK = ("a loss of all layers",)


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_two_stages_have_the_bits_of_one_process(
    ranks: Ranks, whole: Whole, settings: MakeSettings, case: str
) -> None:
    family, dtype, changes = CASES[case]
    store = whole(family, dtype)
    one = wrapped(alone(), store, settings(**{**changes, "parallel.stage_blocks": ()}), 2)
    two = ranks.run(2, wrapped, store, settings(**{"parallel.stages": 2, **changes}), 2, stages=2)
    same(two, one)
    assert one.skipped == 0
    for stage, run in enumerate(two):
        assert tuple(run.log) == one_forward_one_backward(stage, 2, 3)
        assert run.most_held == 2 - stage


def test_a_message_has_counts_and_the_generators_state_beside_it(
    ranks: Ranks, whole: Whole, settings: MakeSettings
) -> None:
    """Eight experts: nine counts each way, and the state of the generator along with the stream."""
    changes = {"parallel.stages": 2, "finetune.aux_loss_weight": 0.3}
    found = ranks.run(2, wrapped, whole("qwen3_moe"), settings(**changes), 1, stages=2)
    stream, state = 4 * 12 * 32 * 4, torch.get_rng_state().numel()
    assert found[0].sends == (3, 3 * (stream + 16 + 9 * 8 + state))
    assert found[1].sends == (3, 3 * (stream + 16 + 9 * 8))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "expert"), [("qwen3_moe", 0), ("deepseek_v3", 1)])
def test_two_stages_of_two_ranks_have_the_bits_of_two_ranks(
    ranks: Ranks, whole: Whole, settings: MakeSettings, family: str, expert: int
) -> None:
    """Which share the experts, or have a copy each."""
    store = whole(family)
    one, other = ranks.run(2, wrapped, store, settings(), 2, expert=expert)
    one.weights = dict(merged([one, other]))
    four = ranks.run(4, wrapped, store, settings(**{"parallel.stages": 2}), 2, expert=expert, stages=2)
    same(four, one)


@pytest.mark.slow
def test_a_stage_is_killed_and_the_resume_ends_in_the_same_bits(
    ranks: Ranks, whole: Whole, settings: MakeSettings, tmp_path: Path
) -> None:
    store, stages, victim = whole("deepseek_v3"), {"parallel.stages": 2}, 1
    expected = ranks.run(2, wrapped, store, settings(**stages), 3, stages=2)
    cut = settings(**stages)
    config = ParallelConfig(stages=2, timeout_s=30.0, grace_s=2.0)
    with ranks.fresh(2, config, tmp_path / "stderr") as world:
        for rank in range(2):
            world.send(rank, dying_wrapped, store, cut, victim, 3)
        check_death(world, victim, tmp_path / "stderr")
    found = ranks.run(2, wrapped, store, cut, 3, stages=2)
    for rank in range(2):
        assert found[rank].losses == expected[rank].losses[1:]  # one step had been committed
        assert found[rank].weights == expected[rank].weights
        assert found[rank].validation == expected[rank].validation


# From one layout to another ---------------------------------------------------------------------------------


def test_what_was_trained_in_stages_is_exported(
    ranks: Ranks, whole: Whole, settings: MakeSettings, tmp_path: Path
) -> None:
    """What one process exports, with the biases of all stages; resharded back, and on from there without them."""
    store = whole("deepseek_v3")
    given, one = settings(**{"parallel.stages": 2}), settings()
    ranks.run(2, wrapped, store, given, 1, stages=2)
    wrapped(alone(), store, one, 1)
    back = tmp_path / "back"
    reshard(given["store"], back, Layout(1, 1, 1, 1), model=stored_spec(given["store"]))
    export(one["store"], tmp_path / "expected")
    for source, target in ((back, tmp_path / "out"), (given["store"], tmp_path / "at once")):
        export(source, target)
        same_tensors(tensors_of(target), tensors_of(tmp_path / "expected"))
    went_on = wrapped(alone(), store, {**one, "store": back}, 2)
    assert went_on.losses == wrapped(alone(), store, one, 2).losses


def test_pairs_that_were_trained_in_stages_are_exported(
    ranks: Ranks, whole: Whole, settings: MakeSettings, tmp_path: Path
) -> None:
    """LoRA over two stages, on attention and on experts: the adapter of one process, and merged its model."""
    frozen = whole("qwen3_moe").with_name("frozen")
    lora = {"lora.rank": 2, "clip_norm": 0.5}
    given, one = settings(**{**lora, "parallel.stages": 2}), settings(**lora)
    found = ranks.run(2, wrapped, frozen, given, 3, stages=2)
    expected = wrapped(alone(), frozen, one, 3)
    for rank in found:
        assert (rank.losses, rank.norms) == (expected.losses, expected.norms)
    for write, kind in ((export_adapter, "adapter"), (export, "merged")):
        for settings_, name in ((given, "stages"), (one, "one")):
            write(settings_["store"], tmp_path / f"{kind}-{name}")
        same_tensors(tensors_of(tmp_path / f"{kind}-stages"), tensors_of(tmp_path / f"{kind}-one"))


def test_there_and_back_is_the_same_store(whole: Whole, tmp_path: Path) -> None:
    store = whole("deepseek_v3")
    spec = stored_spec(store)
    reshard(store, tmp_path / "stages", Layout(2, 2, 1, 1), model=spec)
    reshard(tmp_path / "stages", tmp_path / "back", Layout(1, 1, 1, 1), model=spec)
    export(store, tmp_path / "before")
    export(tmp_path / "back", tmp_path / "after")
    same_tensors(tensors_of(tmp_path / "after"), tensors_of(tmp_path / "before"))


def test_an_elastic_run_makes_the_import_over_by_itself(
    ranks: Ranks, whole: Whole, settings: MakeSettings
) -> None:
    """One rank's import, and then two stages over it."""
    given = settings(**{"parallel.stages": 2, "parallel.stage_blocks": (2, 1), "parallel.elastic": "reshard"})
    shutil.copytree(whole("qwen3_moe"), given["store"])
    found = ranks.run(2, wrapped, whole("qwen3_moe"), given, 2, stages=2)
    same(found, wrapped(alone(), whole("qwen3_moe"), settings(), 2))


def test_the_command_cuts_where_it_is_told(whole: Whole, tmp_path: Path) -> None:
    given = ("--to", tmp_path / "new", "--ranks", 2, "--stages", 2, "--stage-blocks", "1,2")
    assert object_of("reshard", whole("qwen3_moe"), *given)["stages"] == 2
    with open_stored(tmp_path / "new", stored_spec(tmp_path / "new")) as stored:
        assert stored.blocks == [range(1), range(1, 3)]


def test_stages_do_not_open_what_one_rank_has_imported(
    ranks: Ranks, whole: Whole, settings: MakeSettings
) -> None:
    given = {**settings(), "store": whole("deepseek_v3"), "parallel.stages": 2}
    found = ranks.run(2, opened, given, stages=2)
    assert all("reshard" in message for message in found), found


def opened(mesh: Mesh, settings: dict[str, Any]) -> str:
    with (
        pytest.raises(StoreError, match="tierstore reshard") as error,
        open_session(configuration(settings), Opening.RESUME, mesh=mesh),
    ):
        pass
    return str(error.value)


def test_an_import_is_for_one_stage(ranks: Ranks, whole: Whole) -> None:
    source = whole("deepseek_v3").with_name("model")
    assert ranks.run(2, refused_import, source, stages=2) == [True, True]


def refused_import(mesh: Mesh, source: Path) -> bool:
    with pytest.raises(ConfigError, match="tierstore reshard"):
        plan_import(source, ImportOptions(), mesh)
    return True
