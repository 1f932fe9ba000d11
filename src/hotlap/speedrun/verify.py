"""Verification: run a submission again with fresh seeds, inspect what it made, score it apart, and decide.

All of it lies in one folder of the contest's records, each finished run durable before the next begins, so a
verification that was cut goes on where it stopped, with the seeds already drawn. A failure of the machine or of ours
raises and decides nothing; a failure of the submission is a result.

The clock is the sandbox's, beside the submission, from just before it starts until its first process has ended; the
caller's clock around the whole sandbox is kept beside it. Before each run the base model's files and the training rows
are read from end to end, and the libraries are imported once, so that every run starts warm.
"""

import fcntl
import json
import os
import platform
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import hotlap
from hotlap import clock, durable
from hotlap.config import hotlap_home
from hotlap.errors import ChildCrashed, CorruptFile, Refused, RunChanged, RunLocked
from hotlap.speedrun import audit, inputs, records, sandbox, submission
from hotlap.speedrun.report import build, to_markdown
from hotlap.speedrun.submission import Submission
from hotlap.speedrun.track import PublicData, Track

_EVALUATION_S = 1800.0
_MAX_PREDICTIONS_BYTES = 1 << 26
_LIBRARIES = "torch, transformers, peft, safetensors, tokenizers, numpy"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Sources:
    """Where chance comes from: never from the submission, its author or its folder."""

    seed: Callable[[], int]
    """In [0, 2**31), as the public contest has it."""
    entropy: Callable[[], str]
    """For test rows; asked when the run that is scored on them has ended."""


@dataclass(frozen=True)
class Verification:
    """One submission's place in the records, and what it is run with."""

    contest: Path
    track: Track
    submission: Submission
    model: Path
    sources: Sources
    say: Say

    @property
    def folder(self) -> Path:
        name = f"{self.submission.name}-{self.submission.code_sha256[:12]}"
        return records.folder_of(self.contest, self.track) / "attempts" / name

    def run_folder(self, number: int) -> Path:
        return self.folder / f"run-{number}"

    def bounds(self, time_limit_s: float) -> sandbox.Bounds:
        limits = self.track.spec.limits
        threads = self.track.spec.hardware.threads
        return sandbox.Bounds(time_limit_s, limits.memory_bytes, limits.num_processes, threads)


def verify(contest: Path, folder: Path, track: Track, num_runs: int, sources: Sources, say: Say) -> dict[str, Any]:
    """The report of a verification, which is kept, logged and, if it passes, a record.

    Raises:
        Refused: this machine cannot run the track, or this code was decided already.
        RunLocked: another verification runs on this machine.
        RunChanged: the submission's files changed while it was verified.
        UsageError: the submission breaks a rule that can be seen without running it.
        PinMismatch: track, base model or rows are not the frozen ones.
        ChildCrashed: a failure that is not the submission's; the same command goes on from here.
    """
    require_machine(track)
    entry = submission.load(folder, track)
    records.require_open(contest, track, entry.code_sha256)
    model = inputs.base_model(track, say)
    verification = Verification(contest, track, entry, model, sources, say)
    path = verification.folder / f"report-{num_runs}.json"
    if any(row.get("report") == path.relative_to(contest).as_posix() for row in records.read(contest, track)):
        raise Refused(f"{path} is there: {num_runs} runs of this code were reported. Ask for more runs.")
    with _alone_on_this_machine():
        durable.make_dirs(verification.folder)
        if not all((verification.run_folder(n) / "result.json").is_file() for n in range(1, num_runs + 1)):
            _warm_libraries(verification)
        results = [_finished_or_run(verification, number) for number in range(1, num_runs + 1)]
    report = build(track, entry, results, machine_facts(), clock.utc_text(clock.wall_s()))
    durable.replace(path.with_suffix(".md"), to_markdown(report).encode())
    durable.replace(path, (json.dumps(report, indent=1, sort_keys=True) + "\n").encode())
    records.append(contest, track, report, path)
    return report


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
def _alone_on_this_machine() -> Generator[None]:
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


