"""What a run is given: the base model, the training rows, and test rows from entropy drawn when it has ended.

The layout is the public contest's: a working folder with `harness/pins*.json` and `spec*.yaml`, a model cache with
`refs/main`, and the training split alone. A track's own programs are trusted; they run without a sandbox.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from hotlap import artifacts, clock, durable
from hotlap.child import Event, run_child
from hotlap.config import hotlap_home
from hotlap.errors import ChildCrashed, PinMismatch, Refused
from hotlap.speedrun.stopping import require_not_stopped
from hotlap.speedrun.track import FileData, GeneratedData, Row, Spec, Track, content_sha256, require_base_model

_PROGRAM_S = 300.0
REPO, CACHE = "/repo", "/cache"
_BREAKS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}
"""JSON leaves them as they are, and `splitlines`, by which the frozen evaluator reads rows, breaks lines there."""


def base_model(track: Track, say: Callable[[str], None]) -> Path:
    """The folder of a track's base model, brought or made, with every file held against the pins.

    Raises:
        PinMismatch: it is another model.
        FetchFailed: its source did not deliver.
    """
    folder = model_folder(track.folder, track.spec, say)
    try:
        require_base_model(track, folder)
    except PinMismatch:
        if track.spec.base_model.reference.startswith("make:"):
            durable.remove_tree(folder)  # cheap to make again, so damage is not kept
        raise
    return folder


def model_folder(track_folder: Path, spec: Spec, say: Callable[[str], None]) -> Path:
    """The same, before there are pins."""
    kind, _, program = spec.base_model.reference.partition(":")
    if kind != "make":
        return artifacts.fetch(spec.base_model.reference, say)
    source = track_folder / program
    final = hotlap_home() / "tracks" / f"{spec.id}-{durable.sha256_file(source)[:16]}"
    if not final.is_dir():
        staged = final.with_name(f".{final.name}")
        if staged.exists():
            durable.remove_tree(staged)
        durable.make_dirs(staged)
        _run(source, [str(staged)], lambda _event: None)
        durable.rename_exclusively(staged, final)
    return final


def train_rows(track: Track) -> list[Row]:
    """The training rows, which are the pinned ones.

    Raises:
        PinMismatch: they are not.
        Refused: the track's data has to be brought from elsewhere.
    """
    rows = unpinned_train_rows(track.folder, track.spec)
    if content_sha256(rows) != track.pins.train_content_sha256:
        raise PinMismatch(f"Training rows of track {track.spec.id} are not the pinned ones; restore its files.")
    return rows


def unpinned_train_rows(track_folder: Path, spec: Spec) -> list[Row]:
    match spec.data:
        case GeneratedData() as data:
            return _generated(track_folder / data.program, "train", data.train_seed, data.train_examples)
        case FileData() as data:
            return _read_jsonl(track_folder / data.train)
        case _:
            raise Refused(f"Track {spec.id} uses {spec.data.repository}, which this version does not bring here.")


def test_rows(track: Track, entropy: str) -> list[Row]:
    """Rows nobody has seen before, from `entropy`; of a track with a fixed test split, that."""
    match track.spec.data:
        case GeneratedData() as data:
            return _generated(track.folder / data.program, "test", entropy, data.test_examples)
        case FileData() as data:
            return _read_jsonl(track.folder / data.test)
        case _:
            raise Refused(
                f"Track {track.spec.id} uses {track.spec.data.repository}, which this version does not bring here."
            )


def _generated(program: Path, split: str, seed: str, num_rows: int) -> list[Row]:
    rows: list[Row] = []
    _run(program, ["--split", split, "--seed", seed, "--rows", str(num_rows)], lambda event: rows.append(event["row"]))
    if len(rows) != num_rows:
        raise ChildCrashed(f"{program} gave {len(rows)} rows, not {num_rows}.")
    return rows


def _run(program: Path, arguments: list[str], on_event: Callable[[Event], None]) -> None:
    deadline = clock.Deadline(clock.monotonic_s() + _PROGRAM_S)
    end = run_child([sys.executable, "-I", "-S", str(program), *arguments], deadline, on_event=on_event, env={})
    require_not_stopped(end)
    if end.exit_code != 0:
        raise ChildCrashed(f"{program} ended with code {end.exit_code}: {end.last_words[-500:]}")


def as_lines(rows: list[Row]) -> bytes:
    """Rows as JSON lines, the same bytes for the same rows."""
    return "".join(durable.canonical_json(dict(row)).translate(_BREAKS) + "\n" for row in rows).encode()


def _read_jsonl(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def lay_out(track: Track, model: Path, rows: list[Row], submission: Path, folder: Path) -> list[tuple[Path, str]]:
    """Write a run's inputs into `folder`, fresh, and say what is to be seen where. The base model is not copied."""
    spec, name = track.spec, submission.name
    suffix = "" if spec.id == "t1" else f"-{spec.id}"
    revision = durable.sha256_bytes(durable.canonical_json(track.pins.model_file_sha256).encode())[:40]
    cache = f"hub/models--{spec.base_model.name.replace('/', '--')}"
    files = {
        f"repo/harness/pins{suffix}.json": durable.canonical_json(_public_pins(track, revision, len(rows))).encode(),
        f"repo/spec{suffix}.yaml": yaml.safe_dump(_public_spec(spec)).encode(),
        f"cache/hf/{cache}/refs/main": revision.encode(),
    }
    for path in sorted(submission.rglob("*")):
        # The notes are no part of the code state: what a program could read there might change unseen.
        if path.is_file() and path != submission / "NOTES.md":
            files[f"repo/submissions/{name}/{path.relative_to(submission).as_posix()}"] = path.read_bytes()
    for place, data in files.items():
        durable.make_dirs((folder / place).parent)
        durable.write_synced(folder / place, data)
    train = f"cache/data/{spec.data_prefix}_train"
    write_dataset(folder / train, rows)
    durable.make_dirs(folder / f"cache/hf/{cache}/snapshots/{revision}")
    return [
        (folder / "repo", REPO),
        (folder / "cache/data", f"{CACHE}/data"),
        (folder / f"cache/hf/{cache}/refs", f"{CACHE}/hf/{cache}/refs"),
        (model, f"{CACHE}/hf/{cache}/snapshots/{revision}"),
    ]


