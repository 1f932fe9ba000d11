"""A list of commands that says what each does in a whole sentence, and on which occasion one wants it."""

from collections.abc import Mapping
from typing import Any

import click

# Click cuts a sentence where it would need a second line; nobody chooses a command by the half of one.
_WHOLE = 1000


class Commands(click.Group):
    """A group whose help has its commands in the order in which they came, under `headings`, by name of command."""

    def __init__(self, *args: Any, headings: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._headings = headings or {}

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
