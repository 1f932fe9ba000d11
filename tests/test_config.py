"""Configuration: closed, frozen, named after what decides the result, and limits that only an edit can change."""

import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from hotlap import config, durable
from hotlap.config import Config, RunConfig, load_cloud, load_run, load_run_json
from hotlap.errors import ConfigError, ReadOnlyVolume

ROOT = Path(__file__).resolve().parents[1]
MINIMAL: dict[str, Any] = {"base_model": "smollm2", "dataset": "people.jsonl"}


def run_config(**changes: Any) -> RunConfig:
    return RunConfig.model_validate({**MINIMAL, **changes})


def changed(dotted: str, value: Any) -> RunConfig:
    tree: dict[str, Any] = dict(MINIMAL)
    *parents, last = dotted.split(".")
    table = tree
    for name in parents:
        table = table.setdefault(name, {})
    table[last] = value
    return RunConfig.model_validate(tree)


@pytest.fixture
def toml(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


TOML = """
base_model = "smollm2"
dataset = "people.jsonl"

[lora]
rank = 8
"""


# --- closed and frozen ---


def models(kind: type[Config], name: str = "") -> Iterator[tuple[str, type[Config]]]:
    yield name, kind
    for field, info in kind.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Config):
            yield from models(info.annotation, f"{name}.{field}".lstrip("."))


SECTIONS = list(models(RunConfig))


@pytest.mark.parametrize(("section", "kind"), SECTIONS, ids=[name or "run" for name, _ in SECTIONS])
def test_an_unknown_key_is_refused_by_its_full_name(section: str, kind: type[Config], toml: Callable[[str], Path]):
    key = f"{section}.surprise".lstrip(".")
    with pytest.raises(ConfigError, match=rf"{key}: no such setting"):
        load_run(toml(TOML), [f"{key}=1"])
    assert kind.model_config["frozen"]


def test_a_configuration_cannot_be_changed():
    made = run_config()
    with pytest.raises(ValidationError):
        made.seed = 3  # type: ignore[misc]
    with pytest.raises(ValidationError):
        made.lora.rank = 3  # type: ignore[misc]


def test_every_setting_with_a_choice_says_what_it_does():
    """People read these; a plain number of the optimizer's own mathematics needs no words."""
    known = {"beta1", "beta2", "eps", "weight_decay"}
    for _, kind in SECTIONS:
        told = reference.docstrings(kind)
        for name, info in kind.model_fields.items():
            is_section = isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
            assert told.get(name) or is_section or name in known, f"{kind.__name__}.{name}"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lora.rank", 0),
        ("lora.rank", 16.5),
        ("lora.alpha", 0),
        ("lora.dropout", 1.0),
        ("lora.target_modules", "some"),
        ("optim.lr", 0),
        ("optim.lr", float("inf")),
        ("optim.lr", float("nan")),
        ("optim.schedule", "step"),
        ("optim.beta2", 1.0),
        ("optim.max_grad_norm", -1),
        ("train.grad_accumulation", 0),
        ("train.epochs", float("inf")),
        ("train.max_steps", 0),
        ("data.seq_len", 7),
        ("data.eval_examples", -1),
        ("eval.every_steps", 0),
        ("checkpoint.every_s", 0),
        ("checkpoint.keep", 0),
        ("slice.minutes", 0),
        ("slice.minutes", float("inf")),
        ("seed", -1),
        ("seed", 2**31),
        ("run", ""),
        ("run", "../other"),
        ("run", "a/b"),
        ("run", ".hidden"),
        ("run", "a" * 65),
        ("run", "line\n"),
    ],
)
def test_a_value_out_of_range_is_refused(key: str, value: Any):
    with pytest.raises(ValidationError):
        changed(key, value)


def test_two_held_out_sets_are_refused(toml: Callable[[str], Path]):
    with pytest.raises(ConfigError, match="two held-out sets"):
        load_run(toml(TOML), ["data.eval_dataset=other.jsonl", "data.eval_examples=4"])


def test_derived_values():
    made = run_config(lora={"rank": 8, "alpha": 32}, train={"micro_batch_rows": 3, "grad_accumulation": 4})
    assert made.train.rows_per_step == 12
    assert made.slice.cap_s == 300.0
    assert run_config(run="a", output_dir="out").run_folder == Path("out/a")


# --- from a file, from --set, from flags ---


