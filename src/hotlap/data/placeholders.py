"""Placeholders that nobody fills in: in what examples say, and in a chat template of one's own."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from hotlap.data.examples import Example

# Three characters at least: `{{x}}` is what formulas are full of.
_PLACEHOLDER = re.compile(r"\{\{\s?([A-Za-z_][\w.-]{2,31})\s?\}\}")


def placeholder_in(example: Example) -> str | None:
    """The first one that a message holds, as it stands there."""
    for message in example.messages:
        if "{{" in message.content and (found := _PLACEHOLDER.search(message.content)):
            return found[0]
    return None


def unfilled(template: str, tokenizer_s: Mapping[str, str]) -> list[str]:
    """What a chat template writes that no conversation has, so that it writes nothing in its place: names, and keys of
    a message with a dot before them. Found by having it write conversations of every role.

    `tokenizer_s` are the names that the tokenizer fills in. What the template asks about first (`is defined`, an `if`)
    is not written, so it is not told.
    """
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    blanks: dict[str, None] = {}

    class Noted(jinja2.Undefined):
        """Nothing, which notes that it was written."""

        def __str__(self) -> str:
            name, of = self._undefined_name, self._undefined_obj
            if name is not None:  # an `if` without `else` has none
                blanks[name if of is jinja2.utils.missing else f".{name}"] = None
            return ""

    environment = ImmutableSandboxedEnvironment(undefined=Noted, extensions=["jinja2.ext.loopcontrols"])
    try:
        compiled = environment.from_string(template)
    except jinja2.TemplateSyntaxError:  # a tag that transformers adds, or none at all, which is told elsewhere
        return []
    functions = {"raise_exception": _raise, "strftime_now": lambda _format: ""}
    for roles in _CONVERSATIONS:
        given = {"messages": list(map(_message, roles)), "tools": None, "documents": None, **functions, **tokenizer_s}
        for is_prompt in (False, True):
            with suppress(Exception):  # a template may refuse a conversation, and what it does not take it cannot write
                compiled.render(**given, add_generation_prompt=is_prompt)
    return list(blanks)


_CONVERSATIONS: Sequence[Sequence[str]] = (
    ("user", "assistant"),
    ("system", "user", "assistant", "user", "assistant"),
    ("user", "assistant", "tool", "assistant"),
)


def _message(role: str) -> dict[str, Any]:
    """One with every key that a conversation of ours has."""
    return {"role": role, "content": "a", "name": "", "tool_calls": [], "reasoning_content": ""}


def _raise(words: str) -> None:
    raise ValueError(words)
