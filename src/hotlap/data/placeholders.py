"""Placeholders that nobody fills in: in what examples say, and in a chat template of one's own."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from hotlap.data.examples import Example

# Three characters at least: `{{x}}` is what formulas are full of.
_PLACEHOLDER = re.compile(r"\{\{\s?([A-Za-z_][\w.-]{2,31})\s?\}\}")

_OF_A_CONVERSATION = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
_OF_A_MESSAGE = {"role", "content", "tool_calls", "name", "reasoning_content"}


def placeholder_in(example: Example) -> str | None:
    """The first one that a message holds, as it stands there."""
    for message in example.messages:
        if "{{" in message.content and (found := _PLACEHOLDER.search(message.content)):
            return found[0]
    return None


def unfilled(template: str, tokenizer_s: Iterable[str]) -> list[str]:
    """What a chat template writes that no conversation has, so that it writes nothing in its place.

    `tokenizer_s` are the names that the tokenizer fills in. What the template asks about first (`is defined`, an `if`)
    is meant to be missing at times, and is not told.
    """
    import jinja2
    from jinja2 import meta, nodes

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(template)
    except jinja2.TemplateSyntaxError:  # a tag that transformers adds, or none at all, which is told elsewhere
        return []
    asked = {place for node in tree.find_all((nodes.If, nodes.CondExpr)) for place in _places(node.test)}
    asked |= {place for node in tree.find_all(nodes.Filter) if node.name in ("default", "d") for place in _places(node)}
    given = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}  # by `set`, in whatever branch
    free = meta.find_undeclared_variables(tree) - given - _OF_A_CONVERSATION - {*tokenizer_s, *environment.globals}
    of_messages = {
        loop.target.name
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and any(name.name == "messages" for name in _names(loop.iter))
    }
    written = dict.fromkeys(place for output in tree.find_all(nodes.Output) for place in _places(output))
    return [
        place
        for place in written
        if place not in asked and (_is_unknown_key(place, of_messages) if "." in place else place in free)
    ]


def _is_unknown_key(place: str, of_messages: set[str]) -> bool:
    name, _, key = place.partition(".")
    return name in of_messages and key not in _OF_A_MESSAGE and not hasattr(dict, key)


def _names(node: Any) -> Iterator[Any]:
    from jinja2 import nodes

    yield from [node] if isinstance(node, nodes.Name) else node.find_all(nodes.Name)


def _places(node: Any) -> Iterator[str]:
    """`name`, and `name.key` for each key that is taken of a name."""
    from jinja2 import nodes

    for name in _names(node):
        yield name.name
    keyed = (nodes.Getattr, nodes.Getitem)
    for found in [node] if isinstance(node, keyed) else node.find_all(keyed):
        key = found.attr if isinstance(found, nodes.Getattr) else getattr(found.arg, "value", None)
        if isinstance(found.node, nodes.Name) and isinstance(key, str):
            yield f"{found.node.name}.{key}"
