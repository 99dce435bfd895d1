"""An import that is killed at any moment is continued by the same command, and ends in the same records; by ranks too."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    change_config,
    dense_of,
    experts_of,
    fused_experts,
    imported,
    open_store,
    rewrite,
    save,
    tensors_of,
)
from import_cases import import_ranks
from launcher import Ranks

from tierstore.errors import StoreExistsError, StoreFormatError, StoreMissingError
from tierstore.hf.importing import ImportOptions, import_model
from tierstore.hf.manifest import ImportProgress, ImportState, Manifest, Weights
from tierstore.model.config import ComputeDtype
from tierstore.model.store_schema import IMPORT_KEY
from tierstore.parallel import Mesh, RankEnvironment
from tierstore.store.parameter_store import verify_store
from tierstore.train import Opening
from tierstore.train.ranks import agree

_OPTIONS = ImportOptions(commit_bytes=30_000)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source") / "m"
    save(directory, "deepseek_v3", torch.float32, shard="50KB")
    return directory


@pytest.fixture(scope="module")
def wanted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    store = tmp_path_factory.mktemp("whole") / "s"
    import_model(source, store, _OPTIONS)
    return _checksum(store)


def _checksum(store: Path) -> int:
    with open_store(store) as opened:
        return opened.records_crc32c()


def _in_child(work: Callable[[], Any]) -> int:
    """Runs ``work`` in a process of its own; its pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    finally:
        os._exit(status)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _alone() -> Mesh:
    return Mesh.alone(RankEnvironment(), torch.device("cpu"))


def _records(store: Path) -> int:
    try:
        with open_store(store) as opened:
            kept = opened.last_commit.state
            assert ImportState.unpack(kept[IMPORT_KEY], where="").progress is ImportProgress.PARTIAL
            return len(opened.keys)
    except StoreMissingError:
        return -1


@pytest.mark.parametrize("after", [0, 1, 4, 11])
def test_killed_after_so_many_records(after: int, source: Path, wanted: int, tmp_path: Path) -> None:
    seen = 0

    def count(done: int, total: int) -> None:
        nonlocal seen
        if seen == after:
            _die()
        seen += 1

    pid = _in_child(lambda: import_model(source, tmp_path / "s", _OPTIONS, progress=count))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    there = _records(tmp_path / "s")
    assert 0 <= there <= after
    with pytest.raises(
        StoreFormatError, match="the import was cut short; run the same tierstore import again"
    ):
        agree(tmp_path / "s", Opening.RESUME, _alone())
    report = import_model(source, tmp_path / "s", _OPTIONS)
    assert report.skipped == there
    assert _checksum(tmp_path / "s") == wanted
    assert verify_store(tmp_path / "s").failures == []
    Manifest.read(tmp_path / "s")


def test_killed_again_and_again(source: Path, wanted: int, tmp_path: Path) -> None:
    random_ = random.Random(12)
    for _ in range(10):
        pid = _in_child(lambda: import_model(source, tmp_path / "s", ImportOptions(commit_bytes=1)))
        time.sleep(random_.uniform(0.0, 0.12))
        os.kill(pid, signal.SIGKILL)
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert ended in (0, -signal.SIGKILL)
        if ended == 0:
            break
    import_model(source, tmp_path / "s", _OPTIONS)
    assert _checksum(tmp_path / "s") == wanted
    assert verify_store(tmp_path / "s").failures == []


def test_zeros_are_zeros_where_a_slot_was_used_before(source: Path, wanted: int, tmp_path: Path) -> None:
    """What a killed import wrote and did not commit lies in slots that the next one takes."""
    seen = 0

    def count(done: int, total: int) -> None:
        nonlocal seen
        seen += 1
        if seen == 12:
            time.sleep(0.2)  # the writes end
            _die()

    options = ImportOptions(compute=ComputeDtype.BF16, commit_bytes=1 << 40)
    pid = _in_child(lambda: import_model(source, tmp_path / "s", options, progress=count))
    os.waitpid(pid, 0)
    for extent in (tmp_path / "s/extents").iterdir():  # whatever it was: no slot is referred to
        with open(extent, "r+b") as file:
            file.write(b"\xa5" * extent.stat().st_size)
    report = import_model(source, tmp_path / "s", options)
    assert report.skipped == 0
    import_model(source, tmp_path / "t", options)
    assert _checksum(tmp_path / "s") == _checksum(tmp_path / "t")
    experts_of(tmp_path / "s")  # checks the moments too


