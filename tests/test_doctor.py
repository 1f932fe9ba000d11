"""The doctor's findings against what the machine says itself, and against machines that lack something."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hotlap import child, durable
from hotlap.cli.doctor import EXTRAS, doctor

DOCTOR = sys.modules["hotlap.cli.doctor"]
ROOT = Path(__file__).resolve().parents[1]

PROBED = {
    "torch": "2.13.0+cpu",
    "cuda": None,
    "device": "cpu",
    "devices": [],
    "cpu_capability": "AVX2",
    "num_threads": 2,
    "matrix_product": {"size": 256, "float32_s": 1.0, "bfloat16_s": 99.0},
    "uses_bfloat16": False,
    "verdict": "bfloat16: do not use (99.0 times slower than float32)",
}


def hotlap(*args: str) -> Result:
    result = CliRunner().invoke(doctor, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def report() -> dict[str, Any]:
    return json.loads(hotlap("--json").stdout)


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a stand-in for the probe finds, to be changed by the test."""
    found: dict[str, Any] = dict(PROBED)
    result = {"event": "result", "exit_code": 0, "reason": "done", "message": "probed"}
    monkeypatch.setattr(child, "run_child", lambda *_args: child.ChildEnd(0, 1, 0.1, {**result, **found}, ""))
    return found


# --- the machine ---


