"""The ``tierstore`` command: runs the subcommand and turns its outcome into an exit status.

Exit statuses: 0 success; 1 a check failed; 2 bad usage or input, with one line on stderr.
``--help`` imports no subcommand and no torch: a subcommand is imported when it is run.
"""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from keyword import iskeyword
from types import FrameType
from typing import Any, NoReturn

import click

from tierstore import __version__
from tierstore.errors import ChecksumError, TierstoreError

DONE, CHECK_FAILED, BAD_INPUT = 0, 1, 2
INTERRUPTED = 130  # 128 + SIGINT, the shells' convention
_WHOLE = 1000  # a length limit in characters that cuts no summary

#: Commands whose passes are short. Their OpenMP workers keep spinning between passes, since waking them costs more than
#: spinning takes from the engine: on 2 cores, decoding a 1.5 B model token by token took 1.2 to 1.6 times as long without
#: it.
_SHORT_PASSES = ("generate", "serve")
#: Commands that train, or plan and measure training: they run without glibc's thread cache, with which decoding is some 5%
#: faster (``disable_thread_cache``).
_TRAINING = ("train", "deploy", "plan", "cache", "bench")

#: By command: the module that defines it, and its summary in ``tierstore --help``.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "train": ("tierstore.cli.train", "Train a Mixture-of-Experts model that is larger than memory."),
    "import": (
        "tierstore.cli.checkpoints",
        "Import a Hugging Face MoE checkpoint into a store, to train or serve it.",
    ),
    "export": (
        "tierstore.cli.checkpoints",
        "Export the model in a store as a Hugging Face checkpoint.",
    ),
    "generate": (
        "tierstore.cli.serving",
        "Generate text with the model in a store, within a memory budget.",
    ),
    "serve": (
        "tierstore.cli.serving",
        "Serve a store over an OpenAI-compatible API, within a memory budget.",
    ),
    "deploy": ("tierstore.cli.deploy", "Compress and package a store for serving."),
    "plan": ("tierstore.cli.plan", "Plan a run: bytes on each tier, whether they fit, and step time."),
    "doctor": (
        "tierstore.cli.doctor",
        "Show this machine's capabilities and the backend that each resolved to.",
    ),
    "verify": ("tierstore.cli.stores", "Read and check every record of every snapshot of a store."),
    "gc": ("tierstore.cli.stores", "Remove what a crash left behind and free the space."),
    "reshard": ("tierstore.cli.stores", "Reshard a store for a different number of ranks."),
    "cache": ("tierstore.cli.cache.group", "Record, import, replay and tune cache policies from traces."),
    "bench": (
        "tierstore.cli.bench",
        "Benchmark disks, stores, training, kernels, cache policies and links.",
    ),
}


class CommandGroup(click.Group):
    """A click group that shows summaries uncut; its errors list its commands."""

    def summaries(self, ctx: click.Context) -> list[tuple[str, str]]:
        """The name and summary of each command, in help order."""
        found = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        return [(name, command.get_short_help_str(_WHOLE)) for name, command in found if command is not None]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the summaries, wrapped."""
        with formatter.section("Commands"):
            formatter.write_dl(self.summaries(ctx))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve as click does; an unknown command raises an error that lists the commands."""
        known = self.list_commands(ctx)
        if args[0] not in known and not args[0].startswith("-"):
            raise click.UsageError(f"unknown command {args[0]!r}; expected one of {', '.join(known)}", ctx)
        return super().resolve_command(ctx, args)


class LazyGroup(CommandGroup):
    """A group that imports a command when it is run, and exits with the statuses above."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands of ``COMMANDS``, in its order."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command."""
        if cmd_name not in COMMANDS:
            return None
        module, _ = COMMANDS[cmd_name]
        name = f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def summaries(self, ctx: click.Context) -> list[tuple[str, str]]:
        """Read them from ``COMMANDS``: click would import every command."""
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
        """Run the command and exit. Bugs keep their traceback."""
        if isinstance(
            sys.stdout, io.TextIOWrapper
        ):  # file names need not be UTF-8; stderr escapes them already
            sys.stdout.reconfigure(errors="backslashreplace")
        if _command(sys.argv[1:] if args is None else args) not in _SHORT_PASSES:
            # Set before torch is imported: by default OpenMP's idle workers spin on cores that the engine needs.
            os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        try:
            status = super().main(
                args, prog_name or "tierstore", complete_var, standalone_mode=False, **extra
            )
        except click.Abort:
            sys.exit(INTERRUPTED)
        except (click.ClickException, TierstoreError, OSError) as error:
            click.echo(f"tierstore: error: {_rank()}{_one_line(error)}", err=True)
            sys.exit(CHECK_FAILED if isinstance(error, ChecksumError) else BAD_INPUT)
        sys.exit(status if isinstance(status, int) else DONE)


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    """Install ``handler`` for the signals ``numbers`` within the block."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM raises SystemExit(143) in the block, so that it cleans up; 143 is the status that shells report."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handled(leave, signal.SIGTERM):
        yield


class Interrupts:
    """Whether SIGINT or SIGTERM has ``requested`` that a loop end after its current step; a second one exits at once."""

    requested = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise SystemExit(128 + number)
        self.requested = True

    @classmethod
    @contextmanager
    def install(cls) -> Iterator[Interrupts]:
        """Handle the signals within the block."""
        interrupts = cls()
        with _handled(interrupts._handle, signal.SIGINT, signal.SIGTERM):
            yield interrupts


def _rank() -> str:
    """A prefix that names the rank if there are several, since torchrun mixes their output."""
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    return f"rank {os.environ['RANK']}: " if several and "RANK" in os.environ else ""


def _one_line(error: Exception) -> str:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):  # its message is the whole help
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
    """Train and serve Mixture-of-Experts models that are larger than memory."""


def _show_warning(show: Callable[..., None]) -> Callable[..., None]:
    """Show a UserWarning as one line without its code location; pass other warnings to ``show``."""

    def one_line(message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
        if issubclass(category, UserWarning):
            click.echo(f"tierstore: warning: {_rank()}{' '.join(str(message).split())}", err=True)
        else:
            show(message, category, *where, **options)

    return one_line


def _command(words: Sequence[str]) -> str:
    return next((word for word in words if not word.startswith("-")), "")


def disable_thread_cache() -> None:
    """Restarts the process with glibc's thread cache of freed memory off (``has_thread_cache`` says why), unless the
    environment sets the cache's size. glibc reads it only when a process starts.
    """
    from tierstore.machine import NO_THREAD_CACHE  # the others start without it

    tunables = os.environ.get("GLIBC_TUNABLES", "")
    try:
        glibc = (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except ValueError:  # another C library
        glibc = False
    if not glibc or NO_THREAD_CACHE.partition("=")[0] in tunables:
        return
    os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, (tunables, NO_THREAD_CACHE)))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def main() -> NoReturn:
    """The entry point of the console script."""
    if _command(sys.argv[1:]) in _TRAINING:
        disable_thread_cache()
    warnings.showwarning = _show_warning(warnings.showwarning)
    cli.main()


if __name__ == "__main__":
    main()
