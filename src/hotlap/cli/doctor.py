"""`hotlap doctor`: what this machine has, what works on it, and what is missing for the rest."""

import importlib.metadata
import json
import os
import platform
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from hotlap import errors
from hotlap.cli import doctor_money

_PROBE_S = 120.0


@dataclass(frozen=True)
class Extra:
    """A part of hotlap that is installed on demand, and what it is good for. Its packages are pyproject.toml's."""

    name: str
    gives: str


EXTRAS = (
    Extra("train", "training, generating, converting models"),
    Extra("gpt", "studies of small GPTs: hotlap research"),
    Extra("postgres", "a ledger that several machines share"),
    Extra("volume", "files of a network volume: hotlap volume, hotlap pull"),
    Extra("modal", "machines of Modal: hotlap launch --on modal"),
    Extra("report", "charts of studies, hotlap report, hotlap dashboard"),
    Extra("tensorboard", "hotlap sink --to tensorboard"),
    Extra("wandb", "hotlap sink --to wandb"),
    Extra("mlflow", "hotlap sink --to mlflow"),
    Extra("trackio", "hotlap sink --to trackio"),
    Extra("optuna", "Optuna's samplers as proposers of a study"),
    Extra("ray", "trials of a study on a Ray cluster"),
    Extra("docs", "building the documentation site"),
    Extra("bench", "running the benchmarks that measure against other projects"),
    Extra("dev", "running the tests and the checks of style and types"),
)


@click.command(
    epilog="""\b
Example:
  hotlap doctor --json
"""
)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def doctor(as_json: bool) -> None:
    """Tell what works here: machine, disk, torch, limits, models, extras.

    Starts no training. Where there is a key to rent with, its provider is asked what it opens; else no network is used.
    """
    report = examine()
    if as_json:
        click.echo(json.dumps(report, indent=1))
    elif sys.stdout.isatty():
        _print_table(list(_rows(report)))
    else:
        for name, finding in _rows(report):
            click.echo(f"{name}: {finding}")


def examine() -> dict[str, Any]:
    """Everything there is to tell, as JSON values. What cannot be found out stands in `problems`, in words."""
    import hotlap

    problems: list[str] = []
    return {
        "hotlap": hotlap.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "num_cores": _num_cores(),
        "memory": _memory(),
        "limits": _limits(problems),
        "money": doctor_money.examine(problems),
        "disk": _disk(problems),
        "artifacts": _artifacts(),
        "torch": _torch(problems),
        "extras": _extras(problems),
        "problems": problems,
    }


# --- the machine ---


