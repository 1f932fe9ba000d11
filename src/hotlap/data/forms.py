"""The forms in which people write examples, and how each becomes messages.

A form is recognized by its keys, row by row, so the order of rows never matters; or it is named, and then every row
must have it. Keys that belong to no form are ignored. What is doubtful is refused with a reason.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from hotlap.config_data import CleanConfig, ColumnsConfig
from hotlap.data.examples import ROLES, SHOWN_CHARACTERS, Example, Kind, Message, NoExample, kind_of

Record = dict[str, Any]

_SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("observation", "tool", "tool_response", "function_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "function_call"),
}
_PART_TEXTS = ("text", "value")
_NEEDS_TEXT = "Give it text, or remove the row."


@dataclass(frozen=True)
class Form:
    """`keys` announce it; a row that has all of `needed` is complete."""

    name: str
    kind: Kind
    keys: tuple[str, ...]
    needed: tuple[str, ...]
    messages: Callable[[Record], tuple[Message, ...]]


class Reader:
    """Turns records into examples, by a named form or by looking.

    `columns` makes a form of its own; `system` begins conversations that have no system message; `clean` replaces
    patterns in what the assistant says.
    """

    def __init__(
        self, form: str = "auto", columns: ColumnsConfig | None = None, system: str | None = None,
        clean: Sequence[CleanConfig] = (),
    ) -> None:  # fmt: skip
        self._form = _column_form(columns) if columns else None if form == "auto" else FORMS[form]
        self._system = system
        self._clean = [(re.compile(item.pattern), item.replace) for item in clean]

    def example(self, record: Any, line: int, source: str, unit: str) -> Example:
        """
        Raises:
            NoExample: why it is none.
        """
        if not isinstance(record, dict):
            raise NoExample(f"it is {kind_of(record)}, not an object. Write one JSON object a line.", "not an object")
        form = self._form or _found(tuple(record))
        if self._form is not None and not any(key in record for key in form.keys):
            raise NoExample(
                f"it is not of the form '{form.name}' that was named (its keys: {_keys(record)}). "
                f"It needs {' and '.join(repr(key) for key in form.needed)}.",
                f"not of the form '{form.name}'",
            )
        messages = form.messages(record)
        if form.kind != "text":
            messages = self._with_system(messages)
        if self._clean:
            messages = tuple(self._cleaned(message) for message in messages)
        tools = _tools(record) if form.kind == "messages" else ()
        return Example(messages, line, form.kind, source, tools, form.name, unit)

    def _with_system(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        if self._system is None or messages[0].role == "system":
            return messages
        return (Message("system", self._system), *messages)

    def _cleaned(self, message: Message) -> Message:
        if message.role != "assistant" or not message.content:
            return message
        text = message.content
        for pattern, substitute in self._clean:
            text = pattern.sub(substitute, text)
        if not text and not message.tool_calls:
            raise NoExample("data.clean leaves nothing of an answer. Narrow the pattern, or remove the row.")
        return replace(message, content=text)


@functools.lru_cache(maxsize=256)
def _found(keys: tuple[str, ...]) -> Form:
    """The form of a record by its keys."""
    announced = [form for form in FORMS.values() if any(key in keys for key in form.keys)]
    complete = [form for form in announced if all(key in keys for key in form.needed)]
    found = complete or announced
    # Data sets that were written out for other tools often carry the whole as `text` beside its parts.
    found = [form for form in found if form.kind != "text"] or found
    if len(found) == 1:
        return found[0]
    names = ", ".join(f"'{form.name}'" for form in found)
    problem = f"two examples in one ({names})" if found else "no example that hotlap knows"
    raise NoExample(
        f"it is {problem} (its keys: {_keys(keys)}). Name its form with data.format, or its columns with "
        f"data.columns.prompt and data.columns.completion.",
        "two examples in one" if found else "no known form",
    )


def _keys(record: Iterable[str]) -> str:
    return ", ".join(repr(key) for key in record)[:SHOWN_CHARACTERS] or "none"


# --- texts ---


def text_of(record: Record, key: str, name: str | None = None) -> str:
    """The text of a key that must have one."""
    text = optional_text(record, key, name)
    if text is None:
        name = name or key
        if key not in record:
            raise NoExample(f"'{name}' is missing. {_NEEDS_TEXT}")
        raise NoExample(f"'{name}' is {'empty' if record[key] == '' else 'null, not text'}. {_NEEDS_TEXT}")
    return text


def optional_text(record: Record, key: str, name: str | None = None) -> str | None:
    """The text of a key that may be missing, null or empty."""
    text, name = record.get(key), name or key
    if text is None or text == "":
        return None
    if not isinstance(text, str):
        raise NoExample(f"'{name}' is {kind_of(text)}, not text. {_NEEDS_TEXT}")
    return _whole(text, name)


def _whole(text: str, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise NoExample(
            f"'{name}' has half a character, \\u{ord(text[error.start]):04x}, at position {error.start + 1}. "
            f"Write it with its other half, or remove it.",
            f"'{name}' has half a character",
        ) from None
    return text


# --- prompt and answer ---


def _asked(prompt: str, answer: str, system: str | None = None) -> tuple[Message, ...]:
    head = (Message("system", system),) if system else ()
    return (*head, Message("user", prompt), Message("assistant", answer))


def _completion(record: Record) -> tuple[Message, ...]:
    return _asked(text_of(record, "prompt"), text_of(record, "completion"))


def _question(record: Record) -> tuple[Message, ...]:
    return _asked(text_of(record, "question"), text_of(record, "answer"))


def _alpaca(record: Record) -> tuple[Message, ...]:
    prompt, more = text_of(record, "instruction"), optional_text(record, "input")
    asked = _asked(f"{prompt}\n{more}" if more else prompt, text_of(record, "output"), optional_text(record, "system"))
    history = record.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise NoExample("'history' is not a list of pairs. Make it one, or remove it.")
    rounds = [{"question": question, "answer": answer} for question, answer in history]
    told = tuple(message for pair in rounds for message in _question(pair))
    return (*asked[:-2], *told, *asked[-2:])


def _column_form(columns: ColumnsConfig) -> Form:
    def messages(record: Record) -> tuple[Message, ...]:
        system = optional_text(record, columns.system) if columns.system else None
        return _asked(text_of(record, columns.prompt), text_of(record, columns.completion), system)

    keys = (columns.prompt, columns.completion)
    return Form("columns", "completion", keys, keys, messages)


def _text(record: Record) -> tuple[Message, ...]:
    return (Message("assistant", text_of(record, "text")),)


# --- messages ---


def _messages(record: Record) -> tuple[Message, ...]:
    rows = _rows(record["messages"], "messages", "'role' and 'content'")
    return tuple(_message(row, f"messages[{index}]") for index, row in enumerate(rows))


def _rows(value: Any, name: str, needs: str) -> list[Record]:
    """A list of objects; as JSON text or as an object of lists, which is what tables make of it, it is one too."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _json(value, name)
    if isinstance(value, dict) and value and all(isinstance(column, list) for column in value.values()):
        lengths = {len(column) for column in value.values()}
        if len(lengths) == 1:
            value = [dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True)]
    if not isinstance(value, list) or not value:
        what = "an empty list" if value == [] else kind_of(value)
        raise NoExample(f"'{name}' is {what}. Make it a list of objects with {needs}.")
    for index, row in enumerate(value):
        if not isinstance(row, dict):
            raise NoExample(f"'{name}[{index}]' is {kind_of(row)}. Make it an object with {needs}.")
    return value


