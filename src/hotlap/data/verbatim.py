"""Chat templates that are proven to copy what messages say, and their renderings by a conversation's shape.

Two conversations have one shape if their messages' roles are the same, and the same of them are empty. What a proven
template writes around the contents follows from the shape, so a template is asked once a shape. The proof reads the
template's syntax tree; where it cannot tell, there is none, and the template is asked for every conversation.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from hotlap.data.examples import Message

Shape = tuple[tuple[str, bool], ...]

_MOST_SHAPES = 4096
_OPEN, _CLOSE = "\ue000", "\ue001"
_MARK = re.compile(f"{_OPEN}(\\d+){_CLOSE}")


class Skeletons:
    """Renderings of conversations that are nothing but roles and contents, by `apply` once a shape.

    `apply(messages, is_prompt)` is the template itself, and may raise whatever it likes.
    """

    def __init__(self, apply: Callable[[list[dict[str, str]], bool], str]) -> None:
        self._apply = apply
        self._found: dict[tuple[Shape, bool], list[str | int]] = {}

    def write(self, messages: Sequence[Message], is_prompt: bool) -> str | None:
        """The rendering, or None: the template has to be asked."""
        for message in messages:
            if message.tool_calls or message.name is not None or message.reasoning is not None:
                return None
        key = tuple([(message.role, bool(message.content)) for message in messages]), is_prompt
        skeleton = self._found.get(key)
        if skeleton is None:
            skeleton = self._learn(*key)
        return "".join([part if isinstance(part, str) else messages[part].content for part in skeleton])

    def _learn(self, shape: Shape, is_prompt: bool) -> list[str | int]:
        marked = [
            {"role": role, "content": f"{_OPEN}{at}{_CLOSE}" if has_content else ""}
            for at, (role, has_content) in enumerate(shape)
        ]
        parts = _MARK.split(self._apply(marked, is_prompt))
        if len(self._found) >= _MOST_SHAPES:
            self._found.clear()
        skeleton: list[str | int] = [int(part) if at % 2 else part for at, part in enumerate(parts)]
        self._found[shape, is_prompt] = skeleton
        return skeleton


# --- the proof ---

# Whoever reads the day writes another text tomorrow.
_NOT_BY_SHAPE = ("strftime_now", "previtem", "nextitem", _OPEN, _CLOSE, "\\u")


def copies_contents(template: str) -> bool:
    """Whether every content gets into the text as it is, or is asked whether it is empty, and nothing else."""
    import jinja2

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"], trim_blocks=True, lstrip_blocks=True)
    if any(word in template for word in _NOT_BY_SHAPE):
        return False
    try:
        return _Proof(environment.parse(template)).holds
    except jinja2.TemplateSyntaxError:  # a tag that transformers adds
        return False


class _Proof:
    """Follows `messages`, and the names that loops give to each, through a template.

    A value is *copied* on its way into the text, *tested* where only its truth counts, a *base* where one of its keys
    is taken. Anywhere else a message, and what it says, may become anything.
    """

    def __init__(self, tree: Any) -> None:
        from jinja2 import nodes

        self._nodes = nodes
        self._names = {"messages"}
        for loop in tree.find_all(nodes.For):
            if self._is_list(loop.iter) and isinstance(loop.target, nodes.Name):
                self._names.add(loop.target.name)
        self.holds = self._is_right(tree, "other")

    def _is_list(self, node: Any) -> bool:
        """Whether it is all messages, or some of them in a row."""
        nodes = self._nodes
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return self._is_list(node.node) and not self._mentions(node.arg)
        return isinstance(node, nodes.Name) and node.name == "messages"

    def _mentions(self, node: Any) -> bool:
        nodes = self._nodes
        names = [node] if isinstance(node, nodes.Name) else node.find_all(nodes.Name)
        return any(name.name in self._names for name in names)

    def _is_right(self, node: Any, use: str) -> bool:
        nodes = self._nodes
        match node:
            case nodes.Name():
                return use == "base" or node.name not in self._names
            case nodes.Getattr() | nodes.Getitem():
                return self._is_right_key(node, use)
            case nodes.For():
                inside = [*node.body, *node.else_, *([node.test] if node.test is not None else [])]
                is_list = self._is_list(node.iter) and isinstance(node.target, nodes.Name) and not node.recursive
                return (is_list or self._is_right(node.iter, "other")) and self._are_right(inside, "other")
            case nodes.If():
                return self._is_right(node.test, "tested") and self._are_right(
                    [*node.body, *node.elif_, *node.else_], "other"
                )
            case nodes.Output():
                return self._are_right(node.nodes, "copied")
            case nodes.Add() | nodes.Concat():
                return self._are_right(node.iter_child_nodes(), "copied" if use == "copied" else "other")
            case nodes.CondExpr():
                branches = [node.expr1, *([node.expr2] if node.expr2 is not None else [])]
                return self._is_right(node.test, "tested") and self._are_right(branches, use)
            case nodes.And() | nodes.Or():
                return self._are_right([node.left, node.right], use if use != "base" else "other")
            case nodes.Not():
                return self._is_right(node.node, "tested")
            case nodes.Filter() if node.name in ("length", "count") and node.node is not None:
                return self._is_list(node.node) or self._are_right(node.iter_child_nodes(), "other")
            case nodes.Macro() | nodes.AssignBlock() | nodes.FilterBlock() | nodes.CallBlock():
                # What is written in there is a value first, and may be changed.
                return not self._mentions(node)
            case nodes.Include() | nodes.Import() | nodes.FromImport() | nodes.Extends() | nodes.Block():
                return False
            case _:
                return self._are_right(node.iter_child_nodes(), "other")

    def _are_right(self, found: Any, use: str) -> bool:
        return all(self._is_right(node, use) for node in found)

    def _is_right_key(self, node: Any, use: str) -> bool:
        nodes = self._nodes
        key = node.attr if isinstance(node, nodes.Getattr) else getattr(node.arg, "value", None)
        if not self._is_right(node.node, "base"):
            return False
        if key == "content":
            return use in ("copied", "tested")
        if not self._mentions(node):
            return True
        if isinstance(key, str):
            # A method of a dict or a list is a way to everything in it.
            return not hasattr(dict, key) and not hasattr(list, key)
        # A message of the list, of which nothing but a key may be taken.
        is_place = isinstance(node, nodes.Getitem) and self._is_list(node.node) and not self._mentions(node.arg)
        return is_place and use == "base"
