"""What a run will need, before it is paid for: memory, time and slices, from the packed rows and the model's shape.

Memory at the peak of a step, with R rows of T positions in a micro-batch, N = R x T, and b bytes a number (4 in
float32, 2 in the others):

    weights        b bytes x parameters of the base model; of the layers' linear modules 0.516 in nf4 (0.563 with
                   single quantization) and 1 in int8, and the largest of them once more as it is multiplied
    adapter        28 bytes x trained parameters: value, gradient, two moments, and a copy that is published;
                   16 with 8-bit moments; in 16 bits 14 and 10
    activations    b bytes x N x layers x (10 x hidden + 4 x feed-forward + 2 x targets' rank); with DoRA, and on
                   quantized weights, twice the targets' outputs more; recomputed ones: b x N x layers x hidden, and
                   seven times one layer's, for its gradients and what the allocator keeps
    mask           1 byte x R x T x T, and as much again while it is made
    logits         20 bytes x trained positions x vocabulary; in chunks 8 bytes x the positions of one x vocabulary
    staged tail    b bytes x N of all rows in a pass x hidden, when there is more than one pass
    interpreter    0.4 GB: Python, torch, transformers, PEFT

The factors are those of a Llama-type layer; `python -m benchmarks.memory` holds them against real slices, and
`docs/log.md` has what came out.

Time is that of an earlier slice of the same base model, or 4 operations per parameter and token (forward, and
backward through the activations) at the speed of a matrix product here.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hotlap import clock
from hotlap.config import LoraConfig, ModelConfig, RunConfig
from hotlap.config_techniques import chunk_positions
from hotlap.data.packed import PackedDataset, plan_order
from hotlap.errors import MissingArtifact

_INTERPRETER_BYTES = 400_000_000
_LOGIT_BYTES = 20
_CHUNKED_LOGIT_BYTES = 8
_LAYERS_WHEN_RECOMPUTED = 7
_ADAPTER_BYTES = 28
_ADAPTER_8BIT_BYTES = 16
_NF4_BYTES = 0.5 + 4 / 64
_NF4_DOUBLE_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
_REACHED = 0.7
"""Share of a matrix product's speed that a step reaches."""

_SLICE_OVERHEAD_S = 20.0
_PROBE_SIZE = 768
_PROBE_REPEATS = 3


@dataclass(frozen=True)
class Shape:
    """A decoder-only model's shape, as its `config.json` has it."""

    hidden: int
    feed_forward: int
    num_layers: int
    vocabulary: int
    attention: int
    key_value: int
    is_tied: bool
    per_layer_embeddings: int = 0
    """Parameters of the embeddings that every layer has besides, in models that have such."""

    @property
    def num_layer_parameters(self) -> int:
        attention = self.hidden * (2 * self.attention + 2 * self.key_value)
        return self.num_layers * (attention + 3 * self.hidden * self.feed_forward)

    @property
    def num_parameters(self) -> int:
        embeddings = self.vocabulary * self.hidden * (1 if self.is_tied else 2) + self.per_layer_embeddings
        return self.num_layer_parameters + embeddings

    def num_adapter_parameters(self, lora: LoraConfig) -> int:
        return self.num_layers * lora.rank * sum(inputs + outputs for inputs, outputs in self._targets(lora))

    def num_target_ranks(self, lora: LoraConfig) -> int:
        return lora.rank * len(self._targets(lora))

    def num_target_outputs(self, lora: LoraConfig) -> int:
        return sum(outputs for _, outputs in self._targets(lora))

    def _targets(self, lora: LoraConfig) -> list[tuple[int, int]]:
        """Inputs and outputs of a layer's linear modules that get an adapter. Names that are not known count as the
        widest."""
        sizes = {
            "q_proj": (self.hidden, self.attention),
            "k_proj": (self.hidden, self.key_value),
            "v_proj": (self.hidden, self.key_value),
            "o_proj": (self.attention, self.hidden),
            "gate_proj": (self.hidden, self.feed_forward),
            "up_proj": (self.hidden, self.feed_forward),
            "down_proj": (self.feed_forward, self.hidden),
        }
        if lora.target_modules == "all-linear":
            return list(sizes.values())
        return [sizes.get(name, (self.hidden, self.feed_forward)) for name in lora.target_modules]


