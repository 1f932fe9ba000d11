"""RunPod through its REST API v2: a thin client that tells a definite no from a doubt.

`HOTLAP_RUNPOD_URL` (default: the public address) may point at an emulator. Its key is `RUNPOD_API_KEY` of whoever
launches; it never leaves this process but in the Authorization header.
"""

import os
import random
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

import httpx

from hotlap import clock
from hotlap.cloud import boot, quota
from hotlap.cloud.provider import ANYWHERE, Listing, ListingBroken, LogPage, Machine, Offer, Start, Tags, Traits, Where
from hotlap.cloud.quota import Quota
from hotlap.cloud.runpod_shapes import (
    BILLING_UNIT_S,
    KEY_VARIABLE,
    URL_VARIABLE,
    EventReader,
    Problem,
    create_body,
    create_refusal,
    failure,
    in_older_words,
    machine_of,
    machines_in,
    moment_in,
    offers_in,
    problem_of,
)
from hotlap.errors import AmbiguousCreate, ConfigError, NoPermission, NotCreated, ProviderFailed, UsageError
from hotlap.secrecy import is_key, without_login

TRAITS = Traits(
    name="runpod",
    has_hard_ttl=False,
    proof_listings=2,
    proof_gap_s=5.0,
    proof_s=60.0,
    visibility_s=120.0,
    poll_s=5.0,
    provisioning_s=150.0,
    needs_volume=True,
    restarts=True,
    billing_unit_s=BILLING_UNIT_S,
)

_TIMEOUT_S = 20.0
_TRIES = 4
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 30.0
_PAGE = 100
_MAX_PAGES = 1000
_LOG_QUIET_S, _LOG_READ_S = 1.5, 5.0
_LOG_TAIL = 5000
_BUSY = frozenset((500, 502, 503, 504))
_LOST = (httpx.RequestError, httpx.StreamError)
"""What becomes of an answer that does not arrive, or cannot be unpacked."""


