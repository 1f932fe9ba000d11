"""Launching for real, on the local provider: crash points, the whole way, detaching, stopping, dry runs."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from money import make_lease
from processes import command_lines

from hotlap import clock
from hotlap.cli import cli, doctor_money
from hotlap.cloud import launches, rental
from hotlap.cloud.lease import Lease
from hotlap.cloud.ledger import Ledger
from hotlap.cloud.local import LocalProvider
from hotlap.cloud.proof import Patience
from hotlap.cloud.reaper import Reaper
from hotlap.config import CloudConfig, RunConfig
from hotlap.errors import BudgetRefused, HotlapError, Survivors
from hotlap.secrecy import redactor
from hotlap.testing.fake_runpod import FakeRunpod

pytestmark = pytest.mark.long

# --- killed at any line ---

LAUNCHERS = """
import json, os, signal, sys, time
from dataclasses import replace
from pathlib import Path
from hotlap.cloud import launcher, local, money, receipts
from hotlap.cloud.ledger import Ledger
from hotlap.cloud.provider import Start
from hotlap.config import CloudConfig, RunConfig
from hotlap.errors import BudgetRefused, HotlapError

launcher.JOB_MARGIN_S = money.SHUTDOWN_S = 0.0
JOB = '''
import json, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
print("HOTLAP: " + json.dumps({"event": "boot", "boot_id": "b", "nonce": os.environ["HOTLAP_NONCE"]}), flush=True)
while True:
    open(sys.argv[1], "a").write(f"{time.time()}\\\\n")
    time.sleep(0.05)
'''

def deadly(inner, name, point, when):
    nth = int(os.environ.get("NTH", "1"))
    class Deadly:
        def __getattr__(self, called):
            value = getattr(inner, called)
            if f"{name}.{called}" != point:
                return value
            def call(*args, **kwargs):
                if when == "before":
                    os.kill(os.getpid(), signal.SIGKILL)
                answer = value(*args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)
            return call
    return Deadly()

class Quick(local.LocalProvider):
    traits = replace(local.TRAITS, provisioning_s=10.0)

def run(home, point, when):
    os.environ["HOTLAP_HOME"] = home
    settings = CloudConfig()
    ledger = deadly(Ledger(settings), "ledger", point, when)
    provider = deadly(Quick(grace_s=0.2), "provider", point, when)
    def note(self, *args, _note=receipts.Receipt.note, **kwargs):
        if point == "receipt.note" and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        _note(self, *args, **kwargs)
        if point == f"receipt.note.{(kwargs.get('at') or [''])[0]}":
            os.kill(os.getpid(), signal.SIGKILL)
    receipts.Receipt.note = note
    job = launcher.Job("run", 3.0, Start((sys.executable, "-c", JOB, home + "/ticks")))
    lead = launcher.Launcher(provider, ledger, settings, "me", launcher.Stops(), launcher.World())
    end = lead.launch(job, provider.offers())
    os._exit(0 if end.end.kind == "overran" else 1)

pids = {}
for number, (point, when) in enumerate(json.loads(sys.argv[2])):
    home = f"{sys.argv[1]}/{number}"
    os.mkdir(home)
    if (pid := os.fork()) == 0:
        try:
            run(home, point, when)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(2)
    pids[pid] = home
print(json.dumps({home: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, home in pids.items()}))
"""

POINTS = [
    *(("ledger.hold", when) for when in ("before", "after")),
    ("receipt.note", "before"),
    *((f"receipt.note.{name}", "after") for name in ("held", "sent", "created", "booted", "ended", "proven")),
    *(("provider.create", when) for when in ("before", "after")),
    *(("ledger.note_machine", when) for when in ("before", "after")),
    *(("provider.logs", when) for when in ("before", "after")),
    *(("provider.terminate", when) for when in ("before", "after")),
    *(("ledger.settle", when) for when in ("before", "after")),
]


def test_killed_at_any_line_one_pass_after_the_deadline_leaves_nothing_alive_and_the_ledger_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The meter is the job's own: it ignores signals, and writes down every moment of its life."""
    argv = [sys.executable, "-c", LAUNCHERS, str(tmp_path), json.dumps(POINTS)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout)
    assert set(codes.values()) == {-signal.SIGKILL}, (codes, done.stderr)
    deadline_s = max((lease.not_after_s for lease in all_leases(tmp_path)), default=0)
    time.sleep(max(0.0, deadline_s + 1.0 - time.time()))
    for number, point in enumerate(POINTS):
        home = tmp_path / str(number)
        monkeypatch.setenv("HOTLAP_HOME", str(home))
        ledger = Ledger(CloudConfig())
        report = Reaper(LocalProvider(), ledger, CloudConfig(), "me").reap(
            Patience(20, clock.monotonic_s, clock.sleep_s)
        )
        assert report.is_clean, (point, report)
        assert LocalProvider().machines().machines == (), point
        assert ledger.open_leases() == [], point
        ticks = home / "ticks"
        moments = [float(line) for line in ticks.read_text().splitlines()] if ticks.exists() else [0.0]
        charged_s = sum(lease.gpu_s for lease in ledger.leases_of("run"))
        assert moments[-1] - moments[0] <= charged_s, point
        assert not _running_with(str(ticks)), point
        for lease in ledger.leases_of("run"):
            receipt = json.loads((home / "receipts" / f"{lease.lease_id}.json").read_text())
            is_late = point in [("ledger.settle", "after"), ("receipt.note.proven", "after")]
            assert is_late or receipt["settlement"]["state"] == lease.state, point
        ledger.close()


