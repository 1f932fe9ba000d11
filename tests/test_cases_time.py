"""Bug reports B50 and B51: stop signals in every phase, and a cap that holds whatever happens.

Slices that mostly sleep run side by side and are started by a fixture; each test looks at what became of one.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from tiny import tiny_config
from zygote import TESTS, SliceProcess, Zygote

from hotlap import checkpoint, clock, durable, runs, supervise
from hotlap.config import RunConfig
from hotlap.runs import RunFolder

pytestmark = [pytest.mark.torch, pytest.mark.long]

TOLD = "patches:as_told"
SLACK_S = 6.0
"""For a machine that has other things to do, and for noticing that a process has ended. What a naive slice takes longer
is longer than that, and passes in sleep."""


def checkpoints_of(config: RunConfig) -> list[int]:
    """The steps that are saved. Every checkpoint must verify, and nothing half-written may lie about."""
    folder = RunFolder(config.run_folder).checkpoints
    return sorted(checkpoint.read(path).step for path in folder.glob("step-*"))


def last_step(process: SliceProcess) -> int:
    return max((event["step"] for event in process.events() if event["event"] == "step"), default=0)


# --- B50: signals ---

GRACE_S = 2.5
LONG_S = 12.0
WRITE_S = 2.0
STEP_S = 0.1
"""Half of the report's times, but for what is long: a stopped slice does not sit it out."""


@dataclass
class Stopped:
    """A slice that got signals in some phase, each so many seconds after the one before."""

    phase: str
    signals: Sequence[int]
    told: dict[str, str]
    gap_s: float = 0.5
    config: RunConfig = field(init=False)
    process: SliceProcess = field(init=False)
    took_s: float = 0.0
    """From the first signal to the end."""

    def watch(self) -> None:
        """Signal it soon after the phase began; a slow disk is known to the slice by then."""
        if self.phase in ("evaluation", "step"):
            self.process.wait_for("published", step=0)
        self.process.wait_for("phase", name=self.phase) if self.phase != "step" else self.process.wait_for("step")
        time.sleep(0.3)
        began_s = time.monotonic()
        for index, number in enumerate(self.signals):
            time.sleep(self.gap_s if index else 0.0)
            self.process.kill(number)
        self.process.wait()
        self.took_s = time.monotonic() - began_s


TERM, INT = [signal.SIGTERM], [signal.SIGINT]
SLOW = {"TEST_STEP_S": str(STEP_S), "TEST_WRITE_S": str(WRITE_S)}
PHASES = {
    "data": {"TEST_DATA_S": str(LONG_S)},
    "warmup": {"TEST_WARMUP_S": str(LONG_S)},
    "evaluation": {"TEST_EVALUATION_S": str(LONG_S)},
    "write 1": {},
    "write 2": {},
    "step": {},
}


