"""The check for GPUs, on a processor: it trains a real slice, and says what it found."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu_check.py"


@pytest.mark.torch
def test_the_check_for_gpus_runs_on_a_processor() -> None:
    process = run("--device", "cpu", "--only", "speed, plain")
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout.splitlines()[-1])
    assert found["held"] and list(found["checks"]) == ["speed, plain"]
    assert found["checks"]["speed, plain"]["tokens_per_s"] > 0


def test_what_is_missing_is_told_in_one_line(tmp_path: Path) -> None:
    """An interpreter with nothing installed, and one with an older version of something."""
    argv = [sys.executable, "-S", "-E", str(SCRIPT)]
    process = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    words = ", ".join(f"{name} (not installed)" for name in ("torch", "transformers", "peft", "pydantic"))
    advice = "Run: pip install 'torch>=2.6' 'transformers>=5.15' 'peft>=0.19' 'pydantic>=2.9'"
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == f"gpu_check: Lacking: {words}. {advice}\n"

    old = tmp_path / "transformers-4.51.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.51.0\n")
    process = run("--device", "cpu", PYTHONPATH=str(tmp_path))
    assert process.returncode == 2
    assert process.stderr == f"gpu_check: Lacking: transformers (here is 4.51.0). {advice}\n"


def test_it_asks_for_what_the_package_asks_for() -> None:
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        import gpu_check  # pyright: ignore[reportMissingImports]
    finally:
        sys.path.remove(str(SCRIPT.parent))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [
        text.partition(";")[0].strip() for text in project["dependencies"] + project["optional-dependencies"]["train"]
    ]
    for name, least in (gpu_check.NEEDED | gpu_check.FOR_NF4).items():
        assert f"{name}>={least}" in asked


def run(*words: str, **env: str) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, str(SCRIPT), *words]
    return subprocess.run(argv, env={**os.environ, **env}, capture_output=True, text=True, check=False)
