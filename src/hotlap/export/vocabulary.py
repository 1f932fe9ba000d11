"""A byte-level tokenizer as a GGUF file holds it, and whether it splits text as before."""

import json
from pathlib import Path
from typing import Any

import gguf
from transformers import AutoTokenizer

from hotlap.errors import ConfigError

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_RULES = {_QWEN2: "qwen2", _QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|", 1): "llama-bpe"}
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5


def write(writer: gguf.GGUFWriter, folder: Path, num_rows: int) -> None:
    """Tokens, merges, special tokens and template of a model folder; `num_rows` are the model's embedding rows.

    Raises:
        ConfigError: it is no byte-level vocabulary, or splits text by a rule that the format has no name for.
    """
    tokenizer: dict[str, Any] = json.loads((folder / "tokenizer.json").read_bytes())
    model = tokenizer["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise ConfigError(
            f"The tokenizer in {folder} is no byte-level BPE ({model['type']}), which is all that we write into GGUF. "
            f"llama.cpp's convert_hf_to_gguf.py reads the same folder."
        )
    texts = [f"[PAD{number}]" for number in range(num_rows)]
    types = [_UNUSED] * num_rows
    for text, number in model["vocab"].items():
        texts[number], types[number] = text, _NORMAL
    for added in tokenizer.get("added_tokens", []):
        texts[added["id"]] = added["content"]
        types[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitting_rule(tokenizer.get("pre_tokenizer") or {}, folder))
    writer.add_token_list(texts)
    writer.add_token_types(types)
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in model["merges"]])
    _write_specials(writer, folder)


def _write_specials(writer: gguf.GGUFWriter, folder: Path) -> None:
    loaded: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for number, add in (
        (loaded.bos_token_id, writer.add_bos_token_id),
        (loaded.eos_token_id, writer.add_eos_token_id),
        (loaded.pad_token_id, writer.add_pad_token_id),
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
