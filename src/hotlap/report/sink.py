"""A run's metrics, sent to a tracker: read from the run's own log, by a process of its own, after the fact.

Training knows nothing of it: a tracker that fails, hangs or is not there costs no step and changes no bit. Each row is
sent once, also when the command is run again; rows that a resumed slice repeats are the same rows.

    RUN/sinks/NAME.json     how many rows were sent, and what the tracker calls the run
    RUN/sinks/NAME/         what the tracker keeps on the disk, where it takes a folder
"""

import importlib
import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from hotlap import durable
from hotlap.errors import CorruptFile, ProviderFailed, UsageError
from hotlap.runs import RunFolder, read_identity

PROJECT = "hotlap"


class Sink(Protocol):
    """One tracker, open for one run."""

    ident: str
    """What the tracker calls the run; given back to it the next time."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None:
        """Everything that was logged is kept when it returns."""
        ...


class TensorBoard:
    """Event files; `tensorboard --logdir RUN/sinks` shows them."""

    def __init__(self, run: str, settings: Mapping[str, Any], folder: Path, ident: str | None) -> None:
        del settings  # its text panel is no place to compare settings
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._writer = writer.EventFileWriter(str(folder))
        self.ident = ident or run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        told = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(self._event(step=step, summary=self._summary(value=told)))

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Weights & Biases. Offline unless WANDB_MODE says otherwise; `wandb sync` sends what lies in the folder."""

    def __init__(self, run: str, settings: Mapping[str, Any], folder: Path, ident: str | None) -> None:
        wandb = importlib.import_module("wandb")
        self.ident = ident or secrets.token_hex(8)
        quiet = wandb.Settings(silent=True, disable_git=True, disable_code=True, x_disable_stats=True)
        self._run = wandb.init(
            project=PROJECT,
            name=run,
            id=self.ident,
            resume="allow",
            mode=os.environ.get("WANDB_MODE", "offline"),
            dir=str(folder),
            config=dict(settings),
            settings=quiet,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """Wherever MLFLOW_TRACKING_URI points."""

    def __init__(self, run: str, settings: Mapping[str, Any], folder: Path, ident: str | None) -> None:
        del folder
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self._client = importlib.import_module("mlflow.tracking").MlflowClient()
        if ident is None:
            known = self._client.get_experiment_by_name(PROJECT)
            experiment = known.experiment_id if known else self._client.create_experiment(PROJECT)
            ident = str(self._client.create_run(experiment, run_name=run).info.run_id)
            for name, value in _flat(settings).items():
                self._client.log_param(ident, name, value)
        self.ident = ident

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self.ident, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self.ident)


class Trackio:
    """Trackio's own database on this machine (TRACKIO_DIR); `trackio show --project hotlap` shows it."""

    def __init__(self, run: str, settings: Mapping[str, Any], folder: Path, ident: str | None) -> None:
        del folder
        self._trackio = importlib.import_module("trackio")
        self.ident = ident or run
        options = {"auto_log_gpu": False, "auto_log_cpu": False, "embed": False}
        self._trackio.init(project=PROJECT, name=self.ident, config=dict(settings), resume="allow", **options)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        self._trackio.finish()


SINKS: dict[str, Callable[[str, Mapping[str, Any], Path, str | None], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}


def send(run: RunFolder, name: str, is_over: Callable[[], bool], wait: Callable[[], None]) -> int:
    """Send the rows that were not sent yet, and those that come, until `is_over`; returns how many.

    Raises:
        UsageError: the tracker is not installed.
        ProviderFailed: the tracker failed; what it took is remembered, and the same command goes on.
    """
    folder = run.path / "sinks" / name
    durable.make_dirs(folder)
    place = folder.with_suffix(".json")
    num_sent, ident = _cursor(place)
    began_at = num_sent
    identity = read_identity(run)
    try:
        sink = SINKS[name](run.name, identity.trajectory if identity else {}, folder, ident)
        try:
            while True:
                was_over = is_over()
                rows = durable.read_rows(run.metrics)
                for row in rows[num_sent:]:
                    sink.log(row["step"], _numbers(row))
                    num_sent += 1
                if was_over:
                    break
                wait()
        finally:
            sink.close()
            # What was logged is kept, so it is not sent again.
            durable.replace(place, durable.canonical_json({"num_rows": num_sent, "ident": sink.ident}).encode())
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed. Run: pip install 'hotlap[{name}]'.") from None
    except (CorruptFile, KeyboardInterrupt):
        raise
    except Exception as error:
        raise ProviderFailed(f"{name} failed: {type(error).__name__}: {error}. Run the same command again.") from error
    return num_sent - began_at


def _cursor(place: Path) -> tuple[int, str | None]:
    try:
        fields = json.loads(place.read_bytes())
        return int(fields["num_rows"]), str(fields["ident"])
    except FileNotFoundError:
        return 0, None
    except (ValueError, KeyError, TypeError):
        raise CorruptFile(f"{place} is damaged. Remove it, and every row is sent anew.") from None


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if type(value) in (int, float) and name != "step"}


def _flat(tree: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= _flat(value, f"{before}{name}.") if isinstance(value, dict) else {before + name: value}
    return found
