"""The README's generated blocks: `python tests/readme.py` writes them, a test checks that they are up to date."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from hotlap import errors

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
_MEANINGS = {
    0: "done",
    1: "a bug of ours",
    2: "usage, configuration or data",
    3: "refused",
    4: "integrity",
    5: "a provider, or a source, did not deliver",
    6: "training failed; the last good checkpoint is intact",
    7: "storage; what was published before is intact",
    8: "not proven: the claim failed, or nothing can be decided here",
    75: "the slice is over, call again",
    124: "overran its cap and was ended",
    130: "second Ctrl-C",
}
_REASONS_WITHOUT_CLASS = {
    0: ["done"],
    75: ["slice_over", "stopped"],
    124: ["overran"],
    130: ["interrupted"],
}


def tree() -> str:
    """One line a file of `src`: its path and the first sentence of its docstring."""
    return "\n".join(_tree_lines(ROOT / "src" / "hotlap", 0))


def _tree_lines(folder: Path, depth: int) -> Iterator[str]:
    yield f"{'  ' * depth}{folder.relative_to(ROOT) if depth == 0 else folder.name}/".ljust(30) + _sentence(folder)
    children = sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name))
    for path in children:
        if path.is_dir() and (path / "__init__.py").exists():
            yield from _tree_lines(path, depth + 1)
        elif path.suffix == ".py" and path.name != "__init__.py":
            yield f"{'  ' * (depth + 1)}{path.name}".ljust(30) + _sentence(path)
        elif path.suffix == ".jsonl":
            yield f"{'  ' * (depth + 1)}{path.name}".ljust(30) + "The demo's data set."


def _sentence(path: Path) -> str:
    source = (path / "__init__.py" if path.is_dir() else path).read_text()
    text = " ".join((ast.get_docstring(ast.parse(source)) or "").split())
    match = re.match(r"(.*?\.)(\s|$)", text)
    assert match, f"{path} has no docstring"
    return match[1]


def exit_codes() -> str:
    """The rows of the exit-code table, from the classes of `errors.py`."""
    reasons: dict[int, list[str]] = {code: list(words) for code, words in _REASONS_WITHOUT_CLASS.items()}
    for _, kind in inspect.getmembers(errors, inspect.isclass):
        is_raised = issubclass(kind, errors.HotlapError) and kind is not errors.Refused
        if is_raised and kind.reason not in reasons.setdefault(kind.exit_code, []):
            reasons[kind.exit_code].append(kind.reason)
    rows = [
        f"| {code} | {', '.join(f'`{word}`' for word in reasons[code])} | {_MEANINGS[code]} |"
        for code in sorted(reasons)
    ]
    return "\n".join(rows)


def written() -> str:
    """The README with its generated blocks put in."""
    text = README.read_text()
    text = re.sub(r"(## What is where\n\n```\n).*?(\n```)", lambda m: m[1] + tree() + m[2], text, flags=re.S)
    head = "| code | reason words | meaning |\n| --- | --- | --- |\n"
    return re.sub(re.escape(head) + r".*?(\n\n)", lambda m: head + exit_codes() + m[1], text, flags=re.S)


if __name__ == "__main__":
    README.write_text(written())
