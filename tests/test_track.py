"""Tracks: closed rules, pins, a hash over everything, and what happens when a frozen one changes."""

import datetime
import json
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from contest import ROOT, micro, micro_contest

from hotlap.errors import BadData, ConfigError, HotlapError, MissingArtifact, PinMismatch, UsageError
from hotlap.speedrun import inputs, new_track, track

pytestmark = pytest.mark.long

RESEARCH = ROOT.parent / "shared" / "research" / "speedrun-techniques.md"


def test_every_shipped_track_is_as_it_was_frozen() -> None:
    assert {each.spec.id for each in track.tracks(ROOT)} == {"c1", "c2", "micro", "t1", "t2"}


@pytest.mark.parametrize("track_id", ["t1", "t2"])
def test_public_pins_are_those_of_the_research(track_id: str) -> None:
    if not RESEARCH.is_file():
        pytest.skip(f"needs {RESEARCH}")
    text = RESEARCH.read_text()
    section = text.partition("### 5.3 Pins")[2].partition("### 5.4")[0]
    part = section.partition("t2 (`")[0] if track_id == "t1" else section.partition("t2 (`")[2]
    pins = track.find(ROOT, track_id).pins
    assert pins.public
    for value in (*pins.model_file_sha256.values(), pins.train_content_sha256, pins.public.test_content_sha256):
        assert value in part
    assert pins.public.base_model_sha in part and pins.public.dataset_sha in part
    assert f"`{pins.public.spec_sha256}`" in section and f"`{pins.public.env_lock_sha256}`" in section


def test_least_right_answers_of_the_public_tracks() -> None:
    """752 of 1,319 and 7,981 of 10,570 are the first that reach the targets."""
    for track_id, num_rows, least in (("t1", 1319, 752), ("t2", 10570, 7981)):
        spec = track.find(ROOT, track_id).spec
        assert isinstance(spec.data, track.PublicData) and spec.data.test_examples == num_rows
        assert (least - 1) / num_rows < spec.metric.target <= least / num_rows


@pytest.mark.parametrize("name", ["spec.toml", "generate.py", "make_model.py"])
def test_a_changed_file_of_a_frozen_track_is_refused(name: str, tmp_path: Path) -> None:
    contest = micro_contest(tmp_path / "contest")
    before = micro(contest).sha256
    path = contest / "tracks" / "micro" / name
    text = path.read_text()
    path.write_text(text + "\n# harmless\n")
    with pytest.raises(PinMismatch, match=f"is frozen, and {re.escape(name)} was changed"):
        micro(contest)
    path.write_text(text)
    assert micro(contest).sha256 == before


def test_a_file_that_is_gone_is_refused(tmp_path: Path) -> None:
    contest = micro_contest(tmp_path / "contest")
    (contest / "tracks" / "micro" / "generate.py").unlink()
    with pytest.raises(PinMismatch, match=r"generate\.py is gone"):
        micro(contest)


def test_another_evaluator_is_another_track(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contest = micro_contest(tmp_path / "contest")
    (tmp_path / "evaluate.py").write_text(track.EVALUATOR.read_text() + "\n")
    monkeypatch.setattr(track, "EVALUATOR", tmp_path / "evaluate.py")
    with pytest.raises(PinMismatch, match="another evaluator"):
        micro(contest)


def test_a_track_is_frozen_once(tmp_path: Path) -> None:
    contest = micro_contest(tmp_path / "contest")
    folder = contest / "tracks" / "micro"
    with pytest.raises(UsageError, match="frozen already"):
        new_track.freeze(folder, lambda _text: None)
    before = micro(contest).sha256
    (folder / "pins.json").unlink()
    with pytest.raises(PinMismatch, match="is not frozen"):
        micro(contest)
    assert new_track.freeze(folder, lambda _text: None).sha256 == before


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ('title = "', 'colour = "red"\ntitle = "', "colour"),
        ("target = 0.80", "target = 1.5", "target"),
        ("looks = [3, 5]", "looks = [5, 3]", "rising"),
        ("looks = [3, 5]", "looks = [1]", "from 2 on"),
        ('type = "exact"', 'type = "best"', "metric"),
        ('id = "micro"', 'id = "../micro"', "plain word"),
        ("version = 1", "version =", "cannot be read"),
    ],
)
def test_rules_are_closed(old: str, new: str, match: str, tmp_path: Path) -> None:
    contest = micro_contest(tmp_path / "contest")
    path = contest / "tracks" / "micro" / "spec.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=match):
        track.read_spec(path.parent)


