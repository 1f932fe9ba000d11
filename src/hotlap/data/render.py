"""From messages to tokens, and which of them are trained: the assistant's words and its end-of-turn token.

Training, evaluation and generation share what decides what a model sees: the chat template (`turns`) and exactly the
begin token that the tokenizer wants (`_missing_begin`). A tokenizer without a chat template renders prompt,
completion and the end token as plain text; an example that is plain text is written so in any case.
"""

# L tokens of an example

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotlap.config_data import DataConfig
from hotlap.data.examples import BadRow, Example, Message
from hotlap.data.names import kept_names
from hotlap.data.placeholders import unfilled
from hotlap.data.turns import ChatTemplate, Text
from hotlap.errors import BadData, MissingArtifact

DAY_FUNCTION = "strftime_now"
"""What a chat template calls to write the date."""


@dataclass(frozen=True, eq=False)
class Rendered:
    """An example as tokens. The first is never trained: nothing stands before it to predict it from."""

    tokens_L: npt.NDArray[np.int32]
    is_trained_L: npt.NDArray[np.bool_]

    @property
    def is_trainable(self) -> bool:
        return bool(self.is_trained_L.any())


class Renderer:
    """Writes conversations as tokens, with the tokenizer of a model folder, and its chat template or another.

    Raises:
        MissingArtifact: the folder has no `tokenizer.json`, or the chat template's file is not there.
        BadData: the chat template is none.
    """

    def __init__(
        self, tokenizer_folder: Path, settings: DataConfig | None = None, chat_template: Path | None = None
    ) -> None:
        if not (tokenizer_folder / "tokenizer.json").is_file():
            raise MissingArtifact(
                f"{tokenizer_folder} has no tokenizer.json. Load its tokenizer with transformers' AutoTokenizer and "
                f"call save_pretrained to make one."
            )
        # Not AutoTokenizer: it imports torch, and this class reads tokenizer.json to the letter.
        with kept_names():
            from transformers import PreTrainedTokenizerFast

        self._settings = settings or DataConfig()
        self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder, local_files_only=True)
        self._own_template = chat_template
        if chat_template is not None:
            self._tokenizer.chat_template = read_template(chat_template)
        self._folder = tokenizer_folder
        self._backend = self._tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._begin = self._begin_tokens()
        self._template = ChatTemplate(self._tokenizer, self._settings)
        if self.has_chat_template:
            self._require_template(chat_template or tokenizer_folder)

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    @property
    def eos_token_id(self) -> int | None:
        return self._tokenizer.eos_token_id

    @property
    def num_tokens(self) -> int:
        """One more than the largest token, added ones included."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def pad_token_id(self) -> int:
        """What fills a row. Padding is marked by its segment, so any token serves, the end token too."""
        candidates = (self._tokenizer.pad_token_id, self._tokenizer.eos_token_id, 0)
        return next(token for token in candidates if token is not None)

    def doubts(self) -> list[str]:
        """What a chat template does that a run may fail by, though every example can be rendered."""
        if not self.has_chat_template:
            return []
        found = [] if self._own_template is None else self._blanks(self._own_template)
        with contextlib.suppress(BadData):  # a template that refuses the probe says nothing of its ends
            if not self._template_ends:
                found.append(
                    "The chat template ends an answer with no special token, so no end of an answer is trained and a "
                    "model may talk on. Give one that does with data.chat_template, if answers are to end."
                )
        if DAY_FUNCTION in str(self._tokenizer.chat_template):
            found.append(
                "The chat template writes the date of the day into examples. A run keeps its first day's as long as "
                "its packed data is on this machine; what is made on another day is other data. Give a template "
                "without with data.chat_template, if it is to be the same."
            )
        return found

    def _blanks(self, place: Path) -> list[str]:
        blanks = unfilled(str(self._tokenizer.chat_template), self._tokenizer.special_tokens_map)
        if not blanks:
            return []
        names = ", ".join(f"{{{{ {name} }}}}" for name in blanks)
        return [
            f"The chat template {place} writes {names}, which no conversation has, so nothing stands in its place. "
            f"It may write messages (each with role, content, name, tool_calls, reasoning_content), tools, and the "
            f"tokenizer's special tokens: put your text into the template itself, or into data.system."
        ]

    @cached_property
    def _template_ends(self) -> frozenset[int]:
        """The special token that the chat template ends an answer with, if it does."""
        example = Example((Message("user", "a"), Message("assistant", "b")), line=1, source=str(self._folder))
        rendered = self.render([example])[0]
        last = int(rendered.tokens_L[rendered.is_trained_L][-1])
        return frozenset({last} & set(self._backend.get_added_tokens_decoder()))

    @cached_property
    def stop_token_ids(self) -> frozenset[int]:
        """What ends a generated answer: the end token, and the one that ends the template's assistant turn."""
        stops = set() if self.eos_token_id is None else {self.eos_token_id}
        return frozenset(stops | self._template_ends if self.has_chat_template else stops)

    def decode(self, tokens: Sequence[int], shows_special: bool = False) -> str:
        return self._backend.decode([int(token) for token in tokens], skip_special_tokens=not shows_special)

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """What a model sees before it answers, written and tokenized as in training.

        Raises:
            BadData: the template refuses the messages, or there is none and they are not one user message.
        """
        example = Example(tuple(messages), line=1, source="The prompt,")
        if self.has_chat_template:
            text = self._template.prompt(example)
            if isinstance(text, BadRow):
                raise BadData(f"{text.place}: {text.reason}")
        else:
            if [message.role for message in messages] != ["user"]:
                raise BadData(f"{self._no_template}, so a prompt is one user message. Give one.")
            text = messages[0].content
        ids = self._backend.encode(text, add_special_tokens=False).ids
        return self._missing_begin(ids) + ids

    def render(self, examples: Sequence[Example]) -> list[Rendered]:
        """
        Raises:
            BadData: an example cannot be rendered so that what is trained is certain; names its line.
        """
        found: list[Rendered] = []
        for each in self.render_each(examples):
            if isinstance(each, BadRow):
                raise BadData(f"{each.place}: {each.reason}")
            found += each
        return found

    def render_each(self, examples: Sequence[Example]) -> list[list[Rendered] | BadRow]:
        """Every example's tokens: one piece, or more where the template rewrites earlier answers, or why there is none.

        Raises:
            BadData: no example at all can be rendered with this tokenizer.
        """
        texts = self._texts(examples)
        pieces = [text for each in texts if not isinstance(each, BadRow) for text in each]
        # The Rust threads of encode_batch, never forked processes: a fork after they exist may hang.
        encodings = iter(self._backend.encode_batch([text.text for text in pieces], add_special_tokens=False))
        return [
            each
            if isinstance(each, BadRow)
            else self._finished(example, [self._rendered(example, text, next(encodings)) for text in each])
            for example, each in zip(examples, texts, strict=True)
        ]

    def _texts(self, examples: Sequence[Example]) -> list[list[Text] | BadRow]:
        chats = [example for example in examples if self._is_chat(example)]
        written = iter(self._template.texts(chats))
        return [next(written) if self._is_chat(example) else self._plain(example) for example in examples]

    def _is_chat(self, example: Example) -> bool:
        return self.has_chat_template and example.kind != "text"

    def _rendered(self, example: Example, text: Text, encoding: Any) -> Rendered:
        ids = encoding.ids
        begin = self._missing_begin(ids)
        tokens = np.array(begin + ids, dtype=np.int32)
        is_trained = np.zeros(len(tokens), dtype=np.bool_)
        for first, stop in text.spans:
            mark_span(encoding, first, stop, is_trained[len(begin) :])
        ends = not self._is_chat(example) and self._settings.append_end
        if ends and (len(tokens) == 0 or tokens[-1] != self.eos_token_id):
            tokens = np.append(tokens, np.int32(self.eos_token_id or 0))
            is_trained = np.append(is_trained, bool(text.spans))
        is_trained[:1] = False
        return Rendered(tokens, is_trained)

    def _finished(self, example: Example, pieces: list[Rendered]) -> list[Rendered] | BadRow:
        wants_some = any(example.messages[turn].is_trained for turn in example.answers)
        if not wants_some or example.kind == "text" or any(piece.is_trainable for piece in pieces):
            return pieces
        if self._settings.turns == "last" and not example.messages[example.answers[-1]].is_trained:
            return pieces
        return BadRow(
            example.line,
            "answers that the chat template leaves out",
            "the chat template leaves out every answer, so nothing would be trained. "
            "Remove the row, or use another template with data.chat_template.",
            example.source,
            example.unit,
        )

    def _begin_tokens(self) -> list[int]:
        """What the tokenizer's post-processor puts before a text."""
        encoding = self._backend.encode("a")
        specials = encoding.special_tokens_mask
        return encoding.ids[: specials.index(0)] if 0 in specials else []

    def _missing_begin(self, tokens: list[int]) -> list[int]:
        """The begin tokens, unless the template wrote them."""
        return [] if tokens[: len(self._begin)] == self._begin else self._begin

    def _require_template(self, place: Path) -> None:
        try:
            self._tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
        except Exception as error:  # noqa: BLE001  (a template may refuse the probe; only one that is none is refused)
            if type(error).__name__ == "TemplateSyntaxError":
                raise BadData(f"The chat template of {place} is broken: {error}. Repair it.") from None

    # --- plain text ---

    @property
    def _no_template(self) -> str:
        return f"The tokenizer in {self._folder} has no chat template"

    def _plain(self, example: Example) -> list[Text] | BadRow:
        if self.eos_token_id is None and self._settings.append_end:
            raise BadData(
                f"{self._no_template if example.kind != 'text' else f'The tokenizer in {self._folder} writes text'} "
                f"and no end token, so a model would never learn to stop. "
                f"Set eos_token in its tokenizer_config.json, or data.append_end = false."
            )
        if example.kind == "text":
            text = example.messages[0].content
            return [Text(text, ((0, len(text)),))]
        if [message.role for message in example.messages] != ["user", "assistant"] or example.kind != "completion":
            return BadRow(
                example.line,
                "messages without a chat template",
                f"{self._no_template}, so messages cannot be rendered. Write prompt and completion instead, or name "
                f"a template's file in data.chat_template.",
                example.source,
                example.unit,
            )
        prompt, completion = (message.content for message in example.messages)
        return [Text(prompt + completion, ((len(prompt), len(prompt) + len(completion)),))]


def read_template(path: Path) -> str:
    """
    Raises:
        MissingArtifact: there is no such file, or it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise MissingArtifact(f"The chat template {path} cannot be read: {error}. Check data.chat_template.") from None


def mark_span(encoding: Any, first: int, stop: int, is_trained_L: npt.NDArray[np.bool_]) -> None:
    """Mark the tokens that hold a character of a span. One that lies across its boundary does: it cannot be told
    apart."""
    if first == stop:
        return
    # Asking for two positions is an order of magnitude faster than taking every offset out.
    begin, last = encoding.char_to_token(first), encoding.char_to_token(stop - 1)
    if begin is None or last is None:  # a character that no token holds
        for at, (start, end) in enumerate(encoding.offsets):
            is_trained_L[at] |= start < stop and end > first
        return
    # Several tokens may hold one character; a question for it is answered with the first.
    num_tokens = len(is_trained_L)
    while last + 1 < num_tokens and (span := encoding.token_to_chars(last + 1)) is not None and span[0] < stop:
        last += 1
    is_trained_L[begin : last + 1] = True