def all_leases(folder: Path) -> list[Lease]:
    return [
        lease
        for number in range(len(POINTS))
        for lease in Ledger(CloudConfig(), f"sqlite:///{folder / str(number) / 'ledger.sqlite'}").open_leases()
    ]


def _running_with(word: str) -> list[int]:
    return [pid for pid, words in command_lines() if word in words]


# --- the command ---


def hotlap(*args: str, cwd: Path, check: int | None = 0, **env: str) -> subprocess.CompletedProcess[str]:
    process = subprocess.run(
        [sys.executable, "-m", "hotlap", *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **env},
    )
    assert check is None or process.returncode == check, process.stdout + process.stderr
    return process


def launch_args(model: Path, data: Path, *more: str) -> list[str]:
    return [
        *("launch", "--on", "local", "--base-model", str(model), "--dataset", str(data), "--run", "tiny"),
        *("--set", "data.seq_len=64", "--set", "lora.rank=4", "--set", "slice.num_threads=1", "--json", *more),
    ]


@pytest.mark.torch
def test_a_run_on_a_machine_from_hold_to_settlement(tiny_model: Path, f3: Path, home: Path, tmp_path: Path) -> None:
    """Secrets are planted in the environment and searched for in everything that is kept or said."""
    secret = "planted-0xC0FFEE-key"
    args = launch_args(tiny_model, f3, "--set", "train.max_steps=12", "--slices", "3")
    planted = {"RUNPOD_TEST_API_KEY": secret, "MY_PASSWORD": secret}
    done = hotlap(*args, cwd=tmp_path, **planted)
    answer = json.loads(done.stdout)
    (lease,) = answer["leases"]
    assert (answer["exit_code"], answer["reason"], lease["state"]) == (0, "done", "settled")
    assert (tmp_path / "runs" / "tiny" / "adapter" / "manifest.json").exists()
    assert "worst case (local): 3 machines" in done.stderr and "slice 1, from the start of 12" in done.stderr
    assert "is proven dead" in done.stderr and done.stderr.rstrip().splitlines()[-1].startswith("hotlap: exit 0 done")
    receipt = json.loads((home / "receipts" / f"{lease['lease_id']}.json").read_text())
    assert list(receipt["times"]) == ["held", "sent", "created", "booted", "ended", "proven"]
    assert receipt["settlement"]["gpu_s"] == lease["gpu_s"] < receipt["intent"]["worst_case"]["gpu_s"]
    assert receipt["proof"][lease["machine_id"]]["absent_at_s"]
    assert json.loads(hotlap("machines", "--json", cwd=tmp_path, **planted).stdout) == []
    report = json.loads(hotlap("budget", "--json", cwd=tmp_path, **planted).stdout)
    assert report["today"]["charged"]["gpu_s"] == lease["gpu_s"] and report["runs"][0]["run"] == "tiny"

    again = json.loads(hotlap(*args, cwd=tmp_path, **planted).stdout)
    assert (again["exit_code"], again["leases"]) == (0, []) and len(list((home / "receipts").iterdir())) == 1
    kept = [path for path in [*home.rglob("*"), *(tmp_path / "runs").rglob("*")] if path.is_file()]
    assert not [path for path in kept if secret.encode() in path.read_bytes()]
    assert secret not in done.stdout + done.stderr
    # Under the same name with other settings: not done, but refused.
    other = hotlap(*args, "--set", "optim.lr=0.5", cwd=tmp_path, check=3)
    assert json.loads(other.stdout)["reason"] == "changed" and "optim.lr is 0.0002" in other.stderr


