"""Modal's sandboxes through its own SDK: named, tagged, and ended by the server at their time.

The SDK's settings are its own (`modal token set`, or MODAL_TOKEN_ID and MODAL_TOKEN_SECRET). Everything of ours lies in
one app, so `modal app stop hotlap` ends all of it. A machine's name, dates and owner are tags, for a listed sandbox
tells nothing else of itself.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

from hotlap import clock
from hotlap.cloud.provider import (
    ANYWHERE,
    Listing,
    LogPage,
    Machine,
    Offer,
    Start,
    Tags,
    Traits,
    Where,
    read_tags,
)
from hotlap.config_cloud import ModalConfig
from hotlap.errors import AmbiguousCreate, ConfigError, NoCapacity, NoPermission, NotCreated, ProviderFailed, UsageError

T = TypeVar("T")

APP = "hotlap"
VOLUME_PREFIX = "modal:"
"""Tells a volume of Modal's from a folder and from RunPod's."""

DEFAULT_VOLUME = f"{VOLUME_PREFIX}{APP}"
"""Where no other is named. Volumes there are made by their name, and stand in no one place."""

CREATE_S = 120.0
"""The SDK waits 21 minutes for capacity; we do not, and whoever is still queued then is ended."""

TRAITS = Traits(
    name="modal",
    has_hard_ttl=True,
    # Terminate is accepted when the sandbox has its end state; a listing has only those that have none.
    proof_listings=1,
    proof_gap_s=0.0,
    # It is not known whether the server counts from the create or from when the sandbox is scheduled.
    proof_s=CREATE_S + 30.0,
    visibility_s=60.0,
    poll_s=1.0,
    provisioning_s=CREATE_S + 30.0,
    needs_volume=True,
    restarts=False,
    blocks_network=True,
)
CPUS, MEMORY_MIB = 4.0, 32 * 1024
"""Requested, and also the limit: what is used beyond a request would be billed."""

_MEMORY_GB = {
    "T4": 16.0,
    "L4": 24.0,
    "A10": 24.0,
    "L40S": 48.0,
    "A100-40GB": 40.0,
    "A100-80GB": 80.0,
    "H100": 80.0,
    "H200": 141.0,
    "B200": 180.0,
}

_READ_S, _END_S = 30.0, 30.0
_BUILD_S = 900.0
_NAME_TAG, _BORN_TAG = "HOTLAP_NAME", "HOTLAP_CREATED"


def sdk() -> Any:
    """
    Raises:
        UsageError: it is not installed.
    """
    try:
        import modal
    except ImportError:
        raise UsageError("Modal needs its SDK, which is not here. Run: pip install 'hotlap[modal]'.") from None
    return modal


def has_token(env: Mapping[str, str] = os.environ) -> bool:
    """Whether the SDK would find one, without loading it."""
    path = env.get("MODAL_CONFIG_PATH") or str(Path.home() / ".modal.toml")
    return bool(env.get("MODAL_TOKEN_ID")) or Path(path).is_file()


def client() -> Any:
    """A connection of one's own; the SDK's would outlive whoever closes it.

    Raises:
        NoPermission: there is no token.
    """
    modal = sdk()
    from modal.config import config

    token_id, secret = config.get("token_id"), config.get("token_secret")
    if not token_id or not secret:
        raise NoPermission("Modal has no token here. Run: modal token set, or set MODAL_TOKEN_ID and _SECRET.")
    return modal.Client.from_credentials(token_id, secret)


class ModalProvider:
    """See `Provider`. `create_s` is the longest wait for capacity."""

    def __init__(self, settings: ModalConfig, create_s: float = CREATE_S) -> None:
        """
        Raises:
            UsageError: the SDK is not installed.
            NoPermission: it has no token.
            ProviderFailed: Modal does not answer.
        """
        self._sdk = sdk()
        self._settings, self._create_s = settings, create_s
        self._readers: dict[str, _Reader] = {}
        self._listed_s: tuple[float, float] | None = None
        self._opened = contextlib.ExitStack()
        try:
            self._client: Any = self._opened.enter_context(client())
        except self._sdk.exception.Error as error:
            raise definite(error, "answer") from None

    @property
    def traits(self) -> Traits:
        return TRAITS

    def offers(self, gpu: str | None = None, where: Where = ANYWHERE) -> list[Offer]:
        factor = 1.0 if not where.regions else self._settings.region_factor
        if factor is None:
            raise ConfigError(
                "Modal charges more for a region of one's choice, and how much is not known here. Leave --data-center "
                "out, or look it up and write region_factor into cloud.toml, under [modal]."
            )
        prices = self._settings.usd_per_hour
        kinds = {name: ceil(usd * factor * 1e6 - 1e-3) for name, usd in prices.items() if gpu in (None, name)}
        regions = where.regions or (None,)
        found = [
            Offer("modal", name, region, usd_micros, memory_gb=_MEMORY_GB.get(name))
            for name, usd_micros in kinds.items()
            for region in regions
        ]
        return sorted(found, key=lambda offer: offer.usd_micros_per_hour)

    def create(self, offer: Offer, tags: Tags, start: Start) -> Machine:
        if start.image is None:
            raise NotCreated("No image is named, and Modal starts nothing without one. Name one with --image.")
        image = self._built(start.image, tags)
        born_s = self._now_s()
        left_s = int(tags.not_after_s - born_s)
        if left_s <= 0:
            raise NotCreated(f"The time of {tags.name} was over before it was made. Nothing was made; launch again.")
        try:
            sandbox = asyncio.run(self._create_in_time(offer, tags, start, image, left_s, born_s))
        except Exception as error:  # noqa: BLE001  (whatever the SDK raises, it is sorted into no and perhaps)
            raise self._refusal(error, tags.name) from None
        return _machine(sandbox.object_id, _words_of(tags, born_s), born_s)

    async def _create_in_time(
        self, offer: Offer, tags: Tags, start: Start, image: Any, left_s: int, born_s: float
    ) -> Any:
        making = asyncio.ensure_future(self._create(offer, tags, start, image, left_s, born_s))
        await asyncio.wait({making}, timeout=self._create_s)
        if making.done():
            return making.result()
        # What is queued is found by its name, and its end seen, before the SDK forgets it; else nothing is certain.
        try:
            queued = await asyncio.wait_for(self._named(tags.name), _READ_S)
            await asyncio.wait_for(queued.terminate.aio(wait=True), _END_S)
        except self._sdk.exception.NotFoundError:
            raise TimeoutError(f"no answer within {self._create_s:.0f} s") from None
        finally:
            making.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await making
        raise _Queued(f"it was not scheduled within {self._create_s:.0f} s, and was ended")

    async def _named(self, name: str) -> Any:
        return await self._sdk.Sandbox.from_name.aio(APP, name, client=self._client)

    async def _create(self, offer: Offer, tags: Tags, start: Start, image: Any, left_s: int, born_s: float) -> Any:
        modal = self._sdk
        app = await modal.App.lookup.aio(APP, create_if_missing=True, client=self._client)
        volumes: dict[str, Any] = {}
        if start.volume_id is not None:
            volumes[start.volume_path] = modal.Volume.from_name(
                start.volume_id.removeprefix(VOLUME_PREFIX),
                create_if_missing=start.volume_id == DEFAULT_VOLUME,
                client=self._client,
            )
        secrets = [
            modal.Secret.from_name(ref, required_keys=[name], client=self._client)
            for name, ref in start.secret_refs.items()
        ]
        place = {"HOTLAP_VOLUME": start.volume_path} if start.volume_id else {}
        return await modal.Sandbox.create.aio(
            *start.argv,
            app=app,
            name=tags.name,
            tags=_words_of(tags, born_s),
            image=image,
            env={**start.env, **tags.env, **place},
            secrets=secrets,
            timeout=left_s,
            gpu=offer.gpu if offer.num_gpus == 1 else f"{offer.gpu}:{offer.num_gpus}",
            region=offer.region,
            cpu=(CPUS, CPUS),
            memory=(MEMORY_MIB, MEMORY_MIB),
            block_network=not start.has_network,
            volumes=volumes,
            client=self._client,
        )

    def _built(self, image: str, tags: Tags) -> Any:
        """The image, built: that takes minutes the first time, and would be taken from the machine's."""

        async def build() -> Any:
            app = await self._sdk.App.lookup.aio(APP, create_if_missing=True, client=self._client)
            return await self._sdk.Image.from_registry(image).build.aio(app)

        began_s = clock.monotonic_s()
        try:
            built = _within(_BUILD_S, build)
        except Exception as error:  # noqa: BLE001
            failure = definite(error, f"build the image {image}")
            if isinstance(failure, NoPermission):
                raise failure from None
            raise NotCreated(f"{failure} Nothing was made.") from None
        took_s = clock.monotonic_s() - began_s
        if took_s > 20.0 and tags.not_after_s - clock.wall_s() > 0:
            raise NotCreated(f"Modal built the image for {took_s:.0f} s; it is there now. Run the same command again.")
        return built

    def _refusal(self, error: Exception, name: str) -> ProviderFailed:
        """What a create that failed means: a no only where nothing can be there."""
        modal = self._sdk.exception
        said = f"Modal's create of {name} failed: {_said(error)}"
        if isinstance(error, _Queued):
            return NoCapacity(f"{said}. Choose another kind of machine or try later.")
        forbidden = (modal.AuthError, modal.PermissionDeniedError)
        exhausted = (modal.ResourceExhaustedError, modal.ConflictError)
        is_no = isinstance(error, (*forbidden, *exhausted, modal.NotFoundError, modal.InvalidError))
        # The SDK repeats a create whose answer was lost, and waits after it: what is there under this name is ours.
        if not is_no or self._may_be_there(name):
            return AmbiguousCreate(f"{said}. It may have been made all the same.")
        if isinstance(error, forbidden):
            return NoPermission(f"{said}. Nothing was made. Run: modal token set.")
        if isinstance(error, exhausted):
            return NoCapacity(f"{said}. Nothing is left of it; choose another kind of machine or try later.")
        return NotCreated(f"{said}. Nothing was made.")

    def _may_be_there(self, name: str) -> bool:
        try:
            _within(_READ_S, lambda: self._named(name))
        except self._sdk.exception.NotFoundError:
            return False
        except Exception:  # noqa: BLE001
            return True
        return True

    def machines(self) -> Listing:
        async def read() -> list[Machine]:
            try:
                app = await self._sdk.App.lookup.aio(APP, client=self._client)
            except self._sdk.exception.NotFoundError:
                return []  # nothing was ever made
            found: list[Machine] = []
            async for sandbox in self._sdk.Sandbox.list.aio(app_id=app.app_id, client=self._client):
                try:
                    words = await sandbox.get_tags.aio()
                except self._sdk.exception.NotFoundError:  # ended in between
                    continue
                found.append(_machine(sandbox.object_id, words, clock.wall_s()))
            return found

        machines = self._asked(_READ_S, read, "list its sandboxes")
        now_s = clock.wall_s()
        self._listed_s = (now_s, clock.monotonic_s())
        return Listing(now_s, tuple(machines))

    def _now_s(self) -> float:
        """Of the clock by which a date of death was set at the last listing, also if it was set back since: the server
        is told how long a sandbox may live, and not until when."""
        wall_s, at_s = self._listed_s or (0.0, clock.monotonic_s())
        return max(clock.wall_s(), wall_s + clock.monotonic_s() - at_s)

    def terminate(self, machine_id: str) -> bool:
        """Returns when the sandbox has its end state, which proves its death. Modal remembers those that ended."""

        async def end() -> bool:
            try:
                sandbox = await self._sdk.Sandbox.from_id.aio(machine_id, client=self._client)
            except self._sdk.exception.NotFoundError:
                return False
            if await sandbox.poll.aio() is None:
                await sandbox.terminate.aio(wait=True)
            return True

        return self._asked(_END_S, end, f"terminate {machine_id}")

    def logs(self, machine_id: str, cursor: str = "") -> LogPage:
        reader = self._readers.get(machine_id)
        if reader is None:
            try:
                sandbox = _within(_READ_S, lambda: self._sdk.Sandbox.from_id.aio(machine_id, client=self._client))
            except self._sdk.exception.NotFoundError:
                return LogPage((), cursor)
            except Exception as error:  # noqa: BLE001
                raise definite(error, f"read the log of {machine_id}") from None
            reader = self._readers[machine_id] = _Reader(sandbox.stdout)
        return reader.page(int(cursor or 0))

    def close(self) -> None:
        self._opened.close()

    def _asked(self, limit_s: float, ask: Callable[[], Coroutine[Any, Any, T]], what: str) -> T:
        try:
            return _within(limit_s, ask)
        except Exception as error:  # noqa: BLE001
            raise definite(error, what) from None


