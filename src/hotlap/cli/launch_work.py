"""What `hotlap launch` sends to its machines: a run's slices, a study's trials, or a verification's runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hotlap.errors import UsageError

if TYPE_CHECKING:
    from hotlap.cloud.errands import Errand
    from hotlap.cloud.launcher import Job
    from hotlap.cloud.parcel import Parcel
    from hotlap.cloud.preparing import Preparation
    from hotlap.cloud.provider import Offer, Provider
    from hotlap.config import CloudConfig, RunConfig
    from hotlap.research.space import StudyConfig

_SESSION = 8
_ROW_BYTES = 110
"""Of a row of a journal, packed: measured of a study of GPTs."""

_OPTUNAS = ("tpe", "gp", "cma")
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
        return self.volume_id is not None and self.has_nothing_of_ours

    @property
    def has_nothing_of_ours(self) -> bool:
        """Whether its machines begin with an image and no more."""
        return self.provider.traits.needs_volume


@dataclass(frozen=True)
class Work:
    job: "Job"
    preparation: "Preparation | None"
    """What must be brought to the volume first; None where all is there."""

    results: str | None = None
    """The folder below this one to which results come by the machine's log, where no volume keeps them."""

    renew: "Callable[[], Job] | None" = None
    """The job again, with what has come home since; where a job takes that along."""

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
    return Work(job, _preparation(settings, sent, place.volume_id, place))


def of_errand(errand: "Errand", kept: Mapping[str, bytes], place: Place) -> Work:
    """`kept` is as of `errands.job_by_request`."""
    from hotlap.cloud import errands, parcel, preparing
    from hotlap.cloud.runpod_shapes import boot_argv

    traits = place.provider.traits
    if not place.has_nothing_of_ours:
        return Work(errands.job_of(errand, traits, *errands.place_of(place.provider)), None)
    if place.volume_id is None:
        kind = "verify" if errand.run.startswith("verify-") else "research"
        alone = parcel.pack(kind)
        return Work(errands.job_by_request(errand, kept, alone, traits, place.image), None, errand.results)
    sent = parcel.pack()
    job = errands.job_of(errand, traits, preparing.python_of(sent), boot_argv(()))
    job = replace(job, start=preparing.on_machine(job.start, place.volume_id, place.image))
    if preparing.is_prepared(place.volume_id, preparing.ERRANDS, sent) and not place.prepares_again:
        return Work(job, None)
    return Work(job, _preparation(None, sent, place.volume_id, place))


def _preparation(settings: "RunConfig | None", sent: "Parcel", volume_id: str, place: Place) -> "Preparation":
    from hotlap.cli.volume import opened
    from hotlap.cloud import preparing, volume

    is_reached = place.provider.traits.name == "modal" or volume.has_keys()
    there = opened(volume_id) if is_reached else None
    return preparing.preparation(settings, sent, volume_id, place.image, place.provider.traits, volume=there)


def errand_of(
    kind: str,
    path: Path | None,
    place: Place,
    cloud: "CloudConfig",
    num_trials: int | None,
    num_runs: int,
) -> "tuple[Errand, dict[str, bytes]]":
    """The errand, and the files that it takes along where there is no volume: what it works on, and its results so far.

    Raises:
        UsageError: there is no such study or submission here, or it needs a volume.
    """
    from hotlap.cloud import bundle, errands, preparing

    if path is None:
        raise UsageError(f"--job {kind} needs the TOML file of a study, or the folder of a submission, as CONFIG.")
    is_alone = place.has_nothing_of_ours and place.volume_id is None
    root = errands.HERE if is_alone else errands.root_of(place.provider, preparing.VOLUME)
    if kind == "research":
        from hotlap.research import space

        study = space.load_study(path).study  # a wrong one costs nothing
        cap_s = 60.0 * cloud.limits.max_slice_minutes
        if study.deadline_s > cap_s - errands.START_S:
            raise UsageError(
                f"A trial of {study.name} may take {study.deadline_s:.0f} s, and no machine of {cap_s:.0f} s has room "
                f"for one. Lower study.budget_s, or edit limits.max_slice_minutes in cloud.toml."
            )
        errand = errands.research(path.stem, path.read_text(encoding="utf-8"), num_trials, cap_s, root)
        kept = {**_files_of(study), **_so_far(errand)} if is_alone else {}
        return replace(errand, extra="gpt,optuna") if study.proposer in _OPTUNAS else errand, kept
    from hotlap.speedrun import recipe, submission, track

    chosen = track.find(Path.cwd(), submission.track_of(path))
    cap_s = num_runs * (chosen.spec.limits.time_limit_s + _EVALUATION_S)
    code = submission.code_sha256(path)
    errand = errands.verification(path.as_posix(), code, chosen.folder.name, num_runs, cap_s, root)
    if not is_alone:
        return errand, {}
    if (path / recipe.RECIPE).exists():
        raise UsageError(
            f"{path} is a recipe of hotlap's trainer, which is too large for one request. Bring it by a network "
            f"volume: --volume-id V."
        )
    folders = (path, chosen.folder.relative_to(Path.cwd()))
    return errand, bundle.read(Path(), (*(f"{folder.as_posix()}/**/*" for folder in folders), *errand.brings))