@pytest.mark.torch
def test_detach_leaves_a_process_and_stop_ends_it_with_proof(
    tiny_model: Path, f3: Path, home: Path, tmp_path: Path
) -> None:
    args = launch_args(tiny_model, f3, "--set", "train.max_steps=1000000", "--detach", "--slices", "2")
    left = json.loads(hotlap(*args, cwd=tmp_path).stdout)
    assert os.getsid(left["pid"]) == left["pid"]  # no terminal takes it along
    metrics = tmp_path / "runs" / "tiny" / "metrics.jsonl"
    until = time.monotonic() + 90
    while not metrics.exists() or metrics.stat().st_size < 500:
        assert time.monotonic() < until, Path(left["log"]).read_text()
        time.sleep(0.1)
    (machine,) = json.loads(hotlap("machines", "--json", cwd=tmp_path).stdout)
    assert (machine["run"], machine["state"]) == ("tiny", "running") and machine["left_s"] > 0
    refused = hotlap(*args, cwd=tmp_path, check=2)
    assert "hotlap stop tiny" in refused.stderr
    stopped = json.loads(hotlap("stop", "tiny", "--json", cwd=tmp_path).stdout)
    assert [lease["state"] for lease in stopped["leases"]] == ["settled"]
    assert stopped["ending"] == "stopped" and stopped["step"] > 0  # saved
    assert json.loads(hotlap("machines", "--json", cwd=tmp_path).stdout) == []
    assert re.search(r"hotlap: exit 75 stopped", Path(left["log"]).read_text())
    assert hotlap("stop", "tiny", cwd=tmp_path).returncode == 0  # twice is fine


def inside(*args: str) -> Any:
    """The command within this process: what it printed, or the error it raised."""
    result = CliRunner().invoke(cli, list(args))
    return result.exception if isinstance(result.exception, HotlapError) else result


def test_a_dry_run_and_refusals_rent_nothing(
    tiny_model: Path, f3: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = launch_args(tiny_model, f3)
    facts = json.loads(inside(*args, "--dry-run", "--slices", "2").stdout)
    assert facts["gpu_s"] == 2 * facts["ttl_s"] == 740 and facts["is_dry_run"]
    assert "2 machines of at most 370 s" in inside(*args[:-1], "--dry-run", "--slices", "2").stdout
    (home / "cloud.toml").write_text("[budget]\ngpu_minutes_per_day = 5\n")
    refused = inside(*args)
    assert isinstance(refused, BudgetRefused) and "It resets at" in str(refused)
    for more, code, words in (
        (("--on", "nowhere"), 2, "no provider 'nowhere'"),
        (("--slices", "0"), 2, "--slices is 0"),
        (("--gpu", "H100"), 5, "local offers no H100"),
    ):
        error = inside(*args, *more)
        assert error.exit_code == code and words in str(error)
    monkeypatch.delenv("RUNPOD_API_KEY", raising=False)
    assert inside(*args, "--on", "runpod").reason == "no_permission"
    monkeypatch.setenv("HOTLAP_SERVING", "1")
    assert inside(*args).reason == "guard"
    assert not list((home / "machines").glob("*")) and Ledger(CloudConfig()).leases_of("tiny") == []


def test_a_local_machine_finds_every_place_and_keeps_the_run_s_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "d.jsonl", "e.jsonl", "t.jinja", "m.jsonl"):
        Path(name).touch()
    data = {"eval_dataset": "e.jsonl", "chat_template": "t.jinja", "mix": [{"dataset": "m.jsonl"}, {"dataset": "a/b"}]}
    config = RunConfig.model_validate({"base_model": "model", "dataset": "d.jsonl", "data": data})
    job = rental.local_job(config, LocalProvider().traits)
    sent = RunConfig.model_validate(json.loads(job.start.argv[-1])["config"])
    assert job.run == sent.run_name == config.run_name
    assert sent.output_dir == str(tmp_path / "runs")
    assert (sent.base_model, sent.dataset) == (str(tmp_path / "model"), str(tmp_path / "d.jsonl"))
    assert (sent.data.eval_dataset, sent.data.chat_template) == (str(tmp_path / "e.jsonl"), str(tmp_path / "t.jinja"))
    assert [item.dataset for item in sent.data.mix] == [str(tmp_path / "m.jsonl"), "a/b"]