class _Queued(Exception):
    """There was no capacity in our time, and nothing is left."""


class _Reader:
    """Follows a sandbox's output from its beginning, so that a cursor is a number of lines."""

    def __init__(self, stream: Any) -> None:
        self._lines: list[str] = []
        self._stream = stream
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        rest = ""
        try:
            for text in self._stream:
                *whole, rest = (rest + text).split("\n")
                self._lines += whole
        except Exception as error:  # noqa: BLE001  (a log that breaks off is silence, which the launcher watches for)
            self._lines.append(f"[modal] the log broke off: {_said(error)}")

    def page(self, start: int) -> LogPage:
        lines = tuple(self._lines[start:])
        return LogPage(lines, str(start + len(lines)))


def _within(limit_s: float, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
    async def ask_in_time() -> T:
        return await asyncio.wait_for(ask(), limit_s)

    return asyncio.run(ask_in_time())


def definite(error: Exception, what: str) -> ProviderFailed:
    modal = sdk().exception
    said = f"Modal did not {what}: {_said(error)}"
    if isinstance(error, (modal.AuthError, modal.PermissionDeniedError)):
        return NoPermission(f"{said}. Run: modal token set.")
    if isinstance(error, (modal.InvalidError, modal.RemoteError)):
        return NotCreated(f"{said}.")
    return ProviderFailed(f"{said}. Try again later.")


def _said(error: Exception) -> str:
    return f"{type(error).__name__} {str(error)[:200]}".strip(" .")


def _words_of(tags: Tags, born_s: float) -> dict[str, str]:
    return {**tags.env, _NAME_TAG: tags.name, _BORN_TAG: f"{born_s:.3f}"}


def _machine(machine_id: str, words: dict[str, str], now_s: float) -> Machine:
    try:
        created_at_s = float(words[_BORN_TAG])
    except (KeyError, ValueError):
        created_at_s = now_s
    tags = read_tags(words, created_at_s)
    return Machine(
        machine_id=machine_id,
        name=words.get(_NAME_TAG, machine_id),
        state="running",
        created_at_s=created_at_s,
        lease_id=tags.lease_id,
        owner=tags.owner,
        nonce=tags.nonce,
        not_after_s=tags.not_after_s,
        problems=tags.problems,
    )
