"""Headers of safetensors files: what is refused, by hand and by fuzzing, with the package safetensors as the oracle."""

import copy
import fcntl
import json
import os
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import imported, join_header, save, write
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tierstore.errors import DataError, TierstoreError
from tierstore.hf.checkpoint import Checkpoint, TensorReader, read_header
from tierstore.hf.describing import describe_config, read_config
from tierstore.hf.manifest import Manifest
from tierstore.hf.matching import match
from tierstore.model.config import ComputeDtype
from tierstore.store.disk.home import IDENTITY

_OFFSETS = "data_offsets"
_SMALL = {"a": torch.arange(6, dtype=torch.float32).view(2, 3), "b": torch.arange(5, dtype=torch.float16)}


def test_tensors_and_their_bytes(tmp_path: Path) -> None:
    tensors = {**_SMALL, "c": torch.tensor(3, dtype=torch.int64), "d": torch.ones(4, 1, dtype=torch.bfloat16)}
    write(tmp_path / "x.safetensors", tensors)
    header = read_header(tmp_path / "x.safetensors")
    assert {name: info.shape for name, info in header.items()} == {
        "a": (2, 3),
        "b": (5,),
        "c": (),
        "d": (4, 1),
    }
    with TensorReader() as reader:
        for name, info in header.items():
            raw = reader.read(info, 0, info.nbytes)
            assert raw.tobytes() == tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        part = reader.read(header["a"], 12, 24)
        assert part.copy().view(np.float32).tolist() == [3, 4, 5]


def test_a_truncated_shard(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path, _SMALL)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError):
            read_header(path)


# Fuzzing ----------------------------------------------------------------------------------------------------


def _mutate(raw: bytes, chance: random.Random) -> bytes:
    """One of several ways to make a file's header lie."""
    length = int.from_bytes(raw[:8], "little")
    header, data = raw[8 : 8 + length], raw[8 + length :]
    kind = chance.randrange(8)
    if kind == 0:  # bytes of the header
        changed = bytearray(header)
        for _ in range(chance.choice((1, 1, 2, 8))):
            changed[chance.randrange(length)] = chance.randrange(256)
        return join_header(bytes(changed), data)
    if kind == 1:  # the length
        other = chance.choice(
            (0, length - 1, length + 1, chance.randrange(1 << 16), chance.randrange(1 << 64))
        )
        return other.to_bytes(8, "little") + header + data
    if kind == 2:  # the file is cut, or grows
        size = chance.randrange(len(raw) + 1000)
        return raw[:size] + bytes(max(size - len(raw), 0))
    if kind == 3:  # a part is left out, or there twice
        at, count = chance.randrange(length), chance.randrange(40)
        rest = at + count
        return join_header(
            header[:at] + header[rest:] if chance.random() < 0.5 else header[:rest] + header[at:], data
        )
    table = json.loads(header)
    name = chance.choice([name for name in table if name != "__metadata__"])
    other = chance.choice([0, 1, -1, 1 << 31, 1 << 53, 1 << 63, 1 << 64, 10**30, 1.5, None, "1", [], True])
    if kind == 4:
        table[name][_OFFSETS][chance.randrange(2)] = chance.choice((other, chance.randrange(len(data) * 2)))
    elif kind == 5:
        shape = table[name]["shape"]
        shape[chance.randrange(len(shape))] = other
        if chance.random() < 0.3:
            shape.reverse()
    elif kind == 6:
        table[name]["dtype"] = chance.choice(["F16", "BF16", "F64", "U8", "F4", "", None, 3, "F8_E4M3"])
    else:  # offsets that belong to others
        table[name][_OFFSETS] = list(table[chance.choice(list(table))].get(_OFFSETS, [0, 4]))
    return join_header(table, data)


def _taken(source: Path, described: Manifest) -> Checkpoint | None:
    """The checkpoint, unless it is refused, in one line."""
    try:
        checkpoint = Checkpoint.open(source)
        match(described, checkpoint)
        return checkpoint
    except DataError as error:
        if "\n" in str(error):
            raise
        return None


