"""The check for GPUs, on a processor: it trains a real slice, and says what it found."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.torch
def test_the_check_for_gpus_runs_on_a_processor() -> None:
    argv = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), "--device", "cpu", "--only", "speed, plain"]
    process = subprocess.run(argv, env={**os.environ}, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout.splitlines()[-1])
    assert found["held"] and list(found["checks"]) == ["speed, plain"]
    assert found["checks"]["speed, plain"]["tokens_per_s"] > 0
