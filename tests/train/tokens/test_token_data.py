"""Batches of documents: by hand, each sequence once an epoch, the same after a resume, and shares that add up."""

import threading
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refuses
from token_cases import END, PAD, conversation, save_tokenizer, write_lines

from tierstore.errors import ConfigError, DataError
from tierstore.model.interface import IGNORED, Batch
from tierstore.train.data import TextData
from tierstore.train.files import DataConfig, DataFormat, Packing
from tierstore.train.tokens.data import TokenData, open_data
from tierstore.train.tokens.tokenizing import DocumentTokenizer

Open = Callable[..., TokenData]


@pytest.fixture
def opened(tmp_path: Path, tokenizer: Path) -> Open:
    """The tokens of a file, in batches of two sequences of 16 unless options say otherwise."""
    given = {"seq_len": 16, "vocab_size": 300, "tokenizer": tokenizer, "together": "", "store": "store"}

    def make(path: Path, **options: Any) -> TokenData:
        arguments = {name: options.pop(name, value) for name, value in given.items()}
        arguments["store"] = tmp_path / arguments["store"]
        return open_data(DataConfig(paths=(str(path),), **{"batch_size": 2, **options}), **arguments)

    return make


def _chats(path: Path, count: int = 60) -> Path:
    return write_lines(
        path,
        [
            conversation(f"two {i}?", f"experts {'in ' * (i % 7)}{i}", "and?", "the store")
            for i in range(count)
        ],
    )


def _texts(path: Path, count: int = 60) -> Path:
    return write_lines(path, [{"text": f"expert {i} {'in the store ' * (i % 9)}"} for i in range(count)])


def test_a_batch_by_hand(tmp_path: Path, tokenizer: Path, opened: Open) -> None:
    path = write_lines(
        tmp_path / "a.jsonl", [{"text": "abc"}, conversation("u", "a"), {"text": "d"}, {"text": "e"}]
    )
    data = opened(path, seq_len=64, batch_size=1, validation_fraction=0.25)
    # bytes are tokens by themselves where no merge was learned; held out is the fourth chunk, so all others are packed
    ids = DocumentTokenizer(tokenizer)
    abc, (d,), (e,) = ([*map(int, item)] for item in ids.texts(["abc", "d", "e"]))
    head = [*map(int, ids.texts(["<|start|>user\nu<|end|>\n<|start|>assistant\n"])[0])]
    answer, line = [*map(int, ids.texts(["a"])[0]), END], int(ids.texts(["\n"])[0][0])
    documents = [[*abc, END], [*head, *answer, line], [d, END]]
    batch = data.batch(0)
    tokens = [token for document in documents for token in document[:-1]]
    targets = [
        *abc[1:], END,
        *[IGNORED] * (len(head) - 1), *answer, IGNORED,
        END,
    ]  # fmt: skip
    positions = [i for document in documents for i in range(len(document) - 1)]
    space = 64 - len(tokens)
    assert batch.tokens_BT.tolist() == [tokens + [PAD] * space]
    assert batch.targets_BT.tolist() == [targets + [IGNORED] * space]
    assert batch.positions_BT.tolist() == [positions + list(range(space))]
    assert batch.mask_BT.tolist() == [[True] * len(tokens) + [False] * space]
    assert batch.tokens_BT.dtype == batch.targets_BT.dtype == batch.positions_BT.dtype == torch.int64
    (held,) = data.validation_batches(3)
    assert held.tokens_BT[0, :2].tolist() == [e, PAD]
    assert held.targets_BT[0, :2].tolist() == [END, IGNORED]
    assert data.describe() == (
        f"{len(tokens) + 5} tokens, 4 documents (1 jsonl) in 1 sequences of 64 to train on, 1 to validate (chunks of"
        f" documents held out); documents packed, none sees another, {space / 64:.1%} padding"
    )


