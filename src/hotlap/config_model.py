"""The configuration of what is trained: the base model's numbers, the adapter on it, and the optimizer."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from hotlap.config_base import Config

Precision = Literal["float32", "bfloat16", "float16"]


class ModelConfig(Config):
    precision: Literal["auto"] | Precision = "auto"
    """Numbers of the base model's weights and activations. `auto` is bfloat16 where this machine computes it at least
    about as fast as float32, found out at the first slice and kept with the run. The adapter is float32 unless
    `techniques.adapter_precision` says otherwise."""

    quantization: Literal["nf4", "int8"] | None = None
    """Keep the frozen weights of the decoder's linear modules in 4 or 8 bits. Absent: they stay as they are."""

    double_quantization: bool = True
    """With `nf4`: quantize its scales as well, which saves another 0.4 bits a weight."""


FLOAT32 = ModelConfig(precision="float32")


class LoraConfig(Config):
    rank: int = Field(default=16, ge=1)
    """Width of the low-rank update. Adapter size grows linearly with it."""

    alpha: float = Field(default=32.0, gt=0)
    """Numerator of the update's scale."""

    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of an adapter's inputs that is zeroed in a step."""

    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(strict=False)] = "all-linear"
    """Names of the linear modules that get an adapter, or all of the text decoder's but the output head."""

    rslora: bool = False
    """Scale the update by alpha / sqrt(rank) instead of alpha / rank."""

    dora: bool = False
    """Learn the length of every weight column apart from its direction."""

    init: Literal["default", "pissa"] = "default"
    """`default` starts from no update at all, `pissa` from the base's own largest singular directions. A finished
    PiSSA adapter is published as an ordinary one of twice the rank."""

    init_from: str | None = None
    """Warm start: the folder of a PEFT adapter whose values are the first ones. The optimizer starts fresh."""

    modules_to_save: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names of modules that are trained in full and saved whole with the adapter, `lm_head` for example."""

    @model_validator(mode="after")
    def _one_start(self) -> "LoraConfig":
        if self.init == "pissa" and self.dora:
            raise ValueError("lora.init = 'pissa' cannot be published as an ordinary adapter with lora.dora; take one")
        if self.init == "pissa" and self.init_from is not None:
            raise ValueError("lora.init = 'pissa' and lora.init_from are two starts; give one")
        return self


class OptimConfig(Config):
    kind: Literal["adamw", "adamw8bit", "paged_adamw", "paged_adamw8bit"] = "adamw"
    """AdamW with its two moments in float32 or in 8 bits; paged ones move to the host's memory when the GPU's is full.
    Tensors of less than 4,096 values keep float32 moments."""

    lr: float = Field(default=2e-4, gt=0)
    """Peak learning rate. `hotlap init` proposes one by the base model's width."""

    lora_plus_ratio: float | None = Field(default=None, ge=1)
    """LoRA+: the learning rate of every B, as a multiple of the others'. Absent: the same."""

    schedule: Literal["cosine", "linear", "constant", "warmdown"] = "cosine"
    """Shape of the learning rate after warm-up. `warmdown` is constant, then falls linearly at the end of the run."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly to its peak."""

    schedule_steps: int | None = Field(default=None, ge=1)
    """Steps for which the schedule is laid out; a run that ends earlier stops on the way. Absent: the run's own."""

    warmdown_ratio: float = Field(default=0.2, gt=0, le=1)
    """Share of the run over which `warmdown` falls. The other schedules ignore it."""

    final_lr_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """What the learning rate falls towards, as a share of the peak: it would be there one step behind the last.
    `constant` ignores it."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)

    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm. Absent (`"none"` on the command line): never."""
