"""Configuration: TOML in, JSON out, frozen and closed. Units stand in the names.

A run's configuration has two parts. The *trajectory* (base model, data, adapter, optimizer, length, seed) decides
what is learned: it names the run and may not change between its slices. The rest (evaluation, publishing, the
slice's cap) may. Limits and budgets are no part of it: they live in `$HOTLAP_HOME/cloud.toml` and are changed by
editing that file only.
"""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError, model_validator

from hotlap import durable
from hotlap.config_base import Config
from hotlap.config_cloud import CLOUD_TOML, CloudConfig
from hotlap.config_data import DataConfig, PackingConfig
from hotlap.config_model import LoraConfig, ModelConfig, OptimConfig
from hotlap.config_techniques import TechniquesConfig
from hotlap.errors import ConfigError
from hotlap.secrecy import without_login

ConfigT = TypeVar("ConfigT", bound=Config)


class TrainConfig(Config):
    micro_batch_rows: int = Field(default=1, ge=1)
    """Rows in one forward and backward pass. Halved within the slice when memory runs out."""

    grad_accumulation: int = Field(default=1, ge=1)
    """Micro-batches in a step. The loss is the mean over all trained tokens of the step."""

    epochs: float = Field(default=1.0, gt=0)
    """Passes over the data; a fraction is fine. `max_steps` takes its place if given."""

    max_steps: int | None = Field(default=None, ge=1)
    """Length of the run in steps, however many epochs that is."""

    neftune_alpha: float | None = Field(default=None, gt=0)
    """NEFTune: strength of the noise on the embeddings in training; 5 is common. Absent: none."""

    @property
    def rows_per_step(self) -> int:
        return self.micro_batch_rows * self.grad_accumulation


class EvalConfig(Config):
    every_steps: int | None = Field(default=None, ge=1)
    """Evaluate the held-out examples after every so many steps, and after the last. Absent: after the last only."""

    micro_batch_rows: int = Field(default=1, ge=1)
    """Rows in one evaluation pass."""

    patience: int | None = Field(default=None, ge=1)
    """Stop early: the run is done after so many evaluations in a row without a lower `val_loss`. Absent: never."""

    sample_prompts: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Prompts that are answered before the first step and at every evaluation, with the most likely words, into the
    run's `samples.jsonl`."""

    sample_tokens: int = Field(default=64, ge=1)
    """Longest such answer in tokens."""


class CheckpointConfig(Config):
    every_s: float = Field(default=60.0, gt=0)
    """Seconds between published checkpoints within a slice; a kill costs no more than these."""

    keep: int = Field(default=2, ge=1)
    """Newest checkpoints to keep. The best by `val_loss` is kept besides."""


class SliceConfig(Config):
    minutes: float = Field(default=5.0, gt=0)
    """Cap of one slice, from process start to exit, everything included."""

    grace_s: float = Field(default=5.0, gt=0)
    """Seconds between a stop signal and the end: the step is finished if that fits, else given up, and saved."""

    num_threads: int | None = Field(default=None, ge=1)
    """Processor threads. Absent: what the run began with, or one per core. Another number is another rounding."""

    gradient_checkpointing: bool = False
    """Compute a layer's activations again in the backward pass instead of keeping them: less memory, more time, the
    same result. May be changed from slice to slice."""

    attention_kernel: Literal["auto", "mask", "examples", "flash", "flex"] = "auto"
    """What keeps the examples of a row apart. `auto` is FlashAttention on a CUDA device with the `flash-attn` package
    and 16-bit numbers, else a mask there; on a processor it is `examples`, attention in each example by itself. `flex`
    is torch's own, on CUDA. They differ in rounding; may be changed from slice to slice."""

    @property
    def cap_s(self) -> float:
        return self.minutes * 60.0


TRAJECTORY_KEYS = ("base_model", "dataset", "data", "packing", "model", "lora", "optim", "train", "seed")


