"""A group of commands. Its help shows whole summaries, and its errors name the commands that exist."""

from __future__ import annotations

import click

_WHOLE = 1000  # characters of a summary: all of it


class CommandGroup(click.Group):
    """A click group with whole summaries, and errors that list the commands. (click cuts summaries off.)"""

    def summaries(self, ctx: click.Context) -> list[tuple[str, str]]:
        """The name and the summary of each command, in the order of the help."""
        found = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        return [(name, command.get_short_help_str(_WHOLE)) for name, command in found if command is not None]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The summaries, wrapped."""
        with formatter.section("Commands"):
            formatter.write_dl(self.summaries(ctx))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with the commands that there are in the error."""
        known = self.list_commands(ctx)
        if args[0] not in known and not args[0].startswith("-"):
            raise click.UsageError(f"no command {args[0]!r}; expected one of {', '.join(known)}", ctx)
        return super().resolve_command(ctx, args)
