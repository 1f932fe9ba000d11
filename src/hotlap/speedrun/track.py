"""Tracks: a contest's rules and the hashes of everything it is run with, frozen together.

A track is a folder: `spec.toml` (its rules), `pins.json` (written once, by `freeze`) and the files the rules name.
Its identity is one hash over all of them, and every report and record carries it. A rule change is a new version.
Version 0 is provisional: it may be frozen again, and nothing that is verified under it is a record.

Sources of the public tracks' figures: the LoRA speedrun repository, Saivineeth147/lora-speedrun, at its frozen specs.
"""

import hashlib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from hotlap import durable, pins
from hotlap.config_base import Config
from hotlap.errors import ConfigError, MissingArtifact, PinMismatch, UsageError

SPEC, PINS = "spec.toml", "pins.json"
_JUDGED_BY = {"version", "title", "frozen_on", "source"}
_ID = re.compile(r"[a-z][a-z0-9-]{0,39}")
_Names = Annotated[tuple[str, ...], Field(strict=False)]
_Counts = Annotated[tuple[int, ...], Field(strict=False)]
Row = Mapping[str, Any]

EVALUATOR = Path(__file__).with_name("evaluate.py")
"""Its hash is pinned: another evaluator is another track."""


class BaseModelSpec(Config):
    name: str
    """Under which `from_pretrained` finds it in a run."""

    reference: str
    """Where it comes from, as `hotlap prefetch` takes it; or a program of the track that makes it, as `make:FILE`."""


class GeneratedData(Config):
    """Training rows from a fixed seed; test rows from fresh entropy, drawn after a run has ended."""

    type: Literal["generated"]
    program: str
    """A file of the track. Called with `--split train|test --seed TEXT --rows N`, it prints one JSON row a line."""
    train_seed: str
    train_examples: int = Field(ge=1)
    test_examples: int = Field(ge=1)


class FileData(Config):
    """Rows in two files of the track; the test rows are the same in every run."""

    type: Literal["files"]
    train: str
    test: str


class PublicData(Config):
    """A public data set, by its hub name; its revision and content hashes are pinned."""

    type: Literal["public"]
    repository: str
    config: str
    train_split: str
    test_split: str
    train_examples: int
    test_examples: int


class ExactMetric(Config):
    """Share of test rows that are answered right. Greedy decoding; the run passes from `target` on."""

    type: Literal["exact"]
    rule: Literal["exact", "gsm8k", "squad"]
    target: float = Field(gt=0, lt=1)
    prompt: str
    """Text with `{field}` of a row in it."""
    max_new_tokens: int = Field(ge=1)
    batch_rows: int = Field(ge=1)
    stop: _Names = ()
    max_prompt_tokens: int | None = Field(default=None, ge=1)


class LossMetric(Config):
    """Nats per token of the answers. The run passes up to `target`."""

    type: Literal["loss"]
    target: float = Field(gt=0)
    prompt: str
    batch_rows: int = Field(ge=1)


class Limits(Config):
    adapter_params: int = Field(ge=1)
    time_limit_s: int = Field(ge=1)
    memory_bytes: int = Field(ge=1)
    """Of each process, and of all files a run writes."""
    num_processes: int = Field(ge=1)
    """Processes and threads together."""
    max_lora_rank: int = Field(default=1024, ge=1)
    dora: bool = True
    """Whether an adapter may hold DoRA's magnitudes, which count as parameters."""


class Hardware(Config):
    kind: Literal["cpu", "gpu"]
    threads: int = Field(ge=1)
    gpu: str | None = None


class VerificationSpec(Config):
    looks: _Counts
    """Numbers of runs at which a verdict may be given, rising. The first is the least."""
    alpha: float = Field(gt=0, lt=0.5)
    """Chance of passing a recipe whose true mean is at the target, over all looks together."""
    protections: _Names
    """What the sandbox must give; a machine that cannot is refused."""


class Spec(Config):
    id: str
    version: int = Field(ge=0)
    """From 1 on. 0: the rules are provisional."""
    title: str
    frozen_on: str
    source: str
    """Where these rules come from."""
    data_prefix: str
    environment: str | None = None
    """A file of the track, as `pip freeze` writes it: all that a run finds installed. Absent: what hotlap runs in."""
    base_model: BaseModelSpec
    data: Annotated[GeneratedData | FileData | PublicData, Field(discriminator="type")]
    metric: Annotated[ExactMetric | LossMetric, Field(discriminator="type")]
    limits: Limits
    hardware: Hardware
    verification: VerificationSpec