def test_only_the_same_import_goes_on(source: Path, tmp_path: Path) -> None:
    pid = _in_child(
        lambda: import_model(source, tmp_path / "s", _OPTIONS, progress=lambda done, total: _die())
    )
    os.waitpid(pid, 0)
    with pytest.raises(StoreFormatError, match=r"with other options: compute fp32, trainable.*compute bf16"):
        imported(source, tmp_path / "s", compute=ComputeDtype.BF16)
    with pytest.raises(StoreFormatError, match="with other options"):
        imported(source, tmp_path / "s", weights=Weights.FROZEN)
    save(tmp_path / "other", "deepseek_v3")
    tensors = tensors_of(tmp_path / "other")
    tensors["lm_head.weight"][3, 3] += 1
    rewrite(tmp_path / "other", tensors)
    with pytest.raises(
        StoreFormatError, match="holds the import of another checkpoint; give another --store"
    ):
        imported(tmp_path / "other", tmp_path / "s")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/notes.txt").write_text("mine")
    with pytest.raises(StoreFormatError, match="expected an empty or missing directory"):
        imported(source, tmp_path / "foreign")


def test_a_store_that_no_import_made_is_left_alone(source: Path, tmp_path: Path) -> None:
    from tierstore.store import ParameterStore, RecordSchema, StoreConfig

    with ParameterStore.create(
        tmp_path / "s", [RecordSchema("x", 4)], StoreConfig(host_budget=1 << 20)
    ) as store:
        store.commit()
    with pytest.raises(StoreExistsError, match="a store that no import made"):
        imported(source, tmp_path / "s")


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_import_side_by_side(world: int, source: Path, tmp_path: Path, ranks: Ranks) -> None:
    import_model(source, tmp_path / "one", _OPTIONS)
    reports = ranks.run(world, import_ranks, source, tmp_path / "many")
    one, many = experts_of(tmp_path / "one"), experts_of(tmp_path / "many")
    assert one.keys() == many.keys()
    assert all(torch.equal(one[key], many[key]) for key in one)
    alone, together = dense_of(tmp_path / "one"), dense_of(tmp_path / "many")
    assert all(torch.equal(alone[name], together[name]) for name in alone)
    assert sum(reports) == len(one) + world * len(Manifest.read(tmp_path / "many").units)
    with pytest.raises(StoreFormatError, match=f"holds a store of {world} ranks, but this import has 1"):
        imported(source, tmp_path / "many")


def test_what_another_import_left_beside_its_ranks(tmp_path: Path, ranks: Ranks) -> None:
    """Carried tensors of the same shape, say: they are not taken for those of this checkpoint."""
    save(tmp_path / "m", "olmoe")
    tensors = tensors_of(tmp_path / "m")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(tmp_path / "m", tensors | {name: torch.arange(4.0)})
    imported(tmp_path / "m", tmp_path / "one")
    (tmp_path / "s").mkdir()
    shutil.copytree(tmp_path / "one/model", tmp_path / "s/model")
    rewrite(tmp_path / "m", tensors | {name: torch.arange(4.0) + 1})
    ranks.run(2, import_ranks, tmp_path / "m", tmp_path / "s")
    assert torch.equal(tensors_of(tmp_path / "s/model")[name], torch.arange(4.0) + 1)


def test_ranks_must_agree(source: Path, tmp_path: Path, ranks: Ranks) -> None:
    save(tmp_path / "other", "olmoe")
    answers = ranks.run(2, import_ranks, source, tmp_path / "s", tmp_path / "other")
    assert all("another checkpoint, or with other options, than rank 0" in str(answer) for answer in answers)
    assert not (tmp_path / "s").exists()


def test_ranks_are_refused_together(source: Path, tmp_path: Path, ranks: Ranks) -> None:
    """What one of them cannot do leaves nothing of the others."""
    (tmp_path / "s/rank-0000").mkdir(parents=True)
    (tmp_path / "s/rank-0000/notes.txt").write_text("mine")
    answers = ranks.run(2, import_ranks, source, tmp_path / "s")
    assert all("expected an empty or missing directory" in str(answer) for answer in answers)
    assert not (tmp_path / "s/rank-0001").exists()


def test_a_model_is_its_configuration_too(source: Path, tmp_path: Path) -> None:
    model = save(tmp_path / "m", "granitemoe")
    imported(tmp_path / "m", tmp_path / "s")
    assert fused_experts(model).keys() == experts_of(tmp_path / "s").keys()
    change_config(tmp_path / "m", logits_scaling=2.0)
    with pytest.raises(StoreFormatError, match="another checkpoint"):
        imported(tmp_path / "m", tmp_path / "s")
