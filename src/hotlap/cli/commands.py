"""A list of commands that says what each does in a whole sentence, and on which occasion one wants it."""

from collections.abc import Iterable
from typing import Any

import click

# Click cuts a sentence where it would need a second line; nobody chooses a command by the half of one.
_WHOLE = 1000


class Commands(click.Group):
    """A group whose help has its commands under headings, in the order in which they were added."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._headings: dict[str, str] = {}

    def add_commands(self, heading: str, commands: Iterable[click.Command]) -> None:
        for command in commands:
            self.add_command(command)
            self._headings[str(command.name)] = heading

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.commands[name]
            rows.setdefault(self._headings.get(name, "Commands"), []).append((name, command.get_short_help_str(_WHOLE)))
        for heading, mine in rows.items():
            with formatter.section(heading):
                formatter.write_dl(mine)
