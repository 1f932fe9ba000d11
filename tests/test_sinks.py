"""`hotlap sink` with the real libraries, offline: what was sent is read back by each library's own reader."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hotlap import durable
from hotlap.errors import ProviderFailed, UsageError
from hotlap.report import sink
from hotlap.runs import RunFolder

ROWS: list[dict[str, Any]] = [{"step": at, "loss": 3.0 - at, "lr": 0.1, "grad_norm": None} for at in (1, 2)]
MORE: list[dict[str, Any]] = [{"step": 2, "val_loss": 2.5}, {"step": 3, "loss": 0.5, "out_of_memory": True}]


def make_run(folder: Path) -> RunFolder:
    run = RunFolder(folder / "runs" / "mine")
    durable.make_dirs(run.slices)
    durable.append_rows(run.metrics, ROWS)
    return run


class Listed:
    """A tracker that keeps what it is given, until it fails."""

    def __init__(self, told: list[Any], fails_at: int) -> None:
        self.ident, self._told, self._fails_at = "x", told, fails_at

    def log(self, step: int, values: Any) -> None:
        if len(self._told) == self._fails_at:
            raise ConnectionError("gone")
        self._told.append((step, dict(values)))

    def close(self) -> None:
        self._told.append("closed")


def test_each_row_is_sent_once_also_when_the_log_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, told = make_run(tmp_path), list[Any]()
    monkeypatch.setitem(sink.SINKS, "mlflow", lambda *_: Listed(told, 99))
    durable.append_rows(run.metrics, MORE)
    assert sink.send(run, "mlflow", lambda: True, lambda: None) == 4
    assert told == [
        (1, {"loss": 2.0, "lr": 0.1}),
        (2, {"loss": 1.0, "lr": 0.1}),
        (2, {"val_loss": 2.5}),
        (3, {"loss": 0.5}),
        "closed",
    ]
    run.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    assert sink.send(run, "mlflow", lambda: True, lambda: None) == 0
    durable.append_rows(run.metrics, [*MORE, {"step": 4, "loss": 0.25}])
    assert sink.send(run, "mlflow", lambda: True, lambda: None) == 1 and told[-2] == (4, {"loss": 0.25})


def test_a_tracker_that_fails_says_so_and_the_run_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, told = make_run(tmp_path), list[Any]()
    before = run.metrics.read_bytes()
    monkeypatch.setitem(sink.SINKS, "wandb", lambda *_: Listed(told, 1))
    with pytest.raises(ProviderFailed, match=r"wandb failed: ConnectionError: gone\. Run the same"):
        sink.send(run, "wandb", lambda: True, lambda: None)
    assert run.metrics.read_bytes() == before
    monkeypatch.setitem(sink.SINKS, "wandb", lambda *_: Listed(told, 99))
    sink.send(run, "wandb", lambda: True, lambda: None)
    assert [row[0] for row in told if row != "closed"] == [1, 2]


def test_a_tracker_that_is_not_installed_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UsageError, match=r"trackio is not installed. Run: pip install 'hotlap\[trackio\]'"):
        sink.send(make_run(tmp_path), "trackio", lambda: True, lambda: None)


# --- the real ones ---


def read_tensorboard(run: RunFolder) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.path / "sinks" / "tensorboard"))
    events.Reload()
    return {event.step: event.value for event in events.Scalars("loss")}


def read_wandb(run: RunFolder) -> dict[int, float]:
    """From the files that `wandb sync` would send: a head of 7 bytes, then records of crc, length, kind and message. A
    file as small as these is one block."""
    from wandb.proto import wandb_internal_pb2

    found: dict[int, float] = {}
    for path in (run.path / "sinks" / "wandb").glob("wandb/offline-run-*/*.wandb"):
        data, at = path.read_bytes(), 7
        while at + 7 <= len(data):
            length = int.from_bytes(data[at + 4 : at + 6], "little")
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data[at + 7 : at + 7 + length])
            at += 7 + length
            values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            found |= {values["_step"]: values["loss"]} if "loss" in values else {}
    return found


def read_mlflow(run: RunFolder) -> dict[int, float]:
    from mlflow.tracking import MlflowClient

    ident = json.loads((run.path / "sinks" / "mlflow.json").read_bytes())["ident"]
    return {metric.step: metric.value for metric in MlflowClient().get_metric_history(ident, "loss")}


def read_trackio(run: RunFolder) -> dict[int, float]:
    from trackio.sqlite_storage import SQLiteStorage

    return {row["step"]: row["loss"] for row in SQLiteStorage.get_logs("hotlap", run.name) if "loss" in row}


READERS: dict[str, Callable[[RunFolder], dict[int, float]]] = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of the libraries' own, which are not ours to mend
@pytest.mark.parametrize("name", sink.SINKS)
def test_what_was_sent_offline_is_read_back(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed (pip install 'hotlap[{name}]')")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    run = make_run(tmp_path)
    command = [sys.executable, "-m", "hotlap", "sink", "mine", "--to", name]
    for rows in ([], MORE):
        durable.append_rows(run.metrics, rows)
        process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert process.returncode == 0, process.stderr
        assert process.stdout.splitlines()[-1] == f"2 rows of mine sent to {name}"
    assert READERS[name](run) == {1: 2.0, 2: 1.0, 3: 0.5}
