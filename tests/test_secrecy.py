"""Secrets in no message, listing, process or file: what is planted where they live is looked for where people look."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hotlap.cli import cli, doctor_money
from hotlap.cloud import local, runpod
from hotlap.cloud.database import shown
from hotlap.cloud.ledger import Ledger
from hotlap.cloud.provider import Start
from hotlap.cloud.runpod import Runpod
from hotlap.cloud.volume import S3Volume, open_volume
from hotlap.config import CloudConfig
from hotlap.errors import ConfigError, NoPermission, UsageError, VolumeGone
from hotlap.secrecy import redactor, without_login

PLANTED = "planted5ecret"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"at postgresql://ada:{PLANTED}@host:5432/db.", "at postgresql://[redacted]@host:5432/db."),
        (f"https://{PLANTED}@host/x", "https://[redacted]@host/x"),
        (f"('postgresql://ada:{PLANTED}@x@host/db')", "('postgresql://[redacted]@host/db')"),
        (f"postgresql://ada:a/{PLANTED}@host/db", "postgresql://[redacted]@host/db"),
        ("https://host/a:b and me@box", "https://host/a:b and me@box"),
        ("hf://org/name@main", "hf://org/name@main"),
    ],
)
def test_addresses_are_shown_without_their_login(text: str, told: str) -> None:
    assert without_login(text) == told


@pytest.mark.parametrize(
    "url", [f"postgresql://u:{PLANTED}@[h/d", f"postgresql://u:{PLANTED}@h/d?sslpassword=other-{PLANTED}"]
)
def test_an_odd_address_of_a_ledger_is_cut_out_too(url: str) -> None:
    assert redactor(url, {})(f"no route for {PLANTED}") == "no route for [redacted]"


def test_a_password_with_an_at_sign_does_not_pass_for_a_host() -> None:
    """Of `p@ss` the database's reader takes `ss@host` for the host, which is in every message."""
    url = f"postgresql://ada:p@{PLANTED}@127.0.0.1:1/db"
    assert PLANTED not in shown(url)
    with pytest.raises(VolumeGone, match=r"Write it as %40") as raised:
        Ledger(CloudConfig(), url)
    assert PLANTED not in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        f'ledger = "postgresql://ada:{PLANTED}@host/db"\n',
        f'[ledger]\nurl = ["postgresql://ada:{PLANTED}@host/db"]\n',
        f'[reaper]\nowner = "postgresql://ada:{PLANTED}@host/db"\n',
    ],
)
def test_a_password_in_the_wrong_place_of_the_limits_is_not_shown(home: Path, text: str) -> None:
    home.mkdir()
    (home / "cloud.toml").write_text(text)
    for command in (["budget"], ["reap"], ["doctor", "--json"]):
        result = CliRunner().invoke(cli, command)
        assert PLANTED not in result.output + str(result.exception)


def test_a_key_that_cannot_be_sent_is_refused_before_an_error_quotes_it() -> None:
    for key in (f"{PLANTED}\nx", f"{PLANTED} x", f"{PLANTED}\u00e9"):
        with pytest.raises(NoPermission) as raised:
            runpod.from_environment({"RUNPOD_API_KEY": key, "HOTLAP_RUNPOD_URL": "http://127.0.0.1:9"})
        assert PLANTED not in str(raised.value)
        env = {"RUNPOD_S3_ACCESS_KEY": key, "RUNPOD_S3_SECRET_KEY": "s"}
        with pytest.raises(NoPermission, match="Set it anew") as raised:
            open_volume("vol1", lambda _id: "EU-RO-1", env)
        assert PLANTED not in str(raised.value)


def test_an_address_with_a_login_is_refused_and_not_shown() -> None:
    for open_it in (
        lambda url: Runpod("key", url),
        lambda url: S3Volume("v", url.replace("https", "http"), "EU-RO-1", "a", "b"),
    ):
        with pytest.raises(ConfigError) as raised:
            open_it(f"https://ada:{PLANTED}@host.example/v2")
        assert PLANTED not in str(raised.value)


def test_a_local_machine_gets_no_secret_with_the_family_s_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_API_KEY", PLANTED)
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("HF_HOME_TOKEN", PLANTED)
    env = local._environment(Start(("true",)))
    assert env["NVIDIA_VISIBLE_DEVICES"] == "0" and PLANTED not in env.values()


@pytest.mark.parametrize("as_json", [False, True])
def test_neither_last_words_nor_a_traceback_hold_a_secret(as_json: bool, home: Path) -> None:
    """A bug of ours whose message quotes what it was given, as errors of libraries do."""
    code = (
        "import sys, os\n"
        "from hotlap import cli\n"
        "def bug(*args, **kwargs):\n"
        "    token = os.environ['A_TOKEN']\n"
        "    raise RuntimeError(f'cannot reach postgresql://ada:{token}@h/d with {token}')\n"
        "cli.cli.main = bug\n"
        "cli.main()"
    )
    argv = [sys.executable, "-c", code, *(["--json"] if as_json else [])]
    env = {**os.environ, "A_TOKEN": PLANTED}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Traceback" in done.stderr and "in bug" in done.stderr, done.stderr
    assert PLANTED not in done.stdout + done.stderr and "[redacted]" in done.stderr
    if as_json:
        assert json.loads(done.stdout)["reason"] == "unexpected"


def test_no_errand_takes_a_secret_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A study's file stands in the create request, which is read by whoever can list the machine."""
    monkeypatch.chdir(tmp_path)
    study = f'[study]\nname = "lr"\nbudget_s = 1\nproposer = "llm"\nllm_command = ["ask", "{PLANTED}"]\n'
    Path("lr.toml").write_text(study)
    words = ["launch", "lr.toml", "--on", "local", "--job", "research", "--dry-run"]
    monkeypatch.setenv("LLM_API_KEY", PLANTED)
    refused = CliRunner().invoke(cli, words)
    assert isinstance(refused.exception, UsageError) and "holds the value of LLM_API_KEY" in str(refused.exception)
    assert PLANTED not in refused.output + str(refused.exception)
    monkeypatch.setenv("LLM_API_KEY", "another-value")
    assert CliRunner().invoke(cli, words).exit_code == 0


def test_files_with_secrets_are_for_nobody_else_s_eyes(home: Path) -> None:
    home.mkdir()
    (home / "reaper.env").write_text("RUNPOD_API_KEY=x\n")
    (home / "cloud.toml").write_text(f'[ledger]\nurl = "postgresql://ada:{PLANTED}@127.0.0.1:1/db"\n')
    for mode, num_told in ((0o644, 2), (0o600, 0)):
        problems: list[str] = []
        for name in ("reaper.env", "cloud.toml"):
            (home / name).chmod(mode)
        doctor_money.examine(problems)
        assert sum("chmod 600" in problem for problem in problems) == num_told
        assert not any(PLANTED in problem for problem in problems)
