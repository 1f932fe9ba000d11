"""Conversations in a chat template's hand, and where in them the trained answers stand.

Where an answer begins and ends is read off the template itself: it is rendered up to the answer as for generation,
and again with the answer. No marker is ever searched for, so the template needs none, and text that looks like one
misleads nobody.

Some templates write an answer differently once more turns follow, most often leaving out its thoughts. In the whole
conversation such an answer is not what the model would have written, so it becomes an example of its own: the
conversation up to and with it, as the template writes it at that moment, with that answer alone trained.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hotlap.config_data import DataConfig
from hotlap.data.examples import SHOWN_CHARACTERS, BadRow, Example, Message
from hotlap.data.verbatim import Skeletons, copies_contents

Cut = tuple[int, int]
"""An example's index, and how many of its messages are written."""


@dataclass(frozen=True)
class Text:
    """A rendering, and the character ranges in it that are trained."""

    text: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Refused:
    error: str


class ChatTemplate:
    """The chat template that a tokenizer carries."""

    def __init__(self, tokenizer: Any, settings: DataConfig) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._openings: dict[str, str | _Refused] = {}
        self._skeletons: Skeletons | None = None
        if isinstance(tokenizer.chat_template, str) and copies_contents(tokenizer.chat_template):
            self._skeletons = Skeletons(lambda chat, is_prompt: self._apply([chat], None, is_prompt)[0])

    def prompt(self, example: Example) -> str | BadRow:
        """The conversation as a model sees it before it answers."""
        example = self._prepared(example)
        written = self._write([example], [(0, len(example.messages))], is_prompt=True)[0]
        return written if isinstance(written, str) else _refusal(example, written)

    def texts(self, examples: Sequence[Example]) -> list[list[Text] | BadRow]:
        """Each example as one text, or more where the template rewrites earlier answers."""
        examples = [self._prepared(example) for example in examples]
        turns = [(row, turn) for row, example in enumerate(examples) for turn in self._trained(example)]
        ends = {(row, len(example.messages)) for row, example in enumerate(examples)}
        cuts = sorted(ends.union((row, turn + 1) for row, turn in turns))
        through = dict(zip(cuts, self._write(examples, cuts), strict=True))
        later = [(row, turn) for row, turn in turns if turn > 0]
        before = dict(zip(later, self._write(examples, later, is_prompt=True), strict=True))
        before |= {(row, turn): self._opening(examples[row]) for row, turn in turns if turn == 0}
        mine: list[list[int]] = [[] for _ in examples]
        for row, turn in turns:
            mine[row].append(turn)
        return [
            _texts(
                example,
                through[row, len(example.messages)],
                [(turn, before[row, turn], through[row, turn + 1]) for turn in mine[row]],
            )
            for row, example in enumerate(examples)
        ]

    def _trained(self, example: Example) -> Sequence[int]:
        turns = example.answers if self._settings.turns == "all" else example.answers[-1:]
        return [turn for turn in turns if example.messages[turn].is_trained]

    def _opening(self, example: Example) -> str | _Refused:
        """What a template writes before the answer of a conversation that begins with one.

        Templates cannot render a conversation of no messages, so it is what two have in common that differ in their
        answer's first letter.
        """
        key = json.dumps(example.tools)
        if key not in self._openings:
            probes = [replace(example, messages=(Message("assistant", letter),)) for letter in "ab"]
            one, other = self._write(probes, [(0, 1), (1, 1)])
            if isinstance(one, str) and isinstance(other, str):
                differs = (at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
                self._openings[key] = one[: next(differs, None)]
            else:
                self._openings[key] = one if isinstance(one, _Refused) else other
        return self._openings[key]

    def _write(self, examples: Sequence[Example], cuts: Sequence[Cut], is_prompt: bool = False) -> list[str | _Refused]:
        """Examples up to a number of messages; a prompt asks for the assistant's turn next."""
        if self._skeletons is None:
            return self._ask(examples, cuts, is_prompt)
        found = [self._by_shape(self._skeletons, examples[row], num, is_prompt) for row, num in cuts]
        unknown = [cut for cut, text in zip(cuts, found, strict=True) if text is None]
        asked = iter(self._ask(examples, unknown, is_prompt))
        return [next(asked) if text is None else text for text in found]

    def _by_shape(self, skeletons: Skeletons, example: Example, num_messages: int, is_prompt: bool) -> str | None:
        if example.tools:
            return None
        try:
            return skeletons.write(example.messages[:num_messages], is_prompt)
        except Exception:  # noqa: BLE001  (it refuses the shape, and says of the conversation itself why)
            return None

    def _ask(self, examples: Sequence[Example], cuts: Sequence[Cut], is_prompt: bool) -> list[str | _Refused]:
        chats = [[_as_dict(message) for message in examples[row].messages[:num]] for row, num in cuts]
        tools = [examples[row].tools for row, _ in cuts]
        if not any(tools):
            try:
                return self._apply(chats, None, is_prompt) if chats else []
            except Exception:  # noqa: BLE001  (whatever it is, it is raised again below, by the one that raises it)
                pass
        return [self._write_one(chat, list(mine), is_prompt) for chat, mine in zip(chats, tools, strict=True)]

    def _write_one(self, chat: list[dict[str, Any]], tools: list[dict[str, Any]], is_prompt: bool) -> str | _Refused:
        try:
            return self._apply([chat], tools or None, is_prompt)[0]
        except Exception as error:  # noqa: BLE001  (a template is somebody's code: whatever it raises is about its input)
            return _Refused(str(error))

    def _apply(self, chats: list[list[dict[str, Any]]], tools: list[dict[str, Any]] | None, is_prompt: bool) -> Any:
        return self._tokenizer.apply_chat_template(chats, tools=tools, tokenize=False, add_generation_prompt=is_prompt)

    def _prepared(self, example: Example) -> Example:
        if self._settings.tools == "template":
            return example
        return with_tools_as_text(example)


def _texts(
    example: Example, whole: str | _Refused, turns: Sequence[tuple[int, str | _Refused, str | _Refused]]
) -> list[Text] | BadRow:
    if isinstance(whole, _Refused):
        return _refusal(example, whole)
    if (missing := _unwritten_tool(example, whole)) is not None:
        return missing
    spans: list[tuple[int, int]] = []
    alone: list[Text] = []
    for turn, before, through in turns:
        if isinstance(before, _Refused) or isinstance(through, _Refused):
            return _refusal(example, before if isinstance(before, _Refused) else through)
        # What a template writes after the end of a turn is white space.
        through = through.rstrip()
        if not through.startswith(before):
            return _bad(
                example,
                f"the chat template writes message {turn + 1} differently when it is asked for than when it is given, "
                f"so what is trained would not be what the model writes. Use another template with "
                f"data.chat_template, or remove the row.",
                "an answer that the template asks for differently",
            )
        if (missing := _unwritten_call(example, turn, through[len(before) :])) is not None:
            return missing
        span = (len(before), len(through))
        if whole.startswith(through):
            spans.append(span)
        else:
            alone.append(Text(through, (span,)))
    return alone if alone and not spans else [*alone, Text(whole, tuple(spans))]


def _unwritten_tool(example: Example, whole: str) -> BadRow | None:
    name = next((tool["function"]["name"] for tool in example.tools if tool["function"]["name"] not in whole), None)
    return _unwritten(example, f"tool {name!r}") if name is not None else None


def _unwritten_call(example: Example, turn: int, answer: str) -> BadRow | None:
    name = next((call["name"] for call in example.messages[turn].tool_calls if call["name"] not in answer), None)
    return _unwritten(example, f"call of {name!r} in message {turn + 1}") if name is not None else None


def _unwritten(example: Example, what: str) -> BadRow:
    return _bad(
        example,
        f"the chat template leaves out the {what[:SHOWN_CHARACTERS]}. Write tools into the text with "
        f'data.tools = "text", or use a template that writes them.',
        "tools that the chat template leaves out",
    )


def _refusal(example: Example, refused: Any) -> BadRow:
    return _bad(
        example,
        f"the tokenizer's chat template refuses the conversation: {refused.error}. "
        f"Change it, or use another template with data.chat_template.",
        "a conversation that the chat template refuses",
    )


def _bad(example: Example, reason: str, kind: str) -> BadRow:
    return BadRow(example.line, kind, reason, example.source, example.unit)


def _as_dict(message: Message) -> dict[str, Any]:
    row: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        row["tool_calls"] = [{"type": "function", "function": call} for call in message.tool_calls]
    if message.name is not None:
        row["name"] = message.name
    if message.reasoning is not None:
        row["reasoning_content"] = message.reasoning
    return row


# --- tools as text ---


def with_tools_as_text(example: Example) -> Example:
    """Tools in the system message, calls and what they gave in the messages' text, for templates that know none."""
    messages = [_with_calls_as_text(message) for message in example.messages]
    if example.tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in example.tools)
        told = f"You may call these tools:\n<tools>\n{listed}\n</tools>"
        if messages[0].role == "system":
            messages[0] = replace(messages[0], content=f"{messages[0].content}\n\n{told}")
        else:
            messages.insert(0, Message("system", told))
    return replace(example, messages=tuple(messages), tools=())


def _with_calls_as_text(message: Message) -> Message:
    if message.role == "tool":
        return Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
    if not message.tool_calls:
        return message
    calls = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in message.tool_calls]
    return replace(message, content="\n".join([*([message.content] if message.content else []), *calls]), tool_calls=())