@pytest.mark.torch
def test_the_example_in_the_help_tells_what_is_true_of_this_machine(home: Path) -> None:
    import torch

    example = shlex.split(hotlap("--help").stdout.partition("Example:")[2])
    assert example == ["hotlap", "doctor", "--json"]
    found = json.loads(hotlap(*example[2:]).stdout)
    assert found["problems"] == []
    assert found["num_cores"] == len(os.sched_getaffinity(0))
    assert found["memory"]["total_bytes"] == pytest.approx(
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 0.01
    )
    assert 0 < found["memory"]["available_bytes"] <= found["memory"]["total_bytes"]
    assert [place["path"] for place in found["disk"]] == [str(home), str(Path.cwd())]
    assert found["disk"][1]["free_bytes"] == pytest.approx(shutil.disk_usage(".").free, 0.2)
    assert found["limits"] == {"max_slice_minutes": 5.0, "file": str(home / "cloud.toml")}
    assert found["torch"]["torch"] == torch.__version__
    fresh = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.get_num_threads())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found["torch"]["num_threads"] == int(fresh.stdout), (
        "this process may have been told otherwise by other tests"
    )
    assert found["torch"]["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert found["torch"]["matrix_product"]["float32_s"] > 0
    assert found["torch"]["uses_bfloat16"] == found["torch"]["verdict"].startswith("bfloat16: use")
    installed = {extra["name"] for extra in found["extras"] if extra["is_installed"]}
    assert {"train", "dev"} <= installed


def test_the_limits_are_those_of_the_file(home: Path, probed: dict[str, Any]) -> None:
    home.mkdir()
    (home / "cloud.toml").write_text("[limits]\nmax_slice_minutes = 2.5\n")
    assert report()["limits"]["max_slice_minutes"] == 2.5
    assert "slice cap: 2.5 minutes" in hotlap().stdout


def test_limits_that_cannot_be_read_are_a_problem_not_an_end(home: Path, probed: dict[str, Any]) -> None:
    home.mkdir()
    (home / "cloud.toml").write_text("[limits]\nmax_minutes = 9\n")
    found = report()
    assert found["limits"]["max_slice_minutes"] is None
    assert len(found["problems"]) == 1 and "limits.max_minutes" in found["problems"][0]
    assert f"problem: {found['problems'][0]}" in hotlap().stdout


def test_artifacts_are_listed_and_damaged_ones_are_told(home: Path, probed: dict[str, Any]) -> None:
    for name in ("model-a", "model-b"):
        staged = home / "artifacts" / f".{name}.stage-1"
        durable.make_dirs(staged)
        durable.write_synced(staged / "model.safetensors", bytes(1000))
        durable.publish(staged, home / "artifacts" / name)
    (home / "artifacts" / "model-b" / "model.safetensors").write_bytes(bytes(999))
    shutil.copytree(home / "artifacts" / "model-a", home / "artifacts" / ".model-c.stage-2")
    found = {artifact["name"]: artifact for artifact in report()["artifacts"]}
    assert {name: artifact["is_whole"] for name, artifact in found.items()} == {"model-a": True, "model-b": False}
    assert found["model-a"]["bytes"] > 1000
    assert "model-b, 0.0 GB, damaged: fetch it again" in hotlap().stdout


def test_without_artifacts_it_says_how_to_fetch_one(probed: dict[str, Any]) -> None:
    assert report()["artifacts"] == []
    assert "hotlap prefetch smollm2-135m" in hotlap().stdout


# --- torch ---


def test_without_torch_it_says_so_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_child(*_args: object) -> None:
        raise AssertionError("nothing to probe")

    monkeypatch.setattr(child, "run_child", no_child)
    version = DOCTOR._version
    monkeypatch.setattr(DOCTOR, "_version", lambda package: None if package == "torch" else version(package))
    found = report()
    assert found["torch"] is None
    assert "pip install 'hotlap[train]'" in found["problems"][0]
    train = next(extra for extra in found["extras"] if extra["name"] == "train")
    assert not train["is_installed"] and [text[:5] for text in train["missing"]] == ["torch"]
    assert "torch: does not work here" in hotlap().stdout


def test_a_broken_torch_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = report()
    assert found["torch"] is None
    assert "libcudart.so.13" in found["problems"][0] and "does not work" in found["problems"][0]


def test_accelerators_are_told_with_their_memory(probed: dict[str, Any]) -> None:
    devices = [{"name": "NVIDIA H200", "memory_bytes": 150 * 10**9}, {"name": "mps", "memory_bytes": None}]
    probed |= {"cuda": "13.0", "device": "cuda", "devices": devices}
    lines = hotlap().stdout.splitlines()
    assert "torch: 2.13.0+cpu, CUDA 13.0, 2 threads with AVX2" in lines
    assert "device: NVIDIA H200, 150.0 GB" in lines and "device: mps" in lines


def test_a_terminal_gets_the_same_findings_in_a_table(
    probed: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    plain = hotlap().stdout
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    doctor([], standalone_mode=False)
    table = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    for line in plain.splitlines():
        name, _, finding = line.partition(": ")
        if name not in ("memory", "disk"):
            assert any(row.startswith(name) and row.rstrip().endswith(finding) for row in table), line


# --- precision ---


@pytest.mark.torch
@pytest.mark.parametrize(
    ("bfloat16_s", "uses", "words"),
    [(0.4, True, "use (5.0 times as fast"), (2.3, True, "use (as fast"), (2.6, False, "do not use (1.3 times slower")],
)
def test_bfloat16_is_used_where_it_is_as_fast(bfloat16_s: float, uses: bool, words: str) -> None:
    from hotlap.train import probe

    is_used, verdict = probe.judge(2.0, bfloat16_s)
    assert is_used is uses and verdict.startswith(f"bfloat16: {words}")


@pytest.mark.torch
@pytest.mark.parametrize(
    ("seconds_at_256", "size"), [((1e-3, 0.4), 256), ((1e-4, 0.01), 512), ((1e-7, 1e-8), 4096)], ids=str
)
def test_a_slow_machine_is_not_kept_waiting(
    seconds_at_256: tuple[float, float], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from hotlap.train import probe

    def product_s(size: int, dtype: torch.dtype, _device: torch.device) -> float:
        return seconds_at_256[dtype == torch.bfloat16] * (size / 256) ** 3

    monkeypatch.setattr(probe, "_product_s", product_s)
    product = probe.measure(torch.device("cpu"))
    assert product["size"] == size
    assert product["float32_s"] == product_s(size, torch.float32, torch.device("cpu"))


@pytest.mark.torch
def test_a_cuda_build_without_a_gpu_is_probed_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from hotlap.train import probe

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    num_threads = torch.get_num_threads()
    found = probe.probe()
    torch.set_num_threads(num_threads)
    assert found["device"] == "cpu" and found["devices"] == [] and found["num_threads"] == num_threads


@pytest.mark.torch
def test_a_long_product_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from hotlap import clock
    from hotlap.train import probe

    now_s, calls = [0.0], []

    def slow(*matrices: torch.Tensor) -> torch.Tensor:
        calls.append(matrices)
        now_s[0] += 0.4 if len(calls) == 1 else 0.01
        return matrices[0]

    monkeypatch.setattr(torch, "mm", slow)
    monkeypatch.setattr(clock, "monotonic_s", lambda: now_s[0])
    # A deadline binds its clock when it is made.
    monkeypatch.setattr(clock, "Deadline", lambda at_s: Until(at_s, now_s))
    assert probe._product_s(4, torch.float32, torch.device("cpu")) == pytest.approx(0.4)
    assert len(calls) == 1
    assert probe._product_s(4, torch.float32, torch.device("cpu")) == pytest.approx(0.01)
    assert len(calls) == 1 + 20


class Until:
    def __init__(self, at_s: float, now_s: list[float]) -> None:
        self._at_s, self._now_s = at_s, now_s

    def is_over(self) -> bool:
        return self._now_s[0] >= self._at_s


# --- extras ---


def test_every_extra_of_the_project_is_in_the_table() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {extra.name for extra in EXTRAS} == set(project["optional-dependencies"])


@pytest.mark.parametrize(
    ("requirement", "version", "is_met"),
    [
        ("numpy>=2.0", "2.0.1", True),
        ("numpy>=2.0", "1.26.4", False),
        ("numpy>=2.0", None, False),
        ("torch>=2.6", "2.13.0+cpu", True),
        ("torch>=2.10", "2.9.1", False),
        ("modal>=1.6,<1.7", "1.6", True),
        ("pyright[nodejs]>=1.1.400", "1.1.400", True),
        ("tensorboard", "0.1", True),
    ],
)
def test_a_package_is_there_and_new_enough_or_missing(
    requirement: str, version: str | None, is_met: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DOCTOR, "_version", lambda package: version if requirement.startswith(package) else "0")
    extra = DOCTOR._extra(EXTRAS[0], ["click>=9", f'{requirement}; extra == "train"', 'absent; extra == "other"'])
    assert extra["missing"] == ([] if is_met else [requirement])
    assert extra["is_installed"] is is_met


def test_what_a_missing_extra_would_give_is_told(probed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DOCTOR, "_version", lambda package: None if package == "hypothesis" else "99")
    (line,) = [line for line in hotlap().stdout.splitlines() if line.startswith("extra dev")]
    assert line.startswith("extra dev: hypothesis>=") and line.endswith("run: pip install 'hotlap[dev]'")
    assert next(extra.gives for extra in EXTRAS if extra.name == "dev") in line
