"""What an output may replace: an earlier one of its kind, and nothing else, by whatever name."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import click
import pytest
from command_line import commands, invoke

from tierstore.cli.main import cli
from tierstore.cli.options import _Path
from tierstore.errors import ConfigError
from tierstore.outputs import OutputKind, check_output, replacing, write_output

#: The first bytes of a file of each kind, as commands write them.
BEGINNINGS = {
    OutputKind.TRACE: "tsrtrace\2\0\0\0",
    OutputKind.TIMELINE: '[\n{"ph":"M","name":"process_name"',
    OutputKind.METRICS: '{"step": 1, "loss": 5.5}\n',
    OutputKind.PAGE: '<!doctype html>\n<html lang="en">\n',
    OutputKind.PICTURE: '<?xml version="1.0"?>\n<!DOCTYPE svg>\n<svg xmlns="',
    OutputKind.DOCUMENT: '{\n "format": "tierstore-bench",\n',
    OutputKind.PROFILE: '{\n  "profile_version": 1,\n',
    OutputKind.IO_PROFILE: '{\n "format": "tierstore-io-profile",\n',
    OutputKind.TABLES: "All miss ratios and bytes are simulated, at\n",
    OutputKind.CONFIGURATION: '# for a cache of 4 MiB, 50.0% of what t asks for\n[cache]\npolicy = "lru"\n',
    OutputKind.NAMES: "0.1\nkey\n7",
}
#: Sources, configurations, and files of stores and models.
OTHERS = {
    "keys, one a line": "a\nb\na\n",
    "csv": "a,10\nb,20\n",
    "routing": '{"layer":0,"topk_ids":[1]}\n',
    "chat": '{"messages": []}\n',
    "text": "It was a dark and stormy night.\n",
    "settings": "[cache]\npolicy = 'lru'\n",
    "config.json": '{"model_type": "mixtral"}',
    "safetensors": "\x10\0\0\0\0\0\0\0{}",
    "identity": '{"format": 9, "uuid": "5f"}\n',
}


@pytest.mark.parametrize("kind", OutputKind)
def test_each_kind_replaces_its_own_alone(tmp_path: Path, kind: OutputKind) -> None:
    path = tmp_path / "output"
    foreign = {key: text for key, text in BEGINNINGS.items() if key is not kind} | OTHERS  # type: ignore[operator]
    for text in foreign.values():
        path.write_text(text)
        with pytest.raises(ConfigError, match="and is not overwritten"):
            write_output(path, kind, "new")
        assert path.read_text() == text
    for text in (BEGINNINGS[kind], ""):
        path.write_text(text)
        write_output(path, kind, "new")
        assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_links_lead_to_what_is_replaced(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "page.html"
    link.symlink_to("page.html")
    for text in ("<html>1", "<html>2"):  # at first the link leads nowhere
        write_output(link, OutputKind.PAGE, text)
        assert (link.is_symlink(), target.is_symlink(), target.read_text()) == (True, False, text)
    target.write_text("a source")
    with pytest.raises(ConfigError, match="link: this file is not an HTML page"):
        write_output(link, OutputKind.PAGE, "<html>3")


def test_a_source_has_many_names(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"tsrtrace")  # so that its kind alone does not protect it
    (tmp_path / "hard").hardlink_to(source)
    (tmp_path / "soft").symlink_to(source)
    (tmp_path / "there").mkdir()
    for name in ("source", "hard", "soft", "there/../source"):
        with pytest.raises(ConfigError, match=r"the same file as .*source"):
            check_output(tmp_path / name, OutputKind.TRACE, sources=[source])


def test_pipes_and_devices_are_written_directly(tmp_path: Path) -> None:
    pipe, null = tmp_path / "pipe", tmp_path / "null"
    os.mkfifo(pipe)
    null.symlink_to("/dev/null")
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    write_output(pipe, OutputKind.DOCUMENT, "{}")
    reader.join()
    write_output(null, OutputKind.PAGE, "lost")
    assert (found, pipe.is_fifo(), null.readlink()) == (["{}"], True, Path("/dev/null"))
    assert Path("/dev/null").is_char_device()
    for path in (pipe, null):
        with pytest.raises(ConfigError, match="a trace needs a regular file"):
            check_output(path, OutputKind.TRACE)


def test_a_descriptor_is_written_where_it_stands(tmp_path: Path) -> None:
    """As with ``--html /dev/stdout > FILE``, which the shell has opened."""
    with (tmp_path / "both").open("w+") as file:
        file.write("a table\n")
        file.flush()
        (tmp_path / "out").symlink_to(f"/proc/self/fd/{file.fileno()}")
        write_output(tmp_path / "out", OutputKind.PAGE, "<html>")
        file.seek(0)
        assert file.read() == "a table\n<html>"


def test_what_fails_leaves_the_earlier_output(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("<html>old")
    path.chmod(0o640)

    def fail() -> None:
        with replacing(path, OutputKind.PAGE) as file:
            file.write(b"<html>")
            with open("/dev/full", "wb") as full:
                os.dup2(full.fileno(), file.fileno())

    with pytest.raises(OSError, match=r"No space left on device: .*page\.html"):
        fail()
    assert (path.read_text(), list(tmp_path.iterdir())) == ("<html>old", [path])
    write_output(path, OutputKind.PAGE, "<html>new")
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_mount_point_takes_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    path.write_text("<html>old")
    number = path.stat().st_ino

    def busy(source: Path, target: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(source), None, str(target))

    monkeypatch.setattr(Path, "replace", busy)
    write_output(path, OutputKind.PAGE, "<html>new")
    assert (path.read_text(), path.stat().st_ino, list(tmp_path.iterdir())) == ("<html>new", number, [path])


def test_an_empty_file_of_a_store_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "tierstore.json").write_text("{}")
    (tmp_path / "tokens").mkdir()
    for lock in (tmp_path / "lock", tmp_path / "tokens" / "lock"):
        lock.touch()
        with pytest.raises(ConfigError, match="lock: this file is not metrics"):
            check_output(lock, OutputKind.METRICS)


#: Every parameter of every command that names a file to write.
WRITING = [
    (context.command_path, one)
    for command, context in commands(cli, click.Context(cli))
    for one in command.params
    if isinstance(one.type, _Path) and one.type.output
]


def test_every_option_that_writes_says_so() -> None:
    """Options are known by their help: the words for a file that is written."""
    assert len(WRITING) >= 35
    verbs = ("write", "append", "record every", "to write", "picture", "chrome trace", "draw")
    said: list[Any] = []
    for command, context in commands(cli, click.Context(cli)):
        said += [
            (context.command_path, one.name)
            for one in command.params
            if isinstance(one.type, click.Path)
            and any(verb in (getattr(one, "help", "") or "").lower() for verb in verbs)
            and not (isinstance(one.type, _Path) and one.type.output)
        ]
    assert said == []


@pytest.mark.parametrize(("command", "option"), WRITING, ids=lambda one: getattr(one, "name", one))
def test_no_option_overwrites_a_source(tmp_path: Path, command: str, option: click.Parameter) -> None:
    source = tmp_path / "chats.jsonl"
    source.write_text(OTHERS["chat"])
    given = [option.opts[0]] if isinstance(option, click.Option) else []
    result = invoke(*command.split(), *given, source)
    assert result.exit_code == 2
    assert f"{source}: this file is not" in result.stderr
    assert source.read_text() == OTHERS["chat"]


def test_no_command_writes_two_outputs_or_a_source_to_one_file(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old.json"
    old.write_text(BEGINNINGS[OutputKind.DOCUMENT])
    (tmp_path / "link.json").symlink_to(old)
    for words in (
        ("bench", "adamw", "--save", new, "--html", f"{tmp_path}/./new"),
        ("bench", "adamw", "--compare", old, "--save", tmp_path / "link.json"),
        ("bench", "adamw", "--save", tmp_path / "link.json", "--compare", old),
        ("train", "--metrics", new, "--timeline", new),
    ):
        result = invoke(*words)
        assert (result.exit_code, new.exists()) == (2, False)
        assert "the same file as" in result.stderr
