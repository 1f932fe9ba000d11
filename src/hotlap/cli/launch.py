"""`hotlap launch`: rent a machine a slice, run, give back, until the run is done."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotlap import clock, durable

if TYPE_CHECKING:
    from hotlap.cli.launch_work import Place, Work
    from hotlap.cli.progress import SliceProgress
    from hotlap.cloud.launcher import Launcher, LeaseEnd, Stops
    from hotlap.cloud.provider import Offer, Provider, Where
    from hotlap.cloud.rental import ChainEnd, WorstCase
    from hotlap.config import CloudConfig, RunConfig

_START_PATIENCE_S = 30.0


@click.command(
    epilog="""\b
Example:
  hotlap launch --on local --base-model smollm2-135m --dataset data/train.jsonl --slices 3
"""
)
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option("--on", "provider", default="runpod", show_default=True, help="local, ssh, runpod or modal.")
@click.option(
    *("--job", "job"),
    type=click.Choice(["qlora", "research", "verify"]),
    default="qlora",
    show_default=True,
    help="A run's slices, a study's trials, or a submission's runs.",
)
@click.option("--slices", "num_slices", default=1, show_default=True, help="At most so many, each on its own machine.")
@click.option("--gpu", "gpus", multiple=True, help="Kind of GPU; several are tried in this order.  [default: cheapest]")
@click.option("--volume-id", help="Network volume on which run and data lie.  [default, on Modal: modal:hotlap]")
@click.option("--data-center", "regions", multiple=True, help="Where to rent; several are tried in this order.")
@click.option("--cloud", "tier", type=click.Choice(["secure", "community"]), help="Class of machines.  [default: any]")
@click.option("--image", help="Container image with Python 3.11 and torch, by its digest.  [default: from cloud.toml]")
@click.option("--base-model", help="As the machine finds it: a folder, a hub id, a package, or a short name.")
@click.option("--dataset", help="A JSONL file, as the machine finds it.")
@click.option("--output-dir", help="Folder in which runs have theirs.  [default: runs]")
@click.option("--run", "run_name", help="Name of the run; the same name resumes.  [default: from the settings]")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting, as in lora.rank=32.")
@click.option("--trials", "num_trials", type=click.IntRange(min=1), help="Of --job research: changes to try.")
@click.option("--runs", "num_runs", type=click.IntRange(min=1), default=3, show_default=True, help="Of --job verify.")
@click.option("--offers", "shows_offers", is_flag=True, help="List what fits the run, cheapest slice first.")
@click.option("--prepare", "only_prepares", is_flag=True, help="Install, prefetch and pack on the volume; no slice.")
@click.option("--detach", is_flag=True, help="Leave a process behind that sees to it, and return.")
@click.option("--dry-run", is_flag=True, help="Print the worst case and rent nothing.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def launch(**asked: Any) -> int:
    """Rent machines and run slices on them, within the budget of cloud.toml.

    Each slice has a machine of its own: its worst case is held before the machine is made, the machine is ended and
    proven dead, and what it cost is booked. Exits as the last slice did. CONFIG is a TOML file; for research that of
    a study, which is brought along; for verify a submission's folder, which lies on the volume as it lies here.

    What a slice needs is brought to a network volume first, and once: this hotlap, its environment, the model and the
    packed data.
    """
    return _launch(_Asked(**asked))


@dataclass(frozen=True)
class _Asked:
    """The command line."""

    config: Path | None
    provider: str
    job: str
    num_slices: int
    gpus: tuple[str, ...]
    volume_id: str | None
    regions: tuple[str, ...]
    tier: str | None
    image: str | None
    base_model: str | None
    dataset: str | None
    output_dir: str | None
    run_name: str | None
    overrides: tuple[str, ...]
    num_trials: int | None
    num_runs: int
    shows_offers: bool
    only_prepares: bool
    detach: bool
    dry_run: bool
    as_json: bool

    def settings(self) -> "RunConfig | None":
        """Of the run; an errand has none."""
        from hotlap.config import load_run

        if self.job != "qlora":
            return None
        flags = {"base_model": self.base_model, "dataset": self.dataset, "output_dir": self.output_dir}
        return load_run(self.config, self.overrides, **flags, run=self.run_name)

    def where(self) -> "Where":
        from hotlap.cloud.provider import Where

        return Where(self.volume_id, self.regions, self.tier.upper() if self.tier else None)


def _launch(asked: _Asked) -> int:
    from hotlap.cloud import rental
    from hotlap.config import load_cloud

    settings, cloud = asked.settings(), load_cloud()
    asked = replace(asked, volume_id=rental.volume_of(asked.provider, asked.volume_id))
    rental.require_slices(asked.num_slices)
    with closing(rental.open_provider(asked.provider, cloud)) as provider:
        return _launch_on(provider, asked, settings, cloud)


def _launch_on(provider: "Provider", asked: _Asked, settings: "RunConfig | None", cloud: "CloudConfig") -> int:
    from hotlap.cli import launch_offers, launch_work
    from hotlap.cloud import forewords, launches, rental
    from hotlap.cloud.ledger import Ledger

    if asked.shows_offers:
        return launch_offers.show(settings, provider, asked.where(), asked.as_json)
    ledger = Ledger(cloud)
    if settings and rental.is_done(settings, provider, launches.last_ended(settings.run_name, ledger)):
        message = f"{settings.run_name} is done; nothing is rented. Something else needs --run NAME"
        return _tell(asked.as_json, settings.run_name, 0, "done", message, [])
    _require_a_place(provider, asked, cloud)
    offers = rental.offers_for(provider, asked.gpus, asked.where())
    image = rental.image_of(provider.traits, asked.image, cloud)
    place = launch_work.Place(provider, asked.volume_id, image, asked.only_prepares)
    work = _errand(asked, place, cloud) if settings is None else launch_work.of_slices(settings, place)
    run, num_slices = work.job.run, 0 if asked.only_prepares else asked.num_slices
    if not work.jobs(num_slices):
        return _tell(asked.as_json, run, 0, "done", "there is nothing to be prepared", [])
    if asked.job == "research" and asked.config is not None:
        _say(launch_work.session_in_words(asked.config, work, offers, place))
        _say(launch_work.room_in_words(work) if work.results else None)
    _say(forewords.prices_in_words(asked.provider, cloud), forewords.image_in_words(provider.traits, image))
    worst = rental.worst_case(offers, work.jobs(num_slices), provider, cloud)
    unwatched = forewords.unwatched_in_words(provider.traits, cloud)
    if asked.dry_run:
        _say(unwatched)
        return _tell_worst(worst, run, asked.as_json)
    _say(_in_words(worst, asked.provider, worst.num_machines), unwatched)
    launches.require_no_other(run)
    if asked.detach:
        return _leave_behind(run, asked.as_json)
    launches.record(run)
    with _stops() as stops, _Display(settings, work.results) as display:
        launcher = rental.launcher_of(provider, ledger, cloud, stops, display.on_event, display.say)
        end = _run(launcher, work, offers, num_slices, display)
    code = rental.leave_code(stops.is_pressed(), end)
    return _tell(asked.as_json, run, code, end.reason, end.message, list(end.leases))


def _errand(asked: _Asked, place: "Place", cloud: "CloudConfig") -> "Work":
    from hotlap.cli import launch_work

    errand, kept = launch_work.errand_of(asked.job, asked.config, place, cloud, asked.num_trials, asked.num_runs)
    launch_work.require_no_secret(errand, kept)
    work = launch_work.of_errand(errand, kept, place)
    return work if work.results is None else replace(work, renew=lambda: _errand(asked, place, cloud).job)


def _require_a_place(provider: "Provider", asked: _Asked, settings: "CloudConfig") -> None:
    """Somewhere to train that disturbs nobody, and somewhere for what is trained. Errands come home by themselves."""
    from hotlap import guard
    from hotlap.cloud import rental

    if provider.traits.name == "local":
        guard.require_not_serving(settings)
    if asked.job == "qlora":
        rental.require_volume(provider.traits, asked.volume_id)


def _run(launcher: "Launcher", work: "Work", offers: "list[Offer]", num_slices: int, display: "_Display") -> "ChainEnd":
    from hotlap.cloud import preparing, rental

    if work.preparation is None:
        return rental.chain(launcher, work.job, offers, num_slices, display.on_lease_end, work.renew)
    ready = preparing.prepare(launcher, work.preparation, offers, display.on_lease_end)
    click.echo(f"preparing the volume cost {ready.cost.text()}", err=True)
    if not ready.is_whole or num_slices == 0:
        code, reason, message = rental.answer_of(ready.leases[-1])
        return rental.ChainEnd(code, reason, message or "the volume is prepared", ready.leases)
    end = rental.chain(launcher, work.job, offers, num_slices, display.on_lease_end)
    return replace(end, leases=(*ready.leases, *end.leases))


class _Display:
    """Progress of slice after slice on standard error, and a line about each machine's end."""

    def __init__(self, settings: "RunConfig | None", results: str | None) -> None:
        from hotlap.cli import launch_work
        from hotlap.cloud.bundle import Inbox

        self._settings, self._results = settings, results
        self._progress: SliceProgress | None = None
        self._inbox = None if results is None else Inbox(Path(), (results,), launch_work.take_home)

    def __enter__(self) -> "_Display":
        return self

    def __exit__(self, *_error: object) -> None:
        self._close()

    def on_event(self, event: dict[str, Any]) -> None:
        from hotlap.cli.progress import SliceProgress, plain

        if event["event"] == "arrived":
            click.echo(f"on the volume: {plain(str(event.get('step')))}, {event.get('seconds')} s", err=True)
        if event["event"] == "bundle" and self._inbox is not None:
            for name in self._inbox.take(event):
                click.echo(f"came home: {plain(name)}", err=True)
        if event["event"] == "start" and self._settings is not None:
            self._close()
            self._progress = SliceProgress(self._settings).__enter__()
            # The machine's monotonic clock is not this one's.
            left_s = self._settings.slice.cap_s - event["elapsed_s"]
            event = {**event, "deadline_at_s": clock.monotonic_s() + left_s}
        if self._progress is not None:
            self._progress.on_event(event)

    def say(self, text: str) -> None:
        if self._progress is not None:
            self._progress.on_talk(text)
        else:
            click.echo(text, err=True)

    def on_lease_end(self, lease_end: "LeaseEnd") -> None:
        from hotlap.cli import launch_work
        from hotlap.cloud.receipts import receipt_path

        self._close()
        if self._inbox is not None and (wrong := self._inbox.what_is_wrong()):
            click.echo(f"not all results came home: {wrong}. Run the same command again, or name a volume", err=True)
        lease = lease_end.lease
        click.echo(
            f"machine {lease.machine_id} is proven dead; it cost {lease.amount.text()}. "
            f"Receipt: {receipt_path(lease.lease_id)}",
            err=True,
        )
        if self._results is not None:
            launch_work.show_study(Path(self._results))

    def _close(self) -> None:
        if self._progress is not None:
            self._progress.__exit__(None, None, None)
            self._progress = None