@pytest.mark.parametrize("name", ["nope", "../tracks/micro", "micro/", ""])
def test_a_track_that_is_not_there(name: str, tmp_path: Path) -> None:
    with pytest.raises(MissingArtifact):
        track.find(micro_contest(tmp_path / "contest"), name)


# --- content hashes ---


def test_the_public_hash_lets_text_move_between_fields_and_ours_does_not() -> None:
    honest = [{"question": "2+2?", "answer": " 4"}, {"question": "3+3?", "answer": " 6"}]
    leaky = [{"question": "2+2? 4", "answer": ""}, {"question": "3+3? ", "answer": "6"}]
    assert track.content_sha256(honest, "qa-v1") == track.content_sha256(leaky, "qa-v1")
    for scheme in ("rows-v2", "generic"):
        assert track.content_sha256(honest, scheme) != track.content_sha256(leaky, scheme)


def test_public_hashes_as_the_public_contest_defines_them() -> None:
    import hashlib

    rows = [{"question": "é", "answer": "1"}, {"question": "b", "answer": "2"}]
    assert track.content_sha256(rows, "qa-v1") == hashlib.sha256("é1b2".encode()).hexdigest()
    joined = '{"answer": "1", "question": "é"}{"answer": "2", "question": "b"}'
    assert track.content_sha256(rows, "generic") == hashlib.sha256(joined.encode()).hexdigest()


# --- generators ---


def generated(track_id: str, split: str, seed: str, count: int) -> list[dict[str, str]]:
    program = ROOT / "tracks" / track_id / "generate.py"
    command = [sys.executable, "-I", "-S", str(program), "--split", split, "--seed", seed, "--rows", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return [json.loads(line)["row"] for line in done.stdout.splitlines()]


def test_training_rows_are_the_pinned_ones_and_test_rows_follow_their_entropy() -> None:
    c1 = track.find(ROOT, "c1")
    rows = inputs.train_rows(c1)
    assert len(rows) == 2000
    assert [dict(row) for row in rows] == generated("c1", "train", "c1-train-1", 2000)
    assert inputs.test_rows(c1, "aa") == inputs.test_rows(c1, "aa") != inputs.test_rows(c1, "ab")


def test_other_training_rows_are_refused(tmp_path: Path) -> None:
    contest = micro_contest(tmp_path / "contest")
    pins = contest / "tracks" / "micro" / "pins.json"
    tree = json.loads(pins.read_text())
    pins.write_text(json.dumps({**tree, "train_content_sha256": "0" * 64}))
    with pytest.raises(PinMismatch, match="not the pinned ones"):
        inputs.train_rows(micro(contest))


def test_c1_has_ten_forms_and_keeps_its_sentences_apart() -> None:
    program = runpy.run_path(str(ROOT / "tracks" / "c1" / "generate.py"))
    day = datetime.date(2003, 4, 2)
    assert [form(day) for form in program["FORMS"]] == [
        "2 April 2003",
        "April 2, 2003",
        "02/04/2003",
        "2.4.2003",
        "2003/04/02",
        "Apr 2 2003",
        "the 2nd of April 2003",
        "Wednesday, 2 Apr 2003",
        "02-APR-2003",
        "02/04/03",
    ]
    assert not set(program["SENTENCES"]["train"]) & set(program["SENTENCES"]["test"])


def test_c1_answers_are_the_dates_in_the_sentences() -> None:
    """Read back by rules of our own: numbers day first, two-digit years from 1950 to 2049."""
    months = {datetime.date(2000, m, 1).strftime("%b").lower(): m for m in range(1, 13)}
    for row in [*generated("c1", "train", "s", 300), *generated("c1", "test", "s", 300)]:
        text = row["question"]
        if found := re.search(r"(\d{4})/(\d+)/(\d+)", text):
            year, month, day = map(int, found.groups())
        elif found := re.search(r"(\d+)[/.](\d+)[/.](\d+)", text):
            day, month, year = map(int, found.groups())
        else:
            pattern = rf"(?i)\b({'|'.join(months)})[a-z]*\b"
            found = re.search(pattern, re.sub(r"(?i)monday,", "", text))
            assert found, text
            month = months[found[1].lower()]
            numbers = [int(number) for number in re.findall(r"\d+", text)]
            day, year = sorted(numbers)
        if year < 100:
            year += 1900 if year >= 50 else 2000
        assert datetime.date(year, month, day).isoformat() == row["answer"], text


def test_c2_answers_stand_in_their_sentences_and_the_splits_share_neither_sentence_nor_city() -> None:
    program = runpy.run_path(str(ROOT / "tracks" / "c2" / "generate.py"))
    assert not set(program["SENTENCES"]["train"]) & set(program["SENTENCES"]["test"])
    assert not set(program["CITIES"]["train"]) & set(program["CITIES"]["test"])
    for split in ("train", "test"):
        rows = generated("c2", split, "s", 300)
        assert len({row["question"] for row in rows}) > 290
        for row in rows:
            number, amount, goods, city = row["answer"].split("; ")
            assert re.fullmatch(r"\d{4}", number) and re.fullmatch(r"\d{1,2}", amount)
            assert city in program["CITIES"][split]
            assert all(row["question"].count(field) == 1 for field in (number, f"{amount} {goods}", city)), row
    c2 = track.find(ROOT, "c2")
    assert c2.spec.environment and c2.is_provisional
    assert len(inputs.train_rows(c2)) == 600
    assert inputs.test_rows(c2, "aa") == inputs.test_rows(c2, "aa") != inputs.test_rows(c2, "ab")


def test_days_and_ordinals() -> None:
    ordinal: Any = runpy.run_path(str(ROOT / "tracks" / "c1" / "generate.py"))["ordinal"]
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 22, 23, 30, 31)] == (
        ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "22nd", "23rd", "30th", "31st"]
    )


