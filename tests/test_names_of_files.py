"""Names of files are bytes: whatever a command reads or writes may have one that is not UTF-8."""

import os
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from command_line import TEXT, TINY, commands, object_of, toml
from command_line import done as run
from tiny_families import make_config, plain_model
from token_cases import save_tokenizer

from tierstore import _native
from tierstore.cli.main import cli
from tierstore.errors import StoreFormatError
from tierstore.store import ParameterStore, RecordSchema, StoreConfig, StripeConfig, verify_store
from tierstore.trace.files import load_trace

FF = os.fsdecode(b"\xff")


def test_every_path_of_every_command_is_taken(tmp_path: Path) -> None:
    """Sources and outputs, files and directories: the path that arrives has the bytes that were given."""
    file, directory = tmp_path / f"file{FF}", tmp_path / f"directory{FF}"
    file.touch()
    directory.mkdir()
    taken = 0
    for command, _ in commands(cli, click.Context(cli)):
        for param in command.params:
            if isinstance(param.type, click.Path):
                context = click.Context(command)
                given = file if param.type.file_okay else directory
                found = param.type.convert(str(given), param, context)
                assert os.fsencode(found) == os.fsencode(given)
                taken += 1
    assert taken >= 100


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory whose name is not UTF-8, with a configuration and a text."""
    place = tmp_path / f"place{FF}"
    place.mkdir()
    (place / f"text{FF}").write_text(TEXT)
    # A configuration is TOML, so UTF-8: what it names is given as an option.
    (place / f"run{FF}.toml").write_text(toml({**TINY, "steps": 3}))
    return place


@pytest.mark.slow
def test_a_run_and_what_comes_of_it(place: Path, tmp_path: Path) -> None:
    """A store on two drives, with all files beside it, has the records of one whose names are ASCII."""

    def train(place: Path, ff: str, **more: str) -> dict[str, Any]:
        given = [f"{place}/run{ff}.toml", f"--data={place}/text{ff}", f"--store={place}/store{ff}"]
        given += [f"--{option}={place}/{name}{ff}" for option, name in more.items()]
        return object_of("train", *given, "--checksum", "--set", f"stripe.directories={place}/drive{ff}")

    plain = tmp_path / "plain"
    plain.mkdir()
    for name, source in (("text", f"text{FF}"), ("run.toml", f"run{FF}.toml")):
        (plain / name).write_text((place / source).read_text())
    expected = train(plain, "")
    store, trace = place / f"store{FF}", place / f"trace{FF}"
    files = {"metrics": "metrics", "timeline": "timeline", "record-trace": "trace"}
    found = train(place, FF, **files)
    assert found["records_crc32c"] == expected["records_crc32c"]
    assert [os.fsencode(drive["path"]) for drive in found["drives"]] == [
        os.fsencode(place / f"{name}{FF}") for name in ("store", "drive")
    ]
    data = ("--data", place / f"text{FF}")
    run("train", place / f"run{FF}.toml", *data, "--store", store, "--resume", "--steps", "7")
    run("verify", store)
    run("gc", store)
    run("doctor", "--dir", place, "--store", store)
    run("reshard", store, "--to", place / f"ranks{FF}", "--ranks", "2")
    tuned = place / f"tuned{FF}.toml"
    run("cache", "tune", trace, "--capacity", "0.4", "--out", tuned, "--html", place / f"page{FF}.html")
    assert tuned.read_text(encoding="utf-8")
    assert "trace\\udcff" in (place / f"page{FF}.html").read_text(encoding="utf-8")
    (place / f"requests{FF}").write_text("1\n2\n1\n")
    imported = place / f"imported{FF}"
    run("cache", "import", place / f"requests{FF}", imported, "--keys", place / f"keys{FF}")
    replayed = object_of("cache", "simulate", imported, "--policy", "lru", "--capacity", "1.0")
    assert replayed["outcomes"][0]["misses"] == 2


@pytest.mark.slow
def test_an_imported_model_and_its_tokenizer(place: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    config = make_config("mixtral", vocab_size=280, max_position_embeddings=64)
    plain_model(config, torch.float32).save_pretrained(source)
    save_tokenizer(source, size=280)
    model = source.rename(place / f"model{FF}")
    store = place / f"imported{FF}"
    run("import", model, "--store", store)
    sizes = ("--set", "data.batch_size=2", "--set", "finetune.seq_len=16")
    steps = ("--steps", "1", "--host-budget", "4MiB", *sizes)
    run("train", "--store", store, "--data", place / f"text{FF}", *steps)
    run("export", store, "--to", place / f"out{FF}")
    found = object_of("generate", store, "--prompt", "the expert", "--max-tokens", "2")
    assert len(found["texts"][0]["tokens"]) == 2


def test_a_store_on_two_drives_with_a_trace(tmp_path: Path) -> None:
    """What is written is read again, in the one that is opened and in one that was opened under another name."""
    store, trace = tmp_path / f"store{FF}", tmp_path / f"trace{FF}"
    config = StoreConfig(host_budget=1 << 20, stripe=StripeConfig(directories=(tmp_path / f"drive{FF}",)))
    weight = np.arange(4096, dtype=np.float32)
    with ParameterStore.create(store, [RecordSchema("r", 4096)], config, trace=trace) as made:
        for key in ("a", "b"):
            made.register(key, "r", weight=weight)
        made.commit()
    assert verify_store(store).failures == []
    assert load_trace(trace).header.policy
    with (
        ParameterStore.open(store, StoreConfig(host_budget=1 << 20)) as again,
        again.fetch(["a", "b"]) as lease,
    ):
        assert all((lease[key].view("weight") == weight).all() for key in ("a", "b"))
        assert [drive.path for drive in again.status().drives] == [store, tmp_path / f"drive{FF}"]
    (store / "extents" / "r.weights").unlink()
    with pytest.raises(StoreFormatError) as caught:
        ParameterStore.open(store, StoreConfig(host_budget=1 << 20))
    assert str(caught.value) == f"{store}/extents/r.weights: the extent file is missing"


def test_native_files_and_their_errors(tmp_path: Path) -> None:
    path = tmp_path / f"file{FF}"
    with _native.File(path, create=_native.FileCreate.YES) as file:
        assert os.fsencode(file.path) == os.fsencode(path)
    with pytest.raises(FileNotFoundError) as caught:
        _native.File(tmp_path / FF / "none")
    assert os.fsencode(caught.value.filename) == os.fsencode(tmp_path) + b"/\xff/none"
    with _native.Engine(log_path=tmp_path / f"log{FF}"):
        assert (tmp_path / f"log{FF}").exists()
