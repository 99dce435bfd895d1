"""Ring memory and chosen experts in turns: the same weights whatever happens, and the same decisions in a replay."""

from pathlib import Path

import pytest
from effort import share, with_fixtures
from hypothesis import given
from hypothesis import strategies as st
from slotted import make_store, open_slotted

from tierstore.prefetch import PredictorName
from tierstore.serve.config import ExpertMemory
from tierstore.serve.experts import ServingPhase
from tierstore.trace.replay import replay

LAYERS, EXPERTS = (0, 1, 4, 6), 4


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("switching") / "s"
    make_store(directory, LAYERS, EXPERTS)
    return directory


def test_a_ring_for_prompts_and_chosen_experts_for_tokens(store: Path) -> None:
    with open_slotted(
        store, LAYERS, EXPERTS, slots=8, ring=2, top_k=1, copy_s=1e-4, predictor=PredictorName.NONE
    ) as made:
        made.begin(ServingPhase.PREFILL, 512)
        for layer in LAYERS:
            made.read(layer, range(EXPERTS))
        assert list(made.ring.held) == [0, 1]  # type: ignore[union-attr]
        made.begin(ServingPhase.DECODE, 1)
        assert made.copied_by(0, 3) == 0, "the ring held it"
        assert made.copied_by(1, 0) == 0
        made.begin(ServingPhase.DECODE, 1)
        made.begin(ServingPhase.PREFILL, 512)
        assert made.copied_by(0, *range(EXPERTS)) == 3 * EXPERTS, "the ring starts empty"
        assert len(made.said) == 3
        assert [line.split()[4] for line in made.said] == ["ring", "sparse", "ring"]
        assert made.experts.choice.describe() == made.said[-1]
        assert "prefill of 512 tokens reaches about 4 of 4 experts of a layer" in made.said[0]


@st.composite
def passes(draw: st.DrawFn) -> list[tuple[ServingPhase, int, list[tuple[int, list[int], bool]]]]:
    """Forward passes: phase, tokens, and for each layer that they come to its experts, and whether they are left there."""
    made = []
    for _ in range(draw(st.integers(1, 6))):
        layers = []
        for layer in LAYERS:
            if draw(st.integers(0, 9)) == 0:
                continue  # passed over
            asked = draw(st.sets(st.integers(0, EXPERTS - 1), min_size=1))
            left = draw(st.integers(0, 14)) == 0
            layers.append((layer, sorted(asked), left))
            if left:
                break
        made.append((draw(st.sampled_from(ServingPhase)), draw(st.sampled_from([1, 2, 64])), layers))
    return made


@with_fixtures(share(60))
@given(
    asked=passes(),
    ring=st.integers(0, 4),
    spare=st.integers(0, 5),
    host=st.sampled_from([1, 3, 9, 16]),
    memory=st.sampled_from(ExpertMemory),
    policy=st.sampled_from(["lru", "next-use", "lfu-decay"]),
    predictor=st.sampled_from(PredictorName),
    depth=st.integers(0, 2),
)
def test_weights_are_right_and_replays_agree(
    store: Path,
    tmp_path: Path,
    asked: list[tuple[ServingPhase, int, list[tuple[int, list[int], bool]]]],
    ring: int,
    spare: int,
    host: int,
    memory: ExpertMemory,
    policy: str,
    predictor: PredictorName,
    depth: int,
) -> None:
    """``read`` compares each lease with what the store was made of."""
    if memory is ExpertMemory.RING and ring == 0:
        ring = 1
    trace = tmp_path / "t.trace"
    with open_slotted(
        store,
        LAYERS,
        EXPERTS,
        slots=ring * EXPERTS + max(spare, ring == 0),
        ring=ring,
        memory=memory,
        host=host,
        policy=policy,
        predictor=predictor,
        depth=depth,
        trace=trace,
    ) as made:
        stale = []
        for phase, tokens, layers in asked:
            made.begin(phase, tokens)
            for layer, experts, left in layers:
                if left:
                    leases = made.experts.forward(layer, experts)
                    next(leases)
                    stale.append(leases)  # closed long after, as an exception's traceback may keep it
                else:
                    assert sorted(made.read(layer, experts)) == experts
        made.begin()  # ends what was left
        live = made.store.cache.residency.stats()
        assert not made.store.cache.residency.access_open
    assert replay(trace) == live
