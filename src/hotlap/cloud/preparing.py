"""Prepare a volume, so that slices start within seconds of boot: hotlap, its environment, the model and packed data.

The wheel goes there by the volume's own address, where there are keys to it. Else it is brought by machines of a minute
or so, a part each, for it does not fit into one request; the last one brings its part and installs. Every step is
skipped when it was done before.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hotlap import durable
from hotlap.cloud import arrive
from hotlap.cloud.launcher import Job, Launcher, LeaseEnd, plan_of
from hotlap.cloud.money import Amount
from hotlap.cloud.parcel import Parcel
from hotlap.cloud.provider import Offer, Start, Traits
from hotlap.cloud.rental import boot_env, worker_of
from hotlap.cloud.runpod_shapes import boot_argv, packed
from hotlap.cloud.volume import Volume
from hotlap.config import RunConfig, hotlap_home

VOLUME = "/workspace"
HOME = f"{VOLUME}/.hotlap/home"
"""HOTLAP_HOME of a rented machine: models and packed data outlive it."""

ERRANDS = "errands"
"""Stands for every errand in what is known of a volume: they share one environment."""

_PART_CAP_S = 60.0
_INSTALL_CAP_S = 600.0


def python_of(parcel: Parcel) -> str:
    """The Python on the volume that has this hotlap."""
    return str(arrive.env_folder(Path(VOLUME), parcel.digest) / "bin" / "python")


def slice_job(config: RunConfig, parcel: Parcel, volume_id: str, image: str | None, traits: Traits) -> Job:
    """Boot, which runs the worker of the volume's environment, which runs one slice."""
    config = on_volume(config)
    argv = boot_argv(worker_of(config, python_of(parcel)))
    job = _job(config.run_name, config.slice.cap_s, argv, volume_id, image, traits)
    return replace(job, settings=config.settings_digest)


def _job(run: str, cap_s: float, argv: tuple[str, ...], volume_id: str, image: str | None, traits: Traits) -> Job:
    plan = plan_of(Job(run, cap_s, Start(argv)), traits)
    return Job(run, cap_s, on_machine(Start(argv, boot_env(plan, traits)), volume_id, image))


def on_machine(start: Start, volume_id: str, image: str | None) -> Start:
    """The same start on a machine with the volume, where models and packed data outlive it."""
    env = {**start.env, "HOTLAP_HOME": HOME}
    return replace(start, env=env, image=image, volume_id=volume_id, volume_path=VOLUME)


def on_volume(config: RunConfig) -> RunConfig:
    """The run as a rented machine finds it: its folder on the volume, since nothing else outlives the machine."""
    there = {"run": config.run_name, "output_dir": str(Path(VOLUME) / config.output_dir)}
    return config.model_copy(update=there)


def commands_of(config: RunConfig) -> list[list[str]]:
    """What makes model and packed data ready, as words for Python."""
    given = _flat(config.model_dump(mode="json", exclude_defaults=True, exclude={"slice", "checkpoint"}))
    overrides = [word for key, value in given for word in ("--set", f"{key}={_toml(value)}")]
    return [
        ["-m", "hotlap", "prefetch", config.base_model],
        ["-m", "hotlap", "preview", "--examples", "0", *overrides],
    ]


