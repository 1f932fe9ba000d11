"""Another trainer's configuration as ours: what can be carried over is, and everything else is listed with a reason.

Sources of the tables: axolotl's configuration reference (docs.axolotl.ai, "Config Reference", as of its 0.13), and
TRL's `SFTConfig`, `ModelConfig` and `ScriptArguments` on top of transformers' `TrainingArguments` (as of TRL 0.26).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from pydantic import ValidationError

from hotlap.config import RunConfig
from hotlap.errors import ConfigError


@dataclass(frozen=True)
class Left:
    """A setting that was not carried over."""

    key: str
    value: Any
    reason: str


@dataclass
class Translation:
    """`tool` is who wrote it, `tree` our settings by section, `left` what they do not say."""

    tool: str
    tree: dict[str, Any] = field(default_factory=dict[str, Any])
    left: list[Left] = field(default_factory=list[Left])

    def put(self, target: str, value: Any) -> None:
        """Set `section.key`."""
        section, _, key = target.rpartition(".")
        (self.tree.setdefault(section, {}) if section else self.tree)[key] = value

    def leave(self, key: str, value: Any, reason: str) -> None:
        self.left.append(Left(key, value, reason))

    def as_toml(self) -> str:
        """Our TOML, with what was left out as comments on top."""
        lines = [f"# From a configuration of {self.tool}."]
        lines += [f"# not carried over: {one_line(entry)}" for entry in self.left]
        return "\n".join([*lines, "", to_toml(self.tree)])


def one_line(entry: Left) -> str:
    """The setting and the reason; a stranger's text cannot break out of the line."""
    return f"{_escaped(entry.key)} = {_escaped(json.dumps(entry.value, default=str))} ({entry.reason})"


def translate(text: str, source: str) -> Translation:
    """
    Raises:
        ConfigError: the text is no configuration of axolotl or TRL, or what comes out is none of ours.
    """
    try:
        whole: Any = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is neither YAML nor JSON: {' '.join(str(error).split())}.") from None
    if not isinstance(whole, dict):
        raise ConfigError(f"{source} holds no settings. Give a configuration of axolotl or TRL.")
    settings: dict[str, Any] = {str(key): value for key, value in whole.items() if value is not None}
    if "base_model" in settings:
        found, rules = Translation("axolotl"), AXOLOTL
    elif "model_name_or_path" in settings:
        found, rules = Translation("TRL"), TRL
    else:
        raise ConfigError(
            f"{source} has neither base_model (axolotl) nor model_name_or_path (TRL), so it is neither's."
        )
    for key, value in settings.items():
        rule = rules.get(key, "hotlap has no such setting")
        if isinstance(rule, str):
            found.leave(key, value, rule)
        else:
            rule(found, key, value, settings)
    _require_ours(found, source)
    return found


def _require_ours(found: Translation, source: str) -> None:
    try:
        RunConfig.model_validate(found.tree)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "settings"
        raise ConfigError(f"{source}: what comes out is no configuration of ours: {place}: {first['msg']}.") from None


# --- rules ---

Rule = Callable[[Translation, str, Any, Mapping[str, Any]], None]


def to(target: str, convert: Callable[[Any], Any] = lambda value: value) -> Rule:
    """The same under our name."""

    def rule(found: Translation, key: str, value: Any, _settings: Mapping[str, Any]) -> None:
        try:
            found.put(target, convert(value))
        except (ValueError, TypeError):
            found.leave(key, value, f"it is no value of {target}")

    return rule


def of(target: str, values: Mapping[str, str], what: str) -> Rule:
    """One of a few words; others are told."""

    def rule(found: Translation, key: str, value: Any, _settings: Mapping[str, Any]) -> None:
        if str(value) in values:
            found.put(target, values[str(value)])
        else:
            found.leave(key, value, f"hotlap's {what} are {', '.join(sorted(set(values.values())))}")

    return rule


def when(is_on: bool, target: str, value: Any) -> Rule:
    """A switch: ours is set if theirs is `is_on`; the other position is our default."""

    def rule(found: Translation, _key: str, given: Any, _settings: Mapping[str, Any]) -> None:
        if bool(given) is is_on:
            found.put(target, value)

    return rule


