"""`make measure`: sizes of files and functions in src/, annotations and mutual imports, against the limits we set.

Exit status 1 above a limit.
"""

import sys
from collections.abc import Sequence

from source_tree import Module, functions_of, graph_of, load_modules, mutual_imports

MAX_FILE_LINES = 399
MAX_FUNCTION_LINES = 60

LONGER_FILES = {"research.gpt": 610}
"""Stands alone, to be read and changed as one file."""

LONGER_FUNCTIONS = {("train.loop", "Loop._steps"): 80}
"""The step loop: cut into pieces, it could not be read in order."""


def complaints(modules: Sequence[Module]) -> list[str]:
    """What is above its limit, in words."""
    found: list[str] = []
    for module in modules:
        limit = LONGER_FILES.get(module.name, MAX_FILE_LINES)
        if num_lines(module) > limit:
            found.append(f"{module.file} has {num_lines(module)} lines, and {limit} is the limit")
        for function in functions_of(module):
            place = f"{module.file}:{function.line} {function.name}"
            limit = LONGER_FUNCTIONS.get((module.name, function.name), MAX_FUNCTION_LINES)
            if function.num_lines > limit:
                found.append(f"{place} has {function.num_lines} lines, and {limit} is the limit")
            if not function.is_annotated:
                found.append(f"{place} is not fully annotated")
    found += [f"{a} and {b} import each other" for a, b in mutual_imports(graph_of(modules))]
    return found


def num_lines(module: Module) -> int:
    return len(module.text.splitlines())


def table(modules: Sequence[Module]) -> list[str]:
    """One line a file: its lines, its functions, the longest of them; then the sums."""
    lines = [f"{'file':36} {'lines':>5} {'functions':>9}  longest function"]
    every = [function for module in modules for function in functions_of(module)]
    for module in modules:
        functions = functions_of(module)
        longest = max(functions, key=lambda function: function.num_lines, default=None)
        words = f"{longest.num_lines:3} {longest.name}" if longest else ""
        lines.append(f"{module.file:36} {num_lines(module):5} {len(functions):9}  {words}".rstrip())
    num_annotated = sum(function.is_annotated for function in every)
    lines.append(
        f"{len(modules)} files, {sum(map(num_lines, modules))} lines, {len(every)} functions; "
        f"annotated {100.0 * num_annotated / max(1, len(every)):.1f} %; "
        f"mutual imports {len(mutual_imports(graph_of(modules)))}"
    )
    return lines


def main() -> int:
    modules = load_modules()
    print("\n".join(table(modules)))
    found = complaints(modules)
    for complaint in found:
        print(f"above the limit: {complaint}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
