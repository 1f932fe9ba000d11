"""Files of a network volume from outside: list, put and get them, each taken up again where it was cut, and hashed.

RunPod serves its volumes by the S3 protocol: the bucket is the volume's id, and `/workspace/x` in a machine is the key
`x`. Its keys are others than the API's: `RUNPOD_S3_ACCESS_KEY` and `RUNPOD_S3_SECRET_KEY`. A folder on this machine is
a volume too, for the local provider.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from hotlap import durable
from hotlap.cloud import boot
from hotlap.errors import ConfigError, CorruptFile, MissingArtifact, NoPermission, ProviderFailed, UsageError
from hotlap.secrecy import is_key, without_login

URL_VARIABLE = "HOTLAP_S3_URL"
PART_BYTES = 64 << 20
"""Of an upload. Whatever is larger goes in such parts, each of which is sent once."""

CHUNK_BYTES = 4 << 20
"""Of what is read at once."""

_HASH = "sha256"
_PART = re.compile(r"\..+\.[0-9a-f]{12}\.part")


@dataclass(frozen=True)
class Item:
    key: str
    num_bytes: int


class Volume(Protocol):
    """Every method may raise `ProviderFailed` or `NoPermission`."""

    def ls(self, prefix: str = "") -> list[Item]:
        """The files below a folder, or one file, in the order of their keys."""
        ...

    def put(self, source: Path, key: str) -> bool:
        """Bring a file there. False: it was there already, byte for byte."""
        ...

    def get(self, key: str, target: Path) -> bool:
        """Bring a file here, going on with what is here of it already. False: it was here already.

        Raises:
            MissingArtifact: it is not there.
            CorruptFile: what arrived is not what was put there; it is removed.
        """
        ...


def open_volume(volume_id: str, center_of: Callable[[str], str], env: Mapping[str, str] = os.environ) -> Volume:
    """A folder of this machine, or else a network volume, whose data center `center_of` tells.

    Raises:
        NoPermission: there are no keys to it.
    """
    if Path(volume_id).is_dir():
        return FolderVolume(Path(volume_id))
    access, secret = (env.get(f"RUNPOD_S3_{word}_KEY", "").strip() for word in ("ACCESS", "SECRET"))
    if not (is_key(access) and is_key(secret)):
        raise NoPermission(
            "RUNPOD_S3_ACCESS_KEY or RUNPOD_S3_SECRET_KEY holds a space or a character that no key has. Set it anew."
        )
    if not has_keys(env):
        raise NoPermission(
            "RUNPOD_S3_ACCESS_KEY and RUNPOD_S3_SECRET_KEY are not set: volumes have keys of their own, made in the "
            "console under Storage."
        )
    center = center_of(volume_id)
    return S3Volume(
        volume_id, env.get(URL_VARIABLE) or f"https://s3api-{center.lower()}.runpod.io", center, access, secret
    )


def walk(source: Path, key: str) -> Iterable[tuple[Path, str]]:
    """The files of a folder with their keys below `key`, or the one file.

    Raises:
        UsageError: there is nothing.
    """
    if source.is_file():
        return [(source, key)]
    files = [path for path in sorted(source.rglob("*")) if path.is_file()]
    if not files:
        raise UsageError(f"{source} is no file, and no folder with files in it.")
    return [(path, str(PurePosixPath(key) / path.relative_to(source).as_posix())) for path in files]


def begun(target: Path, version: str) -> tuple[Path, int]:
    """Where a file arrives before it is whole, and how many bytes of it are here. Named after that very version of the
    file, so that the rest of another is never put behind it."""
    durable.make_dirs(target.parent)
    part = target.with_name(f".{target.name}.{version[:12]}.part")
    return part, part.stat().st_size if part.exists() else 0


def finish(part: Path, target: Path, digest: str | None, what: str, num_bytes: int | None = None) -> None:
    """Make what has arrived as a part the file that it is to be.

    Raises:
        CorruptFile: it is not what was sent; it is removed.
    """
    if not part.exists():  # an empty file has no first chunk
        durable.write_synced(part, b"")
    is_short = num_bytes is not None and part.stat().st_size != num_bytes
    if is_short or (digest and durable.sha256_file(part) != digest):
        durable.disk.remove(part)
        raise CorruptFile(f"{what} did not arrive as it was sent; it is removed. Run the same command again.")
    durable.sync_file(part)
    durable.disk.rename(part, target)


def has_keys(env: Mapping[str, str] = os.environ) -> bool:
    """Whether a network volume can be reached from here."""
    return bool(env.get("RUNPOD_S3_ACCESS_KEY") and env.get("RUNPOD_S3_SECRET_KEY"))


class FolderVolume:
    def __init__(self, root: Path) -> None:
        self._root = root

    def ls(self, prefix: str = "") -> list[Item]:
        root, top = self._root.resolve(), self.place(prefix)
        files = [top] if top.is_file() else sorted(path for path in top.rglob("*") if path.is_file())
        files = [path for path in files if not _PART.fullmatch(path.name)]
        return [Item(path.relative_to(root).as_posix(), path.stat().st_size) for path in files]

    def put(self, source: Path, key: str) -> bool:
        return _copy(source, self.place(key))

    def get(self, key: str, target: Path) -> bool:
        source = self.place(key)
        if not source.is_file():
            raise MissingArtifact(f"There is no {key} on {self._root}. hotlap volume ls shows what there is.")
        return _copy(source, target)

    def place(self, key: str) -> Path:
        """
        Raises:
            UsageError: it is none of the volume's.
        """
        place = (self._root / key).resolve()
        if not place.is_relative_to(self._root.resolve()):
            raise UsageError(f"{key} leads out of the volume.")
        return place


def _copy(source: Path, target: Path) -> bool:
    digest = durable.sha256_file(source)
    if target.is_file() and durable.sha256_file(target) == digest:
        return False
    part, num_here = begun(target, digest)
    durable.require_free(target.parent, source.stat().st_size - num_here)
    with source.open("rb") as file:
        file.seek(num_here)
        while chunk := file.read(CHUNK_BYTES):
            durable.disk.append(part, chunk)
    finish(part, target, digest, str(source))
    return True


class S3Volume:
    def __init__(self, volume_id: str, url: str, region: str, access: str, secret: str) -> None:
        """
        Raises:
            ConfigError: the address would carry the keys in the clear.
        """
        if not boot.may_carry_a_key(url):
            shown = without_login(url)
            raise ConfigError(f"{URL_VARIABLE} is {shown}: keys go over https only, or to this machine. Correct it.")
        try:
            import boto3
            from botocore.config import Config
        except ImportError:
            raise UsageError(
                "Network volumes need a package that is not here. Run: pip install 'hotlap[volume]'."
            ) from None
        self._id = volume_id
        # Checksums that only the first provider of this protocol knows are left out, and a proxy must not see the keys.
        options = Config(
            retries={"max_attempts": 5, "mode": "standard"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            proxies={},
        )
        self._s3: Any = boto3.client(
            "s3",
            endpoint_url=url,
            region_name=region,
            aws_access_key_id=access,
            aws_secret_access_key=secret,
            config=options,
        )

    def ls(self, prefix: str = "") -> list[Item]:
        pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=self._id, Prefix=prefix)
        found = [
            Item(row["Key"], row["Size"])
            for page in self._asked(lambda: list(pages))
            for row in page.get("Contents", ())
        ]
        return [item for item in found if _is_below(item.key, prefix)]

    def put(self, source: Path, key: str) -> bool:
        digest, num_bytes = durable.sha256_file(source), source.stat().st_size
        there = self._head(key)
        if there and there["ContentLength"] == num_bytes and there["Metadata"].get(_HASH) == digest:
            return False
        if num_bytes <= PART_BYTES:
            body = source.read_bytes()
            self._asked(lambda: self._s3.put_object(Bucket=self._id, Key=key, Body=body, Metadata={_HASH: digest}))
        else:
            self._put_parts(source, key, digest)
        arrived = self._head(key)
        if arrived is None or arrived["ContentLength"] != num_bytes:
            raise ProviderFailed(f"{key} did not arrive whole on {self._id}. Run the same command again.")
        return True

    def _put_parts(self, source: Path, key: str, digest: str) -> None:
        """Go on with an upload that was cut, if there is one; each part in it is told by its own hash."""
        upload_id = self._open_upload(key) or self._asked(
            lambda: self._s3.create_multipart_upload(Bucket=self._id, Key=key, Metadata={_HASH: digest})["UploadId"]
        )
        upload = {"Bucket": self._id, "Key": key, "UploadId": upload_id}
        pages = self._s3.get_paginator("list_parts").paginate(**upload)
        rows = [row for page in self._asked(lambda: list(pages)) for row in page.get("Parts", ())]
        there = {row["PartNumber"]: row["ETag"].strip('"') for row in rows}
        parts: list[dict[str, Any]] = []
        with source.open("rb") as file:
            while body := file.read(PART_BYTES):
                number = len(parts) + 1
                tag = hashlib.md5(body, usedforsecurity=False).hexdigest()
                if there.get(number) != tag:
                    self._asked(lambda n=number, b=body: self._s3.upload_part(**upload, PartNumber=n, Body=b))
                parts.append({"PartNumber": number, "ETag": f'"{tag}"'})
        self._asked(lambda: self._s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts}))

    def _open_upload(self, key: str) -> str | None:
        answer = self._asked(lambda: self._s3.list_multipart_uploads(Bucket=self._id, Prefix=key))
        found = [row["UploadId"] for row in answer.get("Uploads", ()) if row["Key"] == key]
        return found[-1] if found else None

    def get(self, key: str, target: Path) -> bool:
        there = self._head(key)
        if there is None:
            raise MissingArtifact(f"There is no {key} on {self._id}. hotlap volume ls shows what there is.")
        digest, num_bytes = there["Metadata"].get(_HASH), there["ContentLength"]
        if digest and target.is_file() and durable.sha256_file(target) == digest:
            return False
        part, begin = begun(target, hashlib.sha256(there["ETag"].encode()).hexdigest())
        durable.require_free(target.parent, num_bytes - begin)
        if begin < num_bytes:
            asked = {"Bucket": self._id, "Key": key, "IfMatch": there["ETag"], "Range": f"bytes={begin}-"}
            body = self._asked(lambda: self._s3.get_object(**asked)["Body"])
            for chunk in self._asked(lambda: body.iter_chunks(CHUNK_BYTES)):
                durable.disk.append(part, chunk)
        finish(part, target, digest, f"{key} of {self._id}", num_bytes)
        return True

    def _head(self, key: str) -> dict[str, Any] | None:
        from botocore.exceptions import ClientError

        try:
            return self._s3.head_object(Bucket=self._id, Key=key)
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] == 404:
                return None
            raise self._failure(error) from None

    def _asked(self, ask: Callable[[], Any]) -> Any:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return ask()
        except (BotoCoreError, ClientError) as error:
            raise self._failure(error) from None

    def _failure(self, error: Exception) -> ProviderFailed | NoPermission:
        said = f"The volume {self._id} cannot be reached: {str(error)[:200]}."
        answer: dict[str, Any] = getattr(error, "response", {})
        if answer.get("ResponseMetadata", {}).get("HTTPStatusCode") in (401, 403):
            return NoPermission(f"{said} Correct RUNPOD_S3_ACCESS_KEY and RUNPOD_S3_SECRET_KEY.")
        return ProviderFailed(f"{said} What has arrived is kept: run the same command again.")


def _is_below(key: str, prefix: str) -> bool:
    folder = prefix.rstrip("/")
    return not folder or key == folder or key.startswith(f"{folder}/")


RESULTS = ("adapter", "best", "slices", "metrics.jsonl", "run.json")
"""Of a run's folder what a user wants to have: its adapters, and what tells how it went. Checkpoints stay there."""

