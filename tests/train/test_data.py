"""Data: the split, the order, exact resumption, and errors that name the file."""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.train.data import TextData, permute
from tierstore.train.files import DataConfig, text_files


def _file(path: Path, size: int, seed: int = 0) -> bytes:
    content = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return content


def _data(*paths: Path, **options: Any) -> TextData:
    seq_len = options.pop("seq_len", 8)
    return TextData(DataConfig(paths=tuple(map(str, paths)), **{"batch_size": 4, **options}), seq_len=seq_len)


def test_split_by_hand(tmp_path: Path) -> None:
    content = _file(tmp_path / "a.txt", 1000)
    data = _data(tmp_path / "a.txt", validation_fraction=0.25)
    # blocks of 250 bytes, every fourth to validation
    assert data.train.tobytes() == content[:750]
    assert data.validation.tobytes() == content[750:]
    assert data.crc32 == zlib.crc32(content)
    assert data.describe() == "1000 B in 1 files (750 B train, 250 B validation)"


@settings(max_examples=share(25))
@given(
    sizes=st.lists(st.integers(0, 200_000), min_size=1, max_size=5),
    fraction=st.floats(0.02, 0.6),
    most=st.sampled_from([1 << 26, 150_000]),
)
def test_splits_cover_the_text(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], fraction: float, most: int
) -> None:
    root = tmp_path_factory.mktemp("data")
    content = b"".join(_file(root / f"{i}.txt", size, i) for i, size in enumerate(sizes))[:most]
    if len(content) < 2000:
        return
    data = _data(root, validation_fraction=fraction, max_bytes=most)
    assert data.crc32 == zlib.crc32(content)
    assert data.train.size + data.validation.size == len(content) == data.bytes_read
    share = data.validation.size / len(content)
    assert share == pytest.approx(fraction, abs=0.5 if len(content) < 400_000 else 0.2)
    text = np.frombuffer(content, dtype=np.uint8)
    counts = np.bincount(text, minlength=256)
    both = np.bincount(data.train, minlength=256) + np.bincount(data.validation, minlength=256)
    assert (counts == both).all()
    head = min(data.train.size, 30)
    assert data.train[:head].tobytes() in content


@settings(max_examples=share(60))
@given(st.integers(1, 300), st.integers(0, 2**62))
def test_permutation(count: int, key: int) -> None:
    assert sorted(permute(i, count, key) for i in range(count)) == list(range(count))


def test_each_window_once_an_epoch(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(200)))
    data = _data(path, validation_fraction=0.2, batch_size=5, micro_batches=2)
    # 160 bytes to train on are (160 - 8) // 8 = 19 windows; 19 batches of 5 are five epochs
    assert data.windows == 19
    starts = []
    for index in range(19):
        batch = data.batch(*divmod(index, 2))
        tokens, targets = batch.tokens_BT, batch.targets_BT
        assert tokens.dtype == torch.int64
        assert tokens.shape == targets.shape == (5, 8)
        split = data.train.tolist()
        for row, wanted in zip(tokens.tolist(), targets.tolist(), strict=True):
            at = split.index(row[0])
            assert split[at : at + 9] == [*row, wanted[-1]]
            assert row[1:] == wanted[:-1]
            starts.append(at)
    orders = []
    for epoch in range(5):
        seen = starts[19 * epoch : 19 * epoch + 19]
        phase = min(seen)
        assert phase < 8
        assert sorted(seen) == [phase + 8 * i for i in range(19)]
        orders.append(tuple(start - phase for start in seen))
    assert len(set(orders)) == 5


def test_a_batch_is_a_function_of_its_place(tmp_path: Path) -> None:
    _file(tmp_path / "a.txt", 5000)
    data = _data(tmp_path / "a.txt", micro_batches=3)
    forward = [data.batch(step, micro) for step in range(6) for micro in range(3)]
    resumed = _data(tmp_path / "a.txt", micro_batches=3)
    for step in (5, 2):
        for micro in (2, 0):
            a, b = resumed.batch(step, micro), forward[3 * step + micro]
            assert torch.equal(a.tokens_BT, b.tokens_BT)
            assert torch.equal(a.targets_BT, b.targets_BT)
    other = _data(tmp_path / "a.txt", micro_batches=3, seed=1)
    assert not torch.equal(other.batch(0).tokens_BT, data.batch(0).tokens_BT)
    # the same sequences, however they are grouped
    grouped = _data(tmp_path / "a.txt", batch_size=12)
    tokens = torch.cat([batch.tokens_BT for batch in forward[:3]])
    assert torch.equal(grouped.batch(0).tokens_BT, tokens)


def test_validation_is_fixed_and_spread(tmp_path: Path) -> None:
    _file(tmp_path / "a.txt", 4000)
    data = _data(tmp_path / "a.txt", validation_fraction=0.5)
    batches = list(data.validation_batches(3))
    assert [tuple(batch.tokens_BT.shape) for batch in batches] == [(4, 8)] * 3
    again = list(data.validation_batches(3))
    assert all(torch.equal(a.tokens_BT, b.tokens_BT) for a, b in zip(batches, again, strict=True))
    last = batches[-1].tokens_BT[-1].numpy().astype(np.uint8).tobytes()
    assert data.validation.tobytes().index(last) > 0.8 * data.validation.size
    everything = list(data.validation_batches(10_000))
    assert sum(len(batch.tokens_BT) for batch in everything) == (data.validation.size - 1) // 8


def test_files_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/b/c.txt", "c.md"):
        _file(tmp_path / "d" / name, 10)
    _file(tmp_path / "first.bin", 10)
    config = DataConfig(paths=(str(tmp_path / "first.bin"), str(tmp_path / "d")), suffixes=(".txt",))
    names = [path.relative_to(tmp_path).as_posix() for path in text_files(config)]
    assert names == ["first.bin", "d/a/b/c.txt", "d/a/z.txt", "d/b.txt"]


def test_standard_library_by_default() -> None:
    files = text_files(DataConfig())
    assert any(path.name == "argparse.py" for path in files)
    assert not any({"site-packages", "test", "tests"} & set(path.parts[-4:-1]) for path in files)
    assert all(path.suffix == ".py" for path in files)
