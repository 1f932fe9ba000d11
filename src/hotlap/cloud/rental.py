"""From a run's configuration to slices on rented machines: the provider, the offers, the job, and the chain."""

import contextlib
import getpass
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotlap import durable, runs
from hotlap.cloud import boot
from hotlap.cloud.launcher import JOB_MARGIN_S, Job, Launcher, LeaseEnd, Stops, World, plan_of
from hotlap.cloud.lease import Lease
from hotlap.cloud.ledger import Ledger
from hotlap.cloud.local import TRAITS as LOCAL_TRAITS
from hotlap.cloud.local import LocalProvider
from hotlap.cloud.money import Amount, loss_bound_s, rate_of, ttl_s, worst_rate
from hotlap.cloud.provider import ANYWHERE, Offer, Provider, Start, Traits, Where
from hotlap.cloud.ssh import TRAITS as SSH_TRAITS
from hotlap.cloud.ssh import VOLUME as BOX_VOLUME
from hotlap.cloud.ssh import BoxVolume, SshProvider
from hotlap.cloud.volume import Volume
from hotlap.cloud.watch import Plan
from hotlap.config import CloudConfig, RunConfig
from hotlap.errors import (
    INTERRUPTED,
    OVERRAN,
    SLICE_OVER,
    ConfigError,
    HotlapError,
    MachineLost,
    NoCapacity,
    PriceRose,
    ProvisioningFailed,
    RunChanged,
    UsageError,
)
from hotlap.secrecy import redactor

NAMES = ("local", "ssh", "runpod", "modal")
_PINNED = re.compile(r"[^@\s]+@sha256:[0-9a-f]{64}")
_DATA_PLACES = ("eval_dataset", "chat_template")
_CLASSES: dict[str, type[HotlapError]] = {"provisioning": ProvisioningFailed, "price": PriceRose}


def open_provider(name: str, settings: CloudConfig) -> Provider:
    """
    Raises:
        NoPermission: it needs a key, and there is none.
    """
    if name == "local":
        return LocalProvider(settings.local)
    if name == "ssh":
        return SshProvider(settings.ssh)
    if name == "runpod":
        from hotlap.cloud import runpod

        return runpod.from_environment()
    if name == "modal":
        from hotlap.cloud import modal

        return modal.ModalProvider(settings.modal)
    raise UsageError(f"There is no provider {name!r}; there are {', '.join(NAMES)}.")


def center_of(volume_id: str) -> str:
    """The data center of a network volume.

    Raises:
        UsageError: there is no such volume.
    """
    from hotlap.cloud import runpod

    return runpod.from_environment().center_of(volume_id)


def modal_volume(volume_id: str) -> Volume | None:
    """Modal's volume of that name; None if it is not named as one."""
    from hotlap.cloud import modal
    from hotlap.cloud.modal_volume import ModalVolume

    if not volume_id.startswith(modal.VOLUME_PREFIX):
        return None
    return ModalVolume(volume_id.removeprefix(modal.VOLUME_PREFIX))


def box_volume(volume_id: str, settings: CloudConfig) -> BoxVolume | None:
    """The files of one's own box; None if they are not what is named."""
    return BoxVolume(SshProvider(settings.ssh)) if volume_id == BOX_VOLUME else None


def configured(settings: CloudConfig) -> list[str]:
    """Every provider that this environment has an address and a key for: a sweep looks at all of them. Each is opened
    by itself, for one that does not open must not spare the machines of the others."""
    from hotlap.cloud import modal

    is_reached = {
        "local": True,
        "ssh": settings.ssh.host is not None,
        "runpod": bool(os.environ.get("RUNPOD_API_KEY")),
        "modal": modal.has_token(),
    }
    return [name for name in NAMES if is_reached[name]]


def all_traits() -> list[Traits]:
    """How every provider behaves, with or without a key to it."""
    from hotlap.cloud import modal, runpod

    return [LOCAL_TRAITS, SSH_TRAITS, runpod.TRAITS, modal.TRAITS]


def owner_of(settings: CloudConfig) -> str:
    with contextlib.suppress(KeyError, OSError):  # a container's user need not have a name
        return settings.reaper.owner or getpass.getuser()
    return f"uid-{os.getuid()}"