def _message(row: Record, name: str) -> Message:
    role = text_of(row, "role", f"{name}.role")
    if role not in ROLES:
        raise NoExample(f"'{name}.role' is {role[:SHOWN_CHARACTERS]!r}. It may be {', '.join(ROLES)}.", "unknown role")
    calls = _calls(row.get("tool_calls"), f"{name}.tool_calls") if role == "assistant" else ()
    content = _content(row, name, is_needed=not calls)
    reasoning = optional_text(row, "reasoning_content", f"{name}.reasoning_content") if role == "assistant" else None
    is_trained = _is_trained(row, role, name)
    return Message(role, content, calls, optional_text(row, "name", f"{name}.name"), reasoning, is_trained)


def _content(row: Record, name: str, is_needed: bool) -> str:
    name = f"{name}.content"
    parts = row.get("content")
    if isinstance(parts, list):
        text = "".join(_part(part, f"{name}[{index}]") for index, part in enumerate(parts))
        row = {"content": text}
    return text_of(row, "content", name) if is_needed else optional_text(row, "content", name) or ""


def _part(part: Any, name: str) -> str:
    if isinstance(part, str):
        return _whole(part, name)
    if not isinstance(part, dict):
        raise NoExample(f"'{name}' is {kind_of(part)}. Make it an object with 'type' and 'text'.")
    kind = part.get("type", "text")
    if kind != "text":
        raise NoExample(
            f"'{name}' is of the type {str(kind)[:SHOWN_CHARACTERS]!r}, and hotlap trains on text. Remove the row.",
            "a part that is no text",
        )
    key = next((key for key in _PART_TEXTS if part.get(key) is not None), "text")
    return optional_text(part, key, f"{name}.{key}") or ""


