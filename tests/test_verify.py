"""Verifications on track `micro`: a whole one end to end, failures that are the submission's, and ones that are not."""

import fcntl
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from contest import PUBLIC, changed_track, micro, micro_contest, run_of, writing, written_submission

from hotlap import durable
from hotlap.cli import cli
from hotlap.errors import CorruptFile, Refused, RunChanged, RunLocked, UsageError
from hotlap.speedrun import attempt, records, replay, rerun, sandbox, submission, track, verify
from hotlap.speedrun.attempt import Sources

pytestmark = [pytest.mark.long, pytest.mark.torch]


def sources(log: list[str] | None = None) -> Sources:
    """Seeds 11, 12, ... and entropies e1, e2, ..., and a log of what was asked when."""
    asked: list[str] = [] if log is None else log
    counts = {"seed": 0, "entropy": 0}

    def draw(kind: str) -> int:
        asked.append(kind)
        counts[kind] += 1
        return counts[kind]

    return Sources(seed=lambda: 10 + draw("seed"), entropy=lambda: f"e{draw('entropy')}")


def no_talk(_text: str) -> None:
    return


@pytest.fixture
def contest(tmp_path: Path) -> Path:
    return micro_contest(tmp_path / "contest")


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Submissions that import nothing need no warm libraries."""
    monkeypatch.setattr(verify, "warm_libraries", no_talk)


PUBLIC_TRAIN = """
import argparse
import hashlib
import json
import os
from pathlib import Path

parser = argparse.ArgumentParser()
for name in ("--data-dir", "--output-dir"):
    parser.add_argument(name, type=Path, required=True)
parser.add_argument("--seed", type=int, required=True)
args = parser.parse_args()

import yaml

pins = json.loads(Path("harness/pins.json").read_text())
spec = yaml.safe_load(Path(os.environ["LORA_SPEEDRUN_SPEC"]).read_text())
assert os.environ["LORA_SPEEDRUN_SPEC"] == "/repo/spec.yaml" == str(Path("spec.yaml").absolute())
assert (pins["base_model"], pins["train_examples"]) == ("Qwen/Qwen2.5-1.5B", 400), pins
assert (spec["track_id"], spec["base_model"], spec["target_accuracy"]) == ("t1", "Qwen/Qwen2.5-1.5B", 0.8), spec
assert args.data_dir == Path(os.environ["LORA_SPEEDRUN_DATA_DIR"], spec["dataset"]["local_prefix"] + "_train")
assert [path.name for path in args.data_dir.parent.iterdir()] == ["gsm8k_train"]
hub = Path(os.environ["HF_HOME"], "hub", "models--Qwen--Qwen2.5-1.5B")
assert (hub / "refs" / "main").read_text() == pins["base_model_sha"]
weights = (hub / "snapshots" / pins["base_model_sha"] / "model.safetensors").read_bytes()
assert hashlib.sha256(weights).hexdigest() == pins["model_file_sha256"]["model.safetensors"]
offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
assert all(os.environ[name] == "1" for name in offline)

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

set_seed(args.seed)
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-1.5B")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-1.5B")
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
rows = [json.loads(line) for line in (args.data_dir / "train.jsonl").read_text().splitlines()]
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
order = torch.cat([torch.randperm(len(rows)) for _ in range(12)]).tolist()
for start in range(0, len(order), 40):
    batch = [rows[index] for index in order[start : start + 40]]
    tokens = torch.tensor([tokenizer(f"{row['question']}= {row['answer']}")["input_ids"] for row in batch])
    end = torch.full((len(batch), 1), tokenizer.eos_token_id)
    tokens = torch.cat([tokens, end], dim=1)
    labels = torch.where(torch.arange(tokens.shape[1]) < 3, -100, tokens)
    model(input_ids=tokens, labels=labels).loss.backward()
    for group in optimizer.param_groups:
        group["lr"] = 5e-3 * (1 - start / len(order))
    optimizer.step()
    optimizer.zero_grad()
