"""One run of a submission: train it locked in, inspect what it made, score that apart.

The clock is the sandbox's, beside the submission, from just before it starts until its first process has ended; the
caller's clock around the whole sandbox is kept beside it. Before each run the base model's files and the training rows
are read from end to end, so that every run starts warm.
"""

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hotlap import clock, durable
from hotlap.child import Stops, with_waiting_threads
from hotlap.errors import ChildCrashed, RunChanged
from hotlap.speedrun import audit, environments, inputs, recipe, sandbox, submission
from hotlap.speedrun.environments import Environment
from hotlap.speedrun.submission import Submission
from hotlap.speedrun.track import EVALUATOR, Spec, Track

EVALUATION_S = 1800.0
LOADING = 'PeftModel.from_pretrained(base, order["adapter"])'
"""The evaluator's own line, as a traceback shows it, in which the base model is loaded already and the adapter is not:
an audited adapter that PEFT refuses is its author's failure, and not the machine's."""

_MAX_PREDICTIONS_BYTES = 1 << 26
_CPU_SLACK = 1.05
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
    """One submission's place on the disk, and what it is run with."""

    folder: Path
    track: Track
    submission: Submission
    model: Path
    training: Environment
    """With what the submission asked for."""
    scoring: Environment
    """The track's alone."""
    sources: Sources
    say: Say
    stops: Stops

    def run_folder(self, number: int) -> Path:
        return self.folder / f"run-{number}"

    def bounds(self, time_limit_s: float) -> sandbox.Bounds:
        limits = self.track.spec.limits
        threads = self.track.spec.hardware.threads
        return sandbox.Bounds(time_limit_s, limits.memory_bytes, limits.num_processes, threads)

    def variables(self, environment: Environment) -> dict[str, str]:
        return sandbox.variables(self.track.spec.hardware.threads, environment.python)


def run_once(verification: Verification, number: int, seed: int) -> dict[str, Any]:
    """Everything that is kept of a run.

    Raises:
        RunChanged: the submission's files changed while it was verified.
        PinMismatch: the base model or the rows are not the frozen ones.
        ChildCrashed: a failure that is not the submission's.
        Stopped: somebody asked to.
    """
    track, folder = verification.track, verification.run_folder(number)
    inputs.require_base_model(track, verification.model)  # reads every byte, which also warms the page cache
    rows = inputs.train_rows(track)
    places = inputs.lay_out(track, verification.model, rows, verification.submission.folder, folder / "inputs")
    copied = folder / "inputs" / "repo" / "submissions" / verification.submission.name
    if submission.code_sha256(copied) != verification.submission.code_sha256:
        folder_name = verification.submission.folder
        raise RunChanged(f"{folder_name} changed while it was verified. Start again: it is other code now.")
    verification.say(f"run {number}: training with seed {seed}")
    if verification.submission.recipe is None:
        program = _train_program(verification, places, seed)
    else:
        into = folder / "inputs" / "recipe"
        model = next(place for source, place in places if source == verification.model)
        recipe.write_inputs(verification.submission.recipe, track.spec, rows, model, seed, into)
        program = _recipe_program(verification, [*places, (into, recipe.PLACE)])
    durable.make_dirs(folder / "train")
    bounds = verification.bounds(float(track.spec.limits.time_limit_s))
    started_at = clock.utc_text(clock.wall_s())
    busy_before_s = _busy_s()
    ran = sandbox.run(program, bounds, folder / "train", track.spec.verification.protections, verification.stops)
    others_cpu_s = max(0.0, _busy_s() - busy_before_s - ran.cpu_s)
    ran = replace(ran, log=_without_places(ran.log, verification.training))
    durable.replace(folder / "train.log", ran.log.encode(errors="replace"))
    inputs.require_base_model(track, verification.model)
    facts = {"started_at": started_at, "others_cpu_s": others_cpu_s, **_inside(verification, ran)}
    return _judged(verification, number, seed, ran) | facts


def _without_places(log: str, environment: Environment) -> str:
    """A log without the folders of whoever verifies, which warnings name and reports would publish."""
    for place in (*environment.folders, environments.package_folder()):
        log = log.replace(str(place), place.name)
    return log


def _busy_s() -> float:
    """Processor seconds that this machine has spent on anything since it started, those its host took included."""
    user, nice, system, _idle, _waiting, *interrupts_and_stolen = (
        Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    )
    ticks = sum(map(int, (user, nice, system, *interrupts_and_stolen)))
    return ticks / os.sysconf("SC_CLK_TCK")


def _judged(verification: Verification, number: int, seed: int, ran: sandbox.Ran) -> dict[str, Any]:
    limits, folder = verification.track.spec.limits, verification.run_folder(number)
    complaints = _how_it_ended(ran, verification.track.spec)
    facts: dict[str, Any] = {}
    if not complaints:
        found = audit.audit(folder / "train" / "out", ran.output, verification.model, limits)
        complaints = list(found.complaints)
        facts = {"num_params": found.num_params, "adapter_sha256": found.sha256.get(audit.WEIGHTS)}
    if not complaints:
        verification.say(f"run {number}: {ran.wall_s:.1f} s; scoring")
        scored = _score(verification, folder)
        complaints = [scored.pop("misfit")] if "misfit" in scored else _how_it_applies(scored)
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