def shape_of(model_folder: Path) -> Shape:
    """
    Raises:
        MissingArtifact: the model's `config.json` does not say.
    """
    path = model_folder / "config.json"
    try:
        whole: dict[str, Any] = json.loads(path.read_bytes())
        fields: dict[str, Any] = whole.get("text_config", whole)
        heads: int = fields["num_attention_heads"]
        head: int = fields.get("head_dim") or fields["hidden_size"] // heads
        return Shape(
            hidden=fields["hidden_size"],
            feed_forward=fields["intermediate_size"],
            num_layers=fields["num_hidden_layers"],
            vocabulary=fields["vocab_size"],
            attention=heads * head,
            key_value=(fields.get("num_key_value_heads") or heads) * head,
            is_tied=bool(fields.get("tie_word_embeddings", False)),
            per_layer_embeddings=fields.get("vocab_size_per_layer_input", 0)
            * fields.get("hidden_size_per_layer_input", 0)
            * fields["num_hidden_layers"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MissingArtifact(
            f"{path} does not tell the model's shape ({error!r}), so nothing can be estimated. Copy the folder again."
        ) from None


# --- memory ---


@dataclass(frozen=True)
class Memory:
    fixed_bytes: int
    """What there is however many rows a micro-batch has."""

    row_bytes: int
    """What each row of a micro-batch adds."""

    in_words: str = "float32"
    """What the estimate is for."""

    def peak_bytes(self, num_rows: int) -> int:
        return self.fixed_bytes + num_rows * self.row_bytes

    def most_rows(self, available_bytes: int) -> int:
        """The largest micro-batch that leaves a fifth of what is available free."""
        room = 0.8 * available_bytes - self.fixed_bytes
        return max(0, int(room // self.row_bytes))


def memory_of(shape: Shape, config: RunConfig, data: PackedDataset, precision: str | None = None) -> Memory:
    """By the formula above, for rows as full as these and with as many trained tokens as the fullest of them.

    `precision` is the run's, if it is known; one that is still to be chosen counts as float32, the larger.
    """
    precision = precision or ("float32" if config.model.precision == "auto" else config.model.precision)
    most_trained = int(np.max(data.trained_tokens_per_row(), initial=0))
    return _memory(shape, config, precision, data.seq_len, most_trained, _num_kept_rows(config, data.num_rows))


def most_memory_of(shape: Shape, config: RunConfig, precision: str) -> Memory:
    """The same before there are rows: every token of them trained. What a staged tail keeps is not known then, and not
    in it."""
    return _memory(shape, config, precision, config.data.seq_len, config.data.seq_len, 0)


def _memory(
    shape: Shape, config: RunConfig, precision: str, seq_len: int, most_trained: int, num_kept_rows: int
) -> Memory:
    number_bytes = 4 if precision == "float32" else 2
    activation_bytes = number_bytes * seq_len * _kept_width(shape, config)
    row_bytes = activation_bytes + 2 * seq_len**2
    trained = shape.num_adapter_parameters(config.lora) + _num_saved_whole(shape, config.lora)
    fixed_bytes = _INTERPRETER_BYTES + _weight_bytes(shape, config.model, number_bytes)
    fixed_bytes += _adapter_bytes(config, number_bytes) * trained
    fixed_bytes += number_bytes * num_kept_rows * seq_len * shape.hidden
    if config.techniques.prepacked_weights:
        fixed_bytes += 2 * number_bytes * (shape.num_layer_parameters + shape.vocabulary * shape.hidden)
    if config.techniques.chunked_loss:
        positions = min(chunk_positions(shape.vocabulary), most_trained * config.train.micro_batch_rows)
        fixed_bytes += _CHUNKED_LOGIT_BYTES * positions * shape.vocabulary
    else:
        row_bytes += _LOGIT_BYTES * most_trained * shape.vocabulary
    words = precision if config.model.quantization is None else f"{config.model.quantization} over {precision}"
    return Memory(fixed_bytes, row_bytes, words)


def _adapter_bytes(config: RunConfig, number_bytes: int) -> int:
    """Of a trained parameter."""
    is_8bit = config.optim.kind.endswith("8bit")
    if config.techniques.adapter_precision == "model" and number_bytes == 2:
        return _ADAPTER_8BIT_BYTES - 6 if is_8bit else _ADAPTER_BYTES // 2
    return _ADAPTER_8BIT_BYTES if is_8bit else _ADAPTER_BYTES


def _num_kept_rows(config: RunConfig, num_rows: int) -> int:
    """Rows whose boundary the staged tail keeps."""
    staged = config.techniques.staged
    if staged is None or staged.tail_passes == 1:
        return 0
    return plan_order(config, 0, num_rows).num_tail_rows


def _kept_width(shape: Shape, config: RunConfig) -> int:
    """Numbers that are kept for the backward pass, of a position in all layers."""
    layer = 10 * shape.hidden + 4 * shape.feed_forward + 2 * shape.num_target_ranks(config.lora)
    if config.lora.dora or config.model.quantization:
        layer += 2 * shape.num_target_outputs(config.lora)
    if config.slice.gradient_checkpointing:
        return shape.num_layers * shape.hidden + _LAYERS_WHEN_RECOMPUTED * layer
    return shape.num_layers * layer


def _weight_bytes(shape: Shape, settings: ModelConfig, number_bytes: int) -> int:
    outside = number_bytes * (shape.num_parameters - shape.num_layer_parameters)
    if settings.quantization is None:
        return outside + number_bytes * shape.num_layer_parameters
    each = 1.0 if settings.quantization == "int8" else _NF4_DOUBLE_BYTES if settings.double_quantization else _NF4_BYTES
    return outside + round(each * shape.num_layer_parameters) + number_bytes * shape.hidden * shape.feed_forward


def _num_saved_whole(shape: Shape, lora: LoraConfig) -> int:
    """Of embedding and head, which alone are large. The copy that is trained stands beside the frozen one."""
    named = {"embed_tokens", "lm_head"} & set(lora.modules_to_save)
    return shape.vocabulary * shape.hidden * (min(1, len(named)) if shape.is_tied else len(named))


# --- time ---


@dataclass(frozen=True)
class Speed:
    tokens_per_s: float
    source: str
    """Where the figure comes from, in words."""


def estimated_speed(shape: Shape) -> Speed:
    """From how fast this processor multiplies matrices now."""
    flops_per_token = 4.0 * shape.num_parameters
    measured = _matrix_flops_per_s()
    return Speed(
        _REACHED * measured / flops_per_token,
        f"estimated from {measured / 1e9:.0f} GFLOP/s in a matrix product on this processor just now",
    )


def _matrix_flops_per_s() -> float:
    matrix = np.random.Philox(key=0)
    left = np.random.Generator(matrix).random((_PROBE_SIZE, _PROBE_SIZE), dtype=np.float32)
    times_s: list[float] = []
    for _ in range(_PROBE_REPEATS + 1):
        began_s = clock.monotonic_s()
        _ = left @ left
        times_s.append(clock.monotonic_s() - began_s)
    return 2.0 * _PROBE_SIZE**3 / max(1e-9, min(times_s[1:]))


@dataclass(frozen=True)
class Duration:
    num_tokens: int
    seconds: float
    num_slices: int


def duration_of(config: RunConfig, data: PackedDataset, num_rows_trained: int, speed: Speed) -> Duration:
    """Of the whole run, and in how many slices, if each loses `_SLICE_OVERHEAD_S` to starting and saving."""
    num_tokens = round(data.facts.num_tokens / max(1, data.num_rows) * num_rows_trained)
    seconds = num_tokens / max(1e-9, speed.tokens_per_s)
    steps_s = max(1.0, config.slice.cap_s - _SLICE_OVERHEAD_S)
    return Duration(num_tokens, seconds, math.ceil(seconds / steps_s))