def scenarios() -> dict[str, Stopped]:
    found = {
        f"{phase} {signal.Signals(number).name}": Stopped(phase, [number], SLOW | slow)
        for phase, slow in PHASES.items()
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    found["second SIGTERM"] = Stopped("step", TERM * 2, SLOW)
    found["second SIGINT"] = Stopped("step", INT * 2, SLOW)
    found["last write"] = Stopped("write of step 12", TERM, SLOW)
    found["naive"] = Stopped("evaluation", TERM, SLOW | PHASES["evaluation"] | {"TEST_NAIVE": "stop"})
    return found


@pytest.fixture(scope="module")
def stopped(zygote: Zygote, tiny_model: Path, f3: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stopped]:
    folder = tmp_path_factory.mktemp("b50")
    found = scenarios()
    for number, each in enumerate(found.values()):
        each.config = tiny_config(
            tiny_model,
            f3,
            folder / "runs",
            run=f"run-{number}",
            train__max_steps=12 if each.phase == "write of step 12" else 1000,
            checkpoint__every_s=0.5 if each.phase == "write 2" else 60.0,
            data__eval_examples=4,
            eval__every_steps=3 if each.phase == "evaluation" else 5000,
            slice__grace_s=GRACE_S,
        )
    in_parallel([lambda each=each: start_and_watch(zygote, each, folder) for each in found.values()])
    return found


def start_and_watch(zygote: Zygote, each: Stopped, folder: Path) -> None:
    each.process = zygote.start(each.config, TOLD, {"HOTLAP_HOME": str(folder / "home"), **each.told})
    each.watch()


def in_parallel(jobs: Sequence[Callable[[], None]]) -> None:
    errors: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001  (raised again below)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
        # Loading the model is work; only then do they sleep.
        time.sleep(0.2)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def ended_as_asked(each: Stopped) -> None:
    process, run = each.process, RunFolder(each.config.run_folder)
    assert process.status == 75, process.talk()
    result = process.result()
    assert (result["exit_code"], result["reason"]) == (75, "stopped")
    account = runs.slice_state(run, 1).result
    assert account is not None and account["reason"] == "stopped"
    assert runs.run_state(run).state == "paused"


@pytest.mark.parametrize("name", [name for name in scenarios() if name.split()[0] in ("data", *PHASES, "write")])
def test_b50_stopped_in_any_phase_within_the_grace_with_the_last_step_saved(stopped: dict[str, Stopped], name: str):
    each = stopped[name]
    ended_as_asked(each)
    assert each.took_s <= GRACE_S + SLACK_S, each.process.talk()
    steps, last = checkpoints_of(each.config), last_step(each.process)
    if last:
        assert last in steps
        assert each.process.result()["step"] == last
    if each.phase == "data":
        assert steps == []


def test_b50_naive_flag_between_steps_is_too_late(stopped: dict[str, Stopped]):
    """So that the test above can fail: the evaluation is sat out, and a SIGKILL would have come before the save."""
    assert stopped["naive"].process.status == 75
    assert stopped["naive"].took_s > GRACE_S + SLACK_S


def test_b50_a_second_sigterm_does_not_disturb_the_save(stopped: dict[str, Stopped]):
    each = stopped["second SIGTERM"]
    ended_as_asked(each)
    assert each.took_s <= GRACE_S + SLACK_S
    assert last_step(each.process) in checkpoints_of(each.config)


def test_b50_a_second_ctrl_c_ends_it_at_once_and_what_was_saved_stays(stopped: dict[str, Stopped], zygote: Zygote):
    each = stopped["second SIGINT"]
    assert each.process.status == 130
    assert each.took_s <= each.gap_s + SLACK_S
    run = RunFolder(each.config.run_folder)
    newest = runs.newest_checkpoint(run, pytest.fail)
    assert newest is not None and newest.step == 0 < last_step(each.process)
    assert runs.run_state(run).state == "paused"
    torn = [path.name for path in run.checkpoints.iterdir() if path.name.startswith(".staging")]
    assert len(torn) == 1
    process = zygote.run(each.config, TOLD, TEST_STOP_AT="3")
    assert process.status == 75, process.talk()
    # A step that the slow save before leaves no time for is given up at a stop.
    assert checkpoints_of(each.config)[-1] == process.result()["step"] in (2, 3)
    assert not any(path.name.startswith(".staging") for path in run.checkpoints.iterdir()), "the torn one is gone"


def test_b50_stopped_in_the_last_write_the_results_are_left_to_the_next_slice(
    stopped: dict[str, Stopped], zygote: Zygote
):
    each = stopped["last write"]
    ended_as_asked(each)
    assert each.took_s <= GRACE_S + SLACK_S
    assert 12 in checkpoints_of(each.config)
    assert not (each.config.run_folder / "adapter").exists()
    process = zygote.run(each.config)
    assert process.status == 0, process.talk()
    assert process.result()["resumed_at"] == 12
    assert runs.is_finished(RunFolder(each.config.run_folder))


# --- B51: the cap ---


@dataclass
class Capped:
    """Slices of one run, one after another, under a cap each."""

    cap_s: float
    told: list[dict[str, str]]
    changes: dict[str, Any] = field(default_factory=dict)
    config: RunConfig = field(init=False)
    processes: list[SliceProcess] = field(default_factory=list)
    walls_s: list[float] = field(default_factory=list)
    steps: list[list[int]] = field(default_factory=list)
    """What was saved after each."""

    def run(self, zygote: Zygote, home: Path) -> None:
        for told in self.told:
            began_s = time.monotonic()
            process = zygote.start(self.config, TOLD, {"HOTLAP_HOME": str(home), **told})
            process.wait()
            self.walls_s.append(time.monotonic() - began_s)
            self.processes.append(process)
            self.steps.append(checkpoints_of(self.config))

    def reasons(self) -> list[str]:
        for process in self.processes:
            assert "result" in {event["event"] for event in process.events()}, process.talk()
        return [process.result()["reason"] for process in self.processes]

    def num_steps(self, number: int) -> int:
        return self.processes[number].result()["timeline"]["num_steps"]


def test_a_first_save_that_was_given_up_is_no_reason_to_keep_a_fifth_of_the_cap(
    zygote: Zygote, make_config: Callable[..., RunConfig]
) -> None:
    """How long a save takes was never measured then, but for how long that one had; the next slice's steps are
    finished after a stop signal as ever, and it ends no earlier."""
    config = make_config(train__max_steps=30)
    first = zygote.run(config, TOLD, TEST_STOP_AT="2", TEST_WRITE_S="1.5")
    assert (first.status, first.result()["step"]) == (75, 2), first.talk()
    (checkpoint,) = config.run_folder.glob("checkpoints/step-*/manifest.json")
    assert 0.0 < json.loads(checkpoint.read_bytes())["facts"]["publish_s"] < 2.0
    again = zygote.run(config, TOLD, TEST_STOP_AT="5")
    assert (again.status, again.result()["step"]) == (75, 5), again.talk()


EVALUATES = {"data__eval_examples": 4, "eval__every_steps": 3, "train__max_steps": 24}
"""Three steps of 2 s, then an evaluation of 8 s: too much for the rest of 14 s, and not for a whole slice."""


def capped_scenarios() -> dict[str, Capped]:
    steps, write = {"TEST_STEP_S": "0.3"}, {"TEST_WRITE_S": "2.4"}
    evaluation = {"TEST_STEP_S": "2", "TEST_EVALUATION_S": "8"}
    never = {**steps, "TEST_EVALUATION_S": "30"}
    return {
        "evaluation": Capped(14.0, [evaluation, evaluation], EVALUATES),
        "endless evaluation": Capped(14.0, [never, never], {**EVALUATES, "eval__every_steps": 1}),
        "slow save": Capped(14.0, [{**steps, **write}] * 2),
        "naive": Capped(6.0, [{**steps, "TEST_WRITE_S": "9", "TEST_NAIVE": "tail"}]),
        "steps": Capped(8.0, [{"TEST_STEP_S": "0.5"}] * 2),
        "clock": Capped(8.0, [{**steps, "TEST_WALL_CLOCK_JUMPS_AT": "3"}] * 2),
    }


@dataclass(frozen=True)
class Capped51:
    found: dict[str, Capped]
    hung: "Hung"


@pytest.fixture(scope="module")
def capped(zygote: Zygote, tiny_model: Path, f3: Path, tmp_path_factory: pytest.TempPathFactory) -> Capped51:
    folder = tmp_path_factory.mktemp("b51")
    home = folder / "home"
    hung = Hung(tiny_config(tiny_model, f3, folder / "runs", run="hung"), home)
    assert zygote.run(hung.config, TOLD, TEST_STOP_AT="3", HOTLAP_HOME=str(home)).status == 75
    found = capped_scenarios()
    for name, each in found.items():
        each.config = tiny_config(
            tiny_model,
            f3,
            folder / "runs",
            run=name.replace(" ", "-"),
            slice__minutes=each.cap_s / 60,
            **{"train__max_steps": 1000, **each.changes},
        )
    in_parallel([hung.run, *(lambda each=each: each.run(zygote, home) for each in found.values())])
    return Capped51(found, hung)


WATCH = """
    import json, sys
    from hotlap import supervise
    from hotlap.config import load_run_json

    events = []
    end = supervise.run_slice(load_run_json(sys.argv[1]), events.append, events.append, module="told_slice")
    print(json.dumps({"number": end.number, "exit_code": end.exit_code, "reason": end.reason, "wall_s": end.wall_s,
        "result": end.result, "pid": end.end.pid, "events": events}))
"""


@dataclass
class Hung:
    """A run stopped at step 3, and then a whole watched slice, imports included, whose step 5 never ends."""

    config: RunConfig
    home: Path
    cap_s: float = 15.0
    end: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        self._watch()
        if not self.did_hang():  # a busy machine was not done importing
            self.cap_s *= 3
            self._watch()

    def did_hang(self) -> bool:
        return {"event": "phase", "name": "hang"} in self.end["events"]

    def _watch(self) -> None:
        config = RunConfig.model_validate(self.config.model_dump() | {"slice": {"minutes": self.cap_s / 60}})
        watcher = subprocess.run(
            [sys.executable, "-c", dedent(WATCH), config.model_dump_json()],
            env={**os.environ, "PYTHONPATH": str(TESTS), "TEST_HANG_AT": "5", "HOTLAP_HOME": str(self.home)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        self.end = json.loads(watcher.stdout)


def within_the_cap(each: Capped) -> None:
    """And by itself: it said how it ended."""
    each.reasons()
    for process, wall_s in zip(each.processes, each.walls_s, strict=True):
        assert wall_s <= each.cap_s + SLACK_S, process.talk()


def saved_its_last_step(each: Capped) -> None:
    for process, steps in zip(each.processes, each.steps, strict=True):
        assert process.status == 75, process.talk()
        assert steps[-1] == process.result()["step"] == last_step(process)


def test_b51_a_a_step_that_never_ends_is_ended_from_outside(capped: Capped51):
    hung = capped.hung
    assert (hung.end["exit_code"], hung.end["reason"], hung.end["result"]) == (124, "overran", None)
    assert hung.did_hang()
    assert hung.cap_s <= hung.end["wall_s"] <= hung.cap_s + SLACK_S
    with pytest.raises(ProcessLookupError):
        clock.process_birth(hung.end["pid"])
    run = RunFolder(hung.config.run_folder)
    assert hung.end["number"] == runs.newest_number(run)
    seen = runs.slice_state(run, hung.end["number"]).exit
    assert seen is not None and (seen["exit_code"], seen["reason"]) == (124, "overran")
    assert runs.run_state(run).state == "overran"
    newest = runs.newest_checkpoint(run, pytest.fail)
    assert newest is not None and newest.step == 3


def test_b51_a_and_the_run_goes_on_from_the_last_good_checkpoint(capped: Capped51, zygote: Zygote):
    process = zygote.run(capped.hung.config)
    assert process.status == 0, process.talk()
    assert process.result()["resumed_at"] == 3


def test_b51_a_the_whole_slice_is_under_the_cap_with_its_imports(
    zygote: Zygote, make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The true module, unpatched, under a cap that ends in the middle of importing a torch that takes for ever. The
    data is ready by then."""
    assert zygote.run(make_config(), TOLD, TEST_STOP_AT="1").status == 75
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    config = make_config(slice__minutes=10 / 60)
    end = supervise.run_slice(config, lambda event: None, lambda line: None)
    assert (end.exit_code, end.reason, end.result, end.goes_on) == (124, "overran", None, False)
    assert 10.0 <= end.wall_s <= 10.0 + SLACK_S
    with pytest.raises(ProcessLookupError):
        clock.process_birth(end.end.pid)


def test_b51_a_cap_too_short_to_begin_with_the_data_is_refused_rather_than_tried_again(
    make_config: Callable[..., RunConfig],
):
    end = supervise.run_slice(make_config(slice__minutes=3 / 60), lambda event: None, lambda line: None)
    assert (end.exit_code, end.goes_on) == (2, False)
    assert end.result is not None and "Raise slice.minutes" in end.result["message"]


def test_b51_b_an_evaluation_that_does_not_fit_is_left_to_the_next_slice(capped: Capped51):
    each = capped.found["evaluation"]
    within_the_cap(each)
    assert each.reasons()[0] == "slice_over"
    assert each.steps[0][-1] == 3 == each.processes[0].result()["step"]
    kinds = [event["event"] for event in each.processes[1].events() if event["event"] in ("step", "evaluation")]
    assert kinds[0] == "evaluation", "before any step"
    rows = durable.read_rows(RunFolder(each.config.run_folder).metrics)
    assert [row["step"] for row in rows if "val_loss" in row] == [3]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, len(rows)))


def test_b51_b_an_evaluation_that_never_fits_is_a_mistake_in_the_configuration(capped: Capped51):
    each = capped.found["endless evaluation"]
    within_the_cap(each)
    assert [process.status for process in each.processes] == [75, 2]
    assert each.reasons() == ["slice_over", "config"]
    message = each.processes[1].result()["message"]
    assert "before the evaluation could end" in message
    assert "Raise slice.minutes, or lower data.eval_examples" in message
    assert each.steps[1] == each.steps[0] and each.steps[0][-1] == 1, "nothing is lost"


def test_b51_c_a_slow_save_is_measured_and_its_time_kept(capped: Capped51):
    """Also by the second slice, which has not saved anything when it has to know."""
    each = capped.found["slow save"]
    assert each.reasons() == ["slice_over", "slice_over"]
    within_the_cap(each)
    saved_its_last_step(each)
    assert all(process.result()["timeline"]["phases_s"]["publish"] >= 2.4 for process in each.processes)
    assert each.num_steps(1) > 0


def test_b51_c_naive_without_a_reserve_the_save_ends_too_late(capped: Capped51):
    """What ends every slice soon after its cap, whatever it does, ends it in the middle of the save."""
    each = capped.found["naive"]
    assert each.processes[0].status == 1 and each.walls_s[0] > each.cap_s
    assert "result" not in {event["event"] for event in each.processes[0].events()}


def test_b51_d_e_every_slice_has_a_cap_of_its_own(capped: Capped51):
    """Not one for all: the second trains as long as the first."""
    each = capped.found["steps"]
    assert each.reasons() == ["slice_over", "slice_over"]
    within_the_cap(each)
    saved_its_last_step(each)
    assert each.processes[1].result()["resumed_at"] == each.processes[0].result()["step"]
    for number in (0, 1):
        assert each.processes[number].result()["timeline"]["elapsed_s"] > each.cap_s / 2
        assert 4 <= each.num_steps(number) <= 15


def test_b51_f_the_wall_clock_does_not_matter(capped: Capped51):
    jumped_s = time.time() + 3600.0
    by_wall_clock = clock.Deadline(time.time() + 4.0, now_s=lambda: jumped_s)
    assert by_wall_clock.is_over(), "the naive deadline ends the slice at once"
    each = capped.found["clock"]
    assert each.reasons() == ["slice_over", "slice_over"]
    within_the_cap(each)
    saved_its_last_step(each)
    assert last_step(each.processes[0]) > 4, "it went on after the jump"
    assert all(process.result()["timeline"]["elapsed_s"] > each.cap_s / 2 for process in each.processes)