def _inside(verification: Verification, ran: sandbox.Ran) -> dict[str, Any]:
    """Tokens and seconds by phase of a recipe, whose program is ours. What a stranger's program says of itself is no
    measurement."""
    found = re.findall(r"^measured (\{.*\})$", ran.log, flags=re.MULTILINE)
    if not found or verification.submission.recipe is None:
        return {"num_tokens": None, "phases_s": None}
    return json.loads(found[-1])


def _train_program(verification: Verification, places: list[tuple[Path, str]], seed: int) -> sandbox.Program:
    spec, environment = verification.track.spec, verification.training
    script = f"{inputs.REPO}/submissions/{verification.submission.name}/train.py"
    data = f"{inputs.CACHE}/data/{spec.data_prefix}_train"
    arguments = ["--data-dir", data, "--output-dir", sandbox.OUTPUT, "--seed", str(seed)]
    return sandbox.Program(
        argv=(str(environment.python), script, *arguments),
        cwd=inputs.REPO,
        env={**verification.variables(environment), **inputs.contest_environment(spec)},
        inputs=tuple(places),
        collect=audit.max_bytes(spec.limits),
        libraries=environment.folders,
    )


def _recipe_program(verification: Verification, places: list[tuple[Path, str]]) -> sandbox.Program:
    environment, package = verification.training, environments.package_folder()
    return sandbox.Program(
        argv=(str(environment.python), "-m", "hotlap.train.recipe", f"{recipe.PLACE}/config.json", sandbox.OUTPUT),
        cwd="/",
        env={
            **verification.variables(environment),
            "PYTHONPATH": str(package.parent),
            "HOTLAP_HOME": "/tmp/hotlap",
            **with_waiting_threads({}),
        },
        inputs=tuple(places),
        collect=audit.max_bytes(verification.track.spec.limits),
        libraries=(*environment.folders, package),
    )


def _how_it_ended(ran: sandbox.Ran, spec: Spec) -> list[str]:
    if ran.exit_code is None:
        return [f"it was ended at its limit of {spec.limits.time_limit_s} s"]
    if ran.exit_code != 0:
        return [f"it ended with code {ran.exit_code}: {ran.log.strip()[-300:]}"]
    # The kernel lets a program widen the set of processors that it was given, and says afterwards what it used.
    if ran.cpu_s > _CPU_SLACK * spec.hardware.threads * ran.wall_s + 1.0:
        used = f"{ran.cpu_s:.1f} s of processor time in {ran.wall_s:.1f} s"
        return [f"it used {used}, which is more than {spec.hardware.threads} threads give"]
    return []


def _score(verification: Verification, folder: Path) -> dict[str, Any]:
    """Score the collected adapter on rows that did not exist while it was trained, in a sandbox of its own."""
    spec, environment = verification.track.spec, verification.scoring
    entropy = verification.sources.entropy()
    lines = inputs.as_lines(inputs.test_rows(verification.track, entropy))
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
        argv=(str(environment.python), "-P", "/evaluate.py", "/order.json"),
        cwd="/",
        env={**verification.variables(environment), **with_waiting_threads({})},
        inputs=(
            (EVALUATOR, "/evaluate.py"),
            (verification.model, "/model"),
            (folder / "train" / "out", "/adapter"),
            (folder / "test.jsonl", "/test.jsonl"),
            (work / "order.json", "/order.json"),
        ),
        collect={"predictions.jsonl": _MAX_PREDICTIONS_BYTES, "score.json": 1 << 20},
        libraries=environment.folders,
    )
    bounds = verification.bounds(EVALUATION_S)
    ran = sandbox.run(program, bounds, work, spec.verification.protections, verification.stops)
    if ran.exit_code == 1 and LOADING in ran.log:
        return {"misfit": f"PEFT cannot load the adapter: {ran.log.strip().splitlines()[-1][:300]}"}
    if ran.exit_code != 0 or set(ran.collected) != {"predictions.jsonl", "score.json"}:
        how = (
            f"ended with code {ran.exit_code}" if ran.exit_code is not None else f"was ended after {EVALUATION_S:.0f} s"
        )
        raise ChildCrashed(f"The evaluator {how}: {ran.log.strip()[-2000:]}")
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
    """What is wrong with an adapter by its score; figures that are no numbers are taken out of it."""
    found: list[str] = []
    for key in ("score", "adapter_effect"):
        if not math.isfinite(scored[key]):
            scored[key] = None
            found.append(f"the adapter makes the model answer with what is no number ({key})")
    if scored["adapter_effect"] == 0.0:
        found.append("the adapter changes nothing: the base model answers the same without it")
    # PEFT adds `.weight` to a magnitude's name when it loads it, which the frozen evaluator does not know; the audit
    # has held each magnitude against its module.
    if ignored := [name for name in scored["ignored_tensors"] if not name.endswith(audit.MAGNITUDE)]:
        found.append(f"{len(ignored)} tensors of the adapter are never applied, such as {ignored[0]!a}")
    return found