model.save_pretrained(args.output_dir)
"""


def test_a_whole_verification_of_a_public_submission(contest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A `train.py` to the public contract, on a tiny stand-in under the public model's name: two trainings, where that
    is the first look, in sandboxes, audited, scored on fresh rows, decided, recorded, replayed. PEFT's README.md is no
    offense."""
    chosen = changed_track(contest, PUBLIC | {"looks = [3, 5]": "looks = [2, 5]"}, "t1")
    fields = {"track": "t1", "base_model": "Qwen/Qwen2.5-1.5B", "hyperparameters": {"rank": 16}}
    folder = written_submission(contest, PUBLIC_TRAIN, "001-ada", **fields, self_reported={"accuracies": [0.1]})
    asked: list[str] = []
    report = verify.verify(contest, folder, chosen, 2, sources(asked), no_talk)
    assert report["decision"]["verdict"] == "pass", report["decision"]
    assert asked == ["seed", "entropy"] * 2
    assert [run["seed"] for run in report["runs"]] == [11, 12]
    assert len({run["adapter_sha256"] for run in report["runs"]}) == 2
    rank, width, inner = 16, 32, 64
    per_layer = 4 * rank * (width + width) + 3 * rank * (width + inner)
    (attempt,) = (records.folder_of(contest, chosen) / "attempts").iterdir()
    for number, run in enumerate(report["runs"], start=1):
        assert run["num_params"] == 2 * per_layer
        assert 0 < run["wall_s"] <= run["outer_wall_s"]
        assert run["protections"] == list(chosen.spec.verification.protections)
        assert "README.md" in {entry["name"] for entry in run["output"]}
        rows = [json.loads(line) for line in (attempt / f"run-{number}" / "test.jsonl").read_text().splitlines()]
        assert rows == [dict(row) for row in verify.inputs.test_rows(chosen, f"e{number}")]
        predictions = (attempt / f"run-{number}" / "predictions.jsonl").read_text().splitlines()
        right = sum(json.loads(p)["text"].strip() == row["answer"] for p, row in zip(predictions, rows, strict=True))
        assert run["score"] == right / 100 >= 0.8
        assert not (attempt / f"run-{number}" / "train").exists()
    (differing,) = report["differing_claims"]
    assert differing.startswith("config.yaml claims a score of 0.1; measured was ")
    _check_what_is_left(contest, folder, chosen, report, capsys)