@pytest.mark.parametrize("packing", [Packing.DOCUMENTS, Packing.SEPARATE, Packing.CONCATENATE])
def test_each_sequence_once_an_epoch(tmp_path: Path, opened: Open, packing: Packing) -> None:
    data = opened(_texts(tmp_path / "a.jsonl"), packing=packing, batch_size=3, micro_batches=2, seq_len=24)
    count = len(data.packed.train)
    rows: list[tuple[int, ...]] = []
    for step in range(-(-2 * count // 6)):
        for micro in range(2):
            rows += [tuple(row) for row in data.batch(step, micro).tokens_BT.tolist()]
    first, second = Counter(rows[:count]), Counter(rows[count : 2 * count])
    assert first == second
    assert rows[:count] != rows[count : 2 * count]
    held = data.packed.validation
    assert held.starts.size
    assert not set(held.starts.tolist()) & set(data.packed.train.starts.tolist())
    assert (data.batch(0).positions_BT is None) == (packing is not Packing.DOCUMENTS)
    assert (data.batch(0).mask_BT is None) == (packing is Packing.CONCATENATE)


def test_a_resume_needs_the_step_alone(tmp_path: Path, opened: Open) -> None:
    path = _chats(tmp_path / "a.jsonl")
    data = opened(path, micro_batches=2)
    before = [data.batch(step, micro) for step in range(12) for micro in (0, 1)]
    again = opened(path, micro_batches=2)
    for place in (23, 4, 5, 0):
        _assert_equal(again.batch(place // 2, place % 2), before[place])
    assert again.crc32 == data.crc32
    elsewhere = opened(path, store="other store", micro_batches=2)
    _assert_equal(elsewhere.batch(3, 1), before[7])
    assert elsewhere.crc32 == data.crc32


def _assert_equal(one: Batch, other: Batch) -> None:
    assert torch.equal(one.tokens_BT, other.tokens_BT)
    assert torch.equal(one.targets_BT, other.targets_BT)
    assert (one.step_targets, one.parts) == (other.step_targets, other.parts)


def test_what_bits_depend_on_is_in_the_checksum(tmp_path: Path, opened: Open) -> None:
    path = _chats(tmp_path / "a.jsonl")
    same = opened(path)
    assert opened(path, seed=4).crc32 == same.crc32
    others: list[dict[str, Any]] = [
        {"seq_len": 24},
        {"packing": Packing.SEPARATE},
        {"validation_fraction": 0.3},
    ]
    sums = [opened(path, **options).crc32 for options in others]
    assert len({same.crc32, *sums}) == 4


def test_shares_add_up(tmp_path: Path, opened: Open) -> None:
    """The mean over micro-batches and ranks of loss x share is the mean over all counted targets of the step."""
    data = opened(_chats(tmp_path / "a.jsonl"), batch_size=4, micro_batches=3, seq_len=48)
    for step in range(5):
        batches = [data.batch(step, micro) for micro in range(3)]
        generator = torch.Generator().manual_seed(step)
        losses = [
            torch.rand(batch.targets_BT.shape, generator=generator, dtype=torch.float64) for batch in batches
        ]
        counted = [batch.targets_BT != IGNORED for batch in batches]
        expected = torch.cat([loss[mask] for loss, mask in zip(losses, counted, strict=True)]).mean()
        for world in (1, 2, 4):
            found = 0.0
            for batch, loss, mask in zip(batches, losses, counted, strict=True):
                for rank in range(world):
                    own, rows = batch.of_rank(rank, world), 4 // world
                    part = slice(rank * rows, (rank + 1) * rows)
                    assert own.counted
                    found += float(loss[part][mask[part]].mean()) * own.share / (3 * world)
            assert found == pytest.approx(float(expected), rel=1e-12)


def test_shares_are_one_where_all_count(tmp_path: Path, opened: Open) -> None:
    path = _texts(tmp_path / "a.jsonl")
    joined = opened(path, packing=Packing.CONCATENATE, micro_batches=3)
    assert joined.batch(2, 1).step_targets == 0
    assert joined.batch(2, 1).share == 1.0
    path.with_name("b.txt").write_text("three experts in the store. " * 60)
    whole = opened(path.with_name("b.txt"), packing=Packing.DOCUMENTS, micro_batches=3, seq_len=8)
    full = [whole.batch(0, micro) for micro in range(3)]
    assert all((batch.targets_BT != IGNORED).all() for batch in full)
    assert [batch.of_rank(1, 2).share for batch in full] == [1.0] * 3


def test_validation_is_the_same_every_time(tmp_path: Path, opened: Open) -> None:
    data = opened(_texts(tmp_path / "a.jsonl", 300), batch_size=2, validation_fraction=0.2)
    first, second = list(data.validation_batches(3)), list(data.validation_batches(3))
    assert len(first) == 3
    for one, other in zip(first, second, strict=True):
        _assert_equal(one, other)
        assert one.tokens_BT.shape == (2, 16)
        assert one.share == 1.0
    assert "(documents held out)" in data.describe()


def test_validation_is_of_every_held_out_target_once(tmp_path: Path, opened: Open) -> None:
    """More batches than there are: each sequence once, and rows without targets, so that ranks can share the last batch."""
    data = opened(_chats(tmp_path / "a.jsonl"), batch_size=5, validation_fraction=0.2)
    rows = len(data.packed.validation)
    assert rows % 5
    batches = list(data.validation_batches(2000))
    assert len(batches) == -(-rows // 5)
    assert all(batch.tokens_BT.shape == (5, 16) for batch in batches)
    assert sum(batch.counted for batch in batches) == data.packed.validation.counted.sum()
    last = batches[-1]
    assert [last.of_rank(rank, 5).counted > 0 for rank in range(5)] == [row < rows % 5 for row in range(5)]
    assert sum(last.of_rank(rank, 5).share for rank in range(5)) == pytest.approx(5)
    joined = opened(tmp_path / "a.jsonl", batch_size=5, packing=Packing.CONCATENATE)
    assert all(batch.share == 1.0 for batch in joined.validation_batches(2000))


def test_only_the_first_rank_tokenises(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _texts(tmp_path / "a.jsonl")
    config = DataConfig(paths=(str(path),), batch_size=2)
    made_in: list[str] = []
    texts = DocumentTokenizer.texts

    def noted(self: DocumentTokenizer, batch: list[str]) -> Any:
        made_in.append(threading.current_thread().name)
        return texts(self, batch)

    monkeypatch.setattr(DocumentTokenizer, "texts", noted)
    barrier, found = threading.Barrier(3), dict[int, Any]()

    def rank(number: int) -> None:
        found[number] = open_data(
            config,
            seq_len=16,
            vocab_size=300,
            tokenizer=tokenizer,
            store=tmp_path / "store",
            first=number == 0,
            barrier=barrier.wait,
        )

    threads = [threading.Thread(target=rank, args=(i,), name=f"rank {i}") for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(made_in) == {"rank 0"}
    assert {data.crc32 for data in found.values()} == {found[0].crc32}
    _assert_equal(found[2].batch(1), found[0].batch(1))


# Which data a configuration means --------------------------------------------------------------------------


def test_bytes_without_a_tokenizer(tmp_path: Path, tokenizer: Path) -> None:
    path = _texts(tmp_path / "a.txt")
    config = DataConfig(paths=(str(path),), batch_size=2)
    plain = open_data(config, seq_len=16, vocab_size=256, tokenizer=None, store=tmp_path / "store")
    assert isinstance(plain, TextData)
    assert not (tmp_path / "store").exists()
    config = DataConfig(paths=(str(path),), batch_size=2, format=DataFormat.BYTES)
    asked = open_data(config, seq_len=16, vocab_size=300, tokenizer=tokenizer, store=tmp_path / "store")
    assert isinstance(asked, TextData)
    assert asked.crc32 == plain.crc32


@pytest.mark.parametrize("name", ["a.jsonl", "a.NDJSON", "a.parquet", "a.json"])
@pytest.mark.parametrize("whole", [False, True], ids=["file", "directory"])
def test_what_needs_a_tokenizer_is_refused_without_one(tmp_path: Path, name: str, whole: bool) -> None:
    (tmp_path / "in").mkdir()
    path = _texts(tmp_path / "in" / name)
    paths = (str(path.parent if whole else path),)
    with refuses(DataError, f"in/{name}:", "tokenizer.json", 'format = "bytes"'):
        open_data(
            DataConfig(paths=paths), seq_len=16, vocab_size=300, tokenizer=None, store=tmp_path / "store"
        )
    config = DataConfig(paths=paths, format=DataFormat.BYTES, batch_size=2)
    asked = open_data(config, seq_len=16, vocab_size=300, tokenizer=None, store=tmp_path / "store")
    assert asked.crc32 == zlib.crc32(path.read_bytes())


def test_a_model_that_mixes_documents(tmp_path: Path, opened: Open) -> None:
    path, together = _texts(tmp_path / "a.jsonl"), "its state is carried on"
    data = opened(path, packing=Packing.AUTO, together=together)
    assert data.packing is Packing.SEPARATE
    assert data.describe().endswith("; not packed: its state is carried on")
    joined = opened(path, packing=Packing.CONCATENATE, together=together)
    assert joined.packing is Packing.CONCATENATE


#: Settings of the data and arguments of ``open_data``, the error, and what it names.
REFUSED: list[tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = [
    ({"tokenizer": None, "format": DataFormat.JSONL}, ConfigError, ("data.format: jsonl",)),
    ({"tokenizer": None, "column": "body"}, ConfigError, ("data.column: ",)),
    ({"tokenizer": None, "separator": "x"}, ConfigError, ("data.separator: ",)),
    ({"tokenizer": None, "packing": Packing.SEPARATE}, ConfigError, ("data.packing: ",)),
    ({"max_bytes": 4}, ConfigError, ("data.max_bytes: ",)),
    ({"together": "carried on", "packing": Packing.DOCUMENTS}, ConfigError, ("data.packing: ", "carried on")),
    ({"vocab_size": 100}, DataError, ("280 tokens", "100")),
]


@pytest.mark.parametrize(("options", "error", "named"), REFUSED)
def test_what_is_refused(
    tmp_path: Path, opened: Open, options: dict[str, Any], error: type[Exception], named: tuple[str, ...]
) -> None:
    """Also where the tokens have been made before."""
    path = _texts(tmp_path / "a.jsonl")
    opened(path)
    with pytest.raises(error) as raised:
        opened(path, **options)
    assert all(each in str(raised.value) for each in named)


def test_prompts_and_samples(tmp_path: Path, opened: Open) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer", begin="<|start|>")
    data = opened(_texts(tmp_path / "a.jsonl"), tokenizer=tokenizer)
    tokens = data.encode("the store")
    assert tokens[0] == 1
    assert tokens[-1] != END
    assert data.decode(tokens) == "the store"


def test_conditions_of_bytes_are_what_they_were() -> None:
    """A store of an earlier version is resumed without a warning: what it did not know is left out while unset."""
    assert set(DataConfig().conditions()) == {
        "paths", "suffixes", "validation_fraction", "max_bytes", "batch_size", "micro_batches", "seed",
    }  # fmt: skip
    assert DataConfig(packing=Packing.SEPARATE).conditions()["packing"] == "separate"
