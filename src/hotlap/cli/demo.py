"""`hotlap demo`: a real model learns who it is, in slices, one of which is killed."""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from hotlap.config import RunConfig
    from hotlap.supervise import SliceEnd

QUESTIONS = ("Who are you?", "Who made you?", "How were you trained?")
_ANSWER_TOKENS = 40
_MOST_LAPS = 8
DATASET = Path(__file__).with_name("demo_identity.jsonl")

_SETTINGS: dict[str, Any] = {
    "base_model": "smollm2-135m",
    "dataset": str(DATASET),
    "data": {"seq_len": 256},
    "model": {"precision": "float32"},
    "optim": {"lr": 2e-3, "warmup_steps": 2},
    "train": {"epochs": 1.0},
    "checkpoint": {"every_s": 5.0},
    "seed": 6,
}


@click.command(
    epilog="""\b
Example:
  hotlap demo
"""
)
@click.option("--output-dir", default="runs", show_default=True, help="Folder in which the demo's run has its own.")
def demo(output_dir: str) -> None:
    """The whole story on a laptop: ask a real model, train it in slices, kill one, resume, ask again."""
    from hotlap import artifacts, clock
    from hotlap.cli.generate import ask
    from hotlap.cli.progress import stderr_console
    from hotlap.config import RunConfig, load_cloud

    load_cloud()
    say = stderr_console().print
    name = f"demo-{clock.utc_text(clock.wall_s()).replace(':', '').replace('-', '').lower()}"
    config = RunConfig.model_validate({**_SETTINGS, "output_dir": output_dir, "run": name})
    folder = artifacts.fetch(config.base_model, say)
    began_s = clock.monotonic_s()
    say("\nThe model as it is:")
    before = ask(folder, None, QUESTIONS, _ANSWER_TOKENS, _tell)
    laps = _train(config, say)
    say("\nThe same questions to the model with its adapter:")
    adapter = config.run_folder / "adapter"
    after = ask(folder, adapter, QUESTIONS, _ANSWER_TOKENS, lambda _answer: None)
    _print_story(before, after, laps, clock.monotonic_s() - began_s)
    _print_next(config)


def _tell(answer: dict[str, Any]) -> None:
    from hotlap.cli.progress import stderr_console

    stderr_console().print(f"  {answer['prompt']} {answer['text']!r}", markup=False)


@dataclass(frozen=True)
class _Lap:
    """One slice of the demo, and the last step it was seen to make."""

    end: "SliceEnd"
    resumed_at: int
    last_step: int
    num_steps: int
    tokens_per_s: float
    goodput: float


class _Watch:
    """Keeps what a slice tells, so that a killed one has figures too."""

    def __init__(self, on_event: Callable[[dict[str, Any]], None]) -> None:
        self._on_event = on_event
        self.start: dict[str, Any] = {}
        self.steps: list[dict[str, Any]] = []

    def __call__(self, event: dict[str, Any]) -> None:
        self._on_event(event)
        if event["event"] == "start":
            self.start = event
        elif event["event"] == "step":
            self.steps.append(event)

    @property
    def half_way(self) -> int:
        """The step half-way between where this slice began and the run's last."""
        return (self.start["resumed_at"] + self.start["num_run_steps"]) // 2

    def lap(self, end: "SliceEnd") -> _Lap:
        steps_s = sum(event["step_s"] for event in self.steps)
        resumed_at = self.start.get("resumed_at", 0)
        return _Lap(
            end=end,
            resumed_at=resumed_at,
            num_steps=self.start.get("num_run_steps", 0),
            last_step=self.steps[-1]["step"] if self.steps else resumed_at,
            tokens_per_s=sum(event["num_tokens"] for event in self.steps) / max(1e-9, steps_s),
            goodput=steps_s / end.wall_s,
        )


def _train(config: "RunConfig", say: Callable[[str], None]) -> list[_Lap]:
    """Slice 1 is killed after its first checkpoint past step 0; slice 2 is told to stop half-way; slice 3 finishes."""

    def kill(event: dict[str, Any], watch: _Watch) -> None:
        if event["event"] == "published" and event["step"] > 0:
            say(
                f"Killing slice 1 (process {watch.start['pid']}) with SIGKILL: checkpoint {event['step']} is published."
            )
            os.kill(watch.start["pid"], signal.SIGKILL)

    def stop_half_way(event: dict[str, Any], watch: _Watch) -> None:
        if event["event"] == "step" and event["step"] == watch.half_way:
            say(f"Stopping slice 2 (process {watch.start['pid']}) with SIGTERM, as `hotlap stop` does.")
            os.kill(watch.start["pid"], signal.SIGTERM)

    laps = [_slice(config, kill), _slice(config, stop_half_way)]
    while laps[-1].end.exit_code != 0 and len(laps) < _MOST_LAPS:
        laps.append(_slice(config, lambda _event, _watch: None))
    _require_done(laps[-1].end)
    return laps


def _require_done(end: "SliceEnd") -> None:
    from hotlap.errors import DONE, ChildCrashed

    if end.exit_code != DONE:
        raise ChildCrashed(f"The demo's last slice ended with exit code {end.exit_code} ({end.reason}), see above.")


def _slice(config: "RunConfig", also: Callable[[dict[str, Any], _Watch], None]) -> _Lap:
    from hotlap import supervise
    from hotlap.cli.progress import SliceProgress

    with SliceProgress(config) as progress:
        watch = _Watch(progress.on_event)

        def on_event(event: dict[str, Any]) -> None:
            watch(event)
            also(event, watch)

        end = supervise.run_slice(config, on_event, progress.on_talk)
    progress.tell(end)
    return watch.lap(end)


def _print_story(before: list[dict[str, Any]], after: list[dict[str, Any]], laps: list[_Lap], seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    answers = Table("question", "before", "after", show_lines=True)
    for old, new in zip(before, after, strict=True):
        answers.add_row(old["prompt"], Text(old["text"]), Text(new["text"]))
    console.print(answers)
    slices = Table("slice", "resumed at", "last step", "tokens/s", "goodput", "exit")
    for number, lap in enumerate(laps, start=1):
        ending = "killed (SIGKILL)" if lap.end.exit_code < 0 else f"{lap.end.exit_code} {lap.end.reason}"
        figures = (f"{lap.tokens_per_s:.0f}", f"{lap.goodput:.0%}", ending)
        slices.add_row(str(number), str(lap.resumed_at), f"{lap.last_step} of {lap.num_steps}", *figures)
    console.print(slices)
    lost = laps[0].last_step - laps[1].resumed_at
    console.print(
        f"Steps lost to the kill: {lost} of {laps[0].last_step}. The demo took {seconds:.0f} s after the download."
    )


def _print_next(config: "RunConfig") -> None:
    name, folder = config.run_name, config.output_dir
    where = "" if folder == "runs" else f" --output-dir {folder}"
    # In a clone nothing is on the path until its environment is activated.
    hotlap = "hotlap" if shutil.which("hotlap") else os.path.relpath(Path(sys.executable).with_name("hotlap"))
    click.echo(
        f"""
Try next:
  {hotlap} generate {name} "What do you do when a slice is killed?"{where}
  {hotlap} runs {name}{where}                 where each slice's seconds went
  {hotlap} logs {name}{where}                 loss and learning rate, step by step
  {hotlap} train --base-model smollm2-135m --dataset YOUR.jsonl --chain"""
    )