def _is_trained(row: Record, role: str, name: str) -> bool:
    key = next((key for key in ("weight", "loss_weight") if row.get(key) is not None), None)
    if key is None:
        return True
    weight = row[key]
    if isinstance(weight, bool) or weight not in (0, 1):
        raise NoExample(
            f"'{name}.{key}' is {str(weight)[:SHOWN_CHARACTERS]}. It may be 0 or 1; to weigh data sets against each "
            f"other, use data.mix.",
            "a message's weight is neither 0 nor 1",
        )
    if weight == 1 and role != "assistant":
        raise NoExample(f"'{name}.{key}' is 1, and only what the assistant says is trained. Set it to 0.")
    return weight == 1


# --- tools ---


def _calls(value: Any, name: str) -> tuple[dict[str, Any], ...]:
    """Tool calls as `name` and `arguments`, with or without the `function` around them."""
    if value is None or value == []:
        return ()
    rows = _rows(value, name, "'function'")
    return tuple(_call(row.get("function", row), f"{name}[{index}]") for index, row in enumerate(rows))


def _call(call: Any, name: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise NoExample(f"'{name}' is {kind_of(call)}. Make it an object with 'name' and 'arguments'.")
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _json(arguments, f"{name}.arguments")
    if not isinstance(arguments, dict):
        raise NoExample(f"'{name}.arguments' is {kind_of(arguments)}. Make it an object.")
    _whole(json.dumps(arguments, ensure_ascii=False), f"{name}.arguments")
    return {"name": text_of(call, "name", f"{name}.name"), "arguments": arguments}


def _tools(record: Record) -> tuple[dict[str, Any], ...]:
    value = record.get("tools")
    if isinstance(value, str) and value.strip():
        value = _json(value, "tools")
    if value in (None, "", []):
        return ()
    return tuple(_tool(row, f"tools[{index}]") for index, row in enumerate(_rows(value, "tools", "'function'")))


def _tool(row: Record, name: str) -> dict[str, Any]:
    function = row.get("function", row)
    if not isinstance(function, dict):
        raise NoExample(f"'{name}.function' is {kind_of(function)}. Make it an object with 'name'.")
    text_of(function, "name", f"{name}.name")
    _whole(json.dumps(function, ensure_ascii=False), name)
    return {"type": "function", "function": function}


def _json(text: str, name: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        problem = f"'{name}' is not JSON"
        raise NoExample(f"{problem} ({error}). Write it as JSON, or remove the row.", problem) from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


# --- sharegpt ---


def _sharegpt(record: Record) -> tuple[Message, ...]:
    rows = _rows(record["conversations"], "conversations", "'from' and 'value'")
    messages = [_spoken(row, f"conversations[{index}]") for index, row in enumerate(rows)]
    system = optional_text(record, "system")
    if system and messages[0].role != "system":
        messages.insert(0, Message("system", system))
    return tuple(messages)


def _spoken(row: Record, name: str) -> Message:
    if "role" in row:
        return _message(row, name)
    speaker = text_of(row, "from", f"{name}.from")
    role = _SPEAKERS.get(speaker)
    if role is None:
        raise NoExample(
            f"'{name}.from' is {speaker[:SHOWN_CHARACTERS]!r}. It may be {', '.join(_SPEAKERS)}.", "unknown speaker"
        )
    if role != "function_call":
        weight = _is_trained(row, role, name)
        return Message(role, text_of(row, "value", f"{name}.value"), is_trained=weight)
    calls = _json(text_of(row, "value", f"{name}.value"), f"{name}.value")
    calls = calls if isinstance(calls, list) else [calls]
    return Message("assistant", "", _calls(calls, f"{name}.value"), is_trained=_is_trained(row, "assistant", name))


FORMS = {
    form.name: form
    for form in (
        Form("messages", "messages", ("messages",), ("messages",), _messages),
        Form("sharegpt", "messages", ("conversations",), ("conversations",), _sharegpt),
        Form("completion", "completion", ("prompt", "completion"), ("prompt", "completion"), _completion),
        Form("alpaca", "completion", ("instruction", "output"), ("instruction", "output"), _alpaca),
        Form("question-answer", "completion", ("question", "answer"), ("question", "answer"), _question),
        Form("text", "text", ("text",), ("text",), _text),
    )
}
