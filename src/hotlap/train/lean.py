"""Imports without what a slice does not use: torch's compiler, distributed training, bitsandbytes.

transformers and PEFT import these for features of theirs that we do not touch, and that costs as much as all the rest.
While they are imported, optional packages are as if not installed, and torch as if built without them, both of which
they allow for; the compiler's decorators, which say how to compile a function, are left off. Afterwards everything can
be imported as ever.
"""

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from hotlap.data.names import TRIED_TRANSFORMERS, kept_names

TRIED_VERSIONS = {"torch": ("2.13.",), "transformers": TRIED_TRANSFORMERS, "peft": ("0.21.",)}
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
    _forget_what_is_installed()  # a tokenizer may have asked
    try:
        with kept_names():
            yield
        # PEFT asks again when it wraps layers, and remembers the first answer.
        importlib.import_module("peft.import_utils").is_bnb_available()
    finally:
        torch.distributed.is_available, torch.compiler.disable = is_distributed, disable
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
