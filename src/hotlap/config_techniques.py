"""The configuration of what makes a slice fast: each technique a switch of its own, off unless it is given."""

from typing import Literal

from pydantic import Field

from hotlap.config_base import Config
from hotlap.config_model import LoraConfig, ModelConfig

_CHUNK_BYTES = 1 << 28


def chunk_positions(num_logits: int) -> int:
    """Positions whose `num_logits` float32 logits are held at a time by `chunked_loss`: a function of the model only,
    so that the rounding is one of the run and not of the machine."""
    return max(1, _CHUNK_BYTES // (4 * num_logits))


class StagedConfig(Config):
    after_step: int = Field(ge=1)
    """Steps in which every layer trains. After them only the top ones do."""

    top_layers: int = Field(default=1, ge=1)
    """Layers that train to the end, counted from the output."""

    tail_passes: int = Field(default=1, ge=1)
    """How many times the steps after `after_step` go over their rows. What the frozen layers make of a row is computed
    in the first pass, and kept for the others."""

    lr: float | None = Field(default=None, gt=0)
    """Learning rate of the steps after `after_step`. Absent: the schedule's."""


class TechniquesConfig(Config):
    chunked_loss: bool = False
    """Form the logits of a few hundred positions at a time, and their gradient with them."""

    adapter_precision: Literal["float32", "model"] = "float32"
    """`model`: the adapter and its moments in the precision of the base model. Small updates are lost in 16 bits."""

    fused_projections: bool = False
    """One product for queries, keys and values, and one for gate and up, in the base and in LoRA's A."""

    prepacked_weights: bool = False
    """On a processor, multiply by the base model's weights through oneDNN, laid out for it once. Takes twice the memory
    of these weights more. In bfloat16 only where the processor has units for it."""

    staged: StagedConfig | None = None
    """Train only the top layers after some step. Absent: all layers to the end."""

    integrated_lr: float | None = Field(default=None, gt=0)
    """The learning rates of all steps add up to this, however many steps there are; `optim.lr` is then only the scale
    that is taken out again. Absent: `optim.lr` is the peak."""

    kernels: bool = False
    """Use Liger's kernels for norms, rotation and feed-forward on a GPU, if the package is there."""

    direct_load: bool = True
    """Map the base model's weights from their files instead of reading them with transformers' loader, where that
    gives the same model. The weights are the same bit for bit."""

    lean_imports: bool = True
    """Import transformers and PEFT without torch's compiler and what else a slice does not use, where the installed
    versions are known to allow it."""

    overlap: bool = True
    """Import torch, and have the system read the base model's files ahead, while the data is made ready."""

    @property
    def trajectory(self) -> dict[str, object]:
        """The switches that are set and change what is learned, if only its rounding, as JSON values."""
        return self.model_dump(mode="json", include=set(_LEARNED), exclude_defaults=True)

    def misfit(self, lora: LoraConfig, model: ModelConfig, neftune_alpha: float | None) -> str | None:
        """Why these techniques do not go with the other settings, in words, or None."""
        if self.fused_projections and model.quantization is not None:
            return "techniques.fused_projections joins weights, which model.quantization has packed; take one"
        if self.prepacked_weights and model.quantization is not None:
            return (
                "techniques.prepacked_weights lays out plain weights, and model.quantization has packed them; take one"
            )
        if self.fused_projections and (lora.dora or lora.dropout):
            return "techniques.fused_projections needs one input for all, so neither lora.dora nor lora.dropout"
        if self.staged is not None and (lora.dropout or neftune_alpha is not None):
            return "techniques.staged keeps what frozen layers give, so neither lora.dropout nor train.neftune_alpha"
        if self.staged is not None and lora.modules_to_save:
            return "techniques.staged freezes lower layers; lora.modules_to_save may lie below or above them; take one"
        if self.adapter_precision == "model" and lora.init == "pissa":
            return "techniques.adapter_precision = 'model' would round what lora.init = 'pissa' took out of the base"
        if self.adapter_precision == "model" and model.precision == "float16":
            return (
                "techniques.adapter_precision = 'model' keeps squares of gradients, and model.precision = 'float16' "
                "makes 0 of those, so the first steps would be thousands of times too long; take one"
            )
        return None


_LEARNED = (
    "chunked_loss",
    "adapter_precision",
    "fused_projections",
    "prepacked_weights",
    "staged",
    "integrated_lr",
    "kernels",
)
