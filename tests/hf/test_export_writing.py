"""safetensors files that were written as streams, read back by the package safetensors."""

import errno
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import tensors_of
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from tierstore.hf import writing
from tierstore.hf.checkpoint import Checkpoint, TensorSpec
from tierstore.hf.writing import Bytes, StreamFile, new_directory, plan_shards, write_checkpoint

_TORCH = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U8": torch.uint8,
    "I64": torch.int64,
}


def values(tensor: TensorSpec) -> torch.Tensor:
    """Random bytes, the same for a name, as a tensor of its type."""
    generator = torch.Generator().manual_seed(sum(tensor.name.encode()))
    raw = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8, generator=generator)
    return raw.view(_TORCH[tensor.dtype]).reshape(tensor.shape)


def pieces(tensor: TensorSpec, size: int) -> Iterator[Bytes]:
    """Through memory that the next piece overwrites."""
    raw = values(tensor).reshape(-1).view(torch.uint8).numpy()
    window = np.empty(size, np.uint8)
    for begin in range(0, raw.size, size):
        part = raw[begin : begin + size]
        window[: part.size] = part
        yield window[: part.size]


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Also where they are NaN."""
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*flat)


_SPECS = [
    TensorSpec("a.odd", "BF16", (3, 7)),
    TensorSpec("b.wide", "F32", (5,)),
    TensorSpec("c.scalar", "F32", ()),
    TensorSpec("d.empty", "BF16", (0, 4)),
    TensorSpec("e.bytes", "U8", (13,)),
    TensorSpec("f.long", "I64", (2, 2)),
    TensorSpec("g.ünïcode", "F16", (9,)),
]


def test_one_file_is_read_back(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, plan_shards(_SPECS), lambda tensor: pieces(tensor, 5))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    found = tensors_of(tmp_path)
    assert found.keys() == {spec.name for spec in _SPECS}
    assert all(same_bytes(found[spec.name], values(spec)) for spec in _SPECS)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert (
        Checkpoint.open(tmp_path).tensors.keys() == found.keys()
    )  # and by our own reader, which trusts nothing


def test_shards_and_their_index(tmp_path: Path) -> None:
    """By hand: 42 + 20 = 62 bytes, + 4 = 66, + 0, + 13 = 79; 32 + 18 = 50 more."""
    shards = plan_shards(_SPECS, 80)
    assert [[tensor.name[0] for tensor in shard.tensors] for shard in shards] == [list("bcade"), list("fg")]
    assert [shard.file for shard in shards] == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    write_checkpoint(tmp_path, shards, lambda tensor: pieces(tensor, 1000))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": 21 + 5 + 1 + 13 + 4 + 9, "total_size": 129}
    assert set(index["weight_map"]) == {spec.name for spec in _SPECS}
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / file)
    assert all(same_bytes(tensors_of(tmp_path)[spec.name], values(spec)) for spec in _SPECS)


def test_a_tensor_larger_than_a_shard_has_one_of_its_own() -> None:
    specs = [TensorSpec(name, "F32", (size,)) for name, size in (("a", 1), ("b", 100), ("c", 1), ("d", 1))]
    assert [[tensor.name for tensor in shard.tensors] for shard in plan_shards(specs, 8)] == [
        ["a"],
        ["b"],
        ["c", "d"],
    ]


@given(
    sizes=st.lists(
        st.tuples(st.sampled_from(["F32", "BF16", "U8", "I64"]), st.lists(st.integers(0, 5), max_size=3)),
        min_size=1,
        max_size=12,
    ),
    limit=st.integers(1, 400),
)
@settings(max_examples=share(60))
def test_any_shapes(
    sizes: list[tuple[str, list[int]]], limit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In every file values begin at a multiple of their type, and no file but that of one tensor exceeds the limit."""
    specs = [TensorSpec(f"t{number}", dtype, tuple(shape)) for number, (dtype, shape) in enumerate(sizes)]
    shards = plan_shards(specs, limit)
    for shard in shards:
        assert len(shard.header) % 8 == 0
        held = [tensor for tensor in shard.tensors if tensor.nbytes]
        assert shard.data_bytes <= limit or len(held) == 1
        at = 0
        for tensor in shard.tensors:
            assert at % tensor.item_bytes == 0
            at += tensor.nbytes
    directory = tmp_path_factory.mktemp("any")
    write_checkpoint(directory, shards, lambda tensor: pieces(tensor, 3))
    found = tensors_of(directory)
    assert found.keys() == {spec.name for spec in specs}
    assert all(same_bytes(found[spec.name], values(spec)) for spec in specs)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, (8 << 20) - 1, 8 << 20, (24 << 20) + 5])