def test_file_then_set_then_flags(toml: Callable[[str], Path]):
    made = load_run(toml(TOML), ["lora.rank=32", "lora.rank=64", "optim.lr=1e-3"], seed=5, dataset=None)
    assert made.lora.rank == 64
    assert made.optim.lr == 1e-3
    assert made.seed == 5
    assert made.dataset == "people.jsonl"
    assert load_run(toml(TOML), ["seed=4"], seed=5).seed == 5


def test_without_a_file():
    made = load_run(None, ["train.max_steps=3"], **MINIMAL)
    assert made == run_config(train={"max_steps": 3})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("lora.rank=32", 32),
        (" lora.rank = 32 ", 32),
        ("optim.lr=1e-4", 1e-4),
        ("optim.schedule=linear", "linear"),
        ('optim.schedule="linear"', "linear"),
        ('lora.target_modules=["q_proj", "v_proj"]', ("q_proj", "v_proj")),
        ("optim.max_grad_norm=none", None),
        ("dataset=a=b.jsonl", "a=b.jsonl"),
        ("dataset=dir/file with space.jsonl", "dir/file with space.jsonl"),
        ("base_model=org/name@v1", "org/name@v1"),
        ("run='5'", "5"),
        ("output_dir=", ""),
    ],
)
def test_set_reads_a_value_as_toml_does_and_else_as_text(text: str, value: Any):
    made: Any = load_run(None, [text], **{k: v for k, v in MINIMAL.items() if not text.startswith(k)})
    for name in text.partition("=")[0].strip().split("."):
        made = getattr(made, name)
    assert made == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lora.rank", "KEY=VALUE"),
        ("=3", "KEY=VALUE"),
        ("lora.=3", "KEY=VALUE"),
        ("lora.rank.deeper=3", "lora.rank"),
        ("seed.deeper=3", "seed"),
        ("lora=3", "lora"),
        ("data=3", "data"),
        ("lora.rank=many", "lora.rank: .* \\(got 'many'\\)"),
        ("slice=none", "slice"),
        ("..x=1", "no such setting"),
    ],
)
def test_a_wrong_override_is_named(text: str, says: str, toml: Callable[[str], Path]):
    with pytest.raises(ConfigError, match=says) as raised:
        load_run(toml(TOML), [text])
    assert raised.value.exit_code == 2


def test_a_value_where_a_table_belongs_is_an_error_in_words(toml: Callable[[str], Path]):
    for line in ("data = 3", "lora = 'x'", "slice = []"):
        with pytest.raises(ConfigError, match=line.partition(" ")[0]):
            load_run(toml(f'{line}\nbase_model = "a"\ndataset = "b"'))
    with pytest.raises(ConfigError, match=r"lora is a value, not a table"):
        load_run(toml(f"lora = 3\n{TOML.partition('[lora]')[0]}"), ["lora.rank=3"])


def test_a_file_that_an_editor_began_with_a_byte_order_mark_is_read(tmp_path: Path):
    (tmp_path / "marked.toml").write_bytes(b'\xef\xbb\xbfbase_model = "m"\r\ndataset = "d"\r\n')
    assert load_run(tmp_path / "marked.toml").dataset == "d"
    with pytest.raises(ConfigError, match="seed: Input should be a valid integer"):
        load_run(tmp_path / "marked.toml", ["seed=" + "9" * 5000])


def test_what_is_missing_is_named(toml: Callable[[str], Path]):
    with pytest.raises(ConfigError, match=r"base_model: is missing; dataset: is missing"):
        load_run(toml(""))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    (tmp_path / "broken.toml").write_text("lora = {")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "digits.toml").write_text("seed = " + "9" * 5000)
    (tmp_path / "brackets.toml").write_text("seed = " + "[" * 5000)
    for name, says in [
        ("none.toml", "does not exist"),
        ("broken.toml", "not valid TOML"),
        ("digits.toml", "not valid TOML"),
        ("brackets.toml", "not valid TOML"),
        ("binary.toml", "not valid TOML"),
        ("folder.toml", "cannot be read"),
    ]:
        with pytest.raises(ConfigError, match=says) as raised:
            load_run(tmp_path / name)
        assert name in str(raised.value)


def test_paths_in_a_file_are_relative_to_it_if_something_is_there(
    tmp_path: Path, toml: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "people.jsonl").touch()
    (tmp_path / "held-out.jsonl").touch()
    path = toml(TOML + '[data]\neval_dataset = "held-out.jsonl"\n')
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    made = load_run(path)
    assert made.dataset == str(tmp_path / "people.jsonl")
    assert made.data.eval_dataset == str(tmp_path / "held-out.jsonl")
    assert made.base_model == "smollm2", "nothing of that name lies there, so it is a name"
    assert made.output_dir == "runs", "runs belong to where the command runs"
    assert load_run(path, ["dataset=people.jsonl"]).dataset == "people.jsonl"


