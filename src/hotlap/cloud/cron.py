"""Have `hotlap reap` run every few minutes: a line in the user's crontab, or a systemd timer where there is no cron."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from hotlap import durable
from hotlap.config import CloudConfig, hotlap_home
from hotlap.errors import UsageError

_MARK = "# hotlap reap"
_UNIT = "hotlap-reap"


def install(settings: CloudConfig, units: Path | None = None) -> list[str]:
    """Set it up, once however often it is called, and return what was written and where.

    Raises:
        UsageError: this machine has neither cron nor systemd.
    """
    # Never less often than the worst case says, and cron counts minutes up to 59.
    minutes = max(1, min(59, int(settings.reaper.period_minutes)))
    if shutil.which("crontab"):
        listed = subprocess.run(["crontab", "-l"], capture_output=True, text=True)
        if listed.returncode != 0 and "no crontab" not in listed.stderr:
            raise UsageError(f"The crontab cannot be read, so it is left as it is: {listed.stderr.strip()}.")
        table = crontab_with(listed.stdout, minutes, hotlap_home())
        done = subprocess.run(["crontab", "-"], input=table, capture_output=True, text=True)
        if done.returncode != 0:
            raise UsageError(f"crontab refuses the new table: {done.stderr.strip()}.")
        return [f"written to the crontab: {table.splitlines()[-1]}", _key_line()]
    if shutil.which("systemctl"):
        folder = units or Path.home() / ".config" / "systemd" / "user"
        durable.make_dirs(folder)
        said: list[str] = []
        for name, text in systemd_units(minutes, hotlap_home()).items():
            durable.replace(folder / name, text.encode())
            said += [f"written to {folder / name}:", text]
        commands = (["daemon-reload"], ["enable", "--now", f"{_UNIT}.timer"])
        for command in commands:
            done = subprocess.run(["systemctl", "--user", *command], capture_output=True, text=True)
            if done.returncode != 0:
                raise UsageError(f"systemctl --user {' '.join(command)} failed: {done.stderr.strip()}.")
        return [*said, _key_line()]
    raise UsageError(
        f"This machine has neither crontab nor systemctl. Run this every {minutes} minutes in another way: "
        f"{command_line(hotlap_home())}"
    )


def command_line(home: Path) -> str:
    """One pass, with the environment of `reaper.env` if it is there: cron and systemd give it none of yours."""
    env = shlex.quote(str(home / "reaper.env"))
    python = shlex.quote(sys.executable)
    run = f"HOTLAP_HOME={shlex.quote(str(home))} {python} -m hotlap reap >> {shlex.quote(str(home / 'reap.log'))} 2>&1"
    return f"set -a; [ ! -f {env} ] || . {env}; set +a; {run}"


def crontab_with(before: str, minutes: int, home: Path) -> str:
    """The table with this home's line last, and only once: another home has another ledger, and keeps its line. A
    percent sign means a new line to cron."""
    every = "*" if minutes == 1 else f"*/{minutes}"
    command = command_line(home).replace("%", r"\%")
    mine = f"HOTLAP_HOME={shlex.quote(str(home))} ".replace("%", r"\%")
    others = [line for line in before.splitlines() if not (line.endswith(_MARK) and mine in line)]
    return "\n".join([*others, f"{every} * * * * {command} {_MARK}"]) + "\n"


def systemd_units(minutes: int, home: Path) -> Mapping[str, str]:
    command = command_line(home).replace("%", "%%")
    return {
        f"{_UNIT}.service": f"[Service]\nType=oneshot\nExecStart=/bin/sh -c {shlex.quote(command)}\n",
        f"{_UNIT}.timer": (
            f"[Timer]\nOnBootSec=1min\nOnUnitActiveSec={minutes}min\nAccuracySec=5s\n\n[Install]\nWantedBy=timers.target\n"
        ),
    }


def _key_line() -> str:
    return (
        f"Providers need their keys there too: put RUNPOD_API_KEY=... into {hotlap_home() / 'reaper.env'} "
        f"(mode 600), for instance with a key that may only read and write pods."
    )