def require_no_secret(errand: "Errand", kept: Mapping[str, bytes]) -> None:
    """
    Raises:
        UsageError: a file that goes along holds the value of a secret of this environment.
    """
    from hotlap import secrecy

    texts = {**errand.files, **{name: data.decode(errors="replace") for name, data in kept.items()}}
    for place, text in texts.items():
        if names := secrecy.secrets_in(text):
            raise UsageError(
                f"{place} holds the value of {', '.join(names)}, and whoever can list the machine could read it. Take "
                f"it out; nothing was rented."
            )


def _so_far(errand: "Errand") -> dict[str, bytes]:
    """What is here of a study's results, without what no machine needs to go on."""
    from hotlap.cloud import bundle
    from hotlap.research import travel

    files = bundle.read(Path(), errand.brings)
    return {name: travel.thinned(data) if name.endswith(".jsonl") else data for name, data in files.items()}


def take_home(name: str, data: bytes) -> bytes:
    """A file of a study or a verification, as it is to be here when it comes from a machine."""
    from hotlap.research import travel

    here = Path(name)
    is_journal = here.name == "experiments.jsonl" and here.exists()
    return travel.restored(here.read_bytes(), data) if is_journal else data


def show_study(folder: Path) -> None:
    """Make a study's board of the journal that came home."""
    from hotlap.research import board
    from hotlap.research.history import StudyFolder

    study = StudyFolder(folder)
    if study.journal.exists():
        board.write(study, study.read())


def room_in_words(work: Work) -> str:
    """How much longer a study's journal may get before it needs a volume."""
    from hotlap.cloud import errands

    num_rows = errands.room_in(work.job.start.argv) // _ROW_BYTES
    return f"without a volume the journal goes along in the request, which has room for some {num_rows} rows more"


def _files_of(study: "StudyConfig") -> dict[str, bytes]:
    """What a study names that lies here.

    Raises:
        UsageError: a machine without a volume cannot have it.
    """
    if study.program == "hotlap.research.lora" or study.executor != "local":
        raise UsageError(
            f"{study.name} runs {study.program} on {study.executor}, and a machine without a volume has neither "
            f"hotlap's trainer, nor a base model, nor Ray. Name a volume: --volume-id V."
        )
    named = [text for text in (study.data, study.program) if text != "embedded" and Path(text).is_file()]
    for text in named:
        if Path(text).is_absolute() or ".." in Path(text).parts:
            raise UsageError(f"{text} goes along with {study.name} if it lies below this folder; name it from here.")
    return {text: Path(text).read_bytes() for text in named}


def session_in_words(path: Path, work: Work, offers: "Sequence[Offer]", place: Place) -> str:
    """What a whole session of a study costs, expected and at most."""
    from hotlap.cloud import errands
    from hotlap.cloud.launcher import plan_of
    from hotlap.cloud.money import rate_of, worst_rate
    from hotlap.research import price, space

    dearest = max(worst_rate(rate_of(offer)).usd_micros_per_hour for offer in offers)
    unit_s = max(offer.billing_unit_s for offer in offers)
    paid_s = -(-plan_of(work.job, place.provider.traits).ttl_s // unit_s) * unit_s
    installing_s = errands.INSTALL_S if work.results is not None else 0.0
    idle_s = paid_s - (work.job.cap_s - installing_s - errands.START_S)
    return price.price_of(space.load_study(path).study, None, _SESSION, dearest, paid_s, idle_s).words