def test_two_thousand_mutations_of_a_header(tmp_path: Path) -> None:
    """None crashes, hangs or allocates beyond the file; what is taken is what the package reads, and fits the model."""
    source = tmp_path / "m"
    save(source, "olmoe", num_experts=2, vocab_size=16, num_hidden_layers=1)
    path = source / "model.safetensors"
    raw = path.read_bytes()
    described = describe_config(read_config(source), ComputeDtype.FP32)
    imports = 0
    tracemalloc.start()
    for seed in range(2000):
        chance = random.Random(seed)
        mutated = _mutate(raw, chance)
        with open(path, "r+b") as file:  # to truncate it first takes ten times as long
            file.write(mutated)
            file.truncate()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        checkpoint = _taken(source, described)
        assert tracemalloc.get_traced_memory()[1] - before < 4 * len(raw) + (1 << 20)
        if checkpoint is not None:
            with safe_open(path, "np") as package:
                for name in package.keys():  # noqa: SIM118 - it is no mapping
                    info, theirs = checkpoint.tensors[name], package.get_tensor(name)
                    ours = mutated[info.offset : info.offset + info.nbytes]
                    assert (info.shape, ours) == (theirs.shape, theirs.tobytes())
        elif imports < 20 and seed % 50 == 0:
            imports += 1
            with pytest.raises(TierstoreError):
                imported(source, tmp_path / "s")
            assert not (tmp_path / "s" / IDENTITY).exists()
    tracemalloc.stop()
    assert imports == 20


# Reading ----------------------------------------------------------------------------------------------------


@settings(max_examples=share(60))
@given(
    sizes=st.lists(st.integers(0, 20_000), min_size=1, max_size=5), seed=st.integers(0, 999), data=st.data()
)
def test_any_range_is_read_whatever_its_alignment(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int, data: st.DataObject
) -> None:
    tensors = {
        f"t{number}": torch.randint(
            0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
        )
        for number, size in enumerate(sizes)
    }
    path = tmp_path_factory.mktemp("ranges") / "x.safetensors"
    write(path, tensors)
    with TensorReader() as reader:
        for name, info in read_header(path).items():
            begin = data.draw(st.integers(0, info.nbytes))
            end = data.draw(st.integers(begin, info.nbytes))
            assert reader.read(info, begin, end).tobytes() == tensors[name][begin:end].numpy().tobytes()


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path, {"a": torch.zeros(100_000)})
    info = read_header(path)["a"]
    os.truncate(path, 50_000)
    with TensorReader() as reader, pytest.raises(DataError, match="truncated while it was read: tensor 'a'"):
        reader.read(info, 0, info.nbytes)


def test_a_file_system_without_direct_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses at the open, or at the read; pages that were read are dropped either way."""
    path = tmp_path / "x.safetensors"
    write(path, _SMALL)
    info = read_header(path)["a"]
    opened, read = os.open, os.preadv

    def refuse_open(name: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return opened(name, flags, *rest)

    def refuse_read(fd: int, *rest: Any) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return read(fd, *rest)

    for name, function in (("open", refuse_open), ("preadv", refuse_read)):
        with monkeypatch.context() as patched, TensorReader() as reader:
            patched.setattr(os, name, function)
            assert reader.read(info, 0, 24).tobytes() == _SMALL["a"].numpy().tobytes()
            assert "O_DIRECT: Invalid argument" in reader.direct_reason


def test_the_fingerprint_tells_values_apart_and_not_places(tmp_path: Path) -> None:
    save(tmp_path / "a", "olmoe")
    tensors = {name: value.clone() for name, value in _load(tmp_path / "a").items()}
    (tmp_path / "b").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "b" / name).write_bytes((tmp_path / "a" / name).read_bytes())
    one, other = (Checkpoint.open(tmp_path / name).fingerprint() for name in "ab")
    assert one == other
    changed = copy.copy(tensors)
    changed["lm_head.weight"] = tensors["lm_head.weight"] + 1
    write(tmp_path / "b/model.safetensors", changed)
    assert Checkpoint.open(tmp_path / "b").fingerprint() != one


def _load(directory: Path) -> dict[str, torch.Tensor]:
    from checkpoints import tensors_of

    return tensors_of(directory)
