"""`hotlap init --from`: what other trainers' configurations become, value by value, and what is told to be missing."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hotlap.cli import cli
from hotlap.config import load_run
from hotlap.errors import ConfigError
from hotlap.translate import AXOLOTL, TRL, Translation, translate

QLORA = """\
base_model: NousResearch/Llama-3.2-1B
model_type: AutoModelForCausalLM
tokenizer_type: AutoTokenizer
load_in_8bit: false
load_in_4bit: true
strict: false

datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
  - path: json
    data_files: [extra/chats.jsonl]
    ds_type: json
    type: chat_template
    field_messages: turns
dataset_prepared_path: last_run_prepared
val_set_size: 0.05
output_dir: ./outputs/qlora-out

adapter: qlora
lora_model_dir:
sequence_len: 2048
sample_packing: true
eval_sample_packing: true
pad_to_sequence_len: true

lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules: [q_proj, v_proj]
lora_target_linear: true
lora_modules_to_save:
  - embed_tokens
  - lm_head
loraplus_lr_ratio: 16
peft_use_dora: true

wandb_project: llama
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 3
optimizer: paged_adamw_32bit
lr_scheduler: cosine
learning_rate: 2e-4
train_on_inputs: false
group_by_length: false
bf16: auto
tf32: false
gradient_checkpointing: true
early_stopping_patience: 3
logging_steps: 1
flash_attention: true
warmup_steps: 10
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.01
special_tokens:
  pad_token: "<|end_of_text|>"
