"""`hotlap init DATASET`: what is proposed for a data set loads as a run, and says why."""

import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from fixtures_data import write_byte_tokenizer

from hotlap.cli import cli
from hotlap.config import CloudConfig, load_run
from hotlap.data.propose import look_at, propose
from hotlap.errors import BadData, UsageError


def write(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def model_of_width(folder: Path, width: int) -> Path:
    """A tokenizer, and as much of a model as `config.json` tells."""
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 2, "num_attention_heads": 4}
    write_byte_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({**shape, "vocab_size": 300}))
    return folder


def init(*args: str) -> str:
    result = CliRunner().invoke(cli, ["init", *args], catch_exceptions=False, standalone_mode=False)
    assert not isinstance(result.exception, Exception), result.exception
    return result.output


def test_every_form_becomes_a_run_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    forms = {
        "messages": {"messages": chat},
        "completion": {"prompt": "a", "completion": "b"},
        "alpaca": {"instruction": "a", "input": "", "output": "b"},
        "question-answer": {"question": "a", "answer": "b"},
        "text": {"text": "a"},
    }
    for form, row in forms.items():
        write(tmp_path / f"{form}.jsonl", [row] * 50)
        init(f"{form}.jsonl", "--output", f"{form}.toml")
        config = load_run(tmp_path / f"{form}.toml")
        assert config.data.format == form and config.dataset == str(tmp_path / f"{form}.jsonl")
        assert config.data.eval_examples == 2 and config.base_model == "smollm2-135m"
        assert config.eval.every_steps and config.eval.sample_prompts == (() if form == "text" else ("a",))


def test_lengths_are_the_tokenizer_s_and_the_longest_hundredth_is_told(tmp_path: Path) -> None:
    tokenizer = model_of_width(tmp_path / "model", 64)
    rows = [{"prompt": "a", "completion": "b" * 200}] * 198 + [{"prompt": "a", "completion": "b" * 9000}] * 2
    look = look_at(write(tmp_path / "d.jsonl", list(rows)), tokenizer)
    assert look.is_exact and look.lengths[0] == 200 + 5  # two roles, two turn ends, one letter
    tree = tomllib.loads(propose(look, "m", "d.jsonl", CloudConfig()).as_toml())
    assert tree["data"]["seq_len"] == 512  # several to a row, and all but the longest hundredth
    assert "2 of 200 would be dropped" in propose(look, "m", "d", CloudConfig()).as_toml()


@pytest.mark.parametrize(("width", "lr"), [(64, 2e-3), (576, 1.3e-3), (2048, 4.9e-4), (4096, 2.9e-4), (8192, 1.7e-4)])
def test_the_narrower_the_model_the_higher_the_rate_and_the_reason_stands_by(
    tmp_path: Path, width: int, lr: float
) -> None:
    """2e-4 for every model left one of 135M (its width is 576) untrained: docs/log.md."""
    data = write(tmp_path / "d.jsonl", [{"prompt": "a", "completion": "b"}])
    text = propose(look_at(data, model_of_width(tmp_path / "model", width)), "m", "d", CloudConfig()).as_toml()
    assert tomllib.loads(text)["optim"]["lr"] == lr
    assert f"# By the base model's width: 0.0005 x (2000 / {width}) ^ 0.781, at most 0.002." in text
    without = propose(look_at(data, None), "m", "d", CloudConfig()).as_toml()
    assert tomllib.loads(without)["optim"]["lr"] == 2e-4 and "once the base model is here" in without


def test_unknown_columns_that_look_like_a_pair_are_proposed_and_others_are_not(tmp_path: Path) -> None:
    look = look_at(write(tmp_path / "d.jsonl", [{"id": 1, "query": "a", "reply": "b"}]), None)
    assert look.columns is not None and (look.columns.prompt, look.columns.completion) == ("query", "reply")
    with pytest.raises(BadData, match="None of the first 1 rows is an example"):
        look_at(write(tmp_path / "e.jsonl", [{"x": "a", "y": "b", "z": "c"}]), None)


def test_bad_rows_are_told_and_a_stranger_s_text_stays_in_its_comment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "d.jsonl", [{"prompt": "a", "completion": "b"}, {'x\n[limits]\nevil = "1"': "a"}])
    told = init("d.jsonl", "--on", "local")
    assert "a slice costs at most $0.00 there" in told and "No examples: no known form 1." in told
    text = Path("run.toml").read_text()
    assert "evil" in text and "limits" not in tomllib.loads(text)
    assert load_run(Path("run.toml")).data.bad_rows == "drop"
    with pytest.raises(UsageError, match="give one"):
        CliRunner().invoke(cli, ["init"], catch_exceptions=False, standalone_mode=False)
