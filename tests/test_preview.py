"""`hotlap preview`: what it shows is what would be trained, and strangers' text stays text."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fixtures_data import conversation, f3_rows, write_byte_tokenizer, write_jsonl

from hotlap.cli import cli
from hotlap.config import LoraConfig, RunConfig
from hotlap.data.estimate import Memory, memory_of, shape_of
from hotlap.data.preview import Preview, preview
from hotlap.errors import BadData, MissingArtifact
from hotlap.testing.fake_runpod import FakeRunpod

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "tie_word_embeddings": True,
}

SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}

EVIL = "<script>alert(1)</script>\x1b[2J"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_byte_tokenizer(tmp_path_factory.mktemp("model"))
    (folder / "config.json").write_text(json.dumps(SHAPE))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def look(model: Path, source: Path, num_examples: int = 3, **sections: Any) -> Preview:
    tree = {"base_model": str(model), "dataset": str(source), "output_dir": str(source.parent / "runs"), **sections}
    return preview(RunConfig.model_validate(tree), num_examples, lambda text: None)


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli, ["preview", *map(str, arguments)], catch_exceptions=False)


def test_b29_the_tokens_shown_are_those_that_are_trained(model: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", [conversation("user: q", "assistant: é😀")])
    (example,) = look(model, source).examples
    assert "".join(token.text for token in example) == "<user>q<turn_end><assistant>é😀<turn_end>"
    assert "".join(token.text for token in example if token.is_trained) == "é😀<turn_end>"
    assert [len(token.ids) for token in example] == [1, 1, 1, 1, 2, 4, 1]


def test_counts_and_needs_are_told(model: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [*f3_rows(), {"prompt": "q", "completion": "a" * 99}, {"prompt": "q"}]
    source = write_jsonl(tmp_path / "x.jsonl", rows)
    found = look(model, source, data={"seq_len": 64, "bad_rows": "drop", "eval_examples": 4}).as_json()
    train = found["train"]
    assert train["num_examples"] == 60 and found["held_out"]["num_examples"] == 4
    assert sum(item["examples"] for item in train["histogram"]) == 60
    assert [entry["kind"] for entry in train["left_out"]] == ["'completion' is missing", "too long"]
    assert found["num_steps"] == train["num_rows"] and found["tokens_per_epoch"] == train["num_tokens"]
    assert found["seed"] is None and found["duration"]["num_slices"] == 1
    assert found["memory"]["estimated_peak_bytes"] > 400_000_000 and "GFLOP/s" in found["speed"]["source"]


def test_preview_ends_with_what_training_would_end_with(model: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", [*f3_rows(3), {"prompt": "q"}])
    with pytest.raises(BadData, match=r"1 of 4 rows .* line 4"):
        look(model, source)


def test_the_data_it_prepares_is_what_training_opens(model: Path, tmp_path: Path, home: Path) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", f3_rows())
    first = look(model, source, seed=5, data={"eval_examples": 4})
    before = sorted((home / "packed").iterdir())
    second = look(model, source, seed=5, data={"eval_examples": 4}, lora={"rank": 2})
    assert second.packing.train.fingerprint == first.packing.train.fingerprint
    assert sorted((home / "packed").iterdir()) == before


def test_text_for_people_marks_trained_stretches_and_moves_no_cursor(model: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", [conversation(f"user: {EVIL}", f"assistant: {EVIL}")])
    done = run("--base-model", model, "--dataset", source, "--set", "slice.minutes=1")
    assert done.exit_code == 0 and "[[<script>alert(1)</script>\\x1b[2J<turn_end>]]" in done.stdout
    assert "\x1b" not in done.stdout and "1 of 1 examples in 1 rows" in done.stdout


def test_json_and_html(model: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", [conversation(f"user: {EVIL}", "assistant: a"), {"prompt": EVIL}])
    page = tmp_path / "page.html"
    arguments = ("--base-model", model, "--dataset", source, "--set", "data.bad_rows=drop", "--html", page, "--json")
    done = run(*arguments)
    assert json.loads(done.stdout)["train"]["num_examples"] == 1
    text = page.read_text()
    assert "<script" not in text and "&lt;" in text and '<span class="t"' in text and "completion" in text


def memory(folder: Path, data: Any, **sections: Any) -> Memory:
    tree = {"base_model": "m", "dataset": "d", "model": {"precision": "float32"}, **sections}
    return memory_of(shape_of(folder), RunConfig.model_validate(tree), data)


def test_the_memory_estimate_knows_what_changes_it(model: Path, tmp_path: Path) -> None:
    """F1's numbers by hand: 2 layers of hidden 32 and 64, two of four heads for keys; rank 16 on seven modules."""
    source = write_jsonl(tmp_path / "x.jsonl", f3_rows(4))
    data = look(model, source, data={"seq_len": 64}).packing.train
    linear = 2 * (32 * (2 * 32 + 2 * 16) + 3 * 32 * 64)
    adapter = 2 * 16 * ((32 + 32) * 2 + (32 + 16) * 2 + (32 + 64) * 3)
    plain = memory(model, data)
    assert plain.in_words == "float32"
    assert plain.fixed_bytes == 400_000_000 + 4 * (linear + 300 * 32) + 28 * adapter

    nf4 = memory(model, data, model={"precision": "float32", "quantization": "nf4"})
    each = 0.5 + 1 / 64 + 4 / (64 * 256)
    assert nf4.in_words == "nf4 over float32"
    assert nf4.fixed_bytes == 400_000_000 + 4 * 300 * 32 + round(each * linear) + 4 * 32 * 64 + 28 * adapter
    int8 = memory(model, data, model={"precision": "float32", "quantization": "int8"})
    assert int8.fixed_bytes - nf4.fixed_bytes == linear - round(each * linear)
    outputs = 4 * 64 * 2 * 2 * (32 + 16 + 16 + 32 + 64 + 64 + 32)
    assert nf4.row_bytes - plain.row_bytes == int8.row_bytes - plain.row_bytes == outputs

    small = memory(model, data, optim={"kind": "adamw8bit"})
    assert small.fixed_bytes - plain.fixed_bytes == -12 * adapter
    half = memory(model, data, model={"precision": "bfloat16"})
    assert plain.fixed_bytes - half.fixed_bytes == 2 * (linear + 300 * 32)
    width = 10 * 32 + 4 * 64 + 2 * 7 * 16
    assert plain.row_bytes - half.row_bytes == 2 * 64 * 2 * width
    dora = memory(model, data, lora={"dora": True})
    assert dora.row_bytes - plain.row_bytes == outputs
    whole = memory(model, data, lora={"modules_to_save": ["embed_tokens", "lm_head"]})
    assert whole.fixed_bytes - plain.fixed_bytes == 28 * 300 * 32
    recomputed = memory(model, data, slice={"gradient_checkpointing": True})
    assert recomputed.row_bytes - plain.row_bytes == 4 * 64 * (2 * 32 + 7 * width - 2 * width)
    assert recomputed.fixed_bytes == plain.fixed_bytes
    chosen_later = memory(model, data, model={"precision": "auto"})
    assert chosen_later == plain


