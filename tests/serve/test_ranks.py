"""Serving on several ranks: real processes, with the tokens and the bits of one."""

import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launcher import Ranks
from rank_cases import train
from refusals import refuses
from served_cases import drawn
from served_stores import serve_config, store_of
from test_adapted import adapted
from torch import Tensor

from tierstore.errors import ChecksumError, PeerError, TierstoreError
from tierstore.moe.lora import LoraConfig, LoraTargets
from tierstore.moe.source import ExpertSourceRef
from tierstore.parallel import Mesh, RankGroup
from tierstore.parallel.layout import Layout
from tierstore.serve.opening import open_runner, open_served
from tierstore.serve.passes import JointPasses, ServedRanks
from tierstore.train.ranks import Opening
from tierstore.train.resharding import reshard

Settings = Mapping[str, Any]
#: The logits of each sequence, by its number.
Found = dict[int, list[Tensor]]
INVARIANT: Settings = {"batch.invariant": True}


def answers(mesh: Mesh | None, store: Path, settings: Settings) -> Found | None:
    """What a batch computes whose sequences join and leave; on rank 0, which the others follow."""
    with open_served(serve_config(store, settings), mesh) as parts:
        runner = open_runner(parts)
        if mesh is not None and mesh.world.rank:
            return runner.follow()
        found: Found = {}

        def join(*lengths: int) -> None:
            joined = runner.join(drawn(lengths, vocabulary=61, seed=len(found)))
            found.update({number: [logits_V] for number, logits_V in joined.items()})

        def step(*numbers: int) -> None:
            tokens = {number: int(found[number][-1].argmax()) for number in numbers}
            for number, logits_V in runner.step(tokens).items():
                found[number].append(logits_V)

        join(3)  # the other rank has nothing to compute
        step(0)
        join(4, 2, 3)
        step(0, 1, 2, 3)
        for gone in (0, 2):  # all of one rank
            runner.leave(gone)
        step(3)
        join(2)
        step(1, 3, 4)
        again, logits_V = runner.resume([5, 6], [7])
        found[again] = [logits_V]
        runner.idle()
        runner.end()
        return found


def same(found: Found | None, expected: Found | None) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(torch.stack(found[number]), torch.stack(logits)) for number, logits in expected.items()
    )