class RunConfig(Config):
    base_model: str
    """A folder, a GGUF file, a hub id (`org/name` or `org/name@revision`), a package, or a short name."""

    dataset: str
    """A file (JSONL, JSON, CSV, Parquet, Arrow, text), a folder of such, or a prefetched hub id or package."""

    output_dir: str = "runs"
    """The folder in which runs have theirs."""

    run: str | None = None
    """Name of the run. Absent: made from the trajectory settings, so that the same command resumes."""

    seed: int | None = Field(default=None, ge=0, lt=2**31)
    """Absent: drawn at the first slice and kept with the run."""

    data: DataConfig = DataConfig()
    packing: PackingConfig = PackingConfig()
    model: ModelConfig = ModelConfig()
    lora: LoraConfig = LoraConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    techniques: TechniquesConfig = TechniquesConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    slice: SliceConfig = SliceConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> "RunConfig":
        if self.data.eval_dataset and self.data.eval_examples:
            raise ValueError("data.eval_dataset and data.eval_examples are two held-out sets; give one")
        if self.lora.init == "pissa" and self.model.quantization is not None:
            raise ValueError("lora.init = 'pissa' changes the base's weights, which model.quantization has rounded")
        if reason := self.techniques.misfit(self.lora, self.model, self.train.neftune_alpha):
            raise ValueError(reason)
        if self.data.columns and self.data.format != "auto":
            raise ValueError("data.columns and data.format are two forms; give one")
        if self.run is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", self.run):
            raise ValueError("run: a name is 1 to 64 letters, digits, dots, dashes and underscores")
        return self

    @property
    def trajectory(self) -> dict[str, Any]:
        """The settings that decide what is learned, as JSON values."""
        settings = self.model_dump(mode="json", include=set(TRAJECTORY_KEYS))
        # Left out where none is set, so that older runs keep their names.
        return settings | ({"techniques": techniques} if (techniques := self.techniques.trajectory) else {})

    @property
    def run_name(self) -> str:
        if self.run is not None:
            return self.run
        slug = re.sub(r"[^a-z0-9]+", "-", Path(self.dataset).stem.lower()).strip("-")[:32] or "run"
        return f"{slug}-{self.trajectory_digest}"

    @property
    def trajectory_digest(self) -> str:
        """Of the settings that decide what is learned: 8 digits, the same wherever the files lie."""
        return self._digest(self.trajectory)

    @property
    def settings_digest(self) -> str:
        """The same without those that are off: new settings are off by default, so a hotlap that has them makes the
        same of these; one with another default does not."""
        return self._digest(_without_off(self.trajectory))

    def _digest(self, settings: dict[str, Any]) -> str:
        # What is trained on names the run, where it lies does not: a project may move, or run on another machine.
        settings = {**settings, **{key: Path(getattr(self, key)).name for key in ("base_model", "dataset")}}
        if (data := settings.get("data")) is not None:
            names = [key for key in ("eval_dataset", "chat_template") if data.get(key) is not None]
            places: dict[str, Any] = {key: Path(data[key]).name for key in names}
            if "mix" in data:
                places["mix"] = [{**item, "dataset": Path(item["dataset"]).name} for item in data["mix"]]
            settings["data"] = {**data, **places}
        if self.lora.init_from is not None:
            # Every run's adapter lies in a folder of that name; the run tells them apart.
            settings["lora"] = {**settings["lora"], "init_from": "/".join(Path(self.lora.init_from).parts[-2:])}
        return durable.sha256_bytes(durable.canonical_json(settings).encode())[:8]

    @property
    def run_folder(self) -> Path:
        return Path(self.output_dir) / self.run_name


def _without_off(settings: dict[str, Any]) -> dict[str, Any]:
    inner = {key: _without_off(value) if isinstance(value, dict) else value for key, value in settings.items()}
    return {key: value for key, value in inner.items() if value}


def hotlap_home() -> Path:
    """Where artifacts, caches and limits live: `$HOTLAP_HOME`, or `~/.hotlap`. A second home is a second budget."""
    return Path(os.environ.get("HOTLAP_HOME") or Path.home() / ".hotlap").absolute()