class Runpod:
    """The provider. `sleep_s` and `chance` are the waits between repeated reads."""

    def __init__(
        self,
        key: str,
        url: str = boot.DEFAULT_URL,
        sleep_s: Callable[[float], None] = clock.sleep_s,
        chance: random.Random | None = None,
        timeout_s: float = _TIMEOUT_S,
        turns: Quota | None = None,
    ) -> None:
        """`turns` is what requests wait for; None: they do not.

        Raises:
            ConfigError: the address would carry the key in the clear.
        """
        if not boot.may_carry_a_key(url) or without_login(url) != url:
            raise ConfigError(
                f"{URL_VARIABLE} is {without_login(url)}: the key goes over https, or to an emulator on 127.0.0.1, "
                "and the address goes to machines, so it holds no login. Correct it."
            )
        self._url = url.rstrip("/")
        self._sleep_s = sleep_s
        self._chance = chance or random.Random()
        self._turns = turns
        # Redirects and a proxy of the environment could carry the key elsewhere; neither is followed.
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {key}", "Accept": "application/json, text/event-stream"},
            timeout=timeout_s,
            trust_env=False,
            verify=not self._url.startswith("http:"),  # loading certificates takes longer than all of a test
            follow_redirects=False,
            event_hooks={"request": [self._wait_for_turn], "response": [self._learn]},
        )

    def _wait_for_turn(self, request: httpx.Request) -> None:
        if self._turns:
            # Deleting, and unlocking before it, must not wait until all the looking is done.
            self._turns.take(is_termination=request.method in ("DELETE", "PATCH"))

    def _learn(self, answer: httpx.Response) -> None:
        if self._turns:
            self._turns.learn(answer.headers)

    @property
    def traits(self) -> Traits:
        return TRAITS

    def close(self) -> None:
        self._http.close()

    # --- the protocol ---

    def offers(self, gpu: str | None = None, where: Where = ANYWHERE) -> list[Offer]:
        regions = self._regions_of(where)
        params = {"include": "AVAILABILITY", "product": "POD"}
        entries = _rows_in(self._read("/catalog/gpus", params), "gpus")
        found = [offer for entry in entries for offer in offers_in(entry, regions) if gpu in (None, offer.gpu)]
        found = [offer for offer in found if where.cloud in (None, offer.cloud)]
        # Of one price, in the order of the regions that were asked for.
        return sorted(found, key=lambda offer: offer.usd_micros_per_hour)

    def center_of(self, volume_id: str) -> str:
        """The data center that a network volume lies in; no other reaches it.

        Raises:
            UsageError: there is no such volume.
        """
        path = f"/network-volumes/{quote(volume_id, safe='')}"
        answer = self._send("GET", path)
        if not answer.is_success:
            problem = _problem_in(answer)
            if not problem.says_not_found:
                raise failure(problem, f"read {path}")
            raise UsageError(f"There is no network volume {volume_id}; the console lists those of this account.")
        center = _object_in(answer).get("dataCenter")
        if not isinstance(center, str) or not center:
            raise ProviderFailed(f"RunPod does not say in which data center the volume {volume_id} lies.")
        return center

    def _regions_of(self, where: Where) -> tuple[str, ...]:
        if where.volume_id is None:
            return where.regions
        center = self.center_of(where.volume_id)
        if where.regions and center not in where.regions:
            raise UsageError(
                f"The volume {where.volume_id} lies in {center}, not in {' or '.join(where.regions)}, and is reached "
                f"from there only. Leave --data-center out."
            )
        return (center,)

    def create(self, offer: Offer, tags: Tags, start: Start) -> Machine:
        body = create_body(offer, tags, start, self._url)
        try:
            answer = self._post_once(body)
        except _FieldRefused:
            # An unknown field is refused before anything is made, so this is no repetition.
            answer = self._post_once(in_older_words(body))
        try:
            return machine_of(_object_in(answer), _moment_of(answer))
        except ProviderFailed as error:
            raise AmbiguousCreate(f"RunPod's answer to the create of {tags.name} cannot be read: {error}") from None

    def machines(self) -> Listing:
        entries: list[Mapping[str, Any]] = []
        seen: set[str] = set()
        params = {"includeClusterPods": "true", "limit": str(_PAGE)}
        listing, num_nameless = Listing(clock.wall_s(), ()), 0
        for _ in range(_MAX_PAGES):
            answer = self._read("/pods", params)
            entries += _rows_in(answer, "pods")
            pagination = _object_in(answer).get("pagination") or {}
            found, num_nameless = machines_in(entries, _moment_of(answer))
            listing = Listing(_moment_of(answer), tuple(found))
            if not pagination.get("hasNextPage"):
                break
            cursor = pagination.get("nextCursor")
            if not isinstance(cursor, str) or cursor in seen:
                raise _no_end(params, listing)
            seen.add(cursor)
            params["cursor"] = cursor
        else:
            raise _no_end(params, listing)
        if num_nameless:
            raise ListingBroken(
                f"RunPod listed {num_nameless} machines without id or name. Look at the console; what could be read is "
                f"acted on.",
                listing,
            )
        return listing

    def terminate(self, machine_id: str) -> bool:
        path = f"/pods/{quote(machine_id, safe='')}"
        answer = self._send("DELETE", path)
        if answer.status_code == 409:
            self._send("PATCH", path, body={"locked": False})
            answer = self._send("DELETE", path)
        if answer.is_success:
            return True
        problem = _problem_in(answer)
        if problem.says_not_found:
            return False
        raise failure(problem, f"terminate {machine_id}")

    def logs(self, machine_id: str, cursor: str = "") -> LogPage:
        headers = {"Last-Event-ID": cursor} if cursor else {}
        params = {} if cursor else {"tail": str(_LOG_TAIL)}
        reader = EventReader(cursor)
        try:
            timeout = httpx.Timeout(_TIMEOUT_S, read=_LOG_QUIET_S)
            path = f"{self._url}/pods/{quote(machine_id, safe='')}/logs"
            with self._http.stream("GET", path, params=params, headers=headers, timeout=timeout) as answer:
                if answer.status_code == 404:
                    return LogPage((), cursor)
                if not answer.is_success:
                    answer.read()
                    raise failure(_problem_in(answer), f"read the log of {machine_id}")
                self._read_events(answer, reader)
        except httpx.ReadTimeout:
            pass  # the stream stays open for what comes next; what is there now has been read
        except _LOST as error:
            if not reader.lines:
                raise ProviderFailed(f"RunPod's log of {machine_id} cannot be read: {_said(error)}.") from None
        return LogPage(tuple(reader.lines), reader.cursor)

    def _read_events(self, answer: httpx.Response, reader: EventReader) -> None:
        """For some seconds: of a machine that never falls silent the rest is read next time, for whoever reads has
        other things to watch, its deadline above all."""
        until_s, rest = clock.monotonic_s() + _LOG_READ_S, ""
        for text in answer.iter_text():
            *lines, rest = (rest + text).split("\n")
            for line in lines:
                reader.take(line.rstrip("\r"))
            if clock.monotonic_s() >= until_s:
                return

    def key_scope(self) -> str:
        """What the key opens, in words, found out by reading: a machine or a log that leaks it could do as much.

        Raises:
            ProviderFailed: RunPod does not answer, or the key is not valid.
        """
        self._read("/pods", {"limit": "1"})
        answer = self._send("GET", "/account/ssh-keys")
        if answer.is_success:
            return "it opens the whole account; one that may only read and write pods is enough"
        return "it opens pods and not the account" if answer.status_code == 403 else "it opens pods"

    # --- requests ---

    def _post_once(self, body: dict[str, Any]) -> httpx.Response:
        name = body["name"]
        try:
            answer = self._http.post(f"{self._url}/pods", json=body)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise NotCreated(
                f"RunPod could not be reached to create {name} ({_said(error)}); nothing was sent. Try again later."
            ) from None
        except _LOST as error:
            raise AmbiguousCreate(f"RunPod's answer to the create of {name} was lost: {_said(error)}.") from None
        if answer.status_code in (200, 201):
            return answer
        problem = _problem_in(answer)
        if "cmd" in body and problem.names_exec_field:
            raise _FieldRefused
        raise create_refusal(problem, name)

    def _read(self, path: str, params: Mapping[str, str]) -> httpx.Response:
        answer = self._send("GET", path, params=params)
        if answer.is_success:
            return answer
        raise failure(_problem_in(answer), f"read {path}")

    def _send(
        self, method: str, path: str, params: Mapping[str, str] | None = None, body: dict[str, Any] | None = None
    ) -> httpx.Response:
        """A request that is safe to repeat, repeated while there is no answer, or none for now."""
        wait_s = _FIRST_WAIT_S
        trouble = ""
        for attempt in range(1, _TRIES + 1):
            asked_s = 0.0
            try:
                answer = self._http.request(method, self._url + path, params=params, json=body)
                if answer.status_code not in _BUSY and answer.status_code != 429:
                    return answer
                trouble = f"HTTP {answer.status_code}"
                problem = _problem_in(answer)
                asked_s = problem.retry_after_s
                if asked_s > _LONGEST_WAIT_S:
                    raise failure(problem, f"{method} {path}")
            except _LOST as error:
                trouble = _said(error)
            if attempt < _TRIES:
                self._sleep_s(max(asked_s, wait_s * (0.5 + self._chance.random())))
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        raise ProviderFailed(f"RunPod did not answer {method} {path} in {_TRIES} tries: {trouble}. Try again later.")


