"""A merged model as one GGUF file for llama.cpp and its kin: `python -m hotlap.export.gguf ORDER`.

The order, as JSON: `source` (a model folder), `target` (a file that does not exist), `type` (`f16`, `q8_0`). Matrices
are stored in that type, vectors in float32, a tensor at a time. The file is then loaded back, and has to give the
source's tokens, and its logits but for the rounding. The result is what was found.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before torch, for which it sets the environment.
import hotlap.train  # isort: skip  # noqa: F401  # pyright: ignore[reportUnusedImport]
import gguf
import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig

from hotlap import durable
from hotlap.errors import AuditFailed, ConfigError, ProofFailed, storage_errors
from hotlap.export import prompts, proof, tensors, vocabulary
from hotlap.export.rows import encoded
from hotlap.export.task import Say, do_task
from hotlap.export.tensors import Entry
from hotlap.train import convert
from hotlap.train.base import load_base

Array = npt.NDArray[Any]

ALLOWED = {"f16": 0.02, "q8_0": 0.15}
"""How far logits may be from the source's, in standard deviations."""
_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
_TYPES = {
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
_BLOCK = 32
_GEMMA3_PERIOD, _GEMMA3_LOCAL_BASE = 6, 10_000.0
"""Every sixth layer sees all positions; the others have a base of their own. llama.cpp has both from nowhere."""
_TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def main() -> None:
    do_task(work)


def work(order: dict[str, Any], say: Say) -> dict[str, Any]:
    source, target, kind = Path(order["source"]), Path(order["target"]), str(order["type"])
    write(source, target, kind)
    say(f"Wrote {target.stat().st_size / 1e6:,.1f} MB. Loading it back.")
    return {"bytes": target.stat().st_size, **check(source, target, ALLOWED[kind], say)}


def write(source: Path, target: Path, kind: str) -> None:
    """The model in `source` as a GGUF file, synced.

    Raises:
        ConfigError: its architecture, or something about it, has no place in the format as we write it.
        AuditFailed: a tensor has no name in the format, or a value that float16 cannot hold.
        StorageFailed: it cannot be written.
    """
    config: dict[str, Any] = AutoConfig.from_pretrained(source, local_files_only=True).to_dict()
    architecture = _architecture(config, source)
    entries = tensors.all_entries(source)
    named = list(_named(architecture, config, entries))
    durable.require_free(target.parent, sum(_stored(entry, kind)[1] for _, entry in named) + 64_000_000)
    with storage_errors(target):
        writer = gguf.GGUFWriter(str(target), gguf.MODEL_ARCH_NAMES[architecture])
        _describe(writer, config, kind, source)
        vocabulary.write(writer, source, entries["model.embed_tokens.weight"].shape[0])
        for name, entry in named:
            stored, num_bytes = _stored(entry, kind)
            shape = entry.shape if stored.name != "Q8_0" else gguf.quant_shape_to_byte_shape(entry.shape, stored)
            dtype = np.dtype(np.uint8 if stored.name == "Q8_0" else np.float16 if stored.name == "F16" else np.float32)
            writer.add_tensor_info(name, shape, dtype, num_bytes, raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, entry in named:
            writer.write_tensor_data(_values(name, entry, _stored(entry, kind)[0], config))
        writer.close()
        durable.disk.sync(target)


def _architecture(config: dict[str, Any], source: Path) -> gguf.MODEL_ARCH:
    kind: str = config["model_type"]
    way_out = "llama.cpp's convert_hf_to_gguf.py reads the same folder."
    if kind not in _ARCHITECTURES:
        raise ConfigError(f"{source} is a {kind} model, and we write GGUF for {', '.join(_ARCHITECTURES)}. {way_out}")
    traits, sayable = (_gemma3_traits if kind == "gemma3_text" else _traits)(config)
    for name, trait in traits.items():
        if trait != sayable[name]:
            raise ConfigError(
                f"{source} has {name} {trait}. A GGUF file of this architecture cannot say so, and who reads it takes "
                f"{sayable[name] or 'none'}: it would be another model. {way_out}"
            )
    return _ARCHITECTURES[kind]


def _traits(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a model has for which there is no key, and what every reader takes for granted."""
    # Of Mistral all layers slide, and none says so.
    slides = "sliding_attention" in config.get("layer_types", ["sliding_attention"])
    window = config.get("sliding_window") if slides else None
    # A window that no text can outgrow is none.
    is_felt = window is not None and window < config["max_position_embeddings"]
    traits = {"positions of type": config["rope_parameters"]["rope_type"], "a window of": window if is_felt else None}
    return traits, {"positions of type": "default", "a window of": None}


def _gemma3_traits(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    num_layers, rope = config["num_hidden_layers"], config["rope_parameters"]
    names = ("query_pre_attn_scalar", "hidden_activation", "attn_logit_softcapping", "final_logit_softcapping")
    traits = {name: config[name] for name in names}
    traits |= {name: config[name] or None for name in ("attention_bias", "use_bidirectional_attention")}
    traits |= {
        "full attention in layers": [n for n, kind in enumerate(config["layer_types"]) if kind == "full_attention"],
        "positions of type": rope["full_attention"]["rope_type"],
        "local positions of type": rope["sliding_attention"]["rope_type"],
        "rope_local_base_freq": rope["sliding_attention"]["rope_theta"],
    }
    sayable = dict.fromkeys(traits) | {
        "query_pre_attn_scalar": convert.gemma3_scalar(config),
        "hidden_activation": "gelu_pytorch_tanh",
        "full attention in layers": list(range(_GEMMA3_PERIOD - 1, num_layers, _GEMMA3_PERIOD)),
        "positions of type": "default",
        "local positions of type": "default",
        "rope_local_base_freq": _GEMMA3_LOCAL_BASE,
    }
    return traits, sayable


def _named(
    architecture: gguf.MODEL_ARCH, config: dict[str, Any], entries: dict[str, Entry]
) -> Iterator[tuple[str, Entry]]:
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, entry in entries.items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if new is None or entry.dtype not in _TORCH:
            raise AuditFailed(
                f"{name} ({entry.dtype}) of {entry.path} has no place in a GGUF file of this architecture."
            )
        yield new, entry


def _stored(entry: Entry, kind: str) -> tuple[gguf.GGMLQuantizationType, int]:
    """A tensor's type in the file, and its bytes."""
    wanted = _TYPES[kind][0]
    if len(entry.shape) < 2:
        wanted = gguf.GGMLQuantizationType.F32
    elif entry.shape[-1] % _BLOCK:
        wanted = gguf.GGMLQuantizationType.F16
    block, block_bytes = gguf.GGML_QUANT_SIZES[wanted]
    num_values = int(np.prod(entry.shape))
    return wanted, num_values // block * block_bytes


def _values(name: str, entry: Entry, stored: gguf.GGMLQuantizationType, config: dict[str, Any]) -> Array:
    data = bytearray().join(entry.pieces())
    values: Array = torch.frombuffer(data, dtype=_TORCH[entry.dtype]).float().numpy().reshape(entry.shape)
    if config["model_type"] in ("llama", "mistral") and (".attn_q." in name or ".attn_k." in name):
        values = _interleaved(values, config["num_attention_heads" if ".attn_q." in name else "num_key_value_heads"])
    if config["model_type"] == "gemma3_text" and name.endswith("norm.weight"):
        values = values + 1.0  # Gemma's norms multiply by one more than their weight
    if stored == gguf.GGMLQuantizationType.F16 and np.abs(values).max() > np.finfo(np.float16).max:
        raise AuditFailed(
            f"{entry.name} reaches {np.abs(values).max():.6g}, which float16 cannot hold. Take --type q8_0."
        )
    return gguf.quants.quantize(values, stored)


def _interleaved(values: Array, num_heads: int) -> Array:
    """Rows of a head in llama.cpp's order: pairs that rotate together stand side by side."""
    half = values.shape[0] // num_heads // 2
    return values.reshape(num_heads, 2, half, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _describe(writer: gguf.GGUFWriter, config: dict[str, Any], kind: str, source: Path) -> None:
    rope: dict[str, Any] = config["rope_parameters"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_name(source.parent.parent.name or source.name)
    writer.add_file_type(_TYPES[kind][1])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if config["model_type"] == "gemma3_text":
        writer.add_sliding_window(config["sliding_window"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def check(source: Path, target: Path, allowed: float, say: Say) -> dict[str, float]:
    """
    Raises:
        ProofFailed: the file, loaded back, is another model or has another tokenizer.
    """
    asked = encoded(source)[:8]
    before = proof.logits_of(load_base(source), asked)
    model, tokenizer, _ = convert.read(target)
    after = proof.logits_of(model, asked)
    error = proof.error(after, before) / float(torch.cat([each.flatten() for each in before]).std())
    say(f"Logits of the file, loaded back, are {error:.2g} standard deviations from the model's (allowed {allowed:g}).")
    if not error <= allowed:
        raise ProofFailed(
            f"The GGUF file, loaded back, is another model: its logits are {error:.3g} away ({allowed:g})."
        )
    if differs := vocabulary.first_difference(source, tokenizer, prompts.load()["ordinary"]):
        raise ProofFailed(f"The GGUF file, loaded back, splits text otherwise: {differs!r}.")
    return {"error_to_source": error, "error_to_source_allowed": allowed}


if __name__ == "__main__":
    main()
