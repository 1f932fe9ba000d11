"""The `hotlap` command: wiring and rendering. Every command imports what it needs when it runs."""

import errno
import json
import os
import sys
import traceback
from typing import NoReturn

import click

import hotlap
from hotlap.cli.budget import budget
from hotlap.cli.commands import Commands
from hotlap.cli.dashboard import dashboard
from hotlap.cli.demo import demo
from hotlap.cli.doctor import doctor
from hotlap.cli.export import export
from hotlap.cli.generate import generate
from hotlap.cli.init import init
from hotlap.cli.launch import launch
from hotlap.cli.machines import machines
from hotlap.cli.prefetch import prefetch
from hotlap.cli.preview import preview
from hotlap.cli.push import push
from hotlap.cli.reap import reap
from hotlap.cli.report import report
from hotlap.cli.research import research
from hotlap.cli.runs import logs, runs, stop
from hotlap.cli.serve import bench, serve
from hotlap.cli.sink import sink
from hotlap.cli.speedrun import speedrun
from hotlap.cli.speedrun_compare import ablate, duel, transfer
from hotlap.cli.train import train
from hotlap.cli.volume import pull, volume
from hotlap.errors import HotlapError, storage_failure

# Errors that come from a path somebody gave us, when they were not met while writing (those are `StorageFailed`).
_PATHS_OF_THE_USER = {errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(hotlap.__version__)
def cli() -> None:
    """Fine-tune small language models in laps: time-boxed slices that resume bit for bit.

    \b
    Example:
      hotlap demo
    """


cli.add_commands("Begin", (demo, doctor, prefetch, init, preview))
cli.add_commands("Train, and look at it", (train, runs, logs, stop, generate, report, dashboard, sink))
cli.add_commands("Rent machines", (launch, machines, budget, reap, volume, pull))
cli.add_commands("From an adapter to a served model", (export, serve, bench, push))
cli.add_commands("Search and race", (research, speedrun))
for command in (duel, ablate, transfer):
    speedrun.add_command(command)


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
    traceback.print_exception(error)
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


def _leave(code: int, reason: str, message: str) -> NoReturn:
    """Say why on the last line of standard error, which is one line, and as JSON where JSON was asked for."""
    from hotlap.cli.progress import plain

    if "--json" in sys.argv:
        click.echo(json.dumps({"exit_code": code, "reason": reason, "message": message}))
    click.echo(plain(f"hotlap: exit {code} {reason}: {' '.join(message.split())}"), err=True)
    sys.exit(code)