liger_rope: true
"""

SFT = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B",
    "dataset_name": "trl-lib/Capybara",
    "learning_rate": 2.0e-4,
    "num_train_epochs": 1,
    "max_steps": 200,
    "packing": False,
    "max_length": 1024,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 8,
    "gradient_checkpointing": True,
    "eos_token": "<|im_end|>",
    "eval_strategy": "steps",
    "eval_steps": 100,
    "use_peft": True,
    "lora_r": 32,
    "lora_alpha": 16,
    "lora_target_modules": "q_proj k_proj",
    "use_rslora": True,
    "optim": "lion_8bit",
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_ratio": 0.1,
    "dtype": "bfloat16",
    "report_to": "none",
}


def test_axolotl_qlora_becomes_ours_value_by_value(tmp_path: Path) -> None:
    found = translate(QLORA, "q.yaml")
    assert found.tool == "axolotl"
    assert found.tree == {
        "base_model": "NousResearch/Llama-3.2-1B",
        "dataset": "teknium/GPT4-LLM-Cleaned",
        "output_dir": "./outputs/qlora-out",
        "data": {
            "format": "alpaca",
            "mix": [{"dataset": "extra/chats.jsonl", "format": "messages"}],
            "seq_len": 2048,
        },
        "model": {"quantization": "nf4", "precision": "auto"},
        "lora": {
            "rank": 32,
            "alpha": 16.0,
            "dropout": 0.05,
            "target_modules": "all-linear",
            "modules_to_save": ["embed_tokens", "lm_head"],
            "dora": True,
        },
        "optim": {
            "lora_plus_ratio": 16.0,
            "kind": "paged_adamw",
            "schedule": "cosine",
            "lr": 2e-4,
            "warmup_steps": 10,
            "weight_decay": 0.01,
        },
        "train": {"grad_accumulation": 4, "micro_batch_rows": 2, "epochs": 3.0},
        "slice": {"gradient_checkpointing": True},
        "eval": {"patience": 3},
    }
    left = {entry.key: entry.reason for entry in found.left}
    assert set(left) == {
        *("datasets[1].field_messages", "val_set_size", "wandb_project", "logging_steps", "flash_attention"),
        *("evals_per_epoch", "saves_per_epoch", "special_tokens", "liger_rope"),
    }
    assert left["liger_rope"] == "hotlap has no such setting"
    assert "data.eval_examples" in left["val_set_size"]
    written = tmp_path / "run.toml"
    written.write_text(found.as_toml())
    config = load_run(written)
    assert (config.lora.rank, config.model.quantization, config.optim.kind) == (32, "nf4", "paged_adamw")
    assert config.data.mix[0].dataset == "extra/chats.jsonl"


def test_trl_becomes_ours_value_by_value() -> None:
    found = translate(json.dumps(SFT), "sft.json")
    assert found.tool == "TRL"
    assert found.tree == {
        "base_model": "Qwen/Qwen2.5-0.5B",
        "dataset": "trl-lib/Capybara",
        "optim": {"lr": 2e-4, "schedule": "constant", "warmup_steps": 20},
        "train": {"epochs": 1.0, "max_steps": 200, "micro_batch_rows": 2, "grad_accumulation": 8},
        "packing": {"method": "none"},
        "data": {"seq_len": 1024},
        "slice": {"gradient_checkpointing": True},
        "eval": {"every_steps": 100},
        "lora": {"rank": 32, "alpha": 16.0, "target_modules": ["q_proj", "k_proj"], "rslora": True},
        "model": {"precision": "bfloat16"},
    }
    assert {entry.key: entry.reason for entry in found.left} == {
        "eos_token": "the tokenizer is taken as it is; add tokens to its folder and hotlap trains their rows",
        "optim": "hotlap's optimizers are adamw, adamw8bit, paged_adamw, paged_adamw8bit",
        "report_to": "hotlap reports to no service",
    }


@pytest.mark.parametrize(
    ("line", "target", "expected"),
    [
        ("load_in_8bit: true", ("model", "quantization"), "int8"),
        ("lora_model_dir: out/adapter", ("lora", "init_from"), "out/adapter"),
        ("peft_init_lora_weights: pissa_niter_16", ("lora", "init"), "pissa"),
        ("bf16: full", ("model", "precision"), "bfloat16"),
        ("fp16: true", ("model", "precision"), "float16"),
        ("val_set_size: 50", ("data", "eval_examples"), 50),
        ("sample_packing: false", ("packing", "method"), "none"),
        ("cosine_min_lr_ratio: 0.1", ("optim", "final_lr_ratio"), 0.1),
        ("neftune_noise_alpha: 5", ("train", "neftune_alpha"), 5.0),
        ("optimizer: adamw_bnb_8bit", ("optim", "kind"), "adamw8bit"),
        ("eval_steps: 20", ("eval", "every_steps"), 20),
    ],
)
def test_single_settings_of_axolotl(line: str, target: tuple[str, str], expected: Any) -> None:
    found = translate(f"base_model: m\ndatasets: [{{path: d.jsonl}}]\nadapter: lora\n{line}\n", "x")
    section, key = target
    assert found.tree[section][key] == expected and not found.left


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("adapter: ia3", "hotlap trains LoRA and QLoRA"),
        ("train_on_inputs: true", "only what the assistant says is trained"),
        ("optimizer: muon", "hotlap's optimizers are"),
        ("lr_scheduler: rex", "hotlap's schedules are"),
        ("warmup_ratio: 0.1", "depends on the data"),
        ("eval_steps: 0.1", ""),
        ("deepspeed: zero3.json", "one device"),
    ],
)
def test_what_is_not_carried_over_is_told_with_its_reason(line: str, reason: str) -> None:
    text = f"base_model: m\ndatasets: [{{path: d.jsonl}}]\n{line}\n"
    if not reason:
        with pytest.raises(ConfigError, match=r"eval\.every_steps"):
            translate(text, "x")
        return
    (entry,) = translate(text, "x").left
    assert entry.key == line.partition(":")[0] and reason in entry.reason


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "neither YAML nor JSON"),
        ("a: " + "9" * 5000, "neither YAML nor JSON"),
        ("- " * 3000, "neither YAML nor JSON"),
        ("- a", "holds no settings"),
        ("learning_rate: 1", "neither's"),
        ("base_model: m", "dataset: Field required"),
        ("base_model: !!python/object/apply:os.system ['id']", "neither YAML nor JSON"),
    ],
)
def test_what_is_no_configuration_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        translate(text, "x.yaml")


def test_strangers_text_stays_text(tmp_path: Path) -> None:
    """Neither a terminal nor the file is led astray by what a value holds."""
    evil = "\x1b[2J\nlr = 9 \x7f é \"'"
    found = translate(json.dumps({"base_model": evil, "datasets": [{"path": "d"}], "nonesuch\n": evil}), "x")
    written = tmp_path / "run.toml"
    written.write_text(found.as_toml(), encoding="utf-8")
    assert load_run(written).base_model == evil
    assert "\x1b" not in found.as_toml() and len(found.as_toml().splitlines()) == 5


def test_the_command_writes_lists_and_does_not_overwrite(tmp_path: Path) -> None:
    source, output = tmp_path / "axolotl.yaml", tmp_path / "run.toml"
    source.write_text(QLORA)
    arguments = ["init", "--from", str(source), "--output", str(output)]
    done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert done.stdout == f"{output}\n"
    assert 'not carried over: wandb_project = "llama" (hotlap reports to no service)' in done.stderr
    assert "Read as a configuration of axolotl; 9 settings were not carried over." in done.stderr
    assert load_run(output).lora.rank == 32
    again = CliRunner().invoke(cli, arguments)
    assert isinstance(again.exception, ConfigError) and "is there already" in str(again.exception)


def test_every_setting_that_is_never_carried_over_has_a_reason() -> None:
    assert all(callable(rule) or rule for rule in [*AXOLOTL.values(), *TRL.values()])
    assert Translation("x").as_toml() == "# From a configuration of x.\n\n\n"
