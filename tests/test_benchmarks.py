"""Benchmarks on a tiny random model: from beginning to end, and on from where they stopped. What they measure of it
says nothing."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def they_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))


def test_techniques_are_measured_against_none_and_once(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import techniques

    monkeypatch.setenv("HOTLAP_HOME", str(tmp_path / "home"))  # put back afterwards
    monkeypatch.setattr(techniques, "ROWS", tmp_path / "results" / "techniques.jsonl")
    monkeypatch.setattr(techniques, "SUMMARY", tmp_path / "results" / "techniques.json")

    monkeypatch.setitem(techniques.STAGED, "top_layers", 1)  # of the tiny model's two

    def call(*words: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["techniques", str(tiny_model), "--repeats", "1", *words])
        techniques.main()
        printed = json.loads(capsys.readouterr().out)
        assert printed == json.loads(techniques.SUMMARY.read_text())
        return printed

    assert call("--minutes", "0") == {"model": tiny_model.name}
    found = call("--only", "everything")
    assert list(found) == ["model", "load", "off", "everything"]
    for name in ("off", "everything"):
        assert found[name]["runs"] == 1
        for figure in ("wall_s", "start_s", "steps_s", "tokens_per_s", "last_loss", "val_loss"):
            assert 0.0 < found[name][figure]["min"] <= found[name][figure]["max"]
    assert found["off"]["tokens_per_s, of off"]["median"] == 1.0 and found["off"]["val_loss, less off's"]["max"] == 0.0
    rows = techniques.ROWS.read_bytes()
    assert call("--only", "everything") == found
    assert techniques.ROWS.read_bytes() == rows


def test_every_variant_is_a_configuration_and_every_plain_switch_has_one(tmp_path: Path) -> None:
    from benchmarks import techniques
    from hotlap.config_techniques import TechniquesConfig

    plain = set(techniques.plain_switches())
    beside_their_own_name = {"everything": plain, "bfloat16 base, prepacked": {"prepacked_weights"}}
    for name in techniques.variants():
        config = techniques.config_of(tmp_path / "model", tmp_path, name, 0)
        on = {switch for switch in plain if getattr(config.techniques, switch)}
        assert on == beside_their_own_name.get(name, {name} & plain)
    switches = {name for name, info in TechniquesConfig.model_fields.items() if info.annotation is bool}
    assert switches == {*techniques.plain_switches(), *techniques.ONLY_ON_A_GPU}
