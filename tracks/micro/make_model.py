"""The base model of track micro: a Llama of two layers with random weights, written byte for byte the same anywhere.

Weights are scaled integers of a hash, so no library's random numbers are involved. Standard library only.
"""

import argparse
import array
import hashlib
import json
import sys
from pathlib import Path

WIDTH, INNER, LAYERS, HEADS, VOCABULARY = 32, 64, 2, 4, 300

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 256,
    "dtype": "float32",
}


def shapes() -> dict[str, list[int]]:
    wide, tall = [INNER, WIDTH], [WIDTH, INNER]
    found = {"model.embed_tokens.weight": [VOCABULARY, WIDTH], "lm_head.weight": [VOCABULARY, WIDTH]}
    for layer in range(LAYERS):
        for name, shape in {"gate": wide, "up": wide, "down": tall}.items():
            found[f"model.layers.{layer}.mlp.{name}_proj.weight"] = shape
        for name in "qkvo":
            found[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = [WIDTH, WIDTH]
        for name in ("input", "post_attention"):
            found[f"model.layers.{layer}.{name}_layernorm.weight"] = [WIDTH]
    return {**found, "model.norm.weight": [WIDTH]}


def values(name: str, shape: list[int]) -> bytes:
    """Norms are ones; the rest lies evenly between -a and a, so that activations keep their size."""
    count = shape[0] * (shape[1] if len(shape) == 2 else 1)
    if len(shape) == 1:
        numbers = array.array("f", [1.0] * count)
    else:
        stream = b"".join(hashlib.sha512(f"{name}/{block}".encode()).digest() for block in range(-(-count // 32)))
        whole = array.array("H", stream[: 2 * count])
        reach = 1.0 if name == "model.embed_tokens.weight" else (3.0 / shape[1]) ** 0.5
        numbers = array.array("f", [(value / 32768.0 - 1.0) * reach for value in whole])
    return numbers.tobytes()


def safetensors() -> bytes:
    header, data = {}, b""
    for name, shape in sorted(shapes().items()):
        raw = values(name, shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps({**header, "__metadata__": {"format": "pt"}}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def tokenizer() -> dict[str, object]:
    """Bytes are tokens 0 to 255, each under the printable character that byte-level tokenizers give it."""
    kept = [*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    names = {chr(byte): byte for byte in kept} | {chr(256 + index): byte for index, byte in enumerate(others)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    specials = [{"id": 256 + i, "content": text, **flags} for i, text in enumerate(("<pad>", "<begin>", "<end>"))]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": specials,
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": dict(sorted(names.items(), key=lambda item: item[1])), "merges": []},
    }


def main() -> None:
    assert sys.byteorder == "little"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<end>"}
    (folder / "model.safetensors").write_bytes(safetensors())
    for name, value in {
        "config": CONFIG,
        "generation_config": {"eos_token_id": 258, "pad_token_id": 256},
        "tokenizer": tokenizer(),
        "tokenizer_config": {**tokens, "bos_token": "<begin>"},
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")


if __name__ == "__main__":
    main()
