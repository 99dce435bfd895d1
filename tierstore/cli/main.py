"""The ``tierstore`` command: finds the subcommand, and turns every failure into its exit status.

Exit statuses: 0 done; 1 a check failed; 2 bad usage or input, with one line on stderr.
``--help`` imports no command and no torch: commands are imported when they are run.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from keyword import iskeyword
from typing import Any, NoReturn

import click

from tierstore import __version__
from tierstore.cli.groups import CommandGroup
from tierstore.errors import ChecksumError, TierstoreError

_DONE, _CHECK_FAILED, _BAD_INPUT = 0, 1, 2
_INTERRUPTED = 130  # 128 + SIGINT, as shells report it

#: Commands whose passes are so short that waking OpenMP's workers costs more than their spinning takes from the engine: on 2
#: cores, decoding a 1.5 B model one token at a time took 1.2 to 1.6 times as long without it, in memory and from disk.
_SPINNING = ("generate", "serve")

#: For each command the module that has it under its name, and the line that ``tierstore --help`` shows for it.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "train": ("tierstore.cli.train", "Train a Mixture-of-Experts model larger than memory."),
    "import": ("tierstore.cli.importing", "Make a store of a Hugging Face MoE checkpoint, to train it."),
    "export": (
        "tierstore.cli.exporting",
        "Write the model of a store as safetensors that other programs load.",
    ),
    "generate": (
        "tierstore.cli.generate",
        "Continue text with the model of a store, in the memory you give.",
    ),
    "serve": ("tierstore.cli.serve", "Answer OpenAI's API from a store, in the memory you give."),
    "deploy": (
        "tierstore.cli.deploy",
        "Make of a store, in six stages, a smaller, faster thing to serve.",
    ),
    "plan": ("tierstore.cli.plan", "What a model needs on each tier, whether it fits, the time of a step."),
    "doctor": ("tierstore.cli.doctor", "What this machine offers, and what each capability resolved to."),
    "verify": ("tierstore.cli.verify", "Read and check every record of every snapshot of a store."),
    "gc": ("tierstore.cli.gc", "Remove what a crash left behind, and give free space back."),
    "reshard": ("tierstore.cli.reshard", "Make a store over for another number of ranks."),
    "cache": ("tierstore.cli.cache.group", "Record, replay, bound and tune cache policies from traces."),
    "bench": (
        "tierstore.cli.bench",
        "Stress-test disks and stores; measure training, kernels, policies and links.",
    ),
}


class LazyGroup(CommandGroup):
    """A group that imports a command when it is run, and ends the process by the contract's statuses."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The table's commands, in its order."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported."""
        if cmd_name not in COMMANDS:
            return None
        module, _ = COMMANDS[cmd_name]
        name = f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def summaries(self, ctx: click.Context) -> list[tuple[str, str]]:
        """The table's: click would import every command to ask for its help."""
        return [(name, summary) for name, (_, summary) in COMMANDS.items()]

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> NoReturn:
        """Run, and exit. Errors in the program itself keep their traceback."""
        if isinstance(
            sys.stdout, io.TextIOWrapper
        ):  # names of files need not be UTF-8; stderr escapes them by itself
            sys.stdout.reconfigure(errors="backslashreplace")
        words = sys.argv[1:] if args is None else args
        if next((word for word in words if not word.startswith("-")), "") not in _SPINNING:
            # Before torch is imported: OpenMP's idle workers spin by default, on the cores that the engine needs.
            os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        try:
            status = super().main(
                args, prog_name or "tierstore", complete_var, standalone_mode=False, **extra
            )
        except click.Abort:
            sys.exit(_INTERRUPTED)
        except (click.ClickException, TierstoreError, OSError) as error:
            click.echo(f"tierstore: error: {_rank()}{_one_line(error)}", err=True)
            sys.exit(_CHECK_FAILED if isinstance(error, ChecksumError) else _BAD_INPUT)
        sys.exit(status if isinstance(status, int) else _DONE)


def _rank() -> str:
    """Which of several ranks speaks: torchrun mixes what they print."""
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    return f"rank {os.environ['RANK']}: " if several and "RANK" in os.environ else ""


def _one_line(error: Exception) -> str:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):  # whose message is the whole help
        path = error.ctx.command_path if error.ctx is not None else "tierstore"
        text = f"no command given; see {path} --help"
    elif isinstance(error, click.ClickException):
        text = error.format_message()
    elif isinstance(error, OSError) and error.strerror is not None:
        names = [
            os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)
        ]
        text = ": ".join([*names, error.strerror])
    else:
        text = str(error)
    return " ".join(text.split()) or type(error).__name__


@click.command(
    "tierstore",
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(__version__, prog_name="tierstore")
def cli() -> None:
    """Train Mixture-of-Experts models that are larger than memory."""


def _show_warning(show: Callable[..., None]) -> Callable[..., None]:
    """Shows a UserWarning, which the user is meant to read, as one line without a place in the code; others by ``show``."""

    def one_line(message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
        if issubclass(category, UserWarning):
            click.echo(f"tierstore: warning: {_rank()}{' '.join(str(message).split())}", err=True)
        else:
            show(message, category, *where, **options)

    return one_line


def main() -> NoReturn:
    """The console script."""
    warnings.showwarning = _show_warning(warnings.showwarning)
    cli.main()


if __name__ == "__main__":
    main()