def test_micro_answers_by_the_last_letter() -> None:
    rows = generated("micro", "test", "x", 200)
    assert all((row["answer"] == "y") == (row["question"][-1] in "aeiou") for row in rows)
    assert 70 <= sum(row["answer"] == "y" for row in rows) <= 130


# --- the base model ---


def test_the_base_model_of_micro_is_made_to_the_byte(tmp_path: Path) -> None:
    contest = micro_contest(tmp_path / "contest")
    folder = inputs.base_model(micro(contest), lambda _text: None)
    assert {path.name for path in folder.iterdir()} == set(micro(contest).pins.model_file_sha256)


@pytest.mark.parametrize("change", ["flip", "add", "remove"])
def test_another_base_model_is_refused(change: str, tmp_path: Path) -> None:
    contest = micro_contest(tmp_path / "contest")
    folder = inputs.base_model(micro(contest), lambda _text: None)
    if change == "flip":
        data = bytearray((folder / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (folder / "model.safetensors").write_bytes(bytes(data))
    elif change == "add":
        (folder / "chat_template.jinja").write_text("x")
    else:
        (folder / "generation_config.json").unlink()
    with pytest.raises(PinMismatch, match="is not that of track micro"):
        track.require_base_model(micro(contest), folder)


# --- tracks of one's own ---


def own_rows(path: Path, count: int = 200) -> Path:
    rows = [{"prompt": f"say {number}", "completion": f" {number}"} for number in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.torch
def test_a_track_of_ones_own_data(tmp_path: Path, tiny_model: Path) -> None:
    contest = tmp_path / "contest"
    (contest / "tracks").mkdir(parents=True)
    data = own_rows(tmp_path / 'mine "\U0001f642".jsonl')
    made = new_track.make(contest, "mine", data, "loss", 2.5, str(tiny_model), 1, lambda _text: None)
    assert made.spec.title == 'mine "\U0001f642", loss'
    assert track.find(contest, "mine").sha256 == made.sha256
    train, test = inputs.train_rows(made), inputs.test_rows(made, "unused")
    assert sorted(row["answer"] for row in [*train, *test]) == sorted(str(number) for number in range(200))
    assert 20 <= len(test) <= 60
    assert isinstance(made.spec.metric, track.LossMetric)
    assert set(made.pins.files) == {"train.jsonl", "test.jsonl"}
    with pytest.raises(UsageError, match="is there already"):
        new_track.make(contest, "mine", data, "loss", 2.5, str(tiny_model), 1, lambda _text: None)


def odd_ones(rows: list[track.Row]) -> list[track.Row]:
    return [row for row in rows if "\u2028" in row["question"]]


@pytest.mark.torch
def test_equal_questions_never_stand_on_both_sides(tmp_path: Path, tiny_model: Path) -> None:
    contest = tmp_path / "contest"
    (contest / "tracks").mkdir(parents=True)
    data = own_rows(tmp_path / "mine.jsonl")
    odd = [{"prompt": f"a\u2028b\u2029c\x85{number}", "completion": "d\u2028e" * 30} for number in range(50)]
    data.write_text(
        "\ufeff" + (data.read_text() + "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in odd)) * 3
    )
    made = new_track.make(contest, "mine", data, "exact", 0.5, str(tiny_model), 1, lambda _text: None)
    train, test = inputs.train_rows(made), inputs.test_rows(made, "unused")
    assert not {row["question"] for row in train} & {row["question"] for row in test}
    assert isinstance(made.spec.metric, track.ExactMetric) and made.spec.metric.max_new_tokens == 30 * 5 + 1
    assert {row["question"] for row in odd_ones([*train, *test])} == {row["prompt"] for row in odd}
    for rows in (train, test):  # as the frozen evaluator reads them
        assert odd_ones(rows) and len(inputs.as_lines(rows).decode().splitlines()) == len(rows)


@pytest.mark.torch
def test_rows_that_are_no_rows(tmp_path: Path, tiny_model: Path) -> None:
    contest = tmp_path / "contest"
    (contest / "tracks").mkdir(parents=True)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"question": "a", "answer": "b"}\n{"question": 1}\n')
    with pytest.raises(BadData, match="line 2"):
        new_track.make(contest, "mine", bad, "exact", 0.5, str(tiny_model), 1, lambda _text: None)
    bad.write_text(json.dumps({"question": "a", "answer": "b"}) + "\n", encoding="utf-16")
    with pytest.raises(BadData, match="is not text in UTF-8"):
        new_track.make(contest, "mine", bad, "exact", 0.5, str(tiny_model), 1, lambda _text: None)
    bad.write_text((json.dumps({"question": "say 7", "answer": "b"}) + "\n") * 50)
    with pytest.raises(BadData, match="no row to train on"):
        new_track.make(contest, "mine", bad, "exact", 0.5, str(tiny_model), 1, lambda _text: None)
    few = own_rows(tmp_path / "few.jsonl", 30)
    bad.write_text(
        json.dumps({"question": "a", "answer": "b\n"}) + "\n" + json.dumps({"question": "a", "answer": "b\nc"})
    )
    with pytest.raises(BadData, match="line 2 has an answer of several lines"):
        new_track.make(contest, "mine", bad, "exact", 0.5, str(tiny_model), 1, lambda _text: None)
    with pytest.raises(BadData, match="20 are the least"):
        new_track.make(contest, "mine", few, "exact", 0.5, str(tiny_model), 1, lambda _text: None)
    assert not (contest / "tracks" / "mine").exists()


@pytest.mark.parametrize(
    ("name", "target", "base_model", "words"),
    [("../m", 0.5, "", "names no track"), ("mine", 7.0, "", "less than 1"), ("mine", 0.5, "nonesuch", "nonesuch")],
)
def test_what_cannot_be_frozen_leaves_its_name_free(
    name: str, target: float, base_model: str, words: str, tmp_path: Path
) -> None:
    """A mistyped target is no reason to look for another name."""
    (tmp_path / "contest" / "tracks").mkdir(parents=True)
    data = own_rows(tmp_path / "mine.jsonl")
    with pytest.raises(HotlapError, match=words):
        new_track.make(tmp_path / "contest", name, data, "exact", target, base_model or "m", 1, lambda _text: None)
    assert [path.name for path in (tmp_path / "contest").rglob("*")] == ["tracks"]


def test_a_version_lives_in_a_folder_of_its_own(tmp_path: Path) -> None:
    contest = micro_contest(tmp_path / "contest")
    old = contest / "tracks" / "micro"
    new = contest / "tracks" / "micro-v2"
    shutil.copytree(old, new)
    (new / "pins.json").unlink()
    spec = (
        (new / "spec.toml").read_text().replace("version = 1", "version = 2").replace("target = 0.80", "target = 0.9")
    )
    (new / "spec.toml").write_text(spec)
    made = new_track.freeze(new, lambda _text: None)
    assert made.name == "micro-v2" and made.sha256 != micro(contest).sha256
    assert tomllib.loads(spec)["version"] == 2