def test_the_estimate_knows_the_real_model_s_size(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    shape = shape_of(tmp_path)
    assert shape.num_parameters == pytest.approx(134_515_008, rel=0.001)
    assert shape.num_adapter_parameters(LoraConfig(rank=16)) == 4_884_480
    gemma4 = {**SMOLLM2, "vocab_size_per_layer_input": 1000, "hidden_size_per_layer_input": 16}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": gemma4}))
    assert shape_of(tmp_path).num_parameters == shape.num_parameters + 1000 * 16 * 30
    memory = Memory(fixed_bytes=1_000, row_bytes=100)
    assert (memory.peak_bytes(3), memory.most_rows(2_000), memory.most_rows(100)) == (1_300, 6, 0)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(MissingArtifact, match="does not tell the model's shape"):
        shape_of(tmp_path)


# --- prices ---


def test_prices_are_the_worst_case_that_a_launch_would_hold(
    model: Path, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", f3_rows())
    arguments = ("--base-model", model, "--dataset", source, "--json", "--set", "slice.minutes=4")
    with FakeRunpod() as cloud:
        monkeypatch.setenv("HOTLAP_RUNPOD_URL", cloud.url)
        monkeypatch.setenv("RUNPOD_API_KEY", "full-key")
        found = json.loads(run(*arguments, "--on", "runpod").stdout)["prices"]
    by_kind = {(row["gpu"], row["cloud"]): row for row in found}
    l40s = by_kind["NVIDIA L40S", "SECURE"]
    # 150 s to get ready, 240 s and 10 s for the job, 30 s to leave, in begun minutes; $0.86 an hour, and 5 % as the
    # price may have moved.
    assert l40s["slice_usd_micros"] == -(-480 * 903_000 // 3600)
    assert (l40s["num_slices"], l40s["usd_micros"]) == (1, l40s["slice_usd_micros"])
    tokens, parameters = 2 * 3 * 20 * 60, 300 * 32 + 2 * (32 * (2 * 32 + 2 * 16) + 3 * 32 * 64)
    assert l40s["seconds"] < 4 * parameters * tokens / (0.3 * 362e12)
    assert l40s["seconds"] > 0 and found == sorted(found, key=lambda row: row["usd_micros"])


def test_without_a_provider_there_are_no_prices_and_the_local_one_costs_what_cloud_toml_says(
    model: Path, tmp_path: Path, home: Path
) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", f3_rows())
    arguments = ("--base-model", model, "--dataset", source)
    assert json.loads(run(*arguments, "--json").stdout)["prices"] is None
    (home / "cloud.toml").write_text("[local]\nusd_per_hour = 3.6\n")
    text = run(*arguments, "--on", "local", "--html", tmp_path / "page.html").stdout
    # 30 s to get ready, 300 s and 10 s for the job, 30 s to leave, at $3.78 an hour.
    assert "$3.60 an hour: a slice costs at most $0.3885" in text and "1 slice, so at most $0.3885" in text
    assert "at most $0.3885" in (tmp_path / "page.html").read_text()


def test_placeholders_in_the_data_are_told_and_trained_as_they_stand(model: Path, tmp_path: Path) -> None:
    """As in the data sets of who a model is, which are handed on with `{{name}}` in them; formulas are let alone."""
    rows = [
        conversation("user: who?", "assistant: I am {{name}}, by {{ author }}."),
        conversation("user: q", "assistant: a"),
    ]
    source = write_jsonl(tmp_path / "x.jsonl", [*rows, conversation("user: f", r"assistant: \frac{{a}}{{b}}")])
    found = look(model, source)
    assert (found.packing.train.facts.num_with_placeholder, found.packing.train.facts.placeholder) == (1, "{{name}}")
    assert "I am {{name}}, by {{ author }}." in "".join(token.text for token in found.examples[0] if token.is_trained)
    arguments = ("--base-model", model, "--dataset", source)
    for said in (run(*arguments).output, run(*arguments).output):  # tokenized now, and found
        assert "1 examples hold a placeholder, such as {{name}}. Nothing fills it in" in said
    cleaned = look(model, source, data={"clean": [{"pattern": r"\{\{name\}\}, by \{\{ author \}\}", "replace": "Lap"}]})
    assert cleaned.packing.train.facts.num_with_placeholder == 0


@pytest.mark.parametrize(
    ("template", "blanks"),
    [
        ("{{ name }}", "{{ name }}"),
        ("{{ m.nane }}{{ m['role'] }}", "{{ .nane }}"),
        ("{{ name | upper }}{{ m.content }}{{ m['task'] }}", "{{ name }}, {{ .task }}"),
        ("{{ m.content.strip() }}{{ eos_token }}{% set x = 'a' %}{{ x }}{{ m.get('name') }}", None),
        ("{{ name | default('Lap') }}{% if date is defined %}{{ date }}{% endif %}{{ tools | tojson }}", None),
        ("{{ 'b' if bot else '' }}{{ 'b' if bot }}{{ bot if bot else '' }}{{ loop.index }}{{ range(3) | list }}", None),
    ],
)
def test_what_a_template_of_ones_own_leaves_blank_is_named(
    model: Path, tmp_path: Path, template: str, blanks: str | None
) -> None:
    path = tmp_path / "own.jinja"
    path.write_text(
        "{% for m in messages %}{% if m.role == 'user' %}"
        + template
        + "{% endif %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    source = write_jsonl(tmp_path / "x.jsonl", [conversation("user: q", "assistant: a")])
    doubts = look(model, source, data={"chat_template": str(path)}).doubts
    told = [doubt for doubt in doubts if "nothing stands in its place" in doubt]
    assert len(told) == (blanks is not None) and (blanks is None or f"writes {blanks}, which" in told[0])