def refused_when(is_on: bool, reason: str) -> Rule:
    """A switch of which hotlap has one position only."""

    def rule(found: Translation, key: str, given: Any, _settings: Mapping[str, Any]) -> None:
        if bool(given) is is_on:
            found.leave(key, given, reason)

    return rule


def nothing(_found: Translation, _key: str, _value: Any, _settings: Mapping[str, Any]) -> None:
    """Says what hotlap does or finds out anyway."""


def _warmup_ratio(found: Translation, key: str, value: Any, settings: Mapping[str, Any]) -> None:
    steps = settings.get("max_steps")
    if isinstance(steps, int) and steps > 0 and "warmup_steps" not in settings:
        found.put("optim.warmup_steps", round(float(value) * steps))
    elif value:
        found.leave(
            key, value, "how many steps that is depends on the data: see hotlap preview, then optim.warmup_steps"
        )


def _max_steps(found: Translation, _key: str, value: Any, _settings: Mapping[str, Any]) -> None:
    if int(value) > 0:  # -1 is none
        found.put("train.max_steps", int(value))


def _axolotl_datasets(found: Translation, key: str, value: Any, _settings: Mapping[str, Any]) -> None:
    entries: list[Any] = value if isinstance(value, list) else [value]
    read = [_axolotl_dataset(found, f"{key}[{number}]", entry) for number, entry in enumerate(entries)]
    first, *others = [entry for entry in read if entry] or [{}]
    for name, given in first.items():
        found.put("dataset" if name == "dataset" else f"data.{name}", given)
    if others:
        found.put("data.mix", others)


def _axolotl_dataset(found: Translation, key: str, entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict) or "path" not in entry:
        found.leave(key, entry, "a data set is given by its path")
        return {}
    files = entry.get("data_files")
    files = files if isinstance(files, list) else [files] if files else []
    # `path: json` with `data_files` is how a local file is named.
    is_kind = entry["path"] in ("json", "csv", "parquet", "arrow", "text") and files
    read: dict[str, Any] = {"dataset": str(files[0] if is_kind else entry["path"])}
    if files and not is_kind:
        read["files"] = str(files[0])
    for extra in files[1:]:
        found.leave(f"{key}.data_files", extra, "one file or pattern a data set; give it in data.mix")
    kind = entry.get("type")
    if isinstance(kind, str) and (form := _AXOLOTL_FORMS.get(kind.partition(".")[0])):
        read["format"] = form
    elif kind is not None:
        found.leave(
            f"{key}.type", kind, "the form is found by looking; columns of no known form are named in data.columns"
        )
    for name in sorted(set(entry) - {"path", "type", "data_files", "ds_type"}):
        if entry[name] is not None:
            found.leave(f"{key}.{name}", entry[name], "hotlap finds it by looking, or has no such setting")
    return read


_AXOLOTL_FORMS = {
    "alpaca": "alpaca",
    "sharegpt": "sharegpt",
    "chat_template": "messages",
    "completion": "text",
}


def _val_set_size(found: Translation, key: str, value: Any, _settings: Mapping[str, Any]) -> None:
    if float(value) >= 1:
        found.put("data.eval_examples", int(value))
    elif value:
        found.leave(key, value, "a share; data.eval_examples is a number of examples: see hotlap preview")


def _axolotl_adapter(found: Translation, key: str, value: Any, settings: Mapping[str, Any]) -> None:
    if value == "qlora" and not settings.get("load_in_8bit"):
        found.put("model.quantization", "nf4")
    elif value not in ("lora", "qlora"):
        found.leave(key, value, "hotlap trains LoRA and QLoRA")


def _trl_peft(found: Translation, key: str, value: Any, _settings: Mapping[str, Any]) -> None:
    if not value:
        found.leave(key, value, "hotlap trains LoRA, never the whole model")


def _precision(name: str) -> Rule:
    def rule(found: Translation, _key: str, value: Any, _settings: Mapping[str, Any]) -> None:
        if value == "auto":
            found.put("model.precision", "auto")
        elif value in (True, "full"):
            found.put("model.precision", name)

    return rule


