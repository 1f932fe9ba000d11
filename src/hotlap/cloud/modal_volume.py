"""Files of a Modal volume from outside, through the SDK. Beside each file that is put there lies its hash, which Modal
itself does not tell: by it a file is known to be there already, and one that arrives is checked."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hotlap import durable
from hotlap.cloud.modal import client, definite, sdk
from hotlap.cloud.volume import Item, begun, finish
from hotlap.errors import MissingArtifact, ProviderFailed

T = TypeVar("T")


@dataclass(frozen=True)
class _There:
    num_bytes: int
    at_s: int
    """When it was written, in seconds since 1970."""

    digest: str | None
    """None: it was not put there, or was changed since."""


class _Beginning:
    """Stands before the SDK's requests, and has a file read from a place on."""

    def __init__(self, requests: Any, begin: int) -> None:
        self._requests, self._begin = requests, begin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._requests, name)

    async def VolumeGetFile2(self, request: Any) -> Any:
        request.start = self._begin
        answer = await self._requests.VolumeGetFile2(request)
        if answer.start != self._begin:
            raise ProviderFailed("Modal does not read a file from its middle any more. Remove its .part and try again.")
        return answer


_HASHES = ".hotlap/sha256/"
_BATCH_S = 5
"""So far apart two files may be dated that were put there together."""


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
        there = self._there(key)
        if there is not None and there.digest == digest:
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
        there = self._there(key)
        if there is None:
            raise MissingArtifact(f"There is no {key} on {self._name}. hotlap volume ls shows what there is.")
        if there.digest and target.is_file() and durable.sha256_file(target) == there.digest:
            return False
        part, num_here = begun(target, there.digest or durable.sha256_bytes(f"{there.num_bytes} {there.at_s}".encode()))
        # Modal serves blocks, so a block that was cut is fetched again.
        begin = num_here // self._sdk.volume.BLOCK_SIZE * self._sdk.volume.BLOCK_SIZE
        if num_here:
            durable.disk.truncate(part, begin)
        durable.require_free(target.parent, there.num_bytes - begin)
        if begin < there.num_bytes:
            self._asked(lambda: self._read(key, begin, part), f"give {key}")
        finish(part, target, there.digest, f"{key} of {self._name}", there.num_bytes)
        return True

    async def _read(self, key: str, begin: int, part: Path) -> None:
        """Append what a file has from there on. The SDK's reader has no word for a beginning, but its request has."""
        if begin:
            connection = self._sdk._utils.async_utils.synchronizer._translate_in(self._connection)
            connection._control_plane_stub = _Beginning(connection._control_plane_stub, begin)
        async for chunk in self._volume().read_file.aio(key):
            durable.disk.append(part, chunk)

    def _there(self, key: str) -> "_There | None":
        """What lies under a key. None: nothing."""

        async def read() -> _There | None:
            file = await self._entry(key)
            if file is None:
                return None
            known = await self._entry(_HASHES + key)
            # A machine that wrote the file since did not write its hash.
            if known is None or known.mtime + _BATCH_S < file.mtime:
                return _There(file.size, file.mtime, None)
            chunks = [chunk async for chunk in self._volume().read_file.aio(_HASHES + key)]
            return _There(file.size, file.mtime, b"".join(chunks).decode())

        try:
            return self._asked(read, f"tell of {key}")
        except FileNotFoundError:
            return None

    async def _entry(self, key: str) -> Any:
        try:
            entries = await self._volume().listdir.aio(key)
        except self._sdk.exception.NotFoundError:
            return None
        return next((each for each in entries if each.path.strip("/") == key and each.type.name == "FILE"), None)

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