def load_cloud() -> CloudConfig:
    """The limits in `cloud.toml`, which is written with its comments when it is not there yet."""
    path = hotlap_home() / "cloud.toml"
    if not path.exists():
        durable.make_dirs(path.parent)
        durable.replace(path, CLOUD_TOML.encode())
    return _parse(CloudConfig, _read_toml(path), str(path))


def load_run(path: Path | None, overrides: Sequence[str] = (), **flags: Any) -> RunConfig:
    """A run's configuration from a TOML file, then `--set` overrides (`lora.rank=32`), then flags that are not None.

    Paths in a file are relative to the file's folder; those on the command line to the working directory.

    Raises:
        ConfigError: the file, a key or a value is wrong; the message names it.
    """
    tree = _read_toml(path) if path else {}
    if path:
        _anchor_paths(tree, path.absolute().parent)
    for text in overrides:
        _override(tree, text)
    tree.update({key: value for key, value in flags.items() if value is not None})
    config = _parse(RunConfig, tree, str(path) if path else "the command line")
    longest = load_cloud().limits.max_slice_minutes
    if config.slice.minutes > longest:
        raise ConfigError(
            f"slice.minutes is {config.slice.minutes:g}, and no slice may exceed {longest:g}. "
            f"Ask for less, or edit limits.max_slice_minutes in {hotlap_home() / 'cloud.toml'}."
        )
    return config


def load_run_json(text: str) -> RunConfig:
    """A configuration that `RunConfig.model_dump_json` wrote."""
    return RunConfig.model_validate_json(text)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:  # also too many digits, or brackets
        raise ConfigError(f"{path} is not valid TOML: {error}.") from None


def _anchor_paths(tree: dict[str, Any], folder: Path) -> None:
    """Make the file's own relative paths absolute where they name something that is there."""
    data, lora = tree.get("data"), tree.get("lora")
    places: list[tuple[Any, str]] = [(tree, "base_model"), (tree, "dataset")]
    if isinstance(data, dict):
        mix = data.get("mix")
        places += [(data, "eval_dataset"), (data, "chat_template")]
        places += [(item, "dataset") for item in mix] if isinstance(mix, list) else []
    if isinstance(lora, dict):
        places.append((lora, "init_from"))
    for table, key in places:
        if not isinstance(table, dict):
            continue
        value = table.get(key)
        if isinstance(value, str) and (folder / value).exists():
            table[key] = str(folder / value)


def _override(tree: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    *parents, last = key.strip().split(".")
    if not equals or not last:
        raise ConfigError(f"--set takes KEY=VALUE, as in lora.rank=32; got {text!r}.")
    if parents[:1] == ["limits"]:
        raise ConfigError(
            f"Limits are changed only by editing {hotlap_home() / 'cloud.toml'}; --set {text} is refused."
        )
    table = tree
    for name in parents:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {text}: {name} is a value, not a table.")
    table[last] = _toml_value(value.strip())


def _toml_value(text: str) -> Any:
    """`32`, `1e-4`, `true`, `["a"]` as TOML reads them; `none` is absence; anything else is text."""
    if text == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _parse(kind: type[ConfigT], tree: Mapping[str, Any], source: str) -> ConfigT:
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        lines = [
            ": ".join(filter(None, (".".join(str(part) for part in item["loc"]), _in_words(item))))
            for item in error.errors()
        ]
        raise ConfigError(f"{source}: " + "; ".join(lines) + ".") from None


def _in_words(item: Mapping[str, Any]) -> str:
    if item["type"] == "extra_forbidden":
        return "no such setting"
    if item["type"] == "missing":
        return "is missing"
    words = str(item["msg"]).removeprefix("Value error, ")
    if isinstance(item["input"], Mapping):
        return words
    # A database's address in the wrong place must not show its password.
    return f"{words} (got {without_login(repr(item['input']))})"