def test_the_same_file_is_the_same_run_from_every_working_directory(
    tmp_path: Path, toml: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "people.jsonl").touch()
    path = toml(TOML)
    names = set()
    for folder in (tmp_path, tmp_path.parent):
        monkeypatch.chdir(folder)
        names.add(load_run(path).run_name)
        names.add(load_run(Path(path.name) if folder == tmp_path else path).run_name)
    assert len(names) == 1


def test_a_project_that_moved_goes_on_with_its_runs():
    def name_in(folder: str) -> str:
        data = {
            "eval_dataset": f"{folder}/e.jsonl",
            "chat_template": f"{folder}/t",
            "mix": [{"dataset": f"{folder}/m"}],
        }
        return RunConfig.model_validate({"base_model": "m", "dataset": f"{folder}/d.jsonl", "data": data}).run_name

    assert name_in("/home/me/project") == name_in("/workspace/project")


def test_every_shipped_config_loads():
    for path in sorted(ROOT.glob("configs/**/*.toml")):
        made = load_run(path)
        assert load_run_json(made.model_dump_json()) == made, path
        assert Path(made.dataset).is_file(), path


# --- the run's name ---


def leaves(kind: type[Config] = RunConfig, prefix: str = "") -> Iterator[str]:
    for name, info in kind.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Config):
            yield from leaves(info.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


OTHER_VALUES: dict[str, Any] = {
    "base_model": "other",
    "dataset": "other.jsonl",
    "seed": 7,
    "output_dir": "other",
    "data.eval_dataset": "held-out.jsonl",
    "data.eval_examples": 5,
    "data.seq_len": 64,
    "data.format": "alpaca",
    "data.columns": {"prompt": "p", "completion": "c"},
    "data.files": "*.jsonl",
    "data.weight": 2.0,
    "data.mix": [{"dataset": "more.jsonl", "weight": 0.5}],
    "data.too_long": "cut",
    "data.bad_rows": "drop",
    "data.prune": {"by": "first", "keep": 3},
    "data.clean": [{"pattern": "<<.*?>>"}],
    "data.system": "Be brief.",
    "data.chat_template": "mine.jinja",
    "data.tools": "text",
    "data.turns": "last",
    "data.append_end": False,
    "packing.method": "best-fit",
    "packing.attention": "open",
    "lora.rank": 4,
    "lora.alpha": 8.0,
    "model.precision": "float32",
    "model.quantization": "nf4",
    "model.double_quantization": False,
    "lora.dropout": 0.1,
    "lora.rslora": True,
    "lora.dora": True,
    "lora.init": "pissa",
    "lora.init_from": "runs/before/adapter",
    "lora.modules_to_save": ("lm_head",),
    "lora.target_modules": ["q_proj"],
    "optim.lr": 1e-3,
    "optim.schedule": "linear",
    "optim.warmup_steps": 3,
    "optim.final_lr_ratio": 0.1,
    "optim.kind": "adamw8bit",
    "optim.lora_plus_ratio": 16.0,
    "optim.warmdown_ratio": 0.5,
    "optim.schedule_steps": 50,
    "techniques.chunked_loss": True,
    "techniques.adapter_precision": "model",
    "techniques.fused_projections": True,
    "techniques.prepacked_weights": True,
    "techniques.staged": {"after_step": 8, "tail_passes": 2},
    "techniques.integrated_lr": 0.01,
    "techniques.kernels": True,
    "techniques.direct_load": False,
    "techniques.lean_imports": False,
    "techniques.overlap": False,
    "train.neftune_alpha": 5.0,
    "slice.gradient_checkpointing": True,
    "slice.attention_kernel": "mask",
    "eval.patience": 3,
    "eval.sample_prompts": ("Who are you?",),
    "eval.sample_tokens": 16,
    "optim.beta1": 0.8,
    "optim.beta2": 0.99,
    "optim.eps": 1e-6,
    "optim.weight_decay": 0.1,
    "optim.max_grad_norm": None,
    "train.micro_batch_rows": 2,
    "train.grad_accumulation": 2,
    "train.epochs": 2.0,
    "train.max_steps": 9,
    "eval.every_steps": 5,
    "eval.micro_batch_rows": 2,
    "checkpoint.every_s": 5.0,
    "checkpoint.keep": 5,
    "slice.minutes": 2.0,
    "slice.grace_s": 2.0,
    "slice.num_threads": 2,
}
"""Each setting with a value that is not its default."""

ONLY_SOONER = ("techniques.direct_load", "techniques.lean_imports", "techniques.overlap")
"""Techniques that change nothing but when a slice's first step begins."""


def test_every_setting_is_tried_below():
    assert set(OTHER_VALUES) | {"run"} == set(leaves())
    for key, value in OTHER_VALUES.items():
        assert changed(key, value) != run_config()


@pytest.mark.parametrize("key", OTHER_VALUES)
def test_the_name_changes_exactly_with_the_trajectory(key: str):
    other = changed(key, OTHER_VALUES[key])
    sections = ("base_model", "dataset", "data", "packing", "model", "lora", "optim", "train", "techniques", "seed")
    decides = key.partition(".")[0] in sections and key not in ONLY_SOONER
    assert (other.run_name != run_config().run_name) == decides
    assert (other.trajectory != run_config().trajectory) == decides


def test_the_name_is_a_hash_of_the_trajectory_and_nothing_else():
    assert run_config().run_name == run_config(lora={"rank": 16}).run_name
    assert run_config().run_name == load_run_json(run_config().model_dump_json()).run_name
    trajectory = json.dumps(run_config().trajectory, sort_keys=True, ensure_ascii=False)
    assert run_config().run_name == f"people-{durable.sha256_bytes(trajectory.encode())[:8]}"


def test_equal_numbers_written_otherwise_name_the_same_run(toml: Callable[[str], Path]):
    names = {load_run(toml(TOML), [text]).run_name for text in ("optim.lr=0.001", "optim.lr=1e-3", "optim.lr=1.0e-03")}
    assert len(names) == 1
    assert load_run(None, ["lora.alpha=32"], **MINIMAL).run_name == run_config().run_name


def test_a_given_name_stands():
    assert run_config(run="mine").run_name == "mine"
    assert run_config(run="mine", lora={"rank": 2}).run_name == "mine"


@pytest.mark.parametrize(
    ("dataset", "slug"),
    [
        ("data/My People (v2).jsonl", "my-people-v2"),
        ("---.jsonl", "run"),
        ("x" * 80 + ".jsonl", "x" * 32),
        ("漢字.jsonl", "run"),
        ("org/name", "name"),
    ],
)
def test_a_made_up_name_is_a_plain_word(dataset: str, slug: str):
    name = run_config(dataset=dataset).run_name
    assert name.rpartition("-")[0] == slug
    assert run_config(run=name).run_name == name, "it may be given back as --run"


# --- limits ---


@pytest.mark.parametrize("text", ["limits.max_slice_minutes=60", " limits.max_slice_minutes = 60", "limits.x.y=1"])
def test_limits_cannot_be_set_from_the_command_line(text: str, home: Path):
    with pytest.raises(ConfigError, match="only by editing") as raised:
        load_run(None, [text], **MINIMAL)
    assert str(home / "cloud.toml") in str(raised.value)
    assert load_cloud().limits.max_slice_minutes == 5.0


def test_limits_cannot_be_set_in_a_run_or_around_the_refusal(toml: Callable[[str], Path]):
    for text in ("limits={max_slice_minutes=60}", "Limits.max_slice_minutes=60", "'limits'.max_slice_minutes=60"):
        with pytest.raises(ConfigError, match="no such setting"):
            load_run(None, [text], **MINIMAL)
    with pytest.raises(ConfigError, match="limits: no such setting"):
        load_run(toml(TOML + "[limits]\nmax_slice_minutes = 60\n"))


def test_a_cap_above_the_limit_is_refused_naming_the_file(home: Path):
    with pytest.raises(ConfigError) as raised:
        load_run(None, ["slice.minutes=5.001"], **MINIMAL)
    for word in ("5.001", "5", "limits.max_slice_minutes", str(home / "cloud.toml")):
        assert word in str(raised.value)
    assert load_run(None, ["slice.minutes=5"], **MINIMAL).slice.cap_s == 300.0


def test_the_limits_file_is_written_with_comments_and_then_left_alone(home: Path):
    assert not home.exists()
    assert load_cloud().limits.max_slice_minutes == 5.0
    text = (home / "cloud.toml").read_text()
    assert text.startswith("# ")
    assert "no flag, no --set, no environment" in text
    assert tomllib.loads(text) == load_cloud().model_dump(exclude_none=True), "every limit stands in it"
    assert sum(line.startswith("#") for line in text.splitlines()) >= 2
    edited = text.replace("= 5.0", "= 10.0  # mine")
    (home / "cloud.toml").write_text(edited)
    assert load_cloud().limits.max_slice_minutes == 10.0
    assert load_run(None, ["slice.minutes=9"], **MINIMAL).slice.minutes == 9.0
    assert (home / "cloud.toml").read_text() == edited


@pytest.mark.parametrize("text", ["[limits]\nmax_slice_minutes = 0", "[limit]\nx = 1", "[limits", "limits = 3"])
def test_a_broken_limits_file_stops_everything(home: Path, text: str):
    """Nothing falls back to a default: the limit might have been lower."""
    home.mkdir()
    (home / "cloud.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"cloud\.toml"):
        load_run(None, **MINIMAL)


def test_no_environment_variable_changes_a_limit(monkeypatch: pytest.MonkeyPatch):
    for name in ("HOTLAP_MAX_SLICE_MINUTES", "HOTLAP_LIMITS__MAX_SLICE_MINUTES", "MAX_SLICE_MINUTES", "LIMITS"):
        monkeypatch.setenv(name, "60")
    assert load_cloud().limits.max_slice_minutes == 5.0


def test_home_is_the_variable_or_a_folder_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOTLAP_HOME", "here")
    assert config.hotlap_home() == tmp_path / "here"
    monkeypatch.setenv("HOTLAP_HOME", "")
    assert config.hotlap_home() == Path.home() / ".hotlap"


def test_a_home_that_cannot_be_written_says_so(home: Path, monkeypatch: pytest.MonkeyPatch):
    class ReadOnly(durable.Disk):
        def make_dir(self, path: Path) -> None:
            raise OSError(30, "Read-only file system")

    monkeypatch.setattr(durable, "disk", ReadOnly())
    with pytest.raises(ReadOnlyVolume, match=str(home)):
        load_cloud()


@pytest.mark.parametrize(
    ("section", "key", "value", "technique"),
    [
        ("model", "quantization", "nf4", {"fused_projections": True}),
        ("model", "quantization", "nf4", {"prepacked_weights": True}),
        ("lora", "dora", True, {"fused_projections": True}),
        ("lora", "dropout", 0.1, {"fused_projections": True}),
        ("lora", "dropout", 0.1, {"staged": {"after_step": 3}}),
        ("train", "neftune_alpha", 5.0, {"staged": {"after_step": 3}}),
        ("lora", "modules_to_save", ["lm_head"], {"staged": {"after_step": 3}}),
        ("lora", "init", "pissa", {"adapter_precision": "model"}),
        ("model", "precision", "float16", {"adapter_precision": "model"}),
    ],
)
def test_techniques_that_do_not_fit_are_refused(section: str, key: str, value: Any, technique: dict[str, Any]):
    tree = {**MINIMAL, section: {key: value}}
    RunConfig.model_validate(tree)
    RunConfig.model_validate({**MINIMAL, "techniques": technique})
    with pytest.raises(ValidationError, match=rf"techniques\.{next(iter(technique))}.*{key}"):
        RunConfig.model_validate({**tree, "techniques": technique})


def test_a_run_without_techniques_keeps_the_name_it_had_before_there_were_any():
    assert "techniques" not in run_config().trajectory
    assert run_config(techniques={"chunked_loss": True}).trajectory["techniques"] == {"chunked_loss": True}


# --- machines read what machines wrote ---


@settings(max_examples=60, deadline=None)
@given(
    keys=st.sets(st.sampled_from(sorted(OTHER_VALUES)), max_size=6),
    lr=st.floats(min_value=1e-300, max_value=1e300),
    text=st.text(min_size=1, max_size=20),
)
def test_json_brings_back_the_same_configuration(keys: set[str], lr: float, text: str):
    tree: dict[str, Any] = {**MINIMAL, "dataset": text}
    partners = {"lora.init", "lora.dora", "lora.dropout", "lora.modules_to_save", "model.quantization"}
    for key in keys - {"data.eval_dataset", "data.columns", "dataset", "train.neftune_alpha", *partners}:
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = OTHER_VALUES[key]
    tree.setdefault("optim", {})["lr"] = lr
    made = RunConfig.model_validate(tree)
    again = load_run_json(made.model_dump_json())
    assert again == made
    assert again.run_name == made.run_name
    assert RunConfig.model_validate(made.model_dump()) == made