class PublicPins(Config):
    """The public contest's pins, under its own names."""

    hash_scheme: Literal["qa-v1", "generic"]
    base_model_sha: str
    dataset_sha: str
    train_content_sha256: str
    test_content_sha256: str
    env_lock_sha256: str
    spec_sha256: str


class TrackPins(Config):
    format: Literal[1]
    spec_sha256: str
    evaluator_sha256: str
    files: dict[str, str]
    """Files of the track, and their SHA-256."""
    model_file_sha256: dict[str, str]
    """Every file of the base model; for a public track those that it pins."""
    train_content_sha256: str
    public: PublicPins | None = None
    is_provisional: bool = False
    """Whether they may be written again. The rules' own hash covers it."""


@dataclass(frozen=True)
class Track:
    folder: Path
    spec: Spec
    pins: TrackPins

    @property
    def sha256(self) -> str:
        """The track's identity."""
        pinned = self.pins.model_dump(mode="json", exclude={"is_provisional"})
        return durable.sha256_bytes(durable.canonical_json(pinned).encode())

    @property
    def conditions_sha256(self) -> str:
        """Of everything that a run is made and scored under: the identity but for what only judges its figures, which
        are the target, the looks and alpha. Two versions that share it can judge the same runs."""
        pinned = self.pins.model_dump(mode="json", exclude={"is_provisional", "spec_sha256"})
        spec = self.spec.model_dump(mode="json", exclude=_JUDGED_BY)
        del spec["metric"]["target"], spec["verification"]["looks"], spec["verification"]["alpha"]
        return durable.sha256_bytes(durable.canonical_json({"pins": pinned, "spec": spec}).encode())

    @property
    def is_provisional(self) -> bool:
        return self.spec.version == 0

    @property
    def name(self) -> str:
        """`c1`; from the second version on `c1-v2`; provisional ones with the rules they have now, `c1-v0-1a2b3c4d`."""
        if self.is_provisional:
            return f"{self.spec.id}-v0-{self.sha256[:8]}"
        return self.spec.id if self.spec.version == 1 else f"{self.spec.id}-v{self.spec.version}"

    @property
    def lock(self) -> Path | None:
        """The file that says what is installed in a run. The public contest's is pinned and not shipped."""
        if self.pins.public is not None:
            return self.folder / "env.lock"
        return None if self.spec.environment is None else self.folder / self.spec.environment


def tracks(contest: Path) -> list[Track]:
    """Every track of a contest, by id.

    Raises:
        PinMismatch: one was changed after it was frozen.
        ConfigError: one cannot be read.
    """
    return [load(path.parent) for path in sorted((contest / "tracks").glob(f"*/{SPEC}"))]


def find(contest: Path, track_id: str) -> Track:
    """
    Raises:
        MissingArtifact: there is no such track.
    """
    folder = contest / "tracks" / track_id
    if not _ID.fullmatch(track_id) or not (folder / SPEC).is_file():
        known = sorted(path.parent.name for path in (contest / "tracks").glob(f"*/{SPEC}"))
        raise MissingArtifact(f"There is no track {track_id!r} in {contest / 'tracks'}. There are: {known}.")
    return load(folder)


def load(folder: Path) -> Track:
    """A frozen track, after its own files were hashed again.

    Raises:
        PinMismatch: it was changed after it was frozen.
        ConfigError: spec or pins are not what they should be.
    """
    spec = read_spec(folder)
    if spec.id != folder.name and not folder.name.startswith(f"{spec.id}-v"):
        raise ConfigError(f"{folder / SPEC} is of track {spec.id!r}; its folder must have that name.")
    if not (folder / PINS).is_file():
        raise PinMismatch(
            f"Track {spec.id} is not frozen: {folder / PINS} is missing. Run `hotlap speedrun new-track`."
        )
    frozen = _read_pins(folder)
    _require_frozen(folder, spec, frozen)
    return Track(folder, spec, frozen)