def contest_environment(spec: Spec) -> dict[str, str]:
    """The public contest's variables."""
    suffix = "" if spec.id == "t1" else f"-{spec.id}"
    return {
        "HF_HOME": f"{CACHE}/hf",
        "LORA_SPEEDRUN_DATA_DIR": f"{CACHE}/data",
        "LORA_SPEEDRUN_SPEC": f"{REPO}/spec{suffix}.yaml",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }


def _public_pins(track: Track, revision: str, num_train: int) -> dict[str, Any]:
    return {
        "track_id": track.spec.id,
        "hash_scheme": "rows-v2",
        "base_model": track.spec.base_model.name,
        "base_model_sha": revision,
        "model_file_sha256": track.pins.model_file_sha256,
        "dataset": track.spec.data_prefix,
        "train_examples": num_train,
        "train_content_sha256": track.pins.train_content_sha256,
    }


def _public_spec(spec: Spec) -> dict[str, Any]:
    """The rules under the public contest's names, without how test rows are made."""
    metric = spec.metric.model_dump(mode="json")
    return {
        "version": spec.version,
        "track_id": spec.id,
        "track": spec.title,
        "base_model": spec.base_model.name,
        "dataset": {"local_prefix": spec.data_prefix},
        "target_accuracy" if spec.metric.type == "exact" else "target_loss": metric["target"],
        "constraints": {
            "max_trainable_params": spec.limits.adapter_params,
            "max_train_wallclock_minutes": spec.limits.time_limit_s / 60,
            "gpu": spec.hardware.gpu,
        },
        "eval": {**metric, "prompt_format": spec.metric.prompt, "decoding": "greedy"},
    }


def write_dataset(folder: Path, rows: list[Row]) -> None:
    """Training rows as `train.jsonl` and as a folder for `datasets.load_from_disk`: an Arrow stream and two files."""
    durable.make_dirs(folder)
    table = pa.Table.from_pylist([dict(row) for row in rows])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    state = {
        "_data_files": [{"filename": "data-00000-of-00001.arrow"}],
        "_fingerprint": content_sha256(rows)[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": "train",
    }
    durable.write_synced(folder / "data-00000-of-00001.arrow", sink.getvalue().to_pybytes())
    durable.write_synced(folder / "state.json", json.dumps(state).encode())
    # Without `features`, the types are those of the Arrow schema.
    durable.write_synced(folder / "dataset_info.json", b"{}")
    durable.write_synced(folder / "train.jsonl", as_lines(rows))
