"""The command line in this process, and the smallest run of ``tierstore train``."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner, Result
from tiny_runs import MODEL

from tierstore.cli.main import cli

TEXT = "the expert fetched its page from the slower tier; " * 400
#: 16 experts, whose records do not fit into the budget.
TINY: dict[str, object] = {
    **MODEL,
    **{"model.experts": 8, "data.batch_size": 2, "host_budget": "192KiB", "threads": 1, "device": "cpu"},
    **{"eval_batches": 1, "sample_tokens": 0},
}


def toml(settings: Mapping[str, object]) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())


def tiny_run(directory: Path, settings: Mapping[str, object]) -> Path:
    """A configuration file in ``directory``: ``TINY`` with ``settings``, and its text beside it."""
    (directory / "text.txt").write_text(TEXT)
    path = directory / "run.toml"
    path.write_text(toml({**TINY, "data.paths": [str(directory / "text.txt")], **settings}))
    return path


def invoke(*words: object) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words])


def done(*words: object) -> Result:
    result = invoke(*words)
    assert result.exit_code == 0, (words, result.stderr, result.exception)
    return result


def refused(*words: object) -> str:
    """What a command that ends with status 2 says on stderr."""
    result = invoke(*words)
    assert result.exit_code == 2, (words, result.stderr, result.exception)
    return result.stderr


def object_of(*words: object) -> dict[str, Any]:
    """The one line that a command prints with ``--json``."""
    (line,) = done(*words, "--json").stdout.splitlines()
    return json.loads(line)


def planned(*words: object) -> tuple[int, dict[str, Any], str]:
    """Exit status, object and standard error of ``tierstore plan``."""
    result = invoke("plan", *words, "--json")
    return (
        result.exit_code,
        json.loads(result.stdout.splitlines()[-1] if result.stdout else "{}"),
        result.stderr,
    )


def commands(command: click.Command, context: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    """Every command under one, with its context."""
    if not isinstance(command, click.Group):
        yield command, context
        return
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        yield from commands(inner, click.Context(inner, parent=context, info_name=name))