def _read_pins(folder: Path) -> TrackPins:
    try:
        return TrackPins.model_validate_json((folder / PINS).read_bytes())
    except ValidationError as error:
        raise ConfigError(f"{folder / PINS}: {_first(error)}") from None


def _require_frozen(folder: Path, spec: Spec, frozen: TrackPins) -> None:
    present = {SPEC: frozen.spec_sha256, **frozen.files}
    for name, expected in present.items():
        path = folder / name
        if not path.is_file() or durable.sha256_file(path) != expected:
            what = "was changed" if path.is_file() else "is gone"
            way_out = f"in a folder tracks/{spec.id}-v{spec.version + 1} of their own."
            if frozen.is_provisional:
                way_out = f"and this provisional one is frozen again by `hotlap speedrun new-track {folder.name}`."
            raise PinMismatch(
                f"Track {spec.id} is frozen, and {name} {what}. Put it back; changed rules are a new version, {way_out}"
            )
    if durable.sha256_file(EVALUATOR) != frozen.evaluator_sha256:
        raise PinMismatch(
            f"Track {spec.id} was frozen with another evaluator. Results of two evaluators do not compare: "
            f"use the hotlap it was frozen with, or make a new version of the track."
        )


def require_base_model(track: Track, folder: Path) -> None:
    """
    Raises:
        PinMismatch: a file of the base model is missing, new or has other bytes.
    """
    found = hashes(folder)
    expected = track.pins.model_file_sha256
    if track.pins.public is not None:
        found = {name: value for name, value in found.items() if name in expected}
    if wrong := sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name)):
        raise PinMismatch(
            f"The base model in {folder} is not that of track {track.spec.id}: {', '.join(wrong)}. Fetch it again."
        )


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a base model by name."""
    return {name: entry.sha256 for name, entry in pins.pin(folder).items()}


def freeze(folder: Path, base_model: Path, train: Iterable[Row], files: Iterable[str]) -> Track:
    """Write a track's pins: once, but for a provisional one.

    Raises:
        UsageError: it is frozen already.
        ConfigError: the spec is not valid.
    """
    spec = read_spec(folder)
    if (folder / PINS).exists() and not _read_pins(folder).is_provisional:
        raise UsageError(
            f"Track {spec.id} is frozen already. Changed rules are a new version, in a folder of their own."
        )
    frozen = TrackPins(
        format=1,
        spec_sha256=durable.sha256_file(folder / SPEC),
        evaluator_sha256=durable.sha256_file(EVALUATOR),
        files={name: durable.sha256_file(folder / name) for name in sorted(files)},
        model_file_sha256=hashes(base_model),
        train_content_sha256=content_sha256(train),
        is_provisional=spec.version == 0,
    )
    durable.replace(folder / PINS, (frozen.model_dump_json(indent=1, exclude_none=True) + "\n").encode())
    return load(folder)


Scheme = Literal["rows-v2", "qa-v1", "generic"]


def content_sha256(rows: Iterable[Row], scheme: Scheme = "rows-v2") -> str:
    """The hash of a data set's rows in order.

    `rows-v2` (ours): a canonical JSON line a row, so that no text can move between fields or rows unseen. The public
    contest's two, kept to check its pins: `qa-v1` joins questions and answers without anything between them, `generic`
    joins JSON objects.
    """
    digest = hashlib.sha256()
    for row in rows:
        digest.update(_encoded(row, scheme))
    return digest.hexdigest()


def _encoded(row: Row, scheme: Scheme) -> bytes:
    match scheme:
        case "rows-v2":
            return (durable.canonical_json(dict(row)) + "\n").encode()
        case "qa-v1":
            return f"{row['question']}{row['answer']}".encode()
        case "generic":
            return durable.canonical_json(dict(row)).encode()


def is_id(name: str) -> bool:
    """Whether a track may be called that."""
    return _ID.fullmatch(name) is not None


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def read_spec(folder: Path) -> Spec:
    """A track's rules, frozen or not.

    Raises:
        ConfigError: they are not valid.
    """
    path = folder / SPEC
    try:
        spec = Spec.model_validate(_toml(path))
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first(error)}") from None
    looks = spec.verification.looks
    if not is_id(spec.id) or list(looks) != sorted(set(looks)) or not looks or looks[0] < 2:
        raise ConfigError(f"{path}: id must be a plain word, and verification.looks rising numbers from 2 on.")
    return spec


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