def test_names_of_strangers_are_no_markup(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUNPOD_API_KEY", raising=False)
    folder = home / "machines" / "local-0"
    folder.mkdir(parents=True)
    word = {"host": socket.gethostname(), "pid": 1, "birth": "x", "boot": "y"}
    (folder / "guardian.json").write_text(json.dumps(word))
    env = {"HOTLAP_LEASE": "a", "HOTLAP_OWNER": "[/red]\x1b[2J", "HOTLAP_NOT_AFTER": "[/b]"}
    facts = {"machine_id": "local-0", "name": "hotlap-a", "created_at_s": 1.0, "usd_micros_per_hour": 0, "env": env}
    (folder / "machine.json").write_text(json.dumps(facts))
    told = inside("machines").stdout
    assert "[/red]\N{REPLACEMENT CHARACTER}[2J" in told and "'[/b]' cannot be read" in told
    (home / "machines" / "local-1").mkdir()
    (home / "machines" / "local-1" / "guardian.json").write_text("{")
    result = CliRunner().invoke(cli, ["machines"])
    assert "local-0" in result.stdout and "local-1 are damaged" in str(result.exception)


def test_a_local_machine_of_another_home_is_not_taken_for_dead(home: Path) -> None:
    ledger = Ledger(CloudConfig())
    lease = ledger.hold(make_lease(began_s=time.time(), not_after_s=int(time.time()) + 100))
    ledger.note_machine(lease.lease_id, "local-0")
    words: list[str] = []
    patience = Patience(1.0, clock.monotonic_s, clock.sleep_s)
    with pytest.raises(Survivors, match=r"local-0 of run-a+ is a local one of another home"):
        launches.stop(lease.run, ledger, CloudConfig(), lambda _name: LocalProvider(), patience, words.append)
    assert [each.lease_id for each in ledger.open_leases()] == [lease.lease_id]


def test_a_damaged_word_of_a_launcher_is_no_word(home: Path) -> None:
    for text in ("", "[]", "{}", '{"boot": 1, "pid": "x"}'):
        launches.launch_file("tiny").parent.mkdir(parents=True, exist_ok=True)
        launches.launch_file("tiny").write_text(text)
        assert launches.supervisor("tiny") is None
        launches.require_no_other("tiny")


def test_money_commands_on_an_empty_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUNPOD_API_KEY", raising=False)
    assert "60.0 GPU-minutes and $5.00 left" in inside("budget").stdout
    assert inside("budget", "--csv").stdout.startswith("day,lease_id,run,")
    assert json.loads(inside("machines", "--offers", "--json").stdout)[0]["provider"] == "local"
    assert (
        json.loads(inside("reap", "--dry-run", "--json").stdout)["is_dry_run"] and not (home / "reaper.json").exists()
    )
    assert "nothing is past its time" in inside("reap").stderr
    found = doctor_money.examine([])
    assert found and found["reaper"]["is_active"] and found["ledger"]["is_reachable"]
    worst = {row["provider"]: row["seconds"] for row in found["worst_loss"]}
    assert worst == {"local": 385, "ssh": 460, "runpod": 850, "modal": 640}


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("full-key", "opens the whole account"),
        ("pods-key", "opens pods and not the account"),
        ("planted-key", "did not say"),
    ],
)
def test_doctor_says_what_a_key_opens_and_that_nobody_reaps(
    home: Path, monkeypatch: pytest.MonkeyPatch, key: str, words: str
) -> None:
    problems: list[str] = []
    with FakeRunpod() as cloud:
        monkeypatch.setenv("HOTLAP_RUNPOD_URL", cloud.url)
        monkeypatch.setenv("RUNPOD_API_KEY", key)
        found = doctor_money.examine(problems)
    told = list(doctor_money.rows(found))
    rows = dict(told)
    assert words in rows["key"] and key not in json.dumps([found, problems])
    assert "hotlap reap --install-cron" in problems[-1]
    assert len(problems) == (2 if key == "planted-key" else 1)
    assert rows["reaper"].startswith("never seen")
    on_runpod = next(text for name, text in told if name == "worst loss" and text.startswith("on runpod"))
    assert "850 s, which at $3 an hour is $0.75" in on_runpod


# --- secrets ---


def test_secrets_are_cut_out_the_longest_first() -> None:
    env: dict[str, Any] = {"A_TOKEN": "abcdef", "B_KEY": "abcdefgh", "PLAIN": "visible", "SHORT_KEY": "ab"}
    redact = redactor("postgresql://u:passw0rd@h/d", env)
    assert redact("abcdefgh abcdef ab visible passw0rd") == "[redacted] [redacted] ab visible [redacted]"


@pytest.mark.parametrize("name", ["DB_PASS", "GITHUB_PAT", "BASIC_AUTH", "PGPASSWORD", "HF_TOKEN", "AWS_SECRET_KEY"])
def test_names_of_secrets(name: str) -> None:
    assert redactor(env={name: "planted-value", "GIT_AUTHOR_NAME": "Ada Lovelace"})("planted-value, Ada Lovelace") == (
        "[redacted], Ada Lovelace"
    )
