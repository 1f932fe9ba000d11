"""Small data of the bug reports: a byte tokenizer (F2), rows (F3) and a chat template without markers (F4)."""

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

PAD, BEGIN, END, USER, ASSISTANT, SYSTEM, TURN_END = range(256, 263)
SPECIALS = ("<pad>", "<begin>", "<end>", "<user>", "<assistant>", "<system>", "<turn_end>")
NUM_ENTRIES = 263

F4 = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '<turn_end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
"""Role token, text, turn end; no marks around what is trained."""

F4_BEGIN = "{{ '<begin>' }}" + F4
"""F4 for a tokenizer whose template writes the begin token itself."""


def write_byte_tokenizer(
    folder: Path,
    chat_template: str | None = F4,
    adds_begin: bool = False,
    pad_token: str = "<pad>",
    num_entries: int = NUM_ENTRIES,
) -> Path:
    """F2: ids 0-255 are the bytes, then the special tokens, then unused ones up to `num_entries`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_byte_tokenizer(adds_begin, num_entries), encoding="utf-8")
    _write_settings(folder, chat_template, bos="<begin>", eos="<end>", pad=pad_token)
    return folder


@cache
def _byte_tokenizer(adds_begin: bool, num_entries: int) -> str:
    tokenizer = Tokenizer(
        models.BPE(vocab={character: byte for byte, character in byte_characters().items()}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    unused = [f"<unused{number}>" for number in range(NUM_ENTRIES, num_entries)]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in [*SPECIALS, *unused]])
    if adds_begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<begin> $A", pair="<begin> $A $B", special_tokens=[("<begin>", BEGIN)]
        )
    return tokenizer.to_str(pretty=True)


def save_tokenizer(folder: Path, tokenizer: Tokenizer, chat_template: str | None, **specials: str) -> None:
    """`specials`: texts by name, `bos`, `eos`, `pad`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_settings(folder, chat_template, **specials)


def _write_settings(folder: Path, chat_template: str | None, **specials: str) -> None:
    settings: dict[str, Any] = {f"{name}_token": text for name, text in specials.items()}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")


def byte_characters() -> dict[int, str]:
    """The printable character that byte-level tokenizers write for each byte."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + index) for index, byte in enumerate(others)}


def f3_rows(count: int = 64) -> list[dict[str, str]]:
    """Row i asks `q<i>` and answers `a<i>` one to seven times."""
    return [{"prompt": f"q{i}", "completion": f"a{i}" * (1 + i % 7)} for i in range(count)]


def conversation(*turns: str) -> dict[str, Any]:
    """`"user: hi"`, `"assistant: yo"` as a row of messages."""
    pairs = [turn.split(": ", 1) for turn in turns]
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


def f4_conversations(count: int = 10) -> list[dict[str, Any]]:
    """Conversations of two rounds, of different lengths."""
    return [
        conversation(
            f"user: q{i}", f"assistant: a{i}" + "x" * (i % 11), f"user: r{i}" + "y" * (i % 3), f"assistant: b{i}"
        )
        for i in range(count)
    ]


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def byte_ids(text: str) -> list[int]:
    """F2's tokens of a text in which special tokens may stand."""
    ids: list[int] = []
    while text:
        special = next((index for index, name in enumerate(SPECIALS) if text.startswith(name)), None)
        if special is None:
            ids += text[0].encode()
            text = text[1:]
        else:
            ids.append(256 + special)
            text = text[len(SPECIALS[special]) :]
    return ids


def text_of(ids: Sequence[int]) -> str:
    """The inverse of `byte_ids`."""
    pieces = [bytes([token]) if token < 256 else SPECIALS[token - 256].encode() for token in map(int, ids)]
    return b"".join(pieces).decode()