def _num_cores() -> int:
    """Those that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _memory() -> dict[str, int] | None:
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    kib = dict(re.findall(r"^(\w+):\s+(\d+) kB$", path.read_text(), re.MULTILINE))
    return {"total_bytes": int(kib["MemTotal"]) * 1024, "available_bytes": int(kib["MemAvailable"]) * 1024}


def _limits(problems: list[str]) -> dict[str, Any]:
    from hotlap.config import hotlap_home, load_cloud

    minutes = None
    try:
        minutes = load_cloud().limits.max_slice_minutes
    except errors.HotlapError as error:
        problems.append(str(error))
    return {"max_slice_minutes": minutes, "file": str(hotlap_home() / "cloud.toml")}


def _disk(problems: list[str]) -> list[dict[str, Any]]:
    from hotlap import durable
    from hotlap.config import hotlap_home

    found: list[dict[str, Any]] = []
    for what, path in (("HOTLAP_HOME", hotlap_home()), ("working directory", Path.cwd())):
        place = next(folder for folder in (path, *path.parents) if folder.exists())
        try:
            free_bytes = durable.free_bytes(place)
        except errors.StorageFailed as error:
            free_bytes = None
            problems.append(str(error))
        found.append({"what": what, "path": str(path), "free_bytes": free_bytes})
    return found


def _artifacts() -> list[dict[str, Any]]:
    """The base models and data sets that were fetched. Sizes are compared; no file is read."""
    from hotlap import durable
    from hotlap.config import hotlap_home
    from hotlap.data.cache import facts_if_whole

    found: list[dict[str, Any]] = []
    for manifest in sorted((hotlap_home() / "artifacts").glob(f"*/{durable.MANIFEST}")):
        folder = manifest.parent
        if folder.name.startswith("."):  # being built, or left by a fetch that was killed
            continue
        num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        is_whole = facts_if_whole(folder) is not None
        found.append({"name": folder.name, "folder": str(folder), "bytes": num_bytes, "is_whole": is_whole})
    return found


# --- torch and packages ---


def _torch(problems: list[str]) -> dict[str, Any] | None:
    """What `hotlap.train.probe` finds in a process of its own; None if torch is not there or does not start."""
    from hotlap import child, clock

    version = _version("torch")
    if version is None:
        problems.append(f"torch is not installed, so nothing can be trained here. Run: {_install_command('train')}")
        return None
    click.echo("Measuring what torch can do here; this takes a few seconds.", err=True)
    argv = [sys.executable, "-m", "hotlap.train.probe"]
    end = child.run_child(argv, clock.Deadline(clock.monotonic_s() + _PROBE_S))
    if end.exit_code in (errors.INTERRUPTED, -signal.SIGTERM):
        raise KeyboardInterrupt
    if end.exit_code != errors.DONE or end.result is None:
        last_line = (end.last_words.splitlines() or ["it said nothing"])[-1]
        problems.append(
            f"torch {version} is installed and does not work: the probe ended with exit code {end.exit_code} "
            f"({last_line}). Install it again, in a build for this machine."
        )
        return None
    about_the_child = ("event", "exit_code", "reason", "message")
    return {key: value for key, value in end.result.items() if key not in about_the_child}


def _extras(problems: list[str]) -> list[dict[str, Any]]:
    try:
        requirements = importlib.metadata.requires("hotlap") or []
    except importlib.metadata.PackageNotFoundError:
        problems.append("hotlap runs from a folder and is not installed, so its extras are not known. Run: make setup")
        return []
    return [_extra(extra, requirements) for extra in EXTRAS]


def _extra(extra: Extra, requirements: list[str]) -> dict[str, Any]:
    mine = [text.partition(";")[0].strip() for text in requirements if _extra_of(text) == extra.name]
    missing = [text for text in mine if not _is_met(text)]
    return {
        "name": extra.name,
        "gives": extra.gives,
        "is_installed": not missing,
        "missing": missing,
        "install": _install_command(extra.name),
    }


def _install_command(extra: str) -> str:
    return f"pip install 'hotlap[{extra}]'"


def _extra_of(requirement: str) -> str | None:
    match = re.search(r"""extra\s*==\s*["']([\w.-]+)["']""", requirement)
    return match[1] if match else None


def _is_met(requirement: str) -> bool:
    """Whether a package is there, and at least in the version asked for."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    version = _version(match[0]) if match else None
    least = re.search(r">=\s*([\d.]+)", requirement)
    return version is not None and (least is None or _numbers(version) >= _numbers(least[1]))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> list[int]:
    release = re.match(r"[\d.]*\d", version)
    return [int(number) for number in release[0].split(".")] if release else []


# --- rendering ---


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "hotlap", f"{report['hotlap']}, Python {report['python']} on {report['platform']}"
    yield "cores", str(report["num_cores"])
    memory = report["memory"]
    if memory:
        yield "memory", f"{_gb(memory['total_bytes'])}, {_gb(memory['available_bytes'])} of it available"
    for place in report["disk"]:
        yield "disk", f"{_gb(place['free_bytes'])} free for {place['what']}, {place['path']}"
    yield from _torch_rows(report["torch"])
    limits = report["limits"]
    if limits["max_slice_minutes"] is not None:
        yield "slice cap", f"{limits['max_slice_minutes']:g} minutes, as {limits['file']} says"
    yield from doctor_money.rows(report["money"])
    for artifact in report["artifacts"]:
        state = "" if artifact["is_whole"] else ", damaged: fetch it again with hotlap prefetch"
        yield "artifact", f"{artifact['name']}, {_gb(artifact['bytes'])}{state}"
    if not report["artifacts"]:
        yield "artifact", "none yet; to fetch one: hotlap prefetch smollm2-135m"
    for extra in report["extras"]:
        missing = f"{', '.join(extra['missing'])} missing for {extra['gives']}; run: {extra['install']}"
        yield f"extra {extra['name']}", f"installed, for {extra['gives']}" if extra["is_installed"] else missing
    for problem in report["problems"]:
        yield "problem", problem


def _torch_rows(torch: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    if torch is None:
        yield "torch", "does not work here"
        return
    build = f"CUDA {torch['cuda']}" if torch["cuda"] else "no CUDA"
    yield "torch", f"{torch['torch']}, {build}, {torch['num_threads']} threads with {torch['cpu_capability']}"
    for device in torch["devices"]:
        size = f", {_gb(device['memory_bytes'])}" if device["memory_bytes"] else ""
        yield "device", f"{device['name']}{size}"
    if not torch["devices"]:
        yield "device", "the processor; there is no accelerator"
    yield "precision", torch["verdict"]


def _gb(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 1e9:,.1f} GB"


def _print_table(rows: list[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, finding in rows:
        table.add_row(name, Text(finding, style="red" if name == "problem" else ""))
    Console(highlight=False).print(table)