def test_streams_of_any_length(size: int, tmp_path: Path) -> None:
    content = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    with StreamFile(tmp_path / "f") as file:
        for begin in range(0, size, 5 << 20):
            file.append(content[begin : begin + (5 << 20)])
        file.finish()
    assert (tmp_path / "f").read_bytes() == content.tobytes()


@pytest.mark.parametrize("at", ["open", "write"])
def test_file_systems_without_direct_io(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EINVAL where O_DIRECT is asked for, or at the first write with it."""
    really = {"open": os.open, "pwrite": os.pwrite}
    refused = []

    def open_(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if at == "open" and flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
        return really["open"](path, flags, *more, **options)

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if at == "write" and not refused:
            refused.append(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return really["pwrite"](fd, data, offset)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "pwrite", pwrite)
    write_checkpoint(tmp_path, plan_shards(_SPECS), lambda tensor: pieces(tensor, 5))
    assert len(refused) == 1
    assert all(same_bytes(tensors_of(tmp_path)[spec.name], values(spec)) for spec in _SPECS)


def test_a_failed_write_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(OSError, match=r"No space left on device: '.*model\.safetensors'") as caught:
        write_checkpoint(tmp_path, plan_shards(_SPECS), lambda tensor: pieces(tensor, 5))
    assert caught.value.errno == errno.ENOSPC


# The directory ----------------------------------------------------------------------------------------------


def test_a_directory_appears_when_it_is_whole(tmp_path: Path) -> None:
    with new_directory(tmp_path / "out", 10) as directory:
        (directory / "f").write_text("x")
        assert not (tmp_path / "out").exists()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["f"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError), new_directory(tmp_path / "out", 10) as directory:
        write_checkpoint(directory, [plan_shards(_SPECS)[0]] * 2, lambda tensor: pieces(tensor, 5))
    assert not list(tmp_path.iterdir())


def test_targets_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("there", "link"):
        with (
            pytest.raises(FileExistsError, match="there is something here already"),
            new_directory(tmp_path / name, 0),
        ):
            pass
    (tmp_path / "file.partial").touch()
    with pytest.raises(FileExistsError, match="but it exists"), new_directory(tmp_path / "file", 0):
        pass
    (tmp_path / "mine.partial").mkdir()
    (tmp_path / "mine.partial" / "thesis.txt").write_text("x")
    with pytest.raises(FileExistsError, match="but it exists"), new_directory(tmp_path / "mine", 0):
        pass
    assert (tmp_path / "mine.partial" / "thesis.txt").exists()


@pytest.mark.parametrize("got", ["far", "nowhere"])
def test_what_a_killed_export_left_is_replaced(got: str, tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    if got == "far":
        (partial / writing._MARKER).touch()
        (partial / "model.safetensors").write_bytes(b"half")
    with new_directory(tmp_path / "out", 0) as directory:
        assert not (directory / "model.safetensors").exists()
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("call", ["unlink", "rename"])
def test_killed_as_it_takes_its_name(call: str, tmp_path: Path) -> None:
    """The directory is there, whole, or the next export has its way."""
    pid = os.fork()
    if not pid:
        setattr(Path, call, lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL))
        with new_directory(tmp_path / "out", 0) as directory:
            (directory / "model.safetensors").write_bytes(b"values")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    if (tmp_path / "out").exists():
        assert (tmp_path / "out" / "model.safetensors").read_bytes() == b"values"
        return
    with new_directory(tmp_path / "out", 0) as directory:
        assert not (directory / "model.safetensors").exists()


def test_the_marker_is_the_last_to_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of an export that was killed while it cleared up is still known for its own."""
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / writing._MARKER).touch()
    for number in range(8):
        (partial / f"model-{number}").touch()
    removed: list[str] = []
    monkeypatch.setattr(shutil, "rmtree", lambda path, **options: removed.append(path.name))
    writing._remove(partial)
    assert [path.name for path in partial.iterdir()] == [writing._MARKER]
    assert removed == ["out.partial"]


def test_a_full_disk_is_found_out_before(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match=r"the weights need .* are free") as caught,
        new_directory(tmp_path / "below" / "out", 1 << 60),
    ):
        pass
    assert caught.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())
