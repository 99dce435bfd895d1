"""A run over an imported store that was killed, and what takes it up again."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import imported
from launcher import Ranks
from lora_cases import ahead_then_on, configured, take, train_ranks
from tiny_families import make_config, plain_model

from tierstore.errors import StoreExistsError, StoreFormatError
from tierstore.hf.manifest import Weights
from tierstore.hf.spec import stored_spec
from tierstore.model.store_schema import STATE_KEY
from tierstore.moe.lora import LoraConfig, LoraTargets
from tierstore.parallel import Mesh, RankEnvironment
from tierstore.parallel.layout import Layout
from tierstore.store.committing import Keep
from tierstore.train.ranks import Opening
from tierstore.train.resharding import reshard
from tierstore.train.session import open_parts
from tierstore.train.setup import Loop
from tierstore.train.stepping import Stepper

LORA = LoraConfig(rank=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    plain_model(make_config("qwen3_moe")).save_pretrained(directory)
    return directory


def test_a_restarted_job_goes_on_with_the_import_that_it_took_up(model: Path, tmp_path: Path) -> None:
    """Without --resume: the first attempt begins at the import, those that torchrun starts after it at its commits."""
    store = tmp_path / "store"
    imported(model, store, weights=Weights.FROZEN)
    job = Mesh.alone(RankEnvironment(), torch.device("cpu"))
    config = configured(store, LORA)
    for attempt, opening in enumerate((Opening.CREATE, Opening.RESTART, Opening.RESTART)):
        with open_parts(config, opening, loop=Loop.EXTERNAL, mesh=job) as parts:
            assert parts.state.position == attempt
            take(parts, attempt)
            Stepper(parts).commit()
    other = replace(job, job_store=Mesh.alone(RankEnvironment(), torch.device("cpu")).job_store)
    refused = pytest.raises(StoreExistsError, match="--resume continues its run")
    with refused, open_parts(config, Opening.CREATE, loop=Loop.EXTERNAL, mesh=other):
        pass


def test_a_run_that_has_begun_is_not_taken_for_an_import(model: Path, tmp_path: Path) -> None:
    """Its first commit was prepared: the import is the one before it."""
    store = tmp_path / "store"
    imported(model, store, weights=Weights.FROZEN)
    config = configured(store, LORA)
    with open_parts(config, Opening.CREATE, loop=Loop.EXTERNAL) as parts:
        take(parts, 0)
        parts.dense.save(parts.store, parts.store.history.applied)
        parts.store.committer.commit({STATE_KEY: parts.state.pack()}, keep=Keep.PREVIOUS)
    refused = pytest.raises(StoreExistsError, match="--resume continues its run")
    with refused, open_parts(config, Opening.CREATE, loop=Loop.EXTERNAL):
        pass


def test_a_rank_that_was_a_first_commit_ahead(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    """It goes back to the import, whose commit knows no pairs, and adds them again: every bit as if it had never been."""
    expected = ranks.run(2, train_ranks, model, tmp_path / "whole", LORA, 3, 1)
    found = ranks.run(2, ahead_then_on, model, tmp_path / "cut", LORA, 3)
    assert found == expected


@pytest.mark.parametrize("targets", LoraTargets)
def test_pairs_are_not_lost_by_resharding(model: Path, tmp_path: Path, targets: LoraTargets) -> None:
    """Nothing moves them to other ranks: a store with them is refused, and not resharded without them."""
    store = tmp_path / "store"
    imported(model, store, weights=Weights.FROZEN)
    config = configured(store, LoraConfig(rank=2, targets=targets))
    with open_parts(config, Opening.RESUME, loop=Loop.EXTERNAL) as parts:
        take(parts, 0)
        Stepper(parts).commit()
    with pytest.raises(StoreFormatError, match="low-rank pairs cannot be resharded"):
        reshard(store, tmp_path / "two", Layout(1, 1, 2, 1), model=stored_spec(store))
    assert not (tmp_path / "two").exists()