def offers_for(provider: Provider, gpus: Sequence[str], where: Where = ANYWHERE) -> list[Offer]:
    """The candidates, in the order in which they are tried: kind after kind as they were asked for, each cheapest
    first, in each of the data centers. Without any kind, the cheapest there is.

    Raises:
        UsageError: that volume cannot be reached.
        NoCapacity: there is no such kind, or none in the one data center that reaches the volume.
    """
    kinds: Sequence[str | None] = gpus or (None,)
    offers = [offer for kind in kinds for offer in provider.offers(kind, where)]
    wanted = " or ".join(gpus) or "machine of this kind"
    if not offers:
        known = ", ".join(sorted({offer.gpu for offer in provider.offers(None, where)})) or "none"
        raise NoCapacity(f"{provider.traits.name} offers no {wanted} there. It offers: {known}.")
    if where.volume_id is not None and all(offer.has_stock is False for offer in offers):
        raise NoCapacity(
            f"The volume {where.volume_id} lies in {offers[0].region}, and there is no {wanted} to be had there now. "
            f"Nothing was rented: name other kinds with --gpu, or try later."
        )
    if not gpus:
        # The cheapest that is there, in every place where it may stand.
        there = [offer for offer in offers if offer.has_stock is not False] or offers
        return [offer for offer in there if (offer.gpu, offer.cloud) == (there[0].gpu, there[0].cloud)]
    return offers


def volume_of(provider: str, named: str | None) -> str | None:
    """The volume of a launch. Where volumes cost nothing to make, there is always one."""
    from hotlap.cloud import modal

    return named or (modal.DEFAULT_VOLUME if provider == "modal" else None)


def require_volume(traits: Traits, volume_id: str | None) -> None:
    """
    Raises:
        UsageError: what a slice saves would be lost with the machine.
    """
    if traits.needs_volume and volume_id is None:
        raise UsageError(
            f"Nothing outlives a machine of {traits.name} but what lies on a volume, so training needs one: "
            f"--volume-id V. RunPod's console makes them under Storage, each in one data center; docs/how-to/runpod.md "
            f"says more. A study of GPTs or a verification needs none."
        )


def image_of(traits: Traits, named: str | None, settings: CloudConfig) -> str | None:
    """The container image of a launch, which is the same tomorrow. None where machines have none.

    Raises:
        ConfigError: one is named by a name that may be given to another.
    """
    defaults = {"runpod": settings.runpod.image, "modal": settings.modal.image}
    if traits.name not in defaults:
        return None
    image = named or defaults[traits.name]
    if not _PINNED.fullmatch(image):
        raise ConfigError(
            f"The image {image} is not pinned: its name may mean another one tomorrow. Write NAME@sha256:DIGEST; "
            f"`docker buildx imagetools inspect {image.partition('@')[0]}` tells the digest."
        )
    return image


def local_job(config: RunConfig, traits: Traits) -> Job:
    """Boot, which runs the worker, which runs one slice, with this Python and this machine's files."""
    config = _found_anywhere(config)
    argv = (sys.executable, "-S", "-I", boot.__file__, *worker_of(config, sys.executable))
    plan = plan_of(Job(config.run_name, config.slice.cap_s, Start(argv)), traits)
    return Job(config.run_name, config.slice.cap_s, Start(argv, boot_env(plan, traits)), config.settings_digest)


def box_job(config: RunConfig, provider: SshProvider) -> Job:
    """The same on a box of one's own: its Python, and its files. The run's folder begins in the login's home.

    Raises:
        ProviderFailed: the box does not answer.
    """
    box = provider.box()
    there = {"run": config.run_name, "output_dir": str(Path(box["home"]) / config.output_dir)}
    config = config.model_copy(update=there)
    argv = (box["python"], "-S", "-I", box["boot"], *worker_of(config, box["python"]))
    plan = plan_of(Job(config.run_name, config.slice.cap_s, Start(argv)), provider.traits)
    return Job(
        config.run_name, config.slice.cap_s, Start(argv, boot_env(plan, provider.traits)), config.settings_digest
    )


def boot_env(plan: Plan, traits: Traits) -> dict[str, str]:
    """What boot must know of its job and of its place."""
    return {"HOTLAP_CAP_S": f"{plan.cap_s:.0f}"} | ({} if traits.restarts else {"HOTLAP_LEAVES": "1"})


def worker_of(config: RunConfig, python: str) -> tuple[str, ...]:
    """The command of one slice."""
    order = durable.canonical_json({"config": config.model_dump(mode="json"), "cap_s": config.slice.cap_s})
    return (python, "-m", "hotlap.cloud.worker", order)


def ttl_of(config: RunConfig, provider: Provider) -> int:
    """The longest life of a machine for one slice, in seconds."""
    return ttl_s(config.slice.cap_s + JOB_MARGIN_S, provider.traits)


def _found_anywhere(config: RunConfig) -> RunConfig:
    """The same run for a process with another working directory: every place absolute, and its name as it is here."""
    data = config.data
    places = {key: _absolute(text) for key in _DATA_PLACES if (text := getattr(data, key)) is not None}
    mix = tuple(item.model_copy(update={"dataset": _absolute(item.dataset)}) for item in data.mix)
    start = config.lora.init_from
    return config.model_copy(
        update={
            "run": config.run_name,
            "base_model": _absolute(config.base_model),
            "dataset": _absolute(config.dataset),
            "data": data.model_copy(update={**places, "mix": mix}),
            "lora": config.lora.model_copy(update={"init_from": start and _absolute(start)}),
            "output_dir": str(Path(config.output_dir).absolute()),
        }
    )


