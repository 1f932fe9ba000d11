"""Verification: run a submission again with fresh seeds, inspect what it made, score it apart, and decide.

All of it lies in one folder, each finished run durable before the next begins, so a verification that was cut goes on
where it stopped, with the seeds already drawn. A failure of the machine or of ours raises and decides nothing; a
failure of the submission is a result. `measure` needs no records, so a rented machine can do it; `verify` keeps them.
"""

import fcntl
import json
import os
import platform
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import hotlap
from hotlap import clock, durable
from hotlap.child import Stops, passing_on_stops
from hotlap.config import hotlap_home, load_cloud
from hotlap.errors import ChildCrashed, CorruptFile, PinMismatch, Refused, RunChanged, RunLocked
from hotlap.speedrun import claims, environments, inputs, records, sandbox, submission
from hotlap.speedrun.attempt import EVALUATION_S, Say, Sources, Verification, run_once
from hotlap.speedrun.replay import replay
from hotlap.speedrun.report import IDENTITY, build, identity_of, rebased, to_markdown
from hotlap.speedrun.stopping import Stopped
from hotlap.speedrun.submission import Finding, Submission
from hotlap.speedrun.track import PublicData, Track

_Drawn = TypeVar("_Drawn", int, str)
_LIBRARIES = ("torch", "transformers", "peft", "safetensors", "tokenizers", "numpy")
_KEPT = re.compile(
    r"report-\d+\.(json|md)|seeds\.jsonl|run-\d+/(result\.json|(test|predictions)\.jsonl|train\.log)|code/[\w./-]+"
)
_WARM = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"


def verify(contest: Path, folder: Path, track: Track, num_runs: int, sources: Sources, say: Say) -> dict[str, Any]:
    """The report of a verification, which is kept, logged and, if it passes, a record.

    Raises:
        Refused: this machine cannot run the track, or this code was decided already.
        RunLocked: another verification runs on this machine.
        RunChanged: the submission's files changed while it was verified.
        UsageError: the submission breaks a rule that can be seen without running it.
        PinMismatch: track, base model or rows are not the frozen ones.
        FetchFailed: base model or environment cannot be brought here.
        ChildCrashed: a failure that is not the submission's; the same command goes on from here.
        Stopped: somebody asked to; the same command goes on from here.
    """
    require_machine(track)
    entry = submission.load(folder, track)
    into = _require_open(contest, track, entry, num_runs)
    report = measure(entry, track, num_runs, into, sources, say)
    records.append(contest, track, report, into / f"report-{num_runs}.json")
    return report


def accept(contest: Path, folder: Path, track: Track, measured: Path) -> dict[str, Any]:
    """Take what `measure` left in a folder, on another machine or under another version of the track that only judges
    otherwise, into the records. Its report is held against the submission, the track and the kept predictions before.

    Raises:
        PinMismatch: it is of other code, or made under other conditions.
        CorruptFile: it does not follow from what was kept.
        Refused: this code was decided already.
    """
    entry = submission.load(folder, track)
    reports = [path for path in measured.iterdir() if re.fullmatch(r"report-[0-9]+\.json", path.name)]
    reports.sort(key=lambda path: int(path.stem.partition("-")[2]))
    if not reports:
        raise CorruptFile(f"{measured} holds no report: the verification is not finished. Run it again; it goes on.")
    report: dict[str, Any] = json.loads(reports[-1].read_bytes())
    told = report["submission"]
    of_entry = {key: told[key] for key in IDENTITY} == identity_of(entry)
    if told["code_sha256"] != entry.code_sha256 or not of_entry or report["track"] != track.spec.id:
        raise PinMismatch(f"{reports[-1]} is about other code or another track than {folder}, {track.spec.id}.")
    if reports[-1].name != f"report-{len(report['runs'])}.json":
        raise CorruptFile(f"{reports[-1]} is of {len(report['runs'])} runs; its name is that of another report.")
    replay(reports[-1])
    if report["track_sha256"] != track.sha256:
        report = rebased(track, report)
    records.require_consistent(track, report)
    _require_fresh_rows(track, report)
    into = _require_open(contest, track, entry, len(report["runs"]))
    durable.make_dirs(into)
    for path in sorted(measured.rglob("*")):
        name = path.relative_to(measured).as_posix()
        if _KEPT.fullmatch(name) and path.is_file() and not path.is_symlink():
            durable.make_dirs((into / name).parent)
            durable.replace(into / name, path.read_bytes())
    path = into / reports[-1].name
    _write(report, path)
    records.append(contest, track, report, path)
    return report