def _flat(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        found += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return found


def _toml(value: Any) -> str:
    """JSON's scalars and lists are TOML's; its tables are not, and absence has a word of ours."""
    if isinstance(value, dict):
        items = [f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items() if item is not None]
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return "none" if value is None else json.dumps(value)


@dataclass(frozen=True)
class Preparation:
    """The machines that it takes, in order, and what is known to be on the volume afterwards."""

    volume_id: str
    run: str
    digest: str
    jobs: tuple[Job, ...]
    carried: "tuple[Parcel, Volume] | None" = None
    """The wheel, if it goes by the volume's own address, before the first machine."""

    def carry(self) -> None:
        """
        Raises:
            As volumes do.
        """
        if self.carried is None:
            return
        parcel, volume = self.carried
        here = hotlap_home() / "parcels" / parcel.digest / parcel.file_name
        durable.make_dirs(here.parent)
        durable.replace(here, parcel.wheel)
        volume.put(here, f".hotlap/parcels/{parcel.digest}/{parcel.file_name}")

    def note(self) -> None:
        """Remember it, so that the next launch rents nothing for it."""
        known = _known(self.volume_id)
        known["runs"][self.run] = self.digest
        known["parcels"] = sorted({*known["parcels"], self.digest})
        _write(self.volume_id, known)

    def forget(self) -> None:
        """Bring the wheel again next time: somebody may have emptied the volume."""
        known = _known(self.volume_id)
        known["parcels"] = sorted({*known["parcels"]} - {self.digest})
        _write(self.volume_id, known)


def is_prepared(volume_id: str, run: str, parcel: Parcel) -> bool:
    """As far as this home knows."""
    return _known(volume_id)["runs"].get(run) == parcel.digest


def preparation(
    config: RunConfig | None,
    parcel: Parcel,
    volume_id: str,
    image: str | None,
    traits: Traits,
    extra: str = "train",
    volume: Volume | None = None,
) -> Preparation:
    """What it takes to have everything on the volume that a slice of this run needs; without a run, what an errand
    does. `volume` is there if it can be reached from here."""
    run = f"prepare-{volume_id}"[:64]
    source = packed(arrive.__file__)

    def job(cap_s: float, **order: Any) -> Job:
        words = (VOLUME, parcel.digest, parcel.file_name, json.dumps(order))
        return _job(run, cap_s, boot_argv(("python3", "-I", "-c", source, *words)), volume_id, image, traits)

    is_there = parcel.digest in _known(volume_id)["parcels"]
    texts = [] if is_there or volume is not None else parcel.parts()
    parts = [{"part": (number, len(texts), text)} for number, text in enumerate(texts)]
    install = {"install": (extra, [] if config is None else commands_of(on_volume(config)))}
    last = parts.pop() if parts else {}
    jobs = (*(job(_PART_CAP_S, **part) for part in parts), job(_INSTALL_CAP_S, **last, **install))
    carried = None if is_there or volume is None else (parcel, volume)
    return Preparation(volume_id, ERRANDS if config is None else config.run_name, parcel.digest, jobs, carried)


@dataclass(frozen=True)
class Prepared:
    """How a preparation ended: whether all is there now, and the machines it took."""

    is_whole: bool
    leases: tuple[LeaseEnd, ...]

    @property
    def cost(self) -> Amount:
        return sum((end.lease.amount for end in self.leases), Amount())


def prepare(
    launcher: Launcher, plan: Preparation, offers: Sequence[Offer], on_end: Callable[[LeaseEnd], None]
) -> Prepared:
    """Run it, machine after machine, up to the first that fails.

    Raises:
        As `Launcher.launch`, and as volumes do.
    """
    plan.carry()
    ends: list[LeaseEnd] = []
    for job in plan.jobs:
        ends.append(launcher.launch(job, offers))
        on_end(ends[-1])
        end = ends[-1].end
        if end is None or end.result is None or end.result.get("exit_code") != 0:
            if end is not None and end.result is not None and end.result.get("reason") == "provisioning":
                plan.forget()
            return Prepared(False, tuple(ends))
    plan.note()
    return Prepared(True, tuple(ends))


def _record_of(volume_id: str) -> Path:
    return hotlap_home() / "volumes" / f"{volume_id}.json"


def _known(volume_id: str) -> dict[str, Any]:
    try:
        return json.loads(_record_of(volume_id).read_bytes())
    except FileNotFoundError:
        return {"runs": {}, "parcels": []}


def _write(volume_id: str, known: dict[str, Any]) -> None:
    durable.make_dirs(_record_of(volume_id).parent)
    durable.replace(_record_of(volume_id), durable.canonical_json(known).encode())