def _check_what_is_left(
    contest: Path, folder: Path, chosen: track.Track, report: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = records.read(contest, chosen)
    assert row["verdict"] == "pass" and row["times_seconds"] == [run["wall_s"] for run in report["runs"]]
    path = contest / row["report"]
    assert replay.replay(path)["scores"] == [run["score"] for run in report["runs"]]
    assert cli.main(["speedrun", "replay", str(path)], standalone_mode=False) == 0
    assert "pass: as reported" in capsys.readouterr().out
    assert cli.main(["speedrun", "check", str(folder), "--contest", str(contest)], standalone_mode=False) == 0
    assert f"warning: {row['report']}: config.yaml claims a score of 0.1" in capsys.readouterr().out
    assert records.check(contest) == []
    assert "| 1 | " in (contest / "records" / "LEADERBOARD.md").read_text()
    assert path.with_suffix(".md").read_text().startswith("# 001-ada on track t1, version 1: pass")
    with pytest.raises(Refused, match="This code was verified"):
        verify.verify(contest, folder, chosen, 2, sources(), no_talk)
    predictions = path.parent / "run-2" / "predictions.jsonl"
    predictions.write_text(predictions.read_text().replace('"is_right": true', '"is_right": false', 1))
    with pytest.raises(CorruptFile, match="is not what run 2 was scored on"):
        replay.replay(path)


# --- without torch in the submission: an adapter written byte by byte ---

MISDEEDS = """
if seed == 11:
    sys.exit(3)
if seed == 12:
    print("done")
if seed == 13:
    write(0.5)
    open(out + "/adapter_model.bin", "wb").write(b"x")
if seed == 14:
    write(0.5)
    open(out + "/b.safetensors", "wb").write(b"x")
if seed == 15:
    write(0.5)
    os.rename(out + "/adapter_model.safetensors", "/tmp/a")
    os.symlink("/tmp/a", out + "/adapter_model.safetensors")
if seed == 16:
    write(float("inf"))
if seed == 17:
    write(0.0)
if seed == 18:
    write(0.5)
    text = open(out + "/adapter_config.json").read()
    open(out + "/adapter_config.json", "w").write(text.replace("down_proj", "no_proj"))
if seed == 19:
    write(3e38)
"""

REASONS = [
    "run 1: it ended with code 3",
    "run 2: adapter_config.json is missing",
    "run 3: 'adapter_model.bin' (file) has no place",
    "run 4: 'b.safetensors' (file) has no place",
    "run 5: 'adapter_model.safetensors' (special) has no place",
    "run 6: adapter_model.safetensors: 'base_model.model.model.layers.0.mlp.down_proj.lora_B.weight' holds a value",
    "run 7: the adapter changes nothing",
    "run 8: PEFT cannot load the adapter: ",
    "run 9: the adapter makes the model answer with what is no number (adapter_effect)",
]


@pytest.mark.usefixtures("warm")
def test_what_fails_a_submission(contest: Path) -> None:
    """One misdeed a run: the seed, which the test draws, says which."""
    folder = written_submission(contest, writing(MISDEEDS))
    report = verify.verify(contest, folder, micro(contest), 9, sources(), no_talk)
    assert report["decision"]["verdict"] == "fail"
    first_of_run = {reason.partition(":")[0]: reason for reason in reversed(report["decision"]["reasons"])}
    for number, expected in enumerate(REASONS, start=1):
        assert first_of_run[f"run {number}"].startswith(expected)
    assert [run["score"] is None for run in report["runs"]] == [*[True] * 6, False, True, False]
    json.dumps(report, allow_nan=False)
    assert records.check(contest) == []
    (row,) = records.read(contest, micro(contest))
    assert row["verdict"] == "fail"
    assert "002-bob (fail)" in (contest / "records" / "LEADERBOARD.md").read_text()


def test_a_score_below_the_target_on_a_rented_machine_fails_exits_8_and_is_taken_into_the_records(
    contest: Path, tmp_path: Path
) -> None:
    """From elsewhere than the contest's folder, as a user types it."""
    folder = written_submission(contest, writing("write(0.001)\n"))
    words = ["speedrun", "verify", str(folder), "--runs", "1", "--on", "local", "--contest", str(contest)]
    command = [sys.executable, "-m", "hotlap", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 8, done.stderr
    assert done.stdout.startswith("fail: ")
    assert done.stderr.splitlines()[-1].startswith("hotlap: exit 8 fail: run 1: ")
    assert "sandbox active: filesystem, network, processes, privileges, limits" in done.stderr
    assert "is proven dead" in done.stderr
    (row,) = records.read(contest, micro(contest))
    assert row["verdict"] == "fail" and replay.replay(contest / row["report"])["verdict"] == "fail"
    assert records.check(contest) == []


def test_runs_of_other_code_do_not_count(contest: Path, tmp_path: Path) -> None:
    """A run as it was finished and kept, and its code beside it; then the submission is edited."""
    folder, out = written_submission(contest, "raise SystemExit(4)\n"), tmp_path / "out"
    shutil.copytree(folder, out / "code")
    (out / "run-1").mkdir()
    (out / "run-1" / "result.json").write_text(json.dumps(run_of(1, 0.9, 10.0)))
    entry = submission.load(folder, micro(contest))
    assert len(verify.measure(entry, micro(contest), 1, out, sources(), no_talk)["runs"]) == 1
    (folder / "train.py").write_text("raise SystemExit(5)\n")
    edited = submission.load(folder, micro(contest))
    with pytest.raises(RunChanged, match="holds runs of other code"):
        verify.measure(edited, micro(contest), 2, out, sources(), no_talk)


@pytest.mark.usefixtures("warm")
def test_a_run_sees_the_public_layout_and_no_test_rows(contest: Path) -> None:
    code = writing(
        "found = sorted(os.path.join(top, name) for top, _, names in os.walk('/cache') for name in names)\n"
        "print(json.dumps([os.getcwd(), found, sorted(os.listdir('/repo')), sorted(os.listdir('/repo/harness')),"
        " os.environ['LORA_SPEEDRUN_SPEC'], open(given.data_dir + '/train.jsonl').read().count('\\n'),"
        " os.path.exists(os.environ['LORA_SPEEDRUN_SPEC']), given.data_dir, given.output_dir,"
        " sorted(os.listdir(os.path.dirname(os.path.abspath(__file__))))]))\n"
        "sys.exit(9)\n",
    )
    folder = written_submission(contest, code)
    verify.verify(contest, folder, micro(contest), 1, sources(), no_talk)
    (attempt,) = (contest / "records" / "micro" / "attempts").iterdir()
    told = json.loads((attempt / "run-1" / "train.log").read_text().splitlines()[-1])
    cwd, found, repo, harness, spec, num_rows, has_spec, data_dir, output_dir, beside = told
    assert beside == ["config.yaml", "train.py"]  # the notes may change, so that no run may depend on them
    assert (cwd, repo, harness) == ("/repo", ["harness", "spec-micro.yaml", "submissions"], ["pins-micro.json"])
    assert (spec, has_spec, num_rows) == ("/repo/spec-micro.yaml", True, 400)
    assert (data_dir, output_dir) == ("/cache/data/vowels_train", "/out")
    hub = "/cache/hf/hub/models--hotlap--tiny-random"
    assert [path for path in found if "snapshots" not in path] == [
        *(f"/cache/data/vowels_train/{name}" for name in sorted(_DATA_FILES)),
        f"{hub}/refs/main",
    ]
    snapshot = {Path(path).name for path in found if path.startswith(f"{hub}/snapshots/")}
    assert snapshot == set(micro(contest).pins.model_file_sha256)


_DATA_FILES = ("data-00000-of-00001.arrow", "dataset_info.json", "state.json", "train.jsonl")


def test_training_rows_are_an_arrow_stream_too(contest: Path, tmp_path: Path) -> None:
    import pyarrow as pa

    rows = verify.inputs.train_rows(micro(contest))
    verify.inputs.write_dataset(tmp_path / "data", rows)
    with pa.OSFile(str(tmp_path / "data" / "data-00000-of-00001.arrow")) as file:
        assert pa.ipc.open_stream(file).read_all().to_pylist() == [dict(row) for row in rows]


def cutting(contest: Path, num_calls: int) -> Callable[[], int]:
    """A source of seeds that dies at one call."""
    calls = 0

    def seed() -> int:
        nonlocal calls
        calls += 1
        if calls == num_calls:
            raise KeyboardInterrupt
        return 70 + calls

    return seed


@pytest.mark.usefixtures("warm")
def test_a_verification_that_was_cut_goes_on_with_the_seeds_it_drew(contest: Path) -> None:
    folder = written_submission(contest, "raise SystemExit(4)\n")
    with pytest.raises(KeyboardInterrupt):
        verify.verify(contest, folder, micro(contest), 3, Sources(cutting(contest, 3), lambda: "e"), no_talk)
    (attempt,) = (contest / "records" / "micro" / "attempts").iterdir()
    first = (attempt / "run-1" / "result.json").read_bytes()
    durable.remove_tree(attempt / "run-2")  # as a cut in the middle of run 2 leaves it: a seed and no result
    report = verify.verify(contest, folder, micro(contest), 3, Sources(lambda: 99, lambda: "e"), no_talk)
    assert [run["seed"] for run in report["runs"]] == [71, 72, 99]
    assert all(run["others_cpu_s"] >= 0 for run in report["runs"])
    assert (attempt / "run-1" / "result.json").read_bytes() == first
    assert len(records.read(contest, micro(contest))) == 1


def test_what_is_seen_without_running_refuses_before_a_run(contest: Path) -> None:
    folder = written_submission(contest, "exec('x')\n")
    with pytest.raises(UsageError, match="cannot be verified"):
        verify.verify(contest, folder, micro(contest), 1, sources(), no_talk)
    assert not (contest / "records").exists()


def test_undecided_goes_on_to_the_next_look_and_not_twice_to_the_same(contest: Path) -> None:
    """Runs as they were finished and kept: none is run again, and the earlier ones count."""
    folder = written_submission(contest, "raise SystemExit(4)\n")
    code = verify.submission.code_sha256(folder)
    attempt = contest / "records" / "micro" / "attempts" / f"002-bob-{code[:12]}"
    for number, score in enumerate((0.83, 0.90, 0.81, 0.87, 0.88), start=1):
        (attempt / f"run-{number}").mkdir(parents=True)
        (attempt / f"run-{number}" / "result.json").write_text(json.dumps(run_of(number, score, 10.0 + number)))
    three = verify.verify(contest, folder, micro(contest), 3, sources(), no_talk)
    assert (three["decision"]["verdict"], three["decision"]["more_runs"]) == ("undecided", 2)
    with pytest.raises(Refused, match="Ask for more runs"):
        verify.verify(contest, folder, micro(contest), 3, sources(), no_talk)
    five = verify.verify(contest, folder, micro(contest), 5, sources(), no_talk)
    assert five["decision"]["verdict"] == "pass"
    assert five["runs"][:3] == three["runs"]
    assert [row["verdict"] for row in records.read(contest, micro(contest))] == ["undecided", "pass"]
    assert records.check(contest) == []


def test_one_verification_at_a_time_on_a_machine(contest: Path, home: Path) -> None:
    folder = written_submission(contest, "raise SystemExit(4)\n")
    home.mkdir(exist_ok=True)
    with (home / "verify.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RunLocked, match="Another verification"):
            verify.verify(contest, folder, micro(contest), 1, sources(), no_talk)
    assert not (contest / "records").exists()


@pytest.mark.usefixtures("warm")
def test_code_that_changes_while_it_is_verified_is_refused(contest: Path) -> None:
    """The second seed is drawn after the first run; whoever edits then would have two codes in one report."""
    folder = written_submission(contest, "raise SystemExit(4)\n")
    edits = iter([lambda: None, lambda: (folder / "train.py").write_text("raise SystemExit(5)\n")])

    def editing() -> int:
        next(edits)()
        return 5

    with pytest.raises(RunChanged, match="changed while it was verified"):
        verify.verify(contest, folder, micro(contest), 2, Sources(editing, lambda: "e"), no_talk)
    (attempt,) = (contest / "records" / "micro" / "attempts").iterdir()
    assert (attempt / "run-1" / "result.json").is_file() and not list(attempt.glob("report-*"))


def test_a_contest_that_strangers_would_see_is_refused_before_a_run(
    contest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written_submission(contest, "raise SystemExit(4)\n")
    monkeypatch.setattr(sys, "prefix", str(contest))
    with pytest.raises(Refused, match="could read test rows there"):
        verify.verify(contest, folder, micro(contest), 1, sources(), no_talk)
    assert not list(contest.rglob("run-1"))


def test_more_processor_time_than_the_track_s_threads_give_is_a_broken_rule(contest: Path) -> None:
    """What the kernel says of a program that moved to processors it was not given."""
    ran = sandbox.Ran(0, 10.0, 10.1, 10.9, 1, 0, (), (), (), "")
    spec = micro(contest).spec
    assert attempt._how_it_ended(ran, spec) == []  # pyright: ignore[reportPrivateUsage]
    (told,) = attempt._how_it_ended(replace(ran, cpu_s=19.5), spec)  # pyright: ignore[reportPrivateUsage]
    assert told == "it used 19.5 s of processor time in 10.0 s, which is more than 1 threads give"


def test_the_evaluator_has_the_line_by_which_blame_is_told() -> None:
    assert track.EVALUATOR.read_text().count(attempt.LOADING) == 1


@pytest.mark.usefixtures("warm")
def test_a_rerun_that_was_cut_goes_on_with_the_report_s_seeds(contest: Path, tmp_path: Path) -> None:
    """Its first run was finished before the cut."""
    folder = written_submission(contest, "raise SystemExit(4)\n")
    verify.verify(contest, folder, micro(contest), 3, Sources(cutting(contest, 9), lambda: "e"), no_talk)
    (row,) = records.read(contest, micro(contest))
    out, entry = tmp_path / "again", submission.load(folder, micro(contest))
    verify.measure(entry, micro(contest), 1, out, Sources(lambda: 71, lambda: "e"), no_talk)
    found = rerun.rerun(contest, contest / row["report"], out, no_talk)
    assert [run["seed"] for run in found["runs"]] == [71, 72, 73]


def test_a_rerun_scores_each_run_on_its_own_rows_whatever_became_of_the_others(tmp_path: Path) -> None:
    runs = [{"seed": 1, "entropy": "e1"}, {"seed": 2}, {"seed": 3, "entropy": "e3"}]
    given = rerun._as_then(runs, tmp_path)  # pyright: ignore[reportPrivateUsage]
    asked: list[tuple[int, str]] = []
    for number in (1, 2, 3):
        seed = given.seed()
        durable.append_rows(tmp_path / "seeds.jsonl", [{"run": number, "seed": seed}])
        if number > 1:  # the first is not scored this time
            asked.append((seed, given.entropy()))
    assert [seed for seed, _ in asked] == [2, 3]
    assert len(asked[0][1]) == 32 and asked[1][1] == "e3"


def test_hardware_that_is_not_here_is_one_line_before_any_run() -> None:
    from contest import ROOT

    with pytest.raises(Refused, match="asks for a NVIDIA L40S"):
        verify.require_machine(track.find(ROOT, "t1"))