def claims_against_measured(contest: Path, entry: Submission, track: Track) -> list[Finding]:
    """What an author claims of code that was verified, and what that measured otherwise."""
    rows = [row for row in records.read(contest, track) if row.get("code_sha256") == entry.code_sha256]
    if not rows:
        return []
    summary = json.loads((contest / rows[-1]["report"]).read_bytes())["summary"]
    told = claims.disagreements(claims.of_folder(entry.folder, entry.config), summary)
    return [Finding("warning", rows[-1]["report"], each) for each in told]


def _require_fresh_rows(track: Track, report: dict[str, Any]) -> None:
    """
    Raises:
        CorruptFile: a run was scored on rows that its entropy does not give.
    """
    for run in report["runs"]:
        if run["score"] is None:
            continue
        lines = inputs.as_lines(inputs.test_rows(track, run["entropy"]))
        if durable.sha256_bytes(lines) != run["test_sha256"]:
            raise CorruptFile(f"Run {run['run']} was not scored on the rows that its entropy {run['entropy']!a} gives.")


def _require_open(contest: Path, track: Track, entry: Submission, num_runs: int) -> Path:
    """The folder of a submission's verification in the records.

    Raises:
        Refused: this code was decided already, or so many runs of it were reported.
    """
    records.require_open(contest, track, entry.code_sha256)
    into = records.folder_of(contest, track) / "attempts" / f"{entry.name}-{entry.code_sha256[:12]}"
    path = into / f"report-{num_runs}.json"
    if any(row.get("report") == path.relative_to(contest).as_posix() for row in records.read(contest, track)):
        raise Refused(f"{path} is there: {num_runs} runs of this code were reported. Ask for more runs.")
    return into


def measure(entry: Submission, track: Track, num_runs: int, folder: Path, sources: Sources, say: Say) -> dict[str, Any]:
    """Run a submission `num_runs` times, as far as that was not done, and write `report-N.json` and `.md` to `folder`.

    Raises:
        As `verify`.
    """
    require_machine(track)
    with alone_on_this_machine(), passing_on_stops() as stops:
        verification = prepared(entry, track, folder, sources, say, stops)
        if not all(is_finished(verification, number) for number in range(1, num_runs + 1)):
            warm_libraries(verification)
        results = [finished_or_run(verification, number) for number in range(1, num_runs + 1)]
    machine = machine_facts(verification.training)
    report = build(track, entry, results, machine, clock.utc_text(clock.wall_s()))
    _write(report, folder / f"report-{num_runs}.json")
    return report


def _write(report: dict[str, Any], path: Path) -> None:
    durable.replace(path.with_suffix(".md"), to_markdown(report).encode())
    durable.replace(path, (json.dumps(report, indent=1, sort_keys=True) + "\n").encode())


def prepared(entry: Submission, track: Track, folder: Path, sources: Sources, say: Say, stops: Stops) -> Verification:
    """A submission's place in `folder`, with its code kept there, the base model at hand and both environments built.

    Raises:
        As `verify`.
    """
    _keep_code(entry, folder / "code")
    verification = Verification(
        folder=folder,
        track=track,
        submission=entry,
        model=inputs.base_model(track, say),
        scoring=environments.of_track(track, (), say),
        training=environments.of_track(track, entry.extras, say),
        sources=sources,
        say=say,
        stops=stops,
    )
    for place in (track.folder, folder):
        sandbox.require_hidden(place, verification.training.folders)
    return verification


def _keep_code(entry: Submission, folder: Path) -> None:
    """A copy of what is run, so that it can be run again when its author has gone on.

    Raises:
        RunChanged: beside it are runs of other code.
    """
    if folder.is_dir() and submission.code_sha256(folder) != entry.code_sha256:
        if any(folder.parent.glob("run-*")):
            raise RunChanged(f"{folder.parent} holds runs of other code. Name another folder, or remove it.")
        durable.remove_tree(folder)
    for path in sorted(path for path in entry.folder.rglob("*") if path.is_file()):
        target = folder / path.relative_to(entry.folder)
        durable.make_dirs(target.parent)
        durable.replace(target, path.read_bytes())