def _target_modules(found: Translation, _key: str, value: Any, settings: Mapping[str, Any]) -> None:
    if settings.get("lora_target_linear"):
        return
    names = value.replace(",", " ").split() if isinstance(value, str) else list(value)
    found.put("lora.target_modules", "all-linear" if names == ["all-linear"] else names)


def _init_lora(found: Translation, key: str, value: Any, _settings: Mapping[str, Any]) -> None:
    if str(value).startswith("pissa"):
        found.put("lora.init", "pissa")
    elif value is not True:
        found.leave(key, value, "hotlap's starts are default and pissa")


def _names(value: Any) -> list[str]:
    return value.replace(",", " ").split() if isinstance(value, str) else [str(each) for each in value]


OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw"), "adamw"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit"), "adamw8bit"),
    **dict.fromkeys(("paged_adamw", "paged_adamw_32bit"), "paged_adamw"),
    "paged_adamw_8bit": "paged_adamw8bit",
}
SCHEDULES = {
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
_ELSEWHERE = "hotlap publishes by time (checkpoint.every_s), logs every step, and resumes by itself"
_ATTENTION = "examples of a row are kept apart by hotlap's own mask"
_MACHINES = "hotlap trains on one device"
_REPORTS = "hotlap reports to no service"
_TOKENS = "the tokenizer is taken as it is; add tokens to its folder and hotlap trains their rows"

COMMON: dict[str, Rule | str] = {
    "output_dir": to("output_dir", str),
    "seed": to("seed", int),
    "lora_r": to("lora.rank", int),
    "lora_alpha": to("lora.alpha", float),
    "lora_dropout": to("lora.dropout", float),
    "lora_target_modules": _target_modules,
    "lora_modules_to_save": to("lora.modules_to_save", _names),
    "learning_rate": to("optim.lr", float),
    "weight_decay": to("optim.weight_decay", float),
    "warmup_steps": to("optim.warmup_steps", int),
    "warmup_ratio": _warmup_ratio,
    "adam_beta1": to("optim.beta1", float),
    "adam_beta2": to("optim.beta2", float),
    "adam_epsilon": to("optim.eps", float),
    "max_grad_norm": to("optim.max_grad_norm", float),
    "gradient_accumulation_steps": to("train.grad_accumulation", int),
    "max_steps": _max_steps,
    "neftune_noise_alpha": to("train.neftune_alpha", float),
    "gradient_checkpointing": when(True, "slice.gradient_checkpointing", True),
    "eval_steps": to("eval.every_steps", int),
    "bf16": _precision("bfloat16"),
    "fp16": _precision("float16"),
    "load_in_4bit": when(True, "model.quantization", "nf4"),
    "load_in_8bit": when(True, "model.quantization", "int8"),
    **dict.fromkeys(("logging_steps", "save_steps", "save_strategy", "save_total_limit"), _ELSEWHERE),
    **dict.fromkeys(("resume_from_checkpoint", "logging_strategy", "auto_resume_from_checkpoints"), _ELSEWHERE),
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "ddp_timeout", "local_rank"), _MACHINES),
    **dict.fromkeys(("report_to", "push_to_hub", "hub_model_id", "hub_strategy", "run_name"), _REPORTS),
    **dict.fromkeys(("wandb_project", "wandb_entity", "wandb_watch", "wandb_name", "wandb_log_model"), _REPORTS),
    **dict.fromkeys(("tf32", "group_by_length", "gradient_checkpointing_kwargs", "dataloader_num_workers"), nothing),
    "eval_strategy": nothing,
    "do_eval": nothing,
}

