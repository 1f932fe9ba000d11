"""A slice's progress on standard error: a bar where somebody watches, a line now and then where nobody does."""

from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from hotlap import clock
from hotlap.config import RunConfig

if TYPE_CHECKING:
    from hotlap.supervise import SliceEnd

_LINE_EVERY_S = 10.0
_SMOOTHED = 0.8


def stderr_console() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def plain(text: str) -> str:
    """Strangers' text without the characters that steer a terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def hms(seconds: float) -> str:
    minutes, seconds = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class SliceProgress:
    """Step, loss, tokens/s, time left in the slice and in the run, goodput."""

    def __init__(self, settings: RunConfig) -> None:
        self._settings = settings
        self._console = stderr_console()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[facts]}"),
            console=self._console,
            transient=True,
        )
        self._task: TaskID | None = None
        began_s = clock.monotonic_s()
        self._deadline = clock.Deadline(began_s + settings.slice.cap_s)
        self._steps_s = 0.0
        self._step_s: float | None = None
        self._tokens_per_s: float | None = None
        self._told_at_s = began_s

    def __enter__(self) -> "SliceProgress":
        if self._console.is_terminal:
            self._task = self._bar.add_task("starting", total=None, facts="")
            self._bar.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._bar.stop()

    def on_talk(self, line: str) -> None:
        """A line of talk. A terminal that is gone is no reason to end a slice: the run's files tell it all."""
        try:
            self._console.print(escape(plain(line)))
        except OSError:
            self._task = None

    def on_event(self, event: dict[str, Any]) -> None:
        if event["event"] == "start":
            self._deadline = clock.Deadline(event["deadline_at_s"])
            where = f"resumed at step {event['resumed_at']}" if event["resumed_at"] else "from the start"
            self.on_talk(f"{event['run']}: slice {event['slice_number']}, {where} of {event['num_run_steps']}")
        elif event["event"] == "evaluation":
            best = ", the best so far" if event["is_best"] else ""
            self.on_talk(f"step {event['step']}: val_loss {event['val_loss']:.4f}{best}")
        elif event["event"] == "step":
            self._on_step(event)

    def _on_step(self, event: dict[str, Any]) -> None:
        step_s = event["step_s"]
        self._steps_s += step_s
        self._step_s = _smooth(self._step_s, step_s)
        self._tokens_per_s = _smooth(self._tokens_per_s, event["num_tokens"] / step_s)
        text = self._facts(event)
        if self._task is not None:
            name = f"step {event['step']}/{event['num_steps']}"
            self._bar.update(
                self._task, description=name, completed=event["step"], total=event["num_steps"], facts=text
            )
        elif clock.monotonic_s() - self._told_at_s >= _LINE_EVERY_S or event["step"] == event["num_steps"]:
            self._told_at_s = clock.monotonic_s()
            self.on_talk(f"step {event['step']}/{event['num_steps']} {text}")

    def _facts(self, event: dict[str, Any]) -> str:
        assert self._step_s is not None and self._tokens_per_s is not None
        loss = "-" if event["loss"] is None else f"{event['loss']:.4f}"
        run_left_s = (event["num_steps"] - event["step"]) * self._step_s
        # By the slice's own clock: whoever watches a machine sees it later than it began, and all of it at once.
        goodput = self._steps_s / max(1e-9, event["elapsed_s"])
        return (
            f"loss {loss} | {self._tokens_per_s:.0f} tok/s | slice {hms(self._deadline.remaining_s())} left | "
            f"run {hms(run_left_s)} left | goodput {goodput:.0%}"
        )

    def tell(self, end: "SliceEnd") -> None:
        """One line about how the slice ended, unless it said so itself."""
        if end.result is None:
            self.on_talk(
                f"hotlap: exit {end.exit_code} {end.reason}: {_ENDINGS.get(end.reason, 'see the lines above')}"
            )


_ENDINGS = {
    "overran": "the slice did not end by its cap and was killed; what it had published is intact, and calling again "
    "resumes there. If it comes back, lower train.micro_batch_rows or data.seq_len",
    "interrupted": "killed at the second Ctrl-C; what it had published is intact",
    "stopped": "stopped before the first step",
    "killed": "ended from outside; what it had published is intact",
    "unexpected": "the slice crashed, and the lines above tell where; what it had published is intact",
}


def _smooth(before: float | None, value: float) -> float:
    return value if before is None else _SMOOTHED * before + (1 - _SMOOTHED) * value
