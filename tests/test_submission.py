"""Static checks: what is refused, each with its reason, without a line of the submission being run."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from contest import NOTES, ROOT, micro, micro_contest, written_submission

from hotlap.errors import UsageError
from hotlap.speedrun import ablate, submission, template

GOOD = "import argparse\n\nprint('trained')\n"


def refused(contest: Path, folder: Path) -> list[str]:
    return [str(each) for each in submission.check(folder, micro(contest)) if each.level == "refused"]


def warned(contest: Path, folder: Path) -> list[str]:
    return [str(each) for each in submission.check(folder, micro(contest)) if each.level == "warning"]


@pytest.fixture
def contest(tmp_path: Path) -> Path:
    return micro_contest(tmp_path / "contest")


def test_a_plain_submission_is_accepted(contest: Path) -> None:
    folder = written_submission(contest, GOOD)
    assert submission.check(folder, micro(contest)) == []
    entry = submission.load(folder, micro(contest))
    assert entry.name == "002-bob" and entry.config["github"] == "bob"


def test_the_template_is_accepted_for_every_track(tmp_path: Path) -> None:
    from hotlap.speedrun import track

    for number, each in enumerate(track.tracks(ROOT)):
        folder = template.new(tmp_path, f"{number:03}-ada", "ada", each)
        assert submission.check(folder, each) == []
        assert submission.track_of(folder) == each.spec.id


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def f(:\n", "is not Python"),
        ("exec('print(1)')\n", r"exec\(\) runs text"),
        ("eval(open('x').read())\n", r"eval\(\) runs text"),
        ("import torch\ntorch.manual_seed(7)\n", "a seed of its own"),
        ("import random\nrandom.seed(7)\n", "a seed of its own"),
        ("import numpy as np\nnp.random.default_rng(seed=3)\n", "a seed of its own"),
        ("train(data_seed=3)\n", "a seed of its own"),
        ("import torch\ntorch.manual_seed(-7)\n", "a seed of its own"),
        (f"chosen = {list(range(100))}\n", "100 numbers in a row"),
        (f"weights = {[-0.5] * 100}\n", "100 numbers in a row"),
        (f"chosen = {dict.fromkeys(range(100))}\n", "100 numbers in a row"),
        (f"weights = 'a note, then {'QUJD' * 600}'\n", "a word of more than 2,000 characters"),
        (f"weights = '{'QUJD' * 600}'\n", "literal of 2,400 characters"),
        (f"weights = b'{'QUJD' * 600}'\n", "literal of 2,400 characters"),
        ("p\u0430ss_rate = 1\n", "is not ASCII"),
        ("x = 1  # \u202e right to left\n", "U\\+202E RIGHT-TO-LEFT OVERRIDE"),
        ("x\u200b = 1\n", "U\\+200B ZERO WIDTH SPACE"),
        ("x = 'a\u00a0b'\n", "U\\+00A0 NO-BREAK SPACE"),
        ("x = 1\x0c\ny = 2\n", "U\\+000C"),
    ],
)
def test_code_that_is_refused(code: str, reason: str, contest: Path) -> None:
    import re

    found = refused(contest, written_submission(contest, code))
    assert any(re.search(reason, text) for text in found), found


def test_a_seed_from_the_command_line_is_what_it_is_for(contest: Path) -> None:
    code = "import torch\n\n\ndef f(given):\n    torch.manual_seed(given.seed)\n    train(seed=given.seed)\n"
    assert refused(contest, written_submission(contest, code)) == []


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import socket\n", "imports socket"),
        ("from urllib.request import urlopen\n", "imports urllib"),
        ("import pickle\n", "imports pickle"),
        ("import ctypes\n", "imports ctypes"),
        ("import os\nos.sched_setaffinity(0, range(64))\n", "sched_setaffinity: it can take more processors"),
        ("import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n", "SIG_IGN: it can"),
        ("path = '/cache/data/vowels_test'\n", "test split"),
    ],
)
def test_code_that_is_pointed_out(code: str, reason: str, contest: Path) -> None:
    folder = written_submission(contest, code)
    assert refused(contest, folder) == []
    assert any(reason in text for text in warned(contest, folder))


def test_numbers_in_a_data_file_and_declared_packages_are_pointed_out(contest: Path) -> None:
    folder = written_submission(contest, GOOD, extra_pip_packages=["fast==1.0"])
    (folder / "table.json").write_text(str([number / 7 for number in range(500)]))
    assert refused(contest, folder) == []
    assert [text.partition(":")[2] for text in warned(contest, folder)] == [
        " table.json: holds 500 numbers: read whether they are data or weights",
        " config.yaml: has fast==1.0 installed: read what it is; weights or data can be a package too",
    ]


def link(folder: Path) -> None:
    (folder / "data.py").symlink_to("/etc/passwd")


def linked_folder(folder: Path) -> None:
    (folder / "data").symlink_to("/etc")


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe.py")


def weights(folder: Path) -> None:
    (folder / "adapter.safetensors").write_bytes(b"x")


def array(folder: Path) -> None:
    (folder / "rows.npy").write_bytes(b"x")


def large(folder: Path) -> None:
    (folder / "long.py").write_text("#" * 300_000)


def many_bytes(folder: Path) -> None:
    for number in range(5):
        (folder / f"part{number}.py").write_text("#" * 250_000)


def many_files(folder: Path) -> None:
    for number in range(60):
        (folder / f"part{number}.py").write_text("")


def strange_name(folder: Path) -> None:
    (folder / "$(touch x).py").write_text("")


def hidden(folder: Path) -> None:
    (folder / ".hidden.py").write_text("")


def weights_as_text(folder: Path) -> None:
    (folder / "table.json").write_text(f'["{"QUJD" * 600}"]')


def no_notes(folder: Path) -> None:
    (folder / "NOTES.md").unlink()


def short_notes(folder: Path) -> None:
    (folder / "NOTES.md").write_text("fast")


def binary(folder: Path) -> None:
    (folder / "extra.py").write_bytes(b"\xff\xfe\x00")


def yaml_code(folder: Path) -> None:
    (folder / "config.yaml").write_text("author: !!python/object/apply:os.system ['touch /tmp/x']\n")


def yaml_bomb(folder: Path) -> None:
    """Thirty doublings by alias: a gigabyte of text, if anybody wrote it out."""
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 31)), "track: *a30"]
    (folder / "config.yaml").write_text("\n".join(lines) + "\n")


def yaml_list(folder: Path) -> None:
    (folder / "config.yaml").write_text("- a\n")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (link, "neither links nor special files"),
        (linked_folder, "neither links nor special files"),
        (pipe, "neither links nor special files"),
        (weights, "only text is taken"),
        (array, "only text is taken"),
        (weights_as_text, "table.json:1: a word of more than 2,000 characters"),
        (large, "300,000 bytes; 262,144 are allowed"),
        (many_bytes, "1,048,576 bytes are allowed in all"),
        (many_files, "50 files"),
        (strange_name, "names hold ASCII letters"),
        (hidden, "no dot first"),
        (no_notes, "NOTES.md: is missing"),
        (short_notes, "in 100 characters or more"),
        (binary, "is not UTF-8 text"),
        (yaml_code, "is not YAML"),
        (yaml_list, "is not a mapping"),
        (yaml_bomb, "is for track a list, not micro"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_folder_that_is_refused(change: Callable[[Path], None], reason: str, contest: Path) -> None:
    folder = written_submission(contest, GOOD)
    change(folder)
    assert any(reason in text for text in refused(contest, folder)), refused(contest, folder)
    with pytest.raises(UsageError, match="cannot be verified"):
        submission.load(folder, micro(contest))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"author": " "}, "needs a text as 'author'"),
        ({"technique": 3}, "needs a text as 'technique'"),
        ({"author": "Bob\u202e"}, "'author' hides something"),
        ({"description": "fast " * 300}, "'description' has more than 1000 characters"),
        ({"self_reported": {"mean_train_seconds": 10**400}}, "are numbers"),
        ({"base_model": "other/model"}, "base_model must be hotlap/tiny-random"),
        ({"track": "t1"}, "is for track 't1', not micro"),
        ({"seed": 42}, "the verifier draws it"),
        ({"extra_pip_packages": ["fast"]}, "is not name==version"),
        ({"extra_pip_packages": ["x==1 --index-url=http://evil"]}, "is not name==version"),
        ({"extra_pip_packages": ["x @ git+https://evil"]}, "is not name==version"),
        ({"extra_pip_packages": "x==1"}, "is no list"),
        ({"self_reported": {"accuracies": ["0.9"]}}, "are numbers"),
    ],
)
def test_a_configuration_that_is_refused(changes: dict[str, object], reason: str, contest: Path) -> None:
    folder = written_submission(contest, GOOD, **changes)
    assert any(reason in text for text in refused(contest, folder))


@pytest.mark.parametrize("name", ["bob", "1-bob", "001_bob", "001-Bob", "001-bob;rm", "001-$(id)", "001-b\u043eb"])
def test_names_that_are_refused(name: str, contest: Path) -> None:
    folder = written_submission(contest, GOOD)
    renamed = folder.rename(folder.with_name(name))
    assert any("NNN-author" in text for text in refused(contest, renamed))


def test_all_reasons_come_at_once(contest: Path) -> None:
    folder = written_submission(contest, "exec('x')\neval('y')\n", author="", seed=1)
    assert len(refused(contest, folder)) == 4


def test_the_code_state_is_all_files_but_the_notes(contest: Path) -> None:
    folder = written_submission(contest, GOOD)
    before = submission.code_sha256(folder)
    (folder / "NOTES.md").write_text(NOTES + "More.")
    assert submission.code_sha256(folder) == before
    (folder / "train.py").write_text(GOOD + "\n")
    assert submission.code_sha256(folder) != before


def test_new_takes_no_name_twice_and_no_strange_author(contest: Path) -> None:
    folder = template.new(contest, "001-ada", "ada", micro(contest))
    assert yaml.safe_load((folder / "config.yaml").read_text())["track"] == "micro"
    with pytest.raises(UsageError, match="take the next number"):
        template.new(contest, "001-ada", "ada", micro(contest))
    with pytest.raises(UsageError, match="GitHub name"):
        template.new(contest, "002-ada", "ada: x\nb", micro(contest))
    with pytest.raises(UsageError, match="NNN-author"):
        template.new(contest, "../x", "ada", micro(contest))


def test_without_a_track_it_is_the_public_first(contest: Path) -> None:
    folder = written_submission(contest, GOOD)
    (folder / "config.yaml").write_text("author: Bob\n")
    assert submission.track_of(folder) == "t1"
    (folder / "config.yaml").unlink()
    with pytest.raises(UsageError, match=r"config\.yaml"):
        submission.track_of(folder)


@pytest.mark.parametrize("folder", sorted((ROOT / "submissions").iterdir()), ids=lambda path: path.name)
def test_the_shipped_submissions_are_good_ones(folder: Path) -> None:
    from hotlap.speedrun import track

    assert submission.check(folder, track.find(ROOT, submission.track_of(folder))) == []


RECIPES = [
    ("lr = 1", "no such setting|Extra inputs"),
    ("[optim]\nlr = 'fast'", "optim.lr"),
    ("not toml", "not valid TOML"),
    ("base_model = 'x'", "base_model: the track and the verifier give that"),
    ("seed = 1", "seed: the track"),
    ("[slice]\nminutes = 9", "slice: the track"),
    ("[data]\neval_dataset = '/etc/passwd'", "data.eval_dataset: the track"),
    ("[lora]\ninit_from = '/x'", "lora.init_from: the track"),
]


@pytest.mark.parametrize(("text", "reason"), RECIPES)
def test_recipes_that_are_refused(text: str, reason: str, contest: Path) -> None:
    folder = template.new(contest, "001-ada", "ada", micro(contest), "recipe")
    assert refused(contest, folder) == []
    (folder / "recipe.toml").write_text(text)
    (said,) = refused(contest, folder)
    assert re.search(reason, said), said


def test_a_new_recipe_can_be_taken_apart(contest: Path) -> None:
    """The page of the contest types `new --recipe`, then `ablate`, which had nothing to leave out."""
    entry = submission.load(template.new(contest, "001-ada", "ada", micro(contest), "recipe"), micro(contest))
    assert entry.recipe is not None
    factors = ablate.factors_of(entry.recipe, ablate.without_techniques(entry.recipe))
    assert [factor.name for factor in factors] == ["techniques.chunked_loss", "techniques.fused_projections"]


def test_a_submission_is_either_a_program_or_a_recipe(contest: Path) -> None:
    folder = template.new(contest, "001-ada", "ada", micro(contest), "recipe")
    (folder / "train.py").write_text(GOOD)
    assert refused(contest, folder) == ["refused: train.py: there has to be one of train.py and recipe.toml"]