@pytest.fixture(scope="module")
def trained(ranks: Ranks, text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A store that two ranks trained, with a divided embedding, and the store of one rank made of it."""
    directory = tmp_path_factory.mktemp("trained")
    settings = {"store": directory / "two", "data.paths": [str(text)], "parallel.embedding": "partitioned"}
    ranks.run(2, train, settings, 2, Opening.CREATE)
    reshard(directory / "two", directory / "one", Layout(1, 1, 1, 1))
    return directory / "two", directory / "one"


def test_two_ranks_have_the_bits_of_one_process(ranks: Ranks, trained: tuple[Path, Path]) -> None:
    """The stores of two ranks, and one that both open."""
    two, one = trained
    expected = answers(None, one, INVARIANT)
    for store in (two, one):
        found, nothing = ranks.run(2, answers, store, INVARIANT)
        assert nothing is None
        assert same(found, expected)


def test_a_padded_batch_of_each_rank(ranks: Ranks, trained: tuple[Path, Path]) -> None:
    """Other batches than one process has, and so other bits."""
    two, one = trained
    found, _ = ranks.run(2, answers, two, {})
    expected = answers(None, one, {})
    for number, logits in expected.items():
        torch.testing.assert_close(torch.stack(found[number]), torch.stack(logits))


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_an_imported_model(ranks: Ranks, tmp_path: Path, family: str) -> None:
    _, store = store_of(tmp_path, family)
    found, _ = ranks.run(2, answers, store, INVARIANT)
    assert same(found, answers(None, store, INVARIANT))


def test_experts_with_pairs(ranks: Ranks, tmp_path: Path) -> None:
    store, _ = adapted(tmp_path, LoraConfig(rank=4, targets=LoraTargets.EXPERTS), torch.float32)
    found, _ = ranks.run(2, answers, store, INVARIANT)
    assert same(found, answers(None, store, INVARIANT))


def refused(mesh: Mesh, cases: Sequence[tuple[Path, Settings, str]]) -> None:
    """Each of ``cases`` by all ranks, which name this."""
    for store, settings, named in cases:
        with refuses(TierstoreError, named), open_served(serve_config(store, settings), mesh):
            pass


def test_what_several_ranks_cannot_serve(
    ranks: Ranks, trained: tuple[Path, Path], text: Path, tmp_path: Path
) -> None:
    two, one = trained
    settings = {"store": tmp_path / "behind", "data.paths": [str(text)], "parallel.embedding": "partitioned"}
    ranks.run(2, train, settings, 1, Opening.CREATE)
    shutil.rmtree(tmp_path / "behind" / "rank-0001")
    shutil.copytree(two / "rank-0001", tmp_path / "behind" / "rank-0001")
    cases = [
        (one, {"ring.memory": "ring"}, "ring.memory: not supported on several ranks"),
        (one, {"ring.layers": 1}, "ring.layers: not supported on several ranks"),
        (one, {"graphs.compile": "auto"}, "graphs.compile: not supported on several ranks"),
        (tmp_path / "behind", {}, "different steps, [1, 2]"),
    ]
    ranks.run(2, refused, cases)
    ranks.run(3, refused, [(two, {}, "start 2 with torchrun")])


def dying(mesh: Mesh, store: Path) -> str:
    """Rank 1 dies where it would begin a step."""
    with open_served(serve_config(store, INVARIANT), mesh) as parts:
        runner = open_runner(parts)
        if mesh.world.rank:
            runner.step = lambda tokens: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,method-assign,return-value]
            runner.follow()
        first, _ = runner.join(drawn((3, 4), vocabulary=61))
        with pytest.raises(PeerError) as error:
            runner.step({first: 1})
        return str(error.value)


def test_a_rank_that_dies_in_a_pass(ranks: Ranks, trained: tuple[Path, Path]) -> None:
    with ranks.fresh(2) as world:
        for rank in range(2):
            world.send(rank, dying, trained[1])
        assert "rank 1 failed: its process ended" in world.receive(0)


def test_an_error_in_a_pass_names_the_rank() -> None:
    """No rank can go on: none repeats the pass."""

    def corrupt() -> Tensor:
        raise ChecksumError("record expert.0000.00003 is corrupt")

    passes = JointPasses(ExpertSourceRef(), RankGroup.alone(), lambda: torch.empty(0), apart=True)
    with refuses(PeerError, "rank 0 failed: ChecksumError: record expert.0000.00003 is corrupt"):
        passes.run([corrupt])


def test_where_sequences_go() -> None:
    """By hand, on 3 ranks: to the rank with the fewest, the first of several."""
    mine = [ServedRanks(RankGroup(rank, range(3), {})) for rank in range(3)]

    def owners(*sequences: int) -> list[int]:
        for each in mine:
            each.update(sequences)
        return [next(rank for rank in range(3) if mine[rank].owns(number)) for number in sequences]

    assert owners(0, 1, 2, 3) == [0, 1, 2, 0]
    assert owners(0, 3, 2, 4) == [0, 0, 2, 1]
    assert owners(4, 5, 6) == [1, 0, 2]


@given(size=st.integers(1, 5), room=st.integers(1, 12), data=st.data())
def test_no_rank_has_more_than_its_share_of_a_full_batch(size: int, room: int, data: st.DataObject) -> None:
    ranks = [ServedRanks(RankGroup(rank, range(size), {})) for rank in range(size)]
    batch: list[int] = []
    for number in range(20):
        stay = data.draw(st.lists(st.booleans(), min_size=len(batch), max_size=len(batch)))
        batch = [*(each for each, kept in zip(batch, stay, strict=True) if kept), number][-room:]
        for each in ranks:
            each.update(batch)
        held = [sum(each.owns(one) for one in batch) for each in ranks]
        assert sum(held) == len(batch)
        assert max(held) <= -(-room // size)
