"""What can be under way while a slice makes its data ready: torch's import, and the base model's files on their way
from the disk."""

import gc
import importlib
import os
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def importing() -> Generator[None]:
    """Imports within it are not looked through for garbage, then or later: what is imported stays, and is so much that
    every look takes a tenth of a second."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class Preload:
    """Two threads at most. Nothing but `finish` waits for them; nothing depends on what `read_ahead` does."""

    def __init__(self) -> None:
        self._importing: threading.Thread | None = None
        self._error: ImportError | None = None

    def start(self) -> None:
        """Begin to import torch. The tokenizer's libraries, which the data may need at the same time, do not use it;
        more than torch would have two threads in the circular imports of one package."""
        self._importing = threading.Thread(target=self._import, name="importing", daemon=True)
        self._importing.start()

    def read_ahead(self, model_folder: Path) -> None:
        """Have the system read the weights into its page cache, if imports are under way, and if it can."""
        if self._importing is not None and sys.platform == "linux":
            threading.Thread(target=_read_ahead, args=(model_folder,), name="reading", daemon=True).start()

    def finish(self) -> None:
        """Wait for the import.

        Raises:
            ImportError: it failed.
        """
        if self._importing is not None:
            self._importing.join()
        if self._error is not None:
            raise self._error

    def _import(self) -> None:
        try:
            with importing():
                importlib.import_module("torch")
        except ImportError as error:
            self._error = error


def _read_ahead(model_folder: Path) -> None:
    for path in sorted(model_folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        except OSError:  # who loads the file will say what is wrong with it
            return
