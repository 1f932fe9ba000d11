"""What `hotlap launch` sends to its machines: a run's slices, a study's trials, or a verification's runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hotlap.errors import UsageError

if TYPE_CHECKING:
    from hotlap.cloud.errands import Errand
    from hotlap.cloud.launcher import Job
    from hotlap.cloud.preparing import Preparation
    from hotlap.cloud.provider import Offer, Provider
    from hotlap.config import CloudConfig, RunConfig

_SESSION = 8
_EVALUATION_S = 300.0
"""Allowed beside each run of a verification, for its audit and evaluation."""


@dataclass(frozen=True)
class Place:
    """Where the work is to be done."""

    provider: "Provider"
    volume_id: str | None
    image: str | None
    prepares_again: bool

    @property
    def is_on_volume(self) -> bool:
        return self.volume_id is not None and self.provider.traits.name not in ("local", "ssh")


@dataclass(frozen=True)
class Work:
    job: "Job"
    preparation: "Preparation | None"
    """What must be brought to the volume first; None where all is there."""

    def jobs(self, num_slices: int) -> "list[Job]":
        return [*(self.preparation.jobs if self.preparation else ()), *[self.job] * num_slices]


def of_slices(settings: "RunConfig", place: Place) -> Work:
    from hotlap.cloud import parcel, preparing, rental
    from hotlap.cloud.ssh import SshProvider

    if isinstance(place.provider, SshProvider):
        return Work(rental.box_job(settings, place.provider), None)
    traits = place.provider.traits
    if place.volume_id is None or not place.is_on_volume:
        return Work(rental.local_job(settings, traits), None)
    sent = parcel.pack()
    job = preparing.slice_job(settings, sent, place.volume_id, place.image, traits)
    if preparing.is_prepared(place.volume_id, settings.run_name, sent) and not place.prepares_again:
        return Work(job, None)
    return Work(job, preparing.preparation(settings, sent, place.volume_id, place.image, traits))


def of_errand(errand: "Errand", place: Place) -> Work:
    from hotlap.cloud import errands, parcel, preparing
    from hotlap.cloud.runpod_shapes import boot_argv

    traits = place.provider.traits
    if place.volume_id is None or not place.is_on_volume:
        return Work(errands.job_of(errand, traits, *errands.place_of(place.provider)), None)
    sent = parcel.pack()
    job = errands.job_of(errand, traits, preparing.python_of(sent), boot_argv(()))
    job = replace(job, start=preparing.on_machine(job.start, place.volume_id, place.image))
    if preparing.is_prepared(place.volume_id, preparing.ERRANDS, sent) and not place.prepares_again:
        return Work(job, None)
    return Work(job, preparing.preparation(None, sent, place.volume_id, place.image, traits))


def errand_of(
    kind: str,
    path: Path | None,
    place: Place,
    cloud: "CloudConfig",
    num_trials: int | None,
    num_runs: int,
) -> "Errand":
    """
    Raises:
        UsageError: there is no such study or submission here.
    """
    from hotlap.cloud import errands, preparing

    if path is None:
        raise UsageError(f"--job {kind} needs the TOML file of a study, or the folder of a submission, as CONFIG.")
    root = errands.root_of(place.provider, preparing.VOLUME)
    if kind == "research":
        from hotlap.research import space

        study = space.load_study(path).study  # a wrong one costs nothing
        cap_s = 60.0 * cloud.limits.max_slice_minutes
        if study.deadline_s > cap_s - errands.START_S:
            raise UsageError(
                f"A trial of {study.name} may take {study.deadline_s:.0f} s, and no machine of {cap_s:.0f} s has room "
                f"for one. Lower study.budget_s, or edit limits.max_slice_minutes in cloud.toml."
            )
        return errands.research(path.stem, path.read_text(encoding="utf-8"), num_trials, cap_s, root)
    from hotlap.speedrun import submission, track

    chosen = track.find(Path.cwd(), submission.track_of(path))
    cap_s = num_runs * (chosen.spec.limits.time_limit_s + _EVALUATION_S)
    code = submission.code_sha256(path)
    return errands.verification(path.as_posix(), code, chosen.folder.name, num_runs, cap_s, root)


def session_in_words(path: Path, work: Work, offers: "Sequence[Offer]", place: Place) -> str:
    """What a whole session of a study costs, expected and at most."""
    from hotlap.cloud import errands
    from hotlap.cloud.launcher import plan_of
    from hotlap.cloud.money import rate_of, worst_rate
    from hotlap.research import price, space

    dearest = max(worst_rate(rate_of(offer)).usd_micros_per_hour for offer in offers)
    paid_s = plan_of(work.job, place.provider.traits).ttl_s
    idle_s = paid_s - (work.job.cap_s - errands.START_S)
    return price.price_of(space.load_study(path).study, None, _SESSION, dearest, paid_s, idle_s).words