class _FieldRefused(Exception):
    """The server does not know the exec form of a command."""


def from_environment(env: Mapping[str, str] = os.environ) -> Runpod:
    """
    Raises:
        NoPermission: there is no key.
    """
    key = env.get(KEY_VARIABLE, "").strip()
    if not key:
        raise NoPermission(f"{KEY_VARIABLE} is not set: RunPod needs a key that may read and write pods.")
    if not is_key(key):
        raise NoPermission(f"{KEY_VARIABLE} holds a space or a character that no key has. Set it anew.")
    return Runpod(key, env.get(URL_VARIABLE) or boot.DEFAULT_URL, turns=quota.SHARED)


def _problem_in(answer: httpx.Response) -> Problem:
    return problem_of(answer.status_code, answer.headers, answer.text)


def _moment_of(answer: httpx.Response) -> float:
    """The server's time, or ours if it does not tell."""
    return moment_in(answer.headers) or clock.wall_s()


def _no_end(params: Mapping[str, str], listing: Listing) -> ListingBroken:
    return ListingBroken(
        f"RunPod's list of machines does not end: cursor {params.get('cursor')!r} came again after "
        f"{len(listing.machines)} machines. Look at the console; what was seen is acted on.",
        listing,
    )


def _object_in(answer: httpx.Response) -> dict[str, Any]:
    try:
        value = answer.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ProviderFailed(f"RunPod's answer of HTTP {answer.status_code} is not the JSON it should be.")
    return value


def _rows_in(answer: httpx.Response, name: str) -> list[Mapping[str, Any]]:
    rows = _object_in(answer).get(name)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ProviderFailed(f"RunPod's answer holds no list of {name}.")
    return rows


def _said(error: Exception) -> str:
    return f"{type(error).__name__} {str(error)[:200]}".strip(" .")
