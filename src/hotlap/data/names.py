"""The names in transformers' 1,600 model files, for which it reads them all whenever it is imported.

What it found is kept in `$HOTLAP_HOME/cache/`, by its version and the time of its last change.
"""

import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from hotlap import durable
from hotlap.config import hotlap_home
from hotlap.errors import StorageFailed

TRIED_TRANSFORMERS = ("5.24.",)
"""Versions for which this is known to be right. Others are imported plainly."""

_Names = dict[frozenset[str], dict[str, set[str]]]
"""By the packages that they need: names by module."""


@contextmanager
def kept_names() -> Generator[None]:
    """Within it, transformers takes the names in its model files from where they are kept, if it is imported."""
    if not importlib.metadata.version("transformers").startswith(TRIED_TRANSFORMERS):
        yield
        return
    sys.meta_path.insert(0, finder := _KeptNames())
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


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