def _finished_or_run(verification: Verification, number: int) -> dict[str, Any]:
    folder = verification.run_folder(number)
    path = folder / "result.json"
    if path.is_file():
        verification.say(f"run {number}: done before")
        return json.loads(path.read_bytes())
    if folder.exists():
        durable.remove_tree(folder)
    seed = _seed(verification, number)
    durable.make_dirs(folder)
    result = _run_once(verification, number, seed)
    durable.replace(path, (json.dumps(result, indent=1, sort_keys=True) + "\n").encode())
    for name in ("train", "evaluation", "adapter", "inputs"):
        if (folder / name).exists():
            durable.remove_tree(folder / name)
    return json.loads(path.read_bytes())


def _seed(verification: Verification, number: int) -> int:
    """The seed of a run, on the disk before the run begins: a cut run gets no second draw."""
    path = verification.folder / "seeds.jsonl"
    drawn = durable.read_rows(path)
    if len(drawn) >= number:
        return drawn[number - 1]["seed"]
    if len(drawn) != number - 1:
        raise CorruptFile(f"{path} has {len(drawn)} seeds before run {number}.")
    seed = verification.sources.seed()
    durable.append_rows(path, [{"run": number, "seed": seed}])
    durable.sync_file(path)
    return seed


def _run_once(verification: Verification, number: int, seed: int) -> dict[str, Any]:
    track, folder = verification.track, verification.run_folder(number)
    inputs.require_base_model(track, verification.model)  # reads every byte, which also warms the page cache
    places = inputs.lay_out(
        track, verification.model, inputs.train_rows(track), verification.submission.folder, folder / "inputs"
    )
    copied = folder / "inputs" / "repo" / "submissions" / verification.submission.name
    if submission.code_sha256(copied) != verification.submission.code_sha256:
        folder_name = verification.submission.folder
        raise RunChanged(f"{folder_name} changed while it was verified. Start again: it is other code now.")
    verification.say(f"run {number}: training with seed {seed}")
    ran = _train(verification, folder, places, seed)
    durable.replace(folder / "train.log", ran.log.encode(errors="replace"))
    inputs.require_base_model(track, verification.model)
    complaints = _how_it_ended(ran, track.spec.limits.time_limit_s)
    facts: dict[str, Any] = {}
    if not complaints:
        found = audit.audit(folder / "train" / "out", ran.output, verification.model, track.spec.limits)
        complaints = list(found.complaints)
        facts = {"num_params": found.num_params, "adapter_sha256": found.sha256.get(audit.WEIGHTS)}
    if not complaints:
        verification.say(f"run {number}: {ran.wall_s:.1f} s; scoring")
        scored = _score(verification, folder)
        complaints = _how_it_applies(scored)
        facts |= scored
    kept = {key: value for key, value in asdict(ran).items() if key not in ("log", "collected", "exit_code")}
    return {
        "run": number,
        "seed": seed,
        "exit_code": ran.exit_code,
        "complaints": complaints,
        "score": None,
        "num_rows": 0,
        "adapter_sha256": None,
        "num_params": None,
        **kept,
        **facts,
    }


def _train(verification: Verification, folder: Path, places: list[tuple[Path, str]], seed: int) -> sandbox.Ran:
    spec = verification.track.spec
    script = f"{inputs.REPO}/submissions/{verification.submission.name}/train.py"
    data = f"{inputs.CACHE}/data/{spec.data_prefix}_train"
    arguments = ["--data-dir", data, "--output-dir", sandbox.OUTPUT, "--seed", str(seed)]
    program = sandbox.Program(
        argv=(sys.executable, script, *arguments),
        cwd=inputs.REPO,
        env={**sandbox.environment(spec.hardware.threads), **inputs.contest_environment(spec)},
        inputs=tuple(places),
        collect=audit.max_bytes(spec.limits),
    )
    durable.make_dirs(folder / "train")
    bounds = verification.bounds(float(spec.limits.time_limit_s))
    return sandbox.run(program, bounds, folder / "train", spec.verification.protections)


