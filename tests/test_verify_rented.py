"""`hotlap speedrun verify --on ...`, whole: a submission there, its runs in the sandbox there, their records here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from contest import micro, micro_contest, writing, written_submission
from sshd import Box

from hotlap.speedrun import records, replay
from hotlap.testing.fake_modal import FakeModal

pytestmark = pytest.mark.long

IMAGE = f"img@sha256:{0:064}"


def verified(contest: Path, away: Path, *words: str) -> str:
    """The talk of a verification that fails its submission, as it must: that is in the records, and agrees."""
    folder = written_submission(contest, writing("write(0.001)\n"))
    argv = [sys.executable, "-m", "hotlap", "speedrun", "verify", str(folder), "--runs", "1", *words]
    done = subprocess.run(
        [*argv, "--contest", str(contest)], cwd=away, capture_output=True, text=True, timeout=500, env=os.environ.copy()
    )
    assert done.returncode == 8, done.stderr
    assert done.stdout.startswith("fail: ") and "is proven dead" in done.stderr
    (row,) = records.read(contest, micro(contest))
    assert row["verdict"] == "fail" and replay.replay(contest / row["report"])["verdict"] == "fail"
    assert records.check(contest) == []
    return done.stderr


def test_on_a_box_of_one_s_own(box: Box, tmp_path: Path, home: Path) -> None:
    home.mkdir()
    settings = box.settings
    (home / "cloud.toml").write_text(
        f'[ssh]\nhost = "{settings.host}"\npython = "{settings.python}"\nconfig_file = "{settings.config_file}"\n'
    )
    contest = micro_contest(tmp_path / "contest")
    talk = verified(contest, tmp_path, "--on", "ssh")
    assert "sandbox active: filesystem, network, processes, privileges, limits" in talk
    (there,) = (box.home / "verifications").iterdir()
    assert sorted(path.name for path in (contest / "verifications" / there.name).iterdir()) == sorted(
        path.name for path in there.iterdir() if path.name != "warm"
    )


def test_on_modal(modal_cloud: FakeModal, tmp_path: Path, home: Path) -> None:
    """No volume is named: there is one. The wheel goes there by its own address, so one machine prepares it."""
    home.mkdir()
    (home / "cloud.toml").write_text("[budget]\ngpu_minutes_per_day = 600\ngpu_minutes_per_run = 600\n")
    talk = verified(micro_contest(tmp_path / "contest"), tmp_path, "--on", "modal", "--image", IMAGE)
    assert "part 1 of" not in talk and "on the volume: environment" in talk
    assert modal_cloud.volumes == {"hotlap"} and len(modal_cloud.sandboxes) == 2 and modal_cloud.alive() == []
    preparing, running = (box.definition.network_access for box in modal_cloud.sandboxes.values())
    assert preparing.network_access_type != preparing.BLOCKED == running.network_access_type
