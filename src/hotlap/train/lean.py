"""Imports without what a slice does not use: torch's compiler, distributed training, bitsandbytes.

transformers and PEFT import these for features of theirs that we do not touch, and that costs as much as all the rest.
While they are imported, optional packages are as if not installed, and torch as if built without them, both of which
they allow for; the compiler's decorators, which say how to compile a function, are left off. Afterwards everything can
be imported as ever.

And transformers looks through the source of its 1,600 model files for the names in them whenever it is imported; what
it found is kept in `$HOTLAP_HOME/cache/`, by its version and the time of its last change.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from hotlap import durable
from hotlap.config import hotlap_home
from hotlap.errors import StorageFailed

TRIED_VERSIONS = {"torch": ("2.13.",), "transformers": ("5.24.",), "peft": ("0.21.",)}
"""What this is known to be right for. With others, imports are plain."""

_DYNAMO = "torch._dynamo"
_WRAPPED = f"{_DYNAMO}._trace_wrapped_higher_order_op"
_OPTIONAL = ("bitsandbytes", "boto3", "scipy")
"""What PEFT, accelerate and a loss for object detection import, where they are installed."""


def is_tried() -> bool:
    """Whether the installed versions are among those that lean imports are known to be right for."""
    return all(
        importlib.metadata.version(package).startswith(beginnings) for package, beginnings in TRIED_VERSIONS.items()
    )


@contextmanager
def lean_imports() -> Generator[None]:
    """Within it, imports of transformers and PEFT are lean; nothing changes where they, or the compiler, are there."""
    if "transformers.modeling_utils" in sys.modules or _DYNAMO in sys.modules or not is_tried():
        yield
        return
    import torch

    stand_ins = {_DYNAMO: _compiler(), _WRAPPED: _wrapped(), "transformers.models": _package("transformers", "models")}
    hidden = {name: None for name in _OPTIONAL if name not in sys.modules}
    is_distributed, disable = torch.distributed.is_available, torch.compiler.disable
    sys.modules.update({**stand_ins, **hidden})  # type: ignore[arg-type]  (None is how Python hides a module)
    torch.distributed.is_available = lambda: False
    torch.compiler.disable = _unchanged  # type: ignore[assignment]
    sys.meta_path.insert(0, finder := _KeptNames())
    _forget_what_is_installed()  # a tokenizer may have asked
    try:
        yield
        # PEFT asks again when it wraps layers, and remembers the first answer.
        importlib.import_module("peft.import_utils").is_bnb_available()
    finally:
        torch.distributed.is_available, torch.compiler.disable = is_distributed, disable
        sys.meta_path.remove(finder)
        for name in (_DYNAMO, _WRAPPED, *hidden):
            sys.modules.pop(name, None)
        _forget_what_is_installed()


def _forget_what_is_installed() -> None:
    """transformers remembers which packages it found, if it asked already."""
    asked = sys.modules.get("transformers.utils.import_utils")
    for name, value in list(vars(asked).items()) if asked is not None else []:
        if name.startswith(("is_", "_is_")) and hasattr(value, "cache_clear"):
            value.cache_clear()


def _unchanged(function: Callable[..., Any] | None = None, *_given: Any, **_named: Any) -> Any:
    """As a decorator, with arguments or without: the function itself."""
    return function if callable(function) else _unchanged


def _compiler() -> ModuleType:
    module = ModuleType(_DYNAMO)
    for name in ("disable", "allow_in_graph", "assume_constant_result"):
        setattr(module, name, _unchanged)
    return module


def _wrapped() -> ModuleType:
    """transformers makes one whenever it draws a mask: then, the real one is imported."""

    def make() -> Any:
        return importlib.import_module(_WRAPPED).TransformGetItemToIndex()

    module = ModuleType(_WRAPPED)
    module.TransformGetItemToIndex = make  # type: ignore[attr-defined]
    return module


def _package(parent: str, name: str) -> ModuleType:
    """A package whose modules can be imported, without its own `__init__`: that of `transformers.models` reads the
    source of every model there is."""
    spec = importlib.util.find_spec(parent)
    assert spec is not None and spec.submodule_search_locations
    module = ModuleType(f"{parent}.{name}")
    module.__path__ = [f"{place}/{name}" for place in spec.submodule_search_locations]
    return module


# --- the names in transformers ---

_Names = dict[frozenset[str], dict[str, set[str]]]
"""By the packages that they need: names by module."""


class _KeptNames(importlib.abc.MetaPathFinder):
    """Finds one module of transformers', and has its function that looks for names remember them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "transformers.utils.import_utils":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            module.define_import_structure = _remembering(module.define_import_structure)  # type: ignore[attr-defined]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _remembering(look: Callable[..., _Names]) -> Callable[..., _Names]:
    def names(module_path: str, prefix: str | None = None) -> _Names:
        if prefix != "models":
            return look(module_path, prefix)
        changed_at = Path(module_path).stat().st_mtime_ns
        version = importlib.metadata.version("transformers")
        path = hotlap_home() / "cache" / f"transformers-{version}-{changed_at:x}.json"
        if (kept := _read(path)) is not None:
            return kept
        found = look(module_path, prefix)
        _keep(path, found)
        return found

    return names


def _read(path: Path) -> _Names | None:
    try:
        rows = json.loads(path.read_bytes())
        return {frozenset(needs): {name: set(each) for name, each in modules.items()} for needs, modules in rows}
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _keep(path: Path, names: _Names) -> None:
    rows = [[sorted(needs), {name: sorted(each) for name, each in modules.items()}] for needs, modules in names.items()]
    try:
        durable.make_dirs(path.parent)
        durable.replace(path, json.dumps(rows).encode())
    except StorageFailed:  # it is looked for again the next time
        return
