"""A byte-level tokenizer, or Gemma's, as a GGUF file holds it, and whether it splits text as before."""

import json
import re
from pathlib import Path
from typing import Any

import gguf
from transformers import AutoTokenizer

from hotlap.errors import ConfigError

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_RULES = {_QWEN2: "qwen2", _QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|", 1): "llama-bpe"}
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 3, 4, 5, 6
_SPACE = "▁"
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
_GEMMA = {
    "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
    "pre_tokenizer": {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    },
}
"""Before its merges. Each space is a character, and none is put in front."""


def write(writer: gguf.GGUFWriter, folder: Path, num_rows: int) -> None:
    """Tokens, merges, special tokens and template of a model folder; `num_rows` are the model's embedding rows.

    Raises:
        ConfigError: it is another kind of vocabulary, or splits text by a rule that the format has no name for.
    """
    tokenizer: dict[str, Any] = json.loads((folder / "tokenizer.json").read_bytes())
    model = tokenizer["model"]
    is_gemma = bool(model.get("byte_fallback")) and {name: tokenizer.get(name) for name in _GEMMA} == _GEMMA
    if model["type"] != "BPE" or (model.get("byte_fallback") and not is_gemma):
        raise ConfigError(
            f"The tokenizer in {folder} is neither a byte-level BPE nor Gemma's ({model['type']}), which is all that "
            f"we write into GGUF. llama.cpp's convert_hf_to_gguf.py reads the same folder."
        )
    texts = [f"[PAD{number}]" for number in range(num_rows)]
    types = [_UNUSED] * num_rows
    for text, number in model["vocab"].items():
        texts[number] = text
        types[number] = _BYTE if is_gemma and _BYTE_PIECE.fullmatch(text) else _NORMAL
    for added in tokenizer.get("added_tokens", []):
        # What is found in the text before spaces are replaced is written as it stands there.
        is_raw = is_gemma and not added["special"]
        texts[added["id"]] = added["content"].replace(_SPACE, " ") if is_raw else added["content"]
        types[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
    merges = [each.split(" ") if isinstance(each, str) else each for each in model["merges"]]
    if is_gemma:
        _write_scores(writer, folder, num_rows, [model["vocab"]["".join(pair)] for pair in merges])
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(splitting_rule(tokenizer.get("pre_tokenizer") or {}, folder))
        writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_token_list(texts)
    writer.add_token_types(types)
    _write_specials(writer, folder)


def _write_scores(writer: gguf.GGUFWriter, folder: Path, num_rows: int, merged: list[int]) -> None:
    """In place of merges: of what could be merged, that with the highest score is. `merged` are the tokens that merges
    make, in the order of the merges."""
    if merged != sorted(merged):
        raise ConfigError(
            f"The tokenizer in {folder} merges in another order than that of its tokens, which is how a GGUF file of "
            f"its kind is read. llama.cpp's convert_hf_to_gguf.py reads the same folder."
        )
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_scores([-float(number) for number in range(num_rows)])
    writer.add_add_space_prefix(False)


def _write_specials(writer: gguf.GGUFWriter, folder: Path) -> None:
    loaded: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for number, add in (
        (loaded.bos_token_id, writer.add_bos_token_id),
        (loaded.eos_token_id, writer.add_eos_token_id),
        (loaded.pad_token_id, writer.add_pad_token_id),
        (loaded.unk_token_id, writer.add_unk_token_id),
    ):
        if number is not None:
            add(number)
    first: list[int] = loaded("a")["input_ids"]
    writer.add_add_bos_token(bool(first) and first[0] == loaded.bos_token_id)
    if loaded.chat_template:
        writer.add_chat_template(loaded.chat_template)


def splitting_rule(pre_tokenizer: dict[str, Any], folder: Path) -> str:
    """llama.cpp's name for how text is split before merges.

    Raises:
        ConfigError: it has none that we know.
    """
    parts: list[dict[str, Any]] = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kinds = [part.get("type") for part in parts]
    if kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits") and parts[1].get("use_regex", True):
        return "smollm"
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Split", "ByteLevel"] and (rule := _RULES.get(parts[0]["pattern"].get("Regex", ""))):
        return rule
    raise ConfigError(
        f"The tokenizer in {folder} splits text by a rule ({', '.join(map(str, kinds))}) for which GGUF has no name "
        f"that we know. llama.cpp's convert_hf_to_gguf.py reads the same folder."
    )


def first_difference(folder: Path, other: Any, texts: list[str]) -> str | None:
    """The first text that `other` splits otherwise than the folder's tokenizer."""
    ours: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    options = {"add_special_tokens": False}
    return next((text for text in texts if ours(text, **options).input_ids != other(text, **options).input_ids), None)