def _absolute(text: str) -> str:
    return str(Path(text).absolute()) if Path(text).exists() else text


def launcher_of(
    provider: Provider,
    ledger: Ledger,
    settings: CloudConfig,
    stops: Stops,
    on_event: Callable[[dict[str, Any]], None],
    say: Callable[[str], None],
) -> Launcher:
    """A launcher in the real world."""
    world = World(on_event=on_event, say=say, redact=redactor(settings.ledger.url))
    return Launcher(provider, ledger, settings, owner_of(settings), stops, world)


@dataclass(frozen=True)
class WorstCase:
    """What launching may cost, before anything is done."""

    total: Amount
    num_machines: int
    ttl_s: float
    """Of the machine that may live longest."""

    loss: Amount
    """Beyond help: what one machine can cost at most if the launcher dies this second."""


def worst_case(offers: Sequence[Offer], jobs: Sequence[Job], provider: Provider, settings: CloudConfig) -> WorstCase:
    """For the dearest of the offers, since any of them may be taken. The jobs run one after another."""
    traits = provider.traits
    ttls = [plan_of(job, traits).ttl_s for job in jobs]
    rate = worst_rate(max((rate_of(offer) for offer in offers), key=lambda rate: rate.usd_micros_per_hour))
    loss_s = loss_bound_s(max(ttls), settings.reaper.period_minutes * 60.0, traits)
    total = sum((rate.cost(ttl) for ttl in ttls), Amount())
    return WorstCase(total, len(jobs), max(ttls), rate.cost(loss_s))


@dataclass(frozen=True)
class ChainEnd:
    """How a chain of slices ended, as the last of them did."""

    exit_code: int
    reason: str
    message: str
    leases: tuple[LeaseEnd, ...]


def is_done(config: RunConfig, provider: Provider, last: Lease | None) -> bool:
    """Whether nothing is left to rent a machine for. Where the run's folder is out of reach, the ledger remembers.

    `last` is the run's newest lease that ended.

    Raises:
        RunChanged: what the ledger remembers was another run of this name.
    """
    if provider.traits.name != "local":
        if last is None or last.outcome not in ("done", "slice_over"):
            return False
        if last.settings not in (None, config.settings_digest):
            raise RunChanged(
                f"{config.run_name} was trained with other settings (lease {last.lease_id}), and a slice would refuse "
                f"these. Nothing is rented: give this one another name with --run, or go back to those settings."
            )
        return last.outcome == "done"
    run = runs.RunFolder(config.run_folder)
    identity = runs.read_identity(run)
    if identity is None or not runs.is_finished(run):
        return False
    # With other settings it is another run under its name, which the slice refuses; to call that done would be wrong.
    settled = ("packing", "lora", "optim", "train", "techniques")
    return all(identity.trajectory.get(key) == config.trajectory.get(key) for key in settled)


def chain(
    launcher: Launcher,
    job: Job,
    offers: Sequence[Offer],
    num_slices: int,
    on_end: Callable[[LeaseEnd], None],
    renew: Callable[[], Job] | None = None,
) -> ChainEnd:
    """Slice after slice, each on a machine of its own, until the run is done, fails, or the number is used up.

    `renew` is there where a job takes along what came home from the one before.
    """
    ends: list[LeaseEnd] = []
    for number in range(num_slices):
        job = renew() if renew is not None and number > 0 else job
        ends.append(launcher.launch(job, offers))
        on_end(ends[-1])
        code, reason, message = answer_of(ends[-1])
        if (code, reason) != (SLICE_OVER, "slice_over") or launcher.stops.is_asked():
            break
    else:
        code, reason, message = answer_of(ends[-1])
    return ChainEnd(code, reason, message, tuple(ends))


def answer_of(lease_end: LeaseEnd) -> tuple[int, str, str]:
    """The exit code, reason word and message that one lease's end stands for."""
    end = lease_end.end
    if end is None:
        return SLICE_OVER, "stopped", "stopped; the machine is given back"
    if end.result is not None:
        return int(end.result.get("exit_code", 1)), str(end.result.get("reason", "unexpected")), end.message
    if end.kind == "overran":
        return OVERRAN, "overran", f"{end.message}; the machine was ended"
    kind = _CLASSES.get(end.kind, MachineLost)
    return kind.exit_code, kind.reason, f"The machine was ended: {end.message}. Its receipt has its last words."


def leave_code(is_pressed: bool, end: ChainEnd) -> int:
    return INTERRUPTED if is_pressed else end.exit_code


def require_slices(num_slices: int) -> None:
    """
    Raises:
        ConfigError: less than one.
    """
    if num_slices < 1:
        raise ConfigError(f"--slices is {num_slices}; rent at least one.")
