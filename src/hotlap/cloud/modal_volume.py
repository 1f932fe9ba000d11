"""Files of a Modal volume from outside, through the SDK. Beside each file that is put there lies its hash, which Modal
itself does not tell: by it a file is known to be there already, and one that arrives is checked."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from hotlap import durable
from hotlap.cloud.modal import client, definite, sdk
from hotlap.cloud.volume import Item, finish
from hotlap.errors import MissingArtifact

T = TypeVar("T")
_HASHES = ".hotlap/sha256/"


class ModalVolume:
    """See `Volume`. Every request has a connection of its own, for nobody closes a volume."""

    def __init__(self, name: str) -> None:
        self._name, self._sdk = name, sdk()
        self._connection: Any = None

    def ls(self, prefix: str = "") -> list[Item]:
        async def read() -> list[Item]:
            volume = self._volume()
            try:
                entries = await volume.listdir.aio(prefix or "/", recursive=True)
            except self._sdk.exception.NotFoundError:
                return []
            files = [entry for entry in entries if entry.type.name == "FILE"]
            found = [Item(entry.path.lstrip("/"), entry.size) for entry in files]
            return sorted((item for item in found if not item.key.startswith(_HASHES)), key=lambda item: item.key)

        return self._asked(read, "list")

    def put(self, source: Path, key: str) -> bool:
        digest = durable.sha256_file(source)
        if self._hash_of(key) == digest:
            return False

        async def send() -> None:
            import io

            volume = self._volume(create_if_missing=True)
            # One batch appears as a whole: the hash and the file that it is of.
            async with volume.batch_upload.aio(force=True) as batch:
                batch.put_file(str(source), f"/{key}")
                batch.put_file(io.BytesIO(digest.encode()), f"/{_HASHES}{key}")

        self._asked(send, f"take {key}")
        return True

    def get(self, key: str, target: Path) -> bool:
        digest = self._hash_of(key)
        if digest and target.is_file() and durable.sha256_file(target) == digest:
            return False
        durable.make_dirs(target.parent)
        part = target.with_name(f".{target.name}.part")
        if part.exists():
            durable.disk.remove(part)

        async def read() -> None:
            durable.disk.create(part, b"")
            async for chunk in self._volume().read_file.aio(key):
                durable.disk.append(part, chunk)

        try:
            self._asked(read, f"give {key}")
        except FileNotFoundError:
            durable.disk.remove(part)
            raise MissingArtifact(f"There is no {key} on {self._name}. hotlap volume ls shows what there is.") from None
        finish(part, target, digest, f"{key} of {self._name}")
        return True

    def _hash_of(self, key: str) -> str | None:
        async def read() -> str:
            return b"".join([chunk async for chunk in self._volume().read_file.aio(_HASHES + key)]).decode()

        try:
            return self._asked(read, f"give the hash of {key}")
        except FileNotFoundError:
            return None

    def _volume(self, create_if_missing: bool = False) -> Any:
        return self._sdk.Volume.from_name(self._name, create_if_missing=create_if_missing, client=self._connection)

    def _asked(self, ask: Callable[[], Coroutine[Any, Any, T]], what: str) -> T:
        try:
            with client() as self._connection:
                return asyncio.run(ask())
        except FileNotFoundError:
            raise
        except self._sdk.exception.NotFoundError:
            raise FileNotFoundError(self._name) from None  # neither the file nor the volume
        except self._sdk.exception.Error as error:
            raise definite(error, f"{what} on the volume {self._name}") from None