_BOARD = ("LEADERBOARD.md", "leaderboard.json", "best.json", "anchor.json", "plots.json")
_OF_A_STUDY = ("experiments.jsonl", "secret", *_BOARD)
"""The same of a study: its journal, what all seeds come from, and its board. Its trials stay."""


def pull(volume: Volume, run: str, folder_there: str, here: Path, say: Callable[[str], None]) -> list[Path]:
    """Bring the results of a run, or of a study, here. What is published as a folder is checked against its manifest.

    Raises:
        MissingArtifact: there is no such run.
        CorruptFile: an adapter is not what its manifest says; it is removed.
    """
    root = str(PurePosixPath(folder_there) / run)
    wanted = (*RESULTS, *_OF_A_STUDY)
    items = [item for item in volume.ls(root) if PurePosixPath(item.key).relative_to(root).parts[0] in wanted]
    if not items:
        raise MissingArtifact(f"There are no results of {run} in {folder_there} of that volume. It may not have begun.")
    found: list[Path] = []
    for item in items:
        target = here / run / PurePosixPath(item.key).relative_to(root)
        say(f"{'got' if volume.get(item.key, target) else 'have'} {target} ({item.num_bytes} bytes)")
        found.append(target)
    for folder in (here / run / "adapter", here / run / "best"):
        if (folder / durable.MANIFEST).exists():
            durable.verify(folder)
    return found
