"""How soon a later slice trains on a rented machine: from its create to its first step, on the emulator, whose machines
are processes of this one and boot at once. The volume is prepared first, as `hotlap launch` does it.

`python -m benchmarks.later_slices [SLICES]`. Prints one JSON object. Every slice but the last ends with exit 75, on a
machine of its own, and the next one resumes. Beside each slice the same machine imports torch alone, in turns.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import httpx
from fixtures_data import f3_rows, write_jsonl
from tiny import make_tiny_model

from benchmarks import spread
from hotlap.testing.fake_runpod import FakeRunpod

IMAGE = f"image@sha256:{0:064}"
MINUTES = 1.5


def main() -> None:
    num_slices = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(measure(Path(name), num_slices), indent=1))


def measure(folder: Path, num_slices: int) -> dict[str, Any]:
    cloud_folder, home = folder / "cloud", folder / "home"
    volume = cloud_folder / "volume"
    (volume / "data").mkdir(parents=True)
    write_jsonl(volume / "data" / "train.jsonl", f3_rows())
    make_tiny_model(volume / "model")
    home.mkdir()
    (home / "cloud.toml").write_text("[budget]\ngpu_minutes_per_day = 600\ngpu_minutes_per_run = 600\n")
    with FakeRunpod(folder=cloud_folder, per_minute=100_000) as cloud:
        key = {"Authorization": "Bearer full-key"}
        body = {"name": "data", "size": 10, "dataCenter": "EU-RO-1"}
        volume_id = httpx.post(f"{cloud.url}/network-volumes", json=body, headers=key).json()["id"]
        words = ["--volume-id", volume_id, "--image", IMAGE, "--run", "later", "--json"]
        words += ["--base-model", "/workspace/model", "--dataset", "/workspace/data/train.jsonl"]
        words += ["--set", "train.max_steps=1000000", "--set", "data.seq_len=64", "--set", "slice.num_threads=1"]
        words += ["--set", f"slice.minutes={MINUTES}"]
        env = {**os.environ, "HOTLAP_HOME": str(home), "HOTLAP_RUNPOD_URL": cloud.url, "RUNPOD_API_KEY": "full-key"}
        began_s = time.monotonic()
        hotlap(["launch", "--prepare", *words], env, 0)
        prepared_s = time.monotonic() - began_s
        imports_s: list[float] = []
        for _ in range(num_slices):
            hotlap(["launch", *words], env, 75)
            began_s = time.monotonic()
            subprocess.run([sys.executable, "-c", "import torch, transformers, peft"], check=True)
            imports_s.append(time.monotonic() - began_s)
    slices = [
        json.loads(path.read_bytes()) for path in sorted((volume / "runs" / "later").glob("slices/*/result.json"))
    ]
    ready_s = [each["timeline"]["first_step_at_s"] for each in slices]
    return {
        "seconds from process start to the first step": spread(ready_s),
        "phases of the last slice": slices[-1]["timeline"]["phases_s"],
        "over importing torch, transformers and peft alone": spread(
            [one / other for one, other in zip(ready_s, imports_s, strict=True)]
        ),
        "seconds from the create to the first step": spread(from_create(slices, home)),
        "preparing, once": round(prepared_s, 1),
        "steps that each slice began and ended with": [(each["resumed_at"], each["step"]) for each in slices],
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }


def hotlap(words: list[str], env: dict[str, str], code: int) -> None:
    done = subprocess.run([sys.executable, "-m", "hotlap", *words], env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stderr


def from_create(slices: list[dict[str, Any]], home: Path) -> list[float]:
    """What the slice's own clock leaves out is in it: boot, and the worker that starts the slice."""
    receipts = [json.loads(path.read_bytes()) for path in (home / "receipts").glob("*.json")]
    created_s = sorted(each["times"]["created"] for each in receipts if each["run"] == "later")
    return [
        each["ended_at_s"] - each["timeline"]["elapsed_s"] + each["timeline"]["first_step_at_s"] - began_s
        for each, began_s in zip(slices, created_s, strict=True)
    ]


if __name__ == "__main__":
    main()