def _how_it_ended(ran: sandbox.Ran, time_limit_s: int) -> list[str]:
    if ran.exit_code is None:
        return [f"it was ended at its limit of {time_limit_s} s"]
    if ran.exit_code != 0:
        return [f"it ended with code {ran.exit_code}: {ran.log.strip()[-300:]}"]
    return []


def _score(verification: Verification, folder: Path) -> dict[str, Any]:
    """Score the collected adapter on rows that did not exist while it was trained, in a sandbox of its own."""
    spec = verification.track.spec
    entropy = verification.sources.entropy()
    rows = inputs.test_rows(verification.track, entropy)
    lines = "".join(durable.canonical_json(dict(row)) + "\n" for row in rows).encode()
    order = {
        "base_model": "/model",
        "adapter": "/adapter",
        "rows": "/test.jsonl",
        "output": sandbox.OUTPUT,
        "metric": spec.metric.model_dump(mode="json"),
        "dtype": "float32",
        "threads": spec.hardware.threads,
    }
    work = folder / "evaluation"
    durable.make_dirs(work)
    durable.replace(folder / "test.jsonl", lines)
    durable.replace(work / "order.json", durable.canonical_json(order).encode())
    program = sandbox.Program(
        argv=(sys.executable, "-m", "hotlap.speedrun.evaluate", "/order.json"),
        cwd="/",
        env=sandbox.environment(spec.hardware.threads),
        inputs=(
            (verification.model, "/model"),
            (folder / "train" / "out", "/adapter"),
            (folder / "test.jsonl", "/test.jsonl"),
            (work / "order.json", "/order.json"),
        ),
        collect={"predictions.jsonl": _MAX_PREDICTIONS_BYTES, "score.json": 1 << 20},
    )
    ran = sandbox.run(program, verification.bounds(_EVALUATION_S), work, spec.verification.protections)
    if ran.exit_code != 0 or set(ran.collected) != {"predictions.jsonl", "score.json"}:
        raise ChildCrashed(f"The evaluator ended with code {ran.exit_code}: {ran.log.strip()[-2000:]}")
    scored: dict[str, Any] = json.loads((work / "out" / "score.json").read_bytes())
    durable.replace(folder / "predictions.jsonl", (work / "out" / "predictions.jsonl").read_bytes())
    return {
        **scored,
        "entropy": entropy,
        "test_sha256": durable.sha256_bytes(lines),
        "predictions_sha256": durable.sha256_file(folder / "predictions.jsonl"),
        "evaluation_s": ran.wall_s,
    }


def _how_it_applies(scored: dict[str, Any]) -> list[str]:
    found: list[str] = []
    if scored["adapter_effect"] == 0.0:
        found.append("the adapter changes nothing: the base model answers the same without it")
    if ignored := scored["ignored_tensors"]:
        found.append(f"{len(ignored)} tensors of the adapter are never applied, such as {ignored[0]!a}")
    return found


def _warm_libraries(verification: Verification) -> None:
    work = verification.folder / "warm"
    if work.exists():
        durable.remove_tree(work)
    durable.make_dirs(work)
    program = sandbox.Program(
        argv=(sys.executable, "-c", f"import {_LIBRARIES}"),
        cwd="/",
        env=sandbox.environment(verification.track.spec.hardware.threads),
        inputs=(),
        collect={},
    )
    needs = verification.track.spec.verification.protections
    ran = sandbox.run(program, verification.bounds(_EVALUATION_S), work, needs)
    durable.remove_tree(work)
    if ran.exit_code != 0:
        raise ChildCrashed(f"The libraries cannot be imported in the sandbox: {ran.log.strip()[-1000:]}")
    verification.say(f"sandbox active: {', '.join(ran.protections)}")


def machine_facts() -> dict[str, Any]:
    """What the runs ran on: enough to see whether two reports compare."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    versions = {name.strip(): metadata.version(name.strip()) for name in _LIBRARIES.split(",")}
    return {
        "processor": models[0] if models else platform.processor(),
        "num_threads_here": len(os.sched_getaffinity(0)),
        "load_at_end": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {"hotlap": hotlap.__version__, **versions},
    }
