"""Rows on which two models are compared: the frozen prompts as a model reads them, and the run's own data."""

from dataclasses import dataclass
from pathlib import Path

from hotlap.data import packed
from hotlap.data.readers import Message
from hotlap.data.render import Renderer
from hotlap.errors import CorruptFile
from hotlap.export import prompts

_MOST_LOSS_TOKENS = 4096


@dataclass(frozen=True)
class Row:
    """Tokens, and which of them count in a loss."""

    tokens: list[int]
    is_trained: list[bool]


def encoded(model_folder: Path) -> list[list[int]]:
    """The ordinary prompts as a model's chat template and tokenizer have them."""
    renderer = Renderer(model_folder)
    return [renderer.encode_prompt([Message("user", prompt)]) for prompt in prompts.load()["ordinary"]]


def loss_rows(fingerprints: dict[str, str], model_folder: Path) -> tuple[list[Row], str]:
    """Rows on which a loss says something, and what they are: of the run's held-out data where it is here, else of
    its training data, else the frozen prompts."""
    for kind, words in (("held_out", "held-out rows"), ("train", "training rows")):
        try:
            dataset = packed.open_packed(fingerprints[kind]) if kind in fingerprints else None
        except CorruptFile:
            dataset = None
        if dataset is not None:
            return _first(dataset), words
    return [Row(tokens, [True] * len(tokens)) for tokens in encoded(model_folder)], "the frozen prompts"


def _first(dataset: packed.PackedDataset) -> list[Row]:
    rows: list[Row] = []
    num_tokens = 0
    for tokens_T, is_trained_T in dataset.examples():
        if rows and num_tokens + len(tokens_T) > _MOST_LOSS_TOKENS:
            break
        rows.append(Row(tokens_T.tolist(), is_trained_T.tolist()))
        num_tokens += len(tokens_T)
    return rows
