"""The package's source as data: modules, imports, names in use, functions. Shared by test_layers.py and measure.py."""

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

PACKAGE = "hotlap"
SRC = Path(__file__).resolve().parents[1] / "src" / PACKAGE


@dataclass(frozen=True)
class Module:
    name: str
    """Below the package: `durable`, `train.slice`; `__init__` is the package itself, `train` its subpackage."""
    text: str
    file: str = ""

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.file)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def aliases(self) -> dict[str, str]:
        """What each imported local name stands for, dotted. Imports anywhere in the module count."""
        names: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    names[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    names[alias.asname or alias.name] = f"{_source_of(self, node)}.{alias.name}"
        return names


def load_modules(root: Path = SRC) -> list[Module]:
    return [_load(path, root) for path in sorted(root.rglob("*.py"))]


def _load(path: Path, root: Path) -> Module:
    parts = list(path.relative_to(root).with_suffix("").parts)
    if parts[-1] == "__init__" and len(parts) > 1:
        parts.pop()
    return Module(".".join(parts), path.read_text(encoding="utf-8"), path.relative_to(root).as_posix())


# --- imports ---


@dataclass(frozen=True)
class Import:
    module: str
    target: str
    """Dotted, from the top: `hotlap.train.slice`, `torch.nn`."""
    line: int
    is_at_import_time: bool
    """Not inside a function."""

    @property
    def is_ours(self) -> bool:
        return self.target.partition(".")[0] == PACKAGE

    @property
    def top(self) -> str:
        return self.target.partition(".")[0]

    def ours(self, known: set[str]) -> str:
        """Which of our modules is meant: `hotlap.durable.disk` is `durable`."""
        name = self.target.removeprefix(PACKAGE).removeprefix(".")
        while name and name not in known:
            name = name.rpartition(".")[0]
        return name or "__init__"


@cache
def imports_of(module: Module) -> list[Import]:
    """Every import, also inside functions and by name; those for type checkers only are left out."""
    found: list[Import] = []
    _find_imports(module, module.tree, True, found)
    return found


def _find_imports(module: Module, node: ast.AST, is_at_import_time: bool, found: list[Import]) -> None:
    if isinstance(node, ast.If) and _is_type_checking(node.test):
        children: Iterable[ast.AST] = node.orelse
    else:
        children = ast.iter_child_nodes(node)
    for target in _targets(module, node):
        found.append(Import(module.name, target, node.lineno, is_at_import_time))  # type: ignore[attr-defined]
    inside = is_at_import_time and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for child in children:
        _find_imports(module, child, inside, found)


def _targets(module: Module, node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{_source_of(module, node)}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and dotted(module, node.func) in ("__import__", "importlib.import_module"):
        return [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    return []


def _source_of(module: Module, node: ast.ImportFrom) -> str:
    """The dotted source of a `from` import; a relative one is taken from the importing module's place."""
    if node.level == 0:
        assert node.module
        return node.module
    is_package = module.file.endswith("__init__.py")
    parts = [PACKAGE, *([] if module.name == "__init__" else module.name.split("."))]
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, node.module] if node.module else parts)


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def graph_of(modules: Sequence[Module]) -> dict[str, dict[str, Import]]:
    """Who imports whom among our modules, with the import that proves it."""
    known = {module.name for module in modules}
    graph: dict[str, dict[str, Import]] = {module.name: {} for module in modules}
    for module in modules:
        for item in imports_of(module):
            target = item.ours(known) if item.is_ours else None
            if target and target != module.name:
                graph[module.name].setdefault(target, item)
    return graph


def find_cycle(graph: dict[str, dict[str, Import]]) -> list[str]:
    """Names along one circle of imports, or nothing."""
    finished: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in finished:
            return []
        for target in graph.get(name, {}):
            if cycle := visit(target, [*path, name]):
                return cycle
        finished.add(name)
        return []

    return next((cycle for name in sorted(graph) if (cycle := visit(name, []))), [])


def mutual_imports(graph: dict[str, dict[str, Import]]) -> list[tuple[str, str]]:
    """Pairs of top-level parts of the package that import each other."""
    edges = {
        (name.partition(".")[0], target.partition(".")[0]) for name, targets in graph.items() for target in targets
    }
    return sorted((a, b) for a, b in edges if a < b and (b, a) in edges)


# --- names in use ---


def dotted(module: Module, node: ast.expr) -> str:
    """A name with its import resolved: `shutil.rmtree`, `path.open`; `?` stands for what only running could tell."""
    if isinstance(node, ast.Name):
        return module.aliases.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{dotted(module, node.value)}.{node.attr}"
    return "?"


@dataclass(frozen=True)
class Call:
    name: str
    node: ast.Call

    @property
    def is_method(self) -> bool:
        """Called on a value, not on a module of that name."""
        return isinstance(self.node.func, ast.Attribute)

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]

    def argument(self, position: int, keyword: str) -> ast.expr | None:
        for given in self.node.keywords:
            if given.arg == keyword:
                return given.value
        return self.node.args[position] if position < len(self.node.args) else None


@cache
def calls_of(module: Module) -> list[Call]:
    return [Call(dotted(module, node.func), node) for node in module.nodes if isinstance(node, ast.Call)]


@cache
def names_of(module: Module) -> list[tuple[str, int]]:
    """Every name read, called or not, with its line."""
    return [
        (dotted(module, node), node.lineno)
        for node in module.nodes
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
    ]


# --- functions ---


@dataclass(frozen=True)
class Function:
    module: str
    name: str
    line: int
    num_lines: int
    is_annotated: bool
    """Every parameter but `self` or `cls`, and the return."""


@cache
def functions_of(module: Module) -> list[Function]:
    return list(_functions_in(module, module.tree, "", is_in_class=False))


def _functions_in(module: Module, node: ast.AST, prefix: str, is_in_class: bool) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}{child.name}"
            assert child.end_lineno
            num_lines = child.end_lineno - child.lineno + 1
            yield Function(module.name, name, child.lineno, num_lines, _is_annotated(child, is_in_class))
            yield from _functions_in(module, child, f"{name}.", is_in_class=False)
        elif isinstance(child, ast.ClassDef):
            yield from _functions_in(module, child, f"{prefix}{child.name}.", is_in_class=True)
        else:
            yield from _functions_in(module, child, prefix, is_in_class)


def _is_annotated(node: ast.FunctionDef | ast.AsyncFunctionDef, is_in_class: bool) -> bool:
    positional = [*node.args.posonlyargs, *node.args.args]
    is_static = any(isinstance(item, ast.Name) and item.id == "staticmethod" for item in node.decorator_list)
    if is_in_class and not is_static:
        positional = positional[1:]
    rest = [item for item in (node.args.vararg, node.args.kwarg) if item]
    parameters = [*positional, *node.args.kwonlyargs, *rest]
    return node.returns is not None and all(item.annotation for item in parameters)