def require_machine(track: Track) -> None:
    """
    Raises:
        Refused: the track asks for hardware that is not here.
    """
    wanted = track.spec.hardware
    if wanted.kind == "gpu" or isinstance(track.spec.data, PublicData):
        raise Refused(f"Track {track.spec.id} asks for a {wanted.gpu}; this version verifies on processors only.")
    here = len(os.sched_getaffinity(0))
    if here < wanted.threads:
        raise Refused(f"Track {track.spec.id} asks for {wanted.threads} processor threads; this machine has {here}.")


@contextmanager
def alone_on_this_machine() -> Generator[None]:
    """Two verifications at once would measure each other. The lock is the kernel's: it ends with its holder."""
    path = hotlap_home() / "verify.lock"
    durable.make_dirs(path.parent)
    with suppress(FileExistsError):
        durable.disk.create(path, b"")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunLocked("Another verification runs on this machine. Wait for its end.") from None
        yield
    finally:
        os.close(descriptor)


def is_finished(verification: Verification, number: int) -> bool:
    return (verification.run_folder(number) / "result.json").is_file()


def finished_or_run(verification: Verification, number: int) -> dict[str, Any]:
    """What is kept of a run, which is made if it was not made before.

    Raises:
        As `verify`.
    """
    if verification.stops.was_asked:
        raise Stopped
    folder = verification.run_folder(number)
    path = folder / "result.json"
    if is_finished(verification, number):
        verification.say(f"run {number}: done before")
        return json.loads(path.read_bytes())
    if folder.exists():
        durable.remove_tree(folder)
    seed = drawn(verification.folder / "seeds.jsonl", "seed", number, verification.sources.seed)
    durable.make_dirs(folder)
    result = run_once(verification, number, seed)
    durable.replace(path, (json.dumps(result, indent=1, sort_keys=True) + "\n").encode())
    for name in ("train", "evaluation", "adapter", "inputs"):
        if (folder / name).exists():
            durable.remove_tree(folder / name)
    return json.loads(path.read_bytes())


def drawn(path: Path, what: str, number: int, draw: Callable[[], _Drawn]) -> _Drawn:
    """The chance of a run, on the disk before it is used: a cut run gets no second draw.

    Raises:
        CorruptFile: one before it is missing.
    """
    rows = durable.read_rows(path)
    if len(rows) >= number:
        return rows[number - 1][what]
    if len(rows) != number - 1:
        raise CorruptFile(f"{path} has {len(rows)} rows before run {number}.")
    value = draw()
    durable.append_rows(path, [{"run": number, what: value}])
    durable.sync_file(path)
    return value


def warm_libraries(verification: Verification) -> None:
    """Import what is installed as a run will, so that what a run cannot import is no failure of its submission.

    Raises:
        ChildCrashed: something cannot be imported.
    """
    work = verification.folder / "warm"
    if work.exists():
        durable.remove_tree(work)
    durable.make_dirs(work)
    environment = verification.training
    names = [name for name in _LIBRARIES if name in environment.packages]
    program = sandbox.Program(
        argv=(str(environment.python), "-c", _WARM, *names),
        cwd="/",
        env=verification.variables(environment),
        inputs=(),
        collect={},
        libraries=environment.folders,
    )
    needs = verification.track.spec.verification.protections
    ran = sandbox.run(program, verification.bounds(EVALUATION_S), work, needs, verification.stops)
    durable.remove_tree(work)
    if ran.exit_code != 0:
        raise ChildCrashed(f"The libraries cannot be imported in the sandbox: {ran.log.strip()[-1000:]}")
    verification.say(f"sandbox active: {', '.join(ran.protections)}")


def machine_facts(environment: environments.Environment) -> dict[str, Any]:
    """What the runs ran on: enough to see whether two reports compare."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    versions = {name: environment.packages.get(name) for name in _LIBRARIES}
    return {
        "processor": models[0] if models else platform.processor(),
        "num_threads_here": len(os.sched_getaffinity(0)),
        "load_at_end": os.getloadavg()[0],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {"hotlap": hotlap.__version__, **versions},
        "hotlap_sha256": environments.package_sha256(),
        "environment": environment.as_json(),
        "usd_micros_per_hour": load_cloud().local.usd_micros_per_hour,
    }