@contextmanager
def _stops() -> Generator["Stops"]:
    """Signals as questions that the launcher asks, so that none interrupts a termination."""
    from hotlap.cloud.launcher import Stops

    stops = Stops()

    def ask(number: int, _frame: object) -> None:
        if number == signal.SIGINT or not stops.is_asked():
            stops.num_asked += 1
        click.echo("Giving the machine back. A second Ctrl-C leaves without the proof.", err=True)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield stops
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _leave_behind(run: str, as_json: bool) -> int:
    """Start the same command without --detach, apart from this terminal."""
    from hotlap.cloud import launches
    from hotlap.errors import HotlapError

    log = launches.launch_log(run)
    durable.make_dirs(log.parent)
    durable.replace(log, b"")
    args = [arg for arg in sys.argv[1:] if arg != "--detach"]
    out = os.open(log, os.O_WRONLY)
    process = subprocess.Popen(
        [sys.executable, "-m", "hotlap", *args],
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=out,
        start_new_session=True,
    )
    os.close(out)
    patience = clock.Deadline(clock.monotonic_s() + _START_PATIENCE_S)
    while launches.supervisor(run) != process.pid and process.poll() is None and not patience.is_over():
        clock.sleep_s(0.05)
    if process.poll() not in (None, 0):
        last_line = (log.read_text().splitlines() or ["it said nothing"])[-1]
        raise HotlapError(f"The process that was to see to {run} ended at once: {last_line}")
    answer = {"run": run, "pid": process.pid, "log": str(log), "exit_code": 0, "reason": "done"}
    click.echo(json.dumps(answer) if as_json else f"process {process.pid} sees to {run}; to end it: hotlap stop {run}")
    if not as_json:
        click.echo(f"it talks in {log}", err=True)
    process.returncode = 0  # left behind on purpose
    return 0


