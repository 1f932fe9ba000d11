"""What is read: conversations, and what could not become one, with the reason."""

from dataclasses import dataclass
from typing import Any, Literal

ROLES = ("system", "user", "assistant", "tool")

SHOWN_CHARACTERS = 200

Kind = Literal["messages", "completion", "text"]


@dataclass(frozen=True)
class Message:
    """One turn. `tool_calls` are objects of `name` and `arguments`; `is_trained` can only be taken from an answer."""

    role: str
    content: str
    tool_calls: tuple[dict[str, Any], ...] = ()
    name: str | None = None
    reasoning: str | None = None
    is_trained: bool = True


@dataclass(frozen=True)
class Example:
    """One conversation. A `completion` was given as prompt and completion: two messages, user and assistant; a `text`
    is one assistant's message that no template touches. `line` is where it begins, or its row from 1."""

    messages: tuple[Message, ...]
    line: int
    kind: Kind = "messages"
    source: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    form: str = ""
    unit: str = "line"

    @property
    def place(self) -> str:
        """Where it was read, for error messages."""
        return place_of(self.source, self.line, self.unit)

    @property
    def answers(self) -> tuple[int, ...]:
        """Which messages are the assistant's."""
        return tuple(index for index, message in enumerate(self.messages) if message.role == "assistant")


@dataclass(frozen=True)
class BadRow:
    """A row of a source that is no example. `reason` has whole sentences, `kind` the few words it is counted by."""

    line: int
    kind: str
    reason: str
    source: str = ""
    unit: str = "line"

    @property
    def place(self) -> str:
        return place_of(self.source, self.line, self.unit)


class NoExample(Exception):
    """Why a row is no example, and what to do, in sentences. `kind` is the same in few words, without the row's own."""

    def __init__(self, reason: str, kind: str | None = None) -> None:
        super().__init__(reason)
        self.kind = kind or reason.partition(". ")[0]


def place_of(source: str, line: int, unit: str) -> str:
    return f"{source} {unit} {line}" if source else f"{unit.capitalize()} {line}"


def kind_of(value: Any) -> str:
    """What a JSON value is, in words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")
