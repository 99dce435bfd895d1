"""Which way embedding and head take: bytes by hand, AUTO, what a store has recorded, and what is refused."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.config import load
from tierstore.model.vocabulary import VocabularyCost
from tierstore.parallel.config import RowPlacement
from tierstore.parallel.layout import TableRows
from tierstore.tiers.slots import DeviceKind
from tierstore.train.config import TrainConfig
from tierstore.train.vocabulary import VocabularyTables, choose_vocabulary

GATHERED, PARTITIONED = RowPlacement.GATHERED, RowPlacement.PARTITIONED
LARGE: dict[str, Any] = {"model.vocab_size": 151_936, "model.d_model": 512, "data.batch_size": 4}


def chosen(changes: dict[str, Any], *, ranks: int = 4, **options: Any) -> VocabularyTables:
    return choose_vocabulary(load(TrainConfig, None, changes), ranks=ranks, **options)


def placements(choice: VocabularyTables) -> tuple[RowPlacement, RowPlacement]:
    return choice.embedding.value, choice.head.value


def test_bytes_by_hand() -> None:
    # 4 rows of 16 over 2 ranks, 3 tokens on each, fp32: a slice is 2 rows of 64 bytes.
    cost = VocabularyCost(table=TableRows(4, 16, 2), tokens=3, micro_batches=2, value_bytes=4)
    # Gathered once, reduced twice: each time its slice to the other rank.
    assert cost.gathered_sent == 3 * 128
    # A count of 8 bytes, 3 ids of 4, half of 3 rows of 64 there and their gradients back; for both micro-batches.
    assert cost.embedding_sent == 2 * (8 + 12 + 2 * 96)
    # A count, 3 targets, 3 hidden states there and back, 4 figures of each token, 2 doubles.
    assert cost.head_sent == 2 * (8 + 12 + 2 * 192 + 3 * 16 + 16)
    # The table, its gradients from both ranks, and where they are made; rows: where they are made.
    assert (cost.gathered_memory, cost.divided_memory) == (4 * 256, 128)


def test_the_calculated_figures_of_the_paper_s_scale() -> None:
    """4,096 tokens and rank, 8 ranks, fp32, 151,936 rows of 2,048: 2,178 MB against 59 MB; the other way round for 256."""
    cost = VocabularyCost(table=TableRows(151_936, 2048, 8), tokens=4096, micro_batches=1, value_bytes=4)
    assert round(cost.gathered_sent / 1e6) == 2178
    assert round(cost.embedding_sent / 1e6) == 59
    small = VocabularyCost(table=TableRows(256, 256, 8), tokens=2048, micro_batches=1, value_bytes=4)
    assert small.gathered_sent < small.embedding_sent < small.head_sent


def test_auto_by_bytes() -> None:
    large = chosen(LARGE)
    assert placements(large) == (PARTITIONED, PARTITIONED)
    assert "auto: a step sends" in large.embedding.reason
    # 128 K tokens a rank: each rank's hidden states would go to three others.
    many = chosen({**LARGE, "data.batch_size": 2048})
    assert placements(many) == (PARTITIONED, GATHERED)
    assert placements(chosen({**LARGE, "data.batch_size": 8192})) == (GATHERED, GATHERED)
    bytes_ = chosen({})
    assert placements(bytes_) == (GATHERED, GATHERED)
    assert "256 KiB is too small to matter" in bytes_.embedding.reason
    assert bytes_.tables == {}


def test_one_rank_gathers_nothing_and_says_nothing() -> None:
    alone = chosen({**LARGE, "parallel.embedding": "partitioned"}, ranks=1)
    assert placements(alone) == (GATHERED, GATHERED)
    assert (alone.describe(), alone.tables) == (None, {})


@settings(max_examples=share(30))
@given(
    st.integers(2, 300_000), st.sampled_from([64, 256, 4096]), st.integers(2, 16), st.integers(1, 64),
    st.integers(1, 8),
)  # fmt: skip
def test_auto_never_sends_more(vocab: int, width: int, ranks: int, rows: int, micro_batches: int) -> None:
    changes = {
        "model.vocab_size": vocab,
        "model.d_model": width,
        "data.batch_size": rows * ranks,
        "data.micro_batches": micro_batches,
    }
    choice = chosen(changes, ranks=ranks)
    for table, sent in ((choice.embedding, choice.cost.embedding_sent), (choice.head, choice.cost.head_sent)):
        assert (table.value is PARTITIONED) is (
            sent < choice.cost.gathered_sent and 4 * vocab * width >= 4 << 20
        )


def test_a_tied_head_is_the_embedding() -> None:
    tied = {**LARGE, "model.tie_embeddings": "tied"}
    choice = chosen(tied)
    assert placements(choice) == (PARTITIONED, PARTITIONED)
    assert list(choice.tables) == [("embedding", 0)]
    assert list(chosen(LARGE).tables) == [("embedding", 0), ("head", 1)]


def test_a_store_goes_on_as_it_was_made() -> None:
    recorded = {"embedding": "gathered", "head": "partitioned"}
    choice = chosen(LARGE, recorded=recorded)
    assert placements(choice) == (GATHERED, PARTITIONED)
    assert choice.embedding.reason == "as the store was made"
    assert placements(chosen(LARGE, recorded={})) == (GATHERED, GATHERED)  # made before there was a choice
    # Asked for otherwise, it is: the session refuses it, by the conditions.
    asked = chosen({**LARGE, "parallel.embedding": "partitioned"}, recorded=recorded)
    assert asked.conditions() == {"embedding": "partitioned", "head": "partitioned"}


def test_tables_that_are_stepped_on_the_host_are_gathered_for_a_device() -> None:
    partitioned = {**LARGE, "parallel.embedding": "partitioned"}
    host = {"dense.optimizer_state": "host"}
    choice = chosen({**LARGE, **host}, device=DeviceKind.CUDA)
    assert placements(choice) == (GATHERED, GATHERED)
    assert choice.describe() is None
    assert (
        chosen({**partitioned, **host}).embedding.value is PARTITIONED
    )  # on the CPU they are where they are stepped


def test_tasks_keep_their_head(tmp_path: Any) -> None:
    tasks = {f"tasks.{name}.paths": [str(tmp_path)] for name in ("one", "two")}
    choice = chosen({**LARGE, **tasks})
    assert placements(choice) == (PARTITIONED, GATHERED)
    assert choice.head.reason.startswith("the rows of tasks differ")


def test_an_imported_model_keeps_its_tables() -> None:
    large = load(TrainConfig, None, LARGE)
    foreign: Any = SimpleNamespace(
        vocab_size=151_936, d_model=512, seq_len=256, compute_dtype=large.model.compute_dtype
    )
    choice = choose_vocabulary(replace(large, model=foreign), ranks=2)
    assert placements(choice) == (GATHERED, GATHERED)
    assert choice.head.reason.startswith("an imported model's tables")