def _say(*said: str | None) -> None:
    for text in filter(None, said):
        click.echo(text, err=True)


def _tell_worst(worst: "WorstCase", run: str, as_json: bool) -> int:
    facts = {
        "run": run,
        "num_machines": worst.num_machines,
        "ttl_s": worst.ttl_s,
        "gpu_s": worst.total.gpu_s,
        "usd_micros": worst.total.usd_micros,
        "loss_if_the_launcher_dies_usd_micros": worst.loss.usd_micros,
        "is_dry_run": True,
    }
    click.echo(json.dumps(facts) if as_json else _in_words(worst, "dry run", worst.num_machines))
    return 0


def _in_words(worst: "WorstCase", where: str, num_slices: int) -> str:
    return (
        f"worst case ({where}): {num_slices} machine{'s' if num_slices > 1 else ''} of at most {worst.ttl_s:.0f} s, "
        f"one after another, {worst.total.text()} in all; if this process died now, {worst.loss.text()} at most"
    )


def _tell(as_json: bool, run: str, code: int, reason: str, message: str, ends: list["LeaseEnd"]) -> int:
    if as_json:
        leases = [
            {
                "lease_id": end.lease.lease_id,
                "machine_id": end.lease.machine_id,
                "state": end.lease.state,
                "gpu_s": end.lease.gpu_s,
                "usd_micros": end.lease.usd_micros,
            }
            for end in ends
        ]
        click.echo(json.dumps({"run": run, "exit_code": code, "reason": reason, "message": message, "leases": leases}))
    last_words = " ".join(message.split())  # the last line on standard error is one
    click.echo(f"hotlap: exit {code} {reason}: {last_words}", err=True)
    return code
