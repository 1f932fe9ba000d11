"""From messages to tokens, and which of them are trained: the assistant's words and its end-of-turn token.

Training, evaluation and generation share what decides what a model sees: the tokenizer's own chat template (`_write`)
and exactly the begin token that it wants (`_missing_begin`). Where an answer begins and ends is read off the template
itself: it is rendered up to the answer as for generation, and again with the answer. No marker is ever searched for,
so the template needs none, and text that looks like one misleads nobody.

A tokenizer without a chat template renders prompt, completion and the end token as plain text.
"""

# L tokens of an example

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotlap.data.readers import Example, Message
from hotlap.errors import BadData, MissingArtifact


@dataclass(frozen=True, eq=False)
class Rendered:
    """An example as tokens. The first is never trained: nothing stands before it to predict it from."""

    tokens_L: npt.NDArray[np.int32]
    is_trained_L: npt.NDArray[np.bool_]

    @property
    def is_trainable(self) -> bool:
        return bool(self.is_trained_L.any())


@dataclass(frozen=True)
class _Text:
    """A rendering, and the character ranges in it that are trained."""

    text: str
    spans: tuple[tuple[int, int], ...]


class Renderer:
    """Writes conversations as tokens, with the tokenizer and the chat template of a model folder.

    Raises:
        MissingArtifact: the folder has no `tokenizer.json`.
    """

    def __init__(self, tokenizer_folder: Path) -> None:
        if not (tokenizer_folder / "tokenizer.json").is_file():
            raise MissingArtifact(
                f"{tokenizer_folder} has no tokenizer.json. Load its tokenizer with transformers' AutoTokenizer and "
                f"call save_pretrained to make one."
            )
        # Not AutoTokenizer: it imports torch, and this class reads tokenizer.json to the letter.
        from transformers import PreTrainedTokenizerFast

        self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder, local_files_only=True)
        self._folder = tokenizer_folder
        self._backend = self._tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._begin = self._begin_tokens()

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    @property
    def eos_token_id(self) -> int | None:
        return self._tokenizer.eos_token_id

    @property
    def pad_token_id(self) -> int:
        """What fills a row. Padding is marked by its segment, so any token serves, the end token too."""
        candidates = (self._tokenizer.pad_token_id, self._tokenizer.eos_token_id, 0)
        return next(token for token in candidates if token is not None)

    @cached_property
    def stop_token_ids(self) -> frozenset[int]:
        """What ends a generated answer: the end token, and the one that ends the template's assistant turn."""
        stops = set() if self.eos_token_id is None else {self.eos_token_id}
        if self.has_chat_template:
            example = Example((Message("user", "a"), Message("assistant", "b")), line=1, source=str(self._folder))
            rendered = self.render([example])[0]
            last = int(rendered.tokens_L[rendered.is_trained_L][-1])
            stops |= {last} & set(self._backend.get_added_tokens_decoder())
        return frozenset(stops)

    def decode(self, tokens: Sequence[int], shows_special: bool = False) -> str:
        return self._backend.decode([int(token) for token in tokens], skip_special_tokens=not shows_special)

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """What a model sees before it answers, written and tokenized as in training.

        Raises:
            BadData: the template refuses the messages, or there is none and they are not one user message.
        """
        example = Example(tuple(messages), line=1, source="The prompt,")
        if self.has_chat_template:
            text = self._write([(example, len(messages))], is_prompt=True)[0]
        else:
            if [message.role for message in messages] != ["user"]:
                raise BadData(f"{self._no_template}, so a prompt is one user message. Give one.")
            text = messages[0].content
        encoding = self._backend.encode(text, add_special_tokens=False)
        return self._missing_begin(encoding.ids) + encoding.ids

    def render(self, examples: Sequence[Example]) -> list[Rendered]:
        """
        Raises:
            BadData: an example cannot be rendered so that what is trained is certain; names its line.
        """
        texts = self._chats(examples) if self.has_chat_template else [self._plain(example) for example in examples]
        # The Rust threads of encode_batch, never forked processes: a fork after they exist may hang.
        encodings = self._backend.encode_batch([text.text for text in texts], add_special_tokens=False)
        return [self._rendered(*each) for each in zip(examples, texts, encodings, strict=True)]

    def _rendered(self, example: Example, text: _Text, encoding: Any) -> Rendered:
        begin = self._missing_begin(encoding.ids)
        tokens = begin + encoding.ids
        is_trained = [False] * len(begin) + _touched(encoding.offsets, text.spans)
        if not self.has_chat_template and tokens[-1:] != [self.eos_token_id]:
            tokens.append(self.eos_token_id)
            is_trained.append(True)
        is_trained[:1] = [False]
        rendered = Rendered(np.array(tokens, dtype=np.int32), np.array(is_trained, dtype=np.bool_))
        if text.spans and not rendered.is_trainable:
            raise BadData(
                f"{example.place}: the chat template leaves out every answer, so nothing would be trained. "
                f"Remove the line, or use a base model with another template."
            )
        return rendered

    def _begin_tokens(self) -> list[int]:
        """What the tokenizer's post-processor puts before a text."""
        encoding = self._backend.encode("a")
        specials = encoding.special_tokens_mask
        return encoding.ids[: specials.index(0)] if 0 in specials else []

    def _missing_begin(self, tokens: list[int]) -> list[int]:
        """The begin tokens, unless the template wrote them."""
        return [] if tokens[: len(self._begin)] == self._begin else self._begin

    # --- plain text ---

    @property
    def _no_template(self) -> str:
        return f"The tokenizer in {self._folder} has no chat template"

    def _plain(self, example: Example) -> _Text:
        if example.kind != "completion":
            raise BadData(
                f"{example.place}: {self._no_template}, so messages cannot be rendered. "
                f"Write prompt and completion instead, or use a base model with a chat template."
            )
        if self.eos_token_id is None:
            raise BadData(
                f"{self._no_template} and no end token, so a model would never learn to stop. "
                f"Set eos_token in its tokenizer_config.json."
            )
        prompt, completion = (message.content for message in example.messages)
        return _Text(prompt + completion, ((len(prompt), len(prompt) + len(completion)),))

    # --- chat templates ---

    def _chats(self, examples: Sequence[Example]) -> list[_Text]:
        turns = [
            (row, turn)
            for row, example in enumerate(examples)
            for turn, message in enumerate(example.messages)
            if message.role == "assistant"
        ]
        ends = sorted(
            {(row, len(example.messages)) for row, example in enumerate(examples)}.union(
                (row, turn + 1) for row, turn in turns
            )
        )
        through = dict(zip(ends, self._write([(examples[row], num) for row, num in ends]), strict=True))
        later = [(row, turn) for row, turn in turns if turn > 0]
        before = dict(
            zip(later, self._write([(examples[row], num) for row, num in later], is_prompt=True), strict=True)
        )
        before |= {(row, turn): self._opening(examples[row]) for row, turn in turns if turn == 0}
        wholes = [through[row, len(example.messages)] for row, example in enumerate(examples)]
        spans: list[list[tuple[int, int]]] = [[] for _ in examples]
        for row, turn in turns:
            spans[row].append(_span(examples[row], turn, before[row, turn], through[row, turn + 1], wholes[row]))
        return [_Text(whole, tuple(ranges)) for whole, ranges in zip(wholes, spans, strict=True)]

    def _opening(self, example: Example) -> str:
        """What a template writes before the answer of a conversation that begins with one.

        Templates cannot render a conversation of no messages, so it is what two have in common that differ in their
        answer's first letter.
        """
        probes = [Example((Message("assistant", letter),), example.line, source=example.source) for letter in "ab"]
        one, other = self._write([(probe, 1) for probe in probes])
        differs = (at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
        return one[: next(differs, None)]

    def _write(self, cuts: Sequence[tuple[Example, int]], is_prompt: bool = False) -> list[str]:
        """Examples up to a number of messages in the template's hand; a prompt asks for the assistant's turn next."""
        conversations = [
            [{"role": message.role, "content": message.content} for message in example.messages[:num_messages]]
            for example, num_messages in cuts
        ]
        if not conversations:
            return []
        try:
            return self._tokenizer.apply_chat_template(conversations, tokenize=False, add_generation_prompt=is_prompt)
        except Exception as error:  # a template is somebody's code: whatever it raises is about its input
            if len(cuts) > 1:  # one by one, to tell which
                return [self._write([cut], is_prompt)[0] for cut in cuts]
            raise BadData(
                f"{cuts[0][0].place}: the tokenizer's chat template refuses the conversation: {error}. "
                f"Change it, or use a base model with another template."
            ) from error


def _touched(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """Which tokens hold a character of a span. One that lies across its boundary does: it cannot be told apart."""
    if len(spans) == 1:
        first, stop = spans[0]
        return [start < stop and end > first for start, end in offsets]
    return [any(start < stop and end > first for first, stop in spans) for start, end in offsets]


def _span(example: Example, turn: int, before: str, through: str, whole: str) -> tuple[int, int]:
    """Where the answer of a turn, with its end-of-turn token, stands in the whole conversation."""
    # What a template writes after the end of a turn is white space.
    through = through.rstrip()
    if not (through.startswith(before) and whole.startswith(through)):
        raise BadData(
            f"{example.place}: the chat template writes message {turn + 1} differently when it is asked for, given or "
            f"followed by others, so what is trained would not be what the model writes. "
            f"End the example with that message, or use a base model with another template."
        )
    return len(before), len(through)
