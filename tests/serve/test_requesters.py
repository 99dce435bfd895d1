"""Which sequences ask for which experts: numbers by hand, what sources are told, and traces that replay."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from served_cases import Served, built_in, drawn
from served_stores import least_budget, served_store, store_of
from torch import Tensor

from tierstore.cache.access import Need
from tierstore.serve.batch import BatchRunner, InvariantRunner, SequenceBits
from tierstore.trace.files import load_trace
from tierstore.trace.format import TraceKind
from tierstore.trace.replay import replay

KINDS = (BatchRunner, InvariantRunner)


def test_bits_by_hand() -> None:
    """Free numbers in the order in which they were given back; the eighth sequence shares one."""
    bits = SequenceBits()
    bits.update([10, 11])
    assert bits.of([11, 10]) == [2, 1]
    bits.update([11, 12])  # 10's is free, and the last to be given
    assert bits.of([11, 12]) == [2, 4]
    bits.update([11, 12, 13, 14, 15, 16, 17])
    assert bits.of([13, 14, 15, 16, 17]) == [8, 16, 32, 64, 1]
    bits.update([11, 12, 13, 14, 15, 16, 17, 18, 19])
    assert bits.of([18, 19]) == [2, 4]
    bits.update([12, 13, 14, 15, 16, 17, 18, 19, 20])  # 18 keeps what was 11's too; 8 to 1 have one each
    assert bits.of([18, 20]) == [2, 8]


@given(st.lists(st.lists(st.integers(0, 20), unique=True, max_size=7), max_size=12))
def test_up_to_seven_are_told_apart(batches: list[list[int]]) -> None:
    """The same batches give the same bits, and who stays keeps its own."""
    one, other = SequenceBits(), SequenceBits()
    before: dict[int, int] = {}
    for batch in batches:
        one.update(batch)
        other.update(batch)
        found = one.of(batch)
        assert found == other.of(batch)
        assert len(set(found)) == len(batch)
        assert all(0 < bit <= 64 and bit.bit_count() == 1 for bit in found)
        now = dict(zip(batch, found, strict=True))
        assert all(now[sequence] == before[sequence] for sequence in set(now) & set(before))
        before = now


class _Batch:
    """A runner, and the tokens that its sequences go on with."""

    def __init__(self, runner: BatchRunner) -> None:
        self.runner = runner
        self.logits: dict[int, list[Tensor]] = {}

    def join(self, *prompts: Sequence[int]) -> None:
        joined = self.runner.join(prompts)
        self.logits.update({number: [logits_V] for number, logits_V in joined.items()})

    def step(self) -> None:
        chosen = {number: int(self.logits[number][-1].argmax()) for number in self.runner.numbers}
        for number, logits_V in self.runner.step(chosen).items():
            self.logits[number].append(logits_V)

    def come_and_go(self, prompts: Sequence[Sequence[int]]) -> None:
        """Two sequences join, two steps, a third one, two steps; the first leaves and a fourth joins, two steps."""
        self.join(*prompts[:2])
        self.step()
        self.step()
        self.join(prompts[2])
        self.step()
        self.step()
        self.runner.leave(0)
        self.join(prompts[3])
        self.step()
        self.step()


def _alone(served: Served, prompt: Sequence[int], steps: int) -> list[tuple[int, ...]]:
    """The experts of each pass over a layer by the last token of ``prompt``, and in ``steps`` steps, of a sequence alone."""
    runner = served.runner(InvariantRunner)
    (joined,) = runner.join([prompt[:-1]])
    served.experts.asked.clear()
    token = prompt[-1]
    for _ in range(1 + steps):
        token = int(runner.step({joined: token})[joined].argmax())
    return [experts for _, experts in served.experts.asked]


@pytest.mark.parametrize("kind", KINDS)
def test_the_source_is_told_what_each_sequence_asks_for(kind: type[BatchRunner]) -> None:
    """Sequence i has the bit 2 to the i, also the last, since 1 was given back just before. In a step of two layers each
    asks for what it asks for alone, and in a prompt for what its last token asks for.
    """
    _, served = built_in()
    prompts = drawn((5, 3, 6, 4), vocabulary=61)
    # Of nine passes (two prompts, two steps, a prompt, two steps, a prompt, two steps) those that each takes part in.
    passes = ((0, 1, 2, 4, 5), (0, 1, 2, 4, 5, 7, 8), (3, 4, 5, 7, 8), (6, 7, 8))
    expected: list[dict[int, int]] = [{} for _ in range(2 * 9)]
    for number, (prompt, own) in enumerate(zip(prompts, passes, strict=True)):
        places = [2 * at + layer for at in own for layer in range(2)]
        for place, experts in zip(places, _alone(served, prompt, len(own) - 1), strict=True):
            for expert in experts:
                expected[place][expert] = expected[place].get(expert, 0) | 1 << number
    runner = kind(served.model, served.experts, served.passes, sequences=4, requesters=SequenceBits())
    _Batch(runner).come_and_go(prompts)
    assert served.experts.told == expected
    assert any(mask.bit_count() > 1 for told in expected for mask in told.values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_alone_is_told_too(kind: type[BatchRunner]) -> None:
    _, served = built_in()
    runner = kind(served.model, served.experts, served.passes, sequences=4, requesters=SequenceBits())
    batch = _Batch(runner)
    batch.join(*drawn((3, 4), vocabulary=61))
    batch.step()
    runner.leave(0)
    before = len(served.experts.told)
    batch.step()
    told = served.experts.told[before:]
    assert [set(each.values()) for each in told] == [{2}, {2}]


def test_nobody_is_told_where_nobody_asked() -> None:
    _, served = built_in()
    _Batch(served.runner(BatchRunner)).come_and_go(drawn((5, 3, 6, 4), vocabulary=61))
    assert served.experts.told == []


def _run(store: Path, trace: Path, policy: str, **changes: object) -> tuple[dict[int, Tensor], set[int]]:
    """All logits of sequences that come and go, and the requesters that the trace has; its replay counts what live did."""
    with served_store(store, trace=trace, cache__policy=policy, batch__sequences=4, **changes) as (
        parts,
        runner,
    ):
        batch = _Batch(runner)
        batch.come_and_go(drawn((5, 3, 6, 4)))
        live = parts.store.cache.residency.stats()
    assert live.misses > 0
    assert live.hits > 0
    replayed = replay(trace)
    assert replayed == live  # hits, misses, bytes, and the rest
    events = load_trace(trace)
    assert events.header.clock == "steps"  # a pass is one
    accesses = np.repeat(events.kinds == TraceKind.ACCESS, events.counts.astype(np.int64))
    requesters = set((events.flags[accesses] // int(Need.FIRST_SEQUENCE)).tolist())
    return {number: torch.stack(logits) for number, logits in batch.logits.items()}, requesters


@pytest.mark.parametrize("predictor", ["none", "router"])
@pytest.mark.parametrize("invariant", [False, True])
def test_live_decisions_are_replayed(tmp_path: Path, invariant: bool, predictor: str) -> None:
    """And no bit of a result depends on the policy, or on what it is told."""
    _, store = store_of(tmp_path, "qwen3_moe", torch.bfloat16)
    changes = {
        "batch__invariant": invariant,
        "prefetch__predictor": predictor,
        "host_budget": 4 * least_budget(store),
    }
    told, requesters = _run(store, tmp_path / "told", "learned-use", **changes)
    untold, nobody = _run(store, tmp_path / "untold", "lru", **changes)
    assert nobody == {0}  # LRU does not heed who asks
    assert all(any(mask & bit for mask in requesters) for bit in (1, 2, 4, 8))
    assert 0 in requesters  # prompts
    assert max(requesters) < 16
    assert told.keys() == untold.keys()
    assert all(torch.equal(told[number], untold[number]) for number in told)
