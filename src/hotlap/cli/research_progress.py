"""A study's progress on standard error: a line for every run and decision, and a bar for the trials under way."""

import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from hotlap import clock
from hotlap.cli.progress import hms, plain, stderr_console

if TYPE_CHECKING:
    from hotlap.research.history import History
    from hotlap.research.space import StudyConfig
    from hotlap.research.study import Listener


class StudyProgress:
    """Which trial runs and how far it is, what came of the last ones, the best so far."""

    def __init__(self, study: "StudyConfig") -> None:
        self._study = study
        self._console = stderr_console()
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[facts]}"))
        self._bar = Progress(*columns, console=self._console, transient=True)
        self._tasks: dict[str, TaskID] = {}
        self._began_s = clock.monotonic_s()
        self._turn = threading.Lock()  # several trials at a time tell of themselves

    @property
    def listener(self) -> "Listener":
        from hotlap.research.study import Listener

        return Listener(self.on_row, self.on_progress, self.say)

    def __enter__(self) -> "StudyProgress":
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def say(self, text: str) -> None:
        self._console.print(escape(plain(text)))

    def on_progress(self, run_id: str, fraction: float, loss: float | None) -> None:
        with self._turn:
            if run_id in self._tasks:
                facts = "" if loss is None else f"loss {loss:.4f}"
                self._bar.update(self._tasks[run_id], completed=fraction, facts=facts)

    def on_row(self, row: dict[str, Any], history: "History") -> None:
        if row["kind"] == "started":
            with self._turn:
                name = escape(plain(f"{row['run_id']} {row['role']}{_change(row)}"))
                self._tasks[row["run_id"]] = self._bar.add_task(name, total=1.0, facts="")
        elif row["kind"] == "run":
            with self._turn:
                if row["run_id"] in self._tasks:
                    self._bar.remove_task(self._tasks.pop(row["run_id"]))
            loss = row["val_search_nats_per_byte"]
            told = row["status"] if loss is None else f"{row['status']} {loss:.4f} nats/byte"
            self.say(f"{row['run_id']} {row['role']}{_change(row)}: {told}{_why(row)}")
        elif row["kind"] == "decision":
            hidden = " (a placebo: nothing was changed)" if row["placebo"] else ""
            elapsed = hms(clock.monotonic_s() - self._began_s)
            self.say(f"  {row['outcome']}: {row['reason']}{hidden} | {history.num_judged} judged, {elapsed}")


def _change(row: dict[str, Any]) -> str:
    from hotlap.research.space import in_words

    return f" {in_words(row['changes'])}" if row["changes"] else ""


def _why(row: dict[str, Any]) -> str:
    from hotlap.research.disturbed import in_words
    from hotlap.research.plan import last_words

    if row["status"] == "ok":
        return f" (disturbed, and used: {in_words([row['validity']])})" if row["flags"] else ""
    return f" ({row['error_class']}: {last_words(str(row['error_tail']))[-160:]})"