AXOLOTL: dict[str, Rule | str] = {
    **COMMON,
    "base_model": to("base_model", str),
    "datasets": _axolotl_datasets,
    "adapter": _axolotl_adapter,
    "lora_model_dir": to("lora.init_from", str),
    "lora_target_linear": when(True, "lora.target_modules", "all-linear"),
    "peft_use_rslora": to("lora.rslora", bool),
    "peft_use_dora": to("lora.dora", bool),
    "peft_init_lora_weights": _init_lora,
    "loraplus_lr_ratio": to("optim.lora_plus_ratio", float),
    "sequence_len": to("data.seq_len", int),
    "sample_packing": when(False, "packing.method", "none"),
    "val_set_size": _val_set_size,
    "micro_batch_size": to("train.micro_batch_rows", int),
    "eval_batch_size": to("eval.micro_batch_rows", int),
    "num_epochs": to("train.epochs", float),
    "optimizer": of("optim.kind", OPTIMIZERS, "optimizers"),
    "lr_scheduler": of("optim.schedule", SCHEDULES, "schedules"),
    "cosine_min_lr_ratio": to("optim.final_lr_ratio", float),
    "early_stopping_patience": to("eval.patience", int),
    "train_on_inputs": refused_when(True, "only what the assistant says is trained"),
    "strict": nothing,
    "save_safetensors": nothing,
    "chat_template": "the model's own template is used; another one's file is given as data.chat_template",
    **dict.fromkeys(("special_tokens", "tokens", "resize_token_embeddings_to_32x"), _TOKENS),
    **dict.fromkeys(("model_type", "tokenizer_type", "pad_to_sequence_len", "eval_sample_packing"), nothing),
    **dict.fromkeys(("dataset_prepared_path", "is_llama_derived_model", "debug"), nothing),
    **dict.fromkeys(("flash_attention", "sdp_attention", "xformers_attention", "s2_attention"), _ATTENTION),
    **dict.fromkeys(("evals_per_epoch", "saves_per_epoch"), "give eval.every_steps; checkpoints are made by time"),
}

TRL: dict[str, Rule | str] = {
    **COMMON,
    "model_name_or_path": to("base_model", str),
    "model_revision": "write it behind the name: base_model = 'org/name@revision'",
    "dataset_name": to("dataset", str),
    "dataset_test_split": "hold examples out with data.eval_examples, or name a file in data.eval_dataset",
    "dataset_train_split": nothing,
    "use_peft": _trl_peft,
    "use_rslora": to("lora.rslora", bool),
    "use_dora": to("lora.dora", bool),
    "max_length": to("data.seq_len", int),
    "max_seq_length": to("data.seq_len", int),
    "packing": when(False, "packing.method", "none"),
    "per_device_train_batch_size": to("train.micro_batch_rows", int),
    "per_device_eval_batch_size": to("eval.micro_batch_rows", int),
    "num_train_epochs": to("train.epochs", float),
    "optim": of("optim.kind", OPTIMIZERS, "optimizers"),
    "lr_scheduler_type": of("optim.schedule", SCHEDULES, "schedules"),
    "use_bnb_nested_quant": to("model.double_quantization", bool),
    "bnb_4bit_quant_type": refused_when(False, "hotlap quantizes to nf4"),
    "completion_only_loss": refused_when(False, "only what the assistant says is trained"),
    "assistant_only_loss": nothing,
    "torch_dtype": of(
        "model.precision", {name: name for name in ("auto", "float32", "bfloat16", "float16")}, "precisions"
    ),
    "dtype": of("model.precision", {name: name for name in ("auto", "float32", "bfloat16", "float16")}, "precisions"),
    "attn_implementation": _ATTENTION,
    "chat_template_path": to("data.chat_template", str),
    "eos_token": _TOKENS,
    "pad_token": _TOKENS,
}


# --- TOML ---


def to_toml(tree: dict[str, Any]) -> str:
    """Settings as our files have them: values of the top, then a table a section."""
    lines = [f"{key} = {toml_value(value)}" for key, value in tree.items() if not isinstance(value, dict)]
    for section, table in ((name, value) for name, value in tree.items() if isinstance(value, dict)):
        lines += ["", f"[{section}]", *(f"{key} = {toml_value(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """A JSON value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(toml_value(each) for each in value)}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {toml_value(each)}' for key, each in value.items())} }}"
    # JSON's escapes are TOML's, which wants DEL escaped as well.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _escaped(text: str) -> str:
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
