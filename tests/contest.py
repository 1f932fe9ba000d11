"""A contest in a temporary folder: the track `micro` as it is shipped, and submissions to it."""

import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotlap.speedrun import new_track, template, track

ROOT = Path(__file__).resolve().parents[1]
NOTES = "What makes it fast: it does as little as it can, and every line of that is in train.py. " * 2


def micro_contest(folder: Path) -> Path:
    shutil.copytree(ROOT / "tracks" / "micro", folder / "tracks" / "micro")
    (folder / "submissions").mkdir()
    return folder


PUBLIC = {
    'id = "micro"': 'id = "t1"',
    'title = "vowels-tiny-1thread"': 'title = "gsm8k-qwen2.5-1.5b-l40s"',
    'data_prefix = "vowels"': 'data_prefix = "gsm8k"',
    'name = "hotlap/tiny-random"': 'name = "Qwen/Qwen2.5-1.5B"',
}


def changed_track(contest: Path, changes: Mapping[str, str], track_id: str = "micro") -> track.Track:
    """Track `micro` with other words in its rules, frozen under another id or in its own place."""
    old, new = contest / "tracks" / "micro", contest / "tracks" / track_id
    if new != old:
        shutil.copytree(old, new)
    text = (new / "spec.toml").read_text()
    for before, after in changes.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    (new / "spec.toml").write_text(text)
    (new / "pins.json").unlink()
    return new_track.freeze(new, lambda _text: None)


def micro(contest: Path) -> track.Track:
    return track.find(contest, "micro")


def trained_submission(contest: Path, name: str = "001-ada") -> Path:
    """The template, with a learning rate and a length that suit the tiny model."""
    folder = template.new(contest, name, "ada", micro(contest))
    text = (folder / "train.py").read_text()
    for old, new in (
        ("LEARNING_RATE = 2e-3", "LEARNING_RATE = 1e-2"),
        ("NUM_STEPS = 30", "NUM_STEPS = 80"),
        ("BATCH_ROWS = 16", "BATCH_ROWS = 40"),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "train.py").write_text(text)
    return folder


def written_submission(contest: Path, train_py: str, name: str = "002-bob", **config: object) -> Path:
    folder = contest / "submissions" / name
    folder.mkdir()
    fields: dict[str, object] = {
        "author": "Bob",
        "github": "bob",
        "track": "micro",
        "base_model": "hotlap/tiny-random",
        "description": "A short one.",
        "technique": "none",
        **config,
    }
    (folder / "config.yaml").write_text(json.dumps(fields))
    (folder / "NOTES.md").write_text(NOTES)
    (folder / "train.py").write_text(train_py)
    return folder


def run_of(number: int, score: float | None, wall_s: float, *complaints: str) -> dict[str, Any]:
    """What `verify` keeps of a run that had this score and time."""
    return {
        "run": number,
        "seed": 1000 + number,
        "score": score,
        "num_rows": 100,
        "wall_s": wall_s,
        "outer_wall_s": wall_s + 0.3,
        "cpu_s": wall_s / 2,
        "complaints": list(complaints),
        "adapter_sha256": f"{number:064}",
        "num_params": 256,
        "num_left_behind": 0,
        "num_tokens": None,
        "phases_s": None,
        "others_cpu_s": 0.2,
        "protections": ["network"],
    }


def safetensors(tensors: Mapping[str, tuple[str, list[int], bytes]], padding: bytes = b"") -> bytes:
    """A file of tensors by name: kind, shape and bytes."""
    header: dict[str, Any] = {}
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data + padding


def floats(*shape: int, value: float = 0.5) -> tuple[str, list[int], bytes]:
    count = 1
    for size in shape:
        count *= size
    return "F32", list(shape), struct.pack(f"<{count}f", *[value] * count)


# --- a submission without torch: an adapter written byte by byte ---

NAME = "base_model.model.model.layers.0.mlp.down_proj"


WRITER = """
import argparse, json, os, struct, sys

p = argparse.ArgumentParser()
for name in ("--data-dir", "--output-dir", "--seed"):
    p.add_argument(name)
given = p.parse_args()
seed, out = int(given.seed), given.output_dir


def write(value):
    with open(out + "/adapter_model.safetensors", "wb") as file:
        file.write(HEAD + struct.pack("<f", seed / 100) * 128 + struct.pack("<f", value) * 64)
    with open(out + "/adapter_config.json", "w") as file:
        json.dump(CONFIG, file)


"""


def writing(what: str) -> str:
    """A `train.py` without torch: `write(value)` writes an adapter of constants whose A depends on the seed."""
    plain = safetensors({f"{NAME}.lora_A.weight": floats(2, 64), f"{NAME}.lora_B.weight": floats(32, 2)})
    head = plain[: len(plain) - 4 * (2 * 64 + 32 * 2)]
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 2, "target_modules": ["down_proj"]}
    return WRITER.replace("HEAD", repr(head)).replace("CONFIG", repr(config)) + what
