"""The `hotlap` command: wiring and rendering. Every command imports what it needs when it runs."""

import errno
import importlib
import json
import os
import sys
import traceback
from collections.abc import Iterator, MutableMapping
from typing import NoReturn

import click

import hotlap
from hotlap.cli.commands import Commands
from hotlap.errors import HotlapError, storage_failure

# Errors that come from a path somebody gave us, when they were not met while writing (those are `StorageFailed`).
_PATHS_OF_THE_USER = {errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}


_COMMANDS: dict[str, dict[str, str]] = {
    "Begin": {"demo": "demo", "doctor": "doctor", "prefetch": "prefetch", "init": "init", "preview": "preview"},
    "Train, and look at it": {
        "train": "train",
        "runs": "runs",
        "logs": "runs",
        "stop": "runs",
        "generate": "generate",
        "report": "report",
        "dashboard": "dashboard",
        "sink": "sink",
    },
    "Rent machines": {
        "launch": "launch",
        "machines": "machines",
        "budget": "budget",
        "reap": "reap",
        "volume": "volume",
        "pull": "volume",
    },
    "From an adapter to a served model": {"export": "export", "serve": "serve", "bench": "serve", "push": "push"},
    "Search and race": {"research": "research", "speedrun": "speedrun_compare"},
}
"""Every command by occasion, and the module here that has it. Only the one that is asked for is imported: a rented
machine has not all of them, and who asks for one does not wait for the others."""

_HEADINGS = {name: heading for heading, modules in _COMMANDS.items() for name in modules}


class _Later(MutableMapping[str, click.Command]):
    """Commands by name, each found when it is asked for."""

    def __init__(self) -> None:
        self._found: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._found:
            module = importlib.import_module(f"hotlap.cli.{_COMMANDS[_HEADINGS[name]][name]}")
            self._found[name] = getattr(module, name)
        return self._found[name]

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._found[name] = command

    def __delitem__(self, name: str) -> None:
        del self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_HEADINGS)

    def __len__(self) -> int:
        return len(_HEADINGS)


@click.group(
    cls=Commands, commands=_Later(), headings=_HEADINGS, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(hotlap.__version__)
def cli() -> None:
    """Fine-tune small language models in laps: time-boxed slices that resume bit for bit.

    \b
    Example:
      hotlap demo
    """


def main() -> NoReturn:
    """Run a command; end with the exit code that stands in the table of `errors.py`."""
    try:
        _require_utf8(sys.argv[1:])
        code = cli.main(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.Abort:
        _leave(130, "interrupted", "interrupted")
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        _leave(2, "usage", "which command? They stand above.")
    except click.ClickException as error:
        _leave(2, "usage", error.format_message())
    except HotlapError as error:
        _leave(error.exit_code, error.reason, str(error))
    except BrokenPipeError:  # `hotlap runs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
    except OSError as error:
        if error.errno in _PATHS_OF_THE_USER:
            _leave(2, "usage", f"{error.filename}: {error.strerror}. Check the path and who may read it.")
        failure = storage_failure(error, f"{error.filename or 'A file'}: {error.strerror}")
        if failure is None or error.errno == errno.ENOENT:  # a file that we had reason to expect
            _report_bug(error)
        _leave(failure.exit_code, failure.reason, str(failure))
    except MemoryError as error:
        _leave(6, "oom", f"This machine has not the memory: {error}. Lower what is largest, data.seq_len for one.")
    except Exception as error:  # noqa: BLE001  (the last resort: every other error is ours to name)
        _report_bug(error)


def _report_bug(error: Exception) -> NoReturn:
    click.echo(_redacted("".join(traceback.format_exception(error))), err=True, nl=False)
    _leave(
        1, "unexpected", f"{type(error).__name__}: {error}. This is a bug of hotlap's; please report the lines above."
    )


def _require_utf8(arguments: list[str]) -> None:
    """Whatever is given here may end up in a JSON file, which holds UTF-8 only."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise click.UsageError(f"{argument!a} is not UTF-8. Rename it, or set a UTF-8 locale.") from None


def _redacted(text: str) -> str:
    """Without the secrets of this environment: whoever asks for help shows these lines to others."""
    from hotlap.secrecy import redactor

    return redactor()(text)


def _leave(code: int, reason: str, message: str) -> NoReturn:
    """Say why on the last line of standard error, which is one line, and as JSON where JSON was asked for."""
    from hotlap.cli.progress import plain

    message = _redacted(message)
    if "--json" in sys.argv:
        click.echo(json.dumps({"exit_code": code, "reason": reason, "message": message}))
    click.echo(plain(f"hotlap: exit {code} {reason}: {' '.join(message.split())}"), err=True)
    sys.exit(code)
