"""RunPod's words and ours: the bodies that its API takes, and machines, offers, refusals and log lines in its answers.

Nothing here talks to anybody.
"""

import base64
import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from hotlap.cloud import boot
from hotlap.cloud.parcel import bare, uncommented
from hotlap.cloud.provider import PLATFORM_PREFIX, Machine, Offer, Start, State, Tags, read_tags
from hotlap.config_cloud import DEFAULT_IMAGE, DEFAULT_IMAGE_CUDA
from hotlap.errors import (
    AmbiguousCreate,
    NoCapacity,
    NoFunds,
    NoPermission,
    NotCreated,
    ProviderFailed,
    RateLimited,
)

KEY_VARIABLE = "RUNPOD_API_KEY"
URL_VARIABLE = "HOTLAP_RUNPOD_URL"

MAX_ARGV_BYTES = 99_000
"""Of a create's body, which may have 102,400, what the command may take."""

BILLING_UNIT_S = 60
"""Some of RunPod's pages say that each second is billed, some that each minute is begun. The dearer is counted on."""

_STATES: dict[str, State] = {
    "PROVISIONING": "provisioning",
    "STARTING": "starting",
    "RUNNING": "running",
    "EXITED": "exited",
    "ERROR": "error",
    "TERMINATED": "terminated",
}
_NO_CAPACITY = re.compile(r"no longer any instances|no instances|capacity", re.I)
_EXEC_FIELDS = re.compile(r"\b(cmd|entrypoint)\b")

# --- requests' bodies ---


def boot_argv(job: tuple[str, ...]) -> tuple[str, ...]:
    """The command that runs `boot` before the job, on an image that holds nothing of ours: its text travels along."""
    return ("python3", "-S", "-I", "-c", packed(boot.__file__), *job)


def packed(path: str) -> str:
    """A Python file as a word for `python -c`, so small that there is room for something else in the request."""
    source = uncommented(bare(Path(path).read_text(encoding="utf-8")))
    text = base64.b85encode(zlib.compress(source.encode(), 9)).decode()
    return f"import base64, zlib; exec(zlib.decompress(base64.b85decode('{text}')))"


def create_body(offer: Offer, tags: Tags, start: Start, url: str = boot.DEFAULT_URL) -> dict[str, Any]:
    """Exactly the fields that the server knows; an unknown one would refuse every create."""
    secrets = {name: "{{ RUNPOD_SECRET_" + secret + " }}" for name, secret in start.secret_refs.items()}
    env = {**start.env, **secrets, **tags.env}
    if url.rstrip("/") != boot.DEFAULT_URL:
        env[URL_VARIABLE] = url
    if start.image is None:
        raise NotCreated(
            "No image is named, and RunPod starts nothing without one. Name one with --image, or with runpod.image in "
            "cloud.toml."
        )
    body: dict[str, Any] = {
        "name": tags.name,
        "image": start.image,
        "cloud": offer.cloud or "SECURE",
        "disk": max(start.disk_gb, 20),
        "cmd": list(start.argv),
    }
    if offer.gpu == "cpu":
        body["cpu"] = {"id": "cpu3c", "vcpuCount": 2}
    else:
        floor = {"minCudaVersion": DEFAULT_IMAGE_CUDA} if start.image == DEFAULT_IMAGE else {}
        body["gpu"] = {"id": offer.gpu, "count": offer.num_gpus, **floor}
    if offer.region:
        body["dataCenterIds"] = [offer.region]
    if start.volume_id:
        body["mounts"] = {"network": [{"volumeId": start.volume_id, "path": start.volume_path}]}
        env["HOTLAP_VOLUME"] = start.volume_path
    body["env"] = env
    return body


def in_older_words(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same create for a server that knows no `cmd`: the command as JSON in `args`."""
    older = {name: value for name, value in body.items() if name not in ("cmd", "entrypoint")}
    return {**older, "args": json.dumps({name: body[name] for name in ("entrypoint", "cmd") if name in body})}


# --- answers ---


@dataclass(frozen=True)
class Problem:
    """An answer that is no success."""

    status: int
    detail: str
    retry_after_s: float

    @property
    def names_exec_field(self) -> bool:
        """Whether the server refused `cmd` as a field it does not know; then nothing was made."""
        return self.status == 422 and _EXEC_FIELDS.search(self.detail) is not None

    @property
    def says_not_found(self) -> bool:
        return self.status == 404 or (self.status == 400 and "not found" in self.detail.lower())


def problem_of(status: int, headers: Mapping[str, str], text: str) -> Problem:
    """What a problem says of itself; of a proxy's page nothing but that it is one."""
    asked = headers.get("Retry-After", "")
    retry_after_s = float(asked) if re.fullmatch(r"[0-9]{1,6}", asked) else 0.0
    try:
        tree = json.loads(text)
        words = [str(tree.get("detail") or tree.get("title") or ""), *map(str, tree.get("errors") or ())]
        detail = "; ".join(dict.fromkeys(word for word in words if word))[:500].rstrip(".") or "no words"
    except (ValueError, AttributeError, TypeError):
        detail = "a page that is no JSON"
    return Problem(status, detail, retry_after_s)


def failure(problem: Problem, what: str) -> ProviderFailed:
    """What a refused request other than a create means."""
    said = f"RunPod answered {problem.status} to {what}: {problem.detail}"
    if problem.status in (401, 403):
        return _no_permission(problem.status, said)
    if problem.status == 429:
        return RateLimited(f"{said}. Wait, and run fewer launchers on this account.", problem.retry_after_s)
    return ProviderFailed(f"{said}.")


def create_refusal(problem: Problem, name: str) -> ProviderFailed:
    """What a create that was not answered with a machine means for it."""
    status, detail = problem.status, problem.detail
    said = f"RunPod answered {status} to the create of {name}: {detail}"
    if status in (401, 403):
        return _no_permission(status, said)
    if status == 402:
        return NoFunds(f"{said}. The balance must cover one hour of this machine, however short the run: top it up.")
    if status == 429:
        return RateLimited(f"{said}. Nothing was made.", problem.retry_after_s)
    if status == 400 and _NO_CAPACITY.search(detail):
        return NoCapacity(f"{said}. Nothing was made; choose another kind of machine or try later.")
    if status in (400, 404, 405, 410, 413, 422):
        return NotCreated(f"{said}. Nothing was made.")
    return AmbiguousCreate(f"{said}. It may have been made all the same.")


def machine_of(entry: Mapping[str, Any], now_s: float) -> Machine:
    """A machine as an answer of that moment has it.

    Raises:
        ProviderFailed: it is none that could be named.
    """
    ident, name, created_s = entry.get("id"), entry.get("name"), _moment(entry.get("createdAt"))
    if not isinstance(ident, str) or not ident or not isinstance(name, str):
        raise ProviderFailed("RunPod listed a machine without id or name; look at the console.")
    state = _STATES.get(str(entry.get("status")), "unknown")
    env = entry.get("env")
    # One without a date counts as new, so that its own tag alone dates its end.
    words = {name: value for name, value in env.items() if isinstance(value, str)} if isinstance(env, dict) else None
    tags = read_tags(words, now_s if created_s is None else created_s)
    problems = list(tags.problems)
    if created_s is None:
        problems.append("its date of creation cannot be read")
    if state == "unknown":
        problems.append(f"its state is {str(entry.get('status'))[:32]!r}")
    if entry.get("cluster"):
        problems.append("it belongs to a cluster, and is ended only with it")
    return Machine(
        machine_id=ident,
        name=name,
        state=state,
        created_at_s=now_s if created_s is None else created_s,
        lease_id=tags.lease_id,
        owner=tags.owner,
        nonce=tags.nonce,
        not_after_s=tags.not_after_s,
        usd_micros_per_hour=_micros(entry.get("cost")),
        # Some answers say {} where they mean null.
        is_up=state == "running" and bool(entry.get("runtime")),
        problems=tuple(problems),
    )


def machines_in(entries: Sequence[Mapping[str, Any]], now_s: float) -> tuple[list[Machine], int]:
    """The machines, and how many entries are none that could be named. A machine may move from page to page while they
    are read; it is listed once."""
    found: dict[str, Machine] = {}
    num_nameless = 0
    for entry in entries:
        try:
            machine = machine_of(entry, now_s)
        except ProviderFailed:
            num_nameless += 1
        else:
            found[machine.machine_id] = machine
    return list(found.values()), num_nameless


def _micros(dollars: object) -> int | None:
    """None for a price that cannot be true of something that is billed."""
    if isinstance(dollars, bool) or not isinstance(dollars, (int, float)):
        return None
    return math.ceil(round(dollars * 1e6, 3)) if math.isfinite(dollars) and dollars > 0 else None


def offers_in(entry: Mapping[str, Any], regions: Sequence[str] = ()) -> list[Offer]:
    """What a kind of GPU is rented out as. A named data center is one of the secure cloud."""
    prices = entry.get("price") or {}
    memory = entry.get("memory")
    memory_gb = float(memory) if isinstance(memory, (int, float)) and memory > 0 else None
    stocks = {center["id"]: center.get("availability") for center in entry.get("dataCenters") or ()}
    found: list[Offer] = []
    for cloud in ("SECURE",) if regions else ("SECURE", "COMMUNITY"):
        price = _micros(prices.get(cloud.lower()))
        if not entry.get(cloud.lower()) or price is None:
            continue
        for region in regions or (None,):
            # Centers without this kind are left out of the list.
            stock = entry.get("availability") if region is None else stocks.get(region, "NONE")
            has_stock = None if stock is None else stock != "NONE"
            found.append(
                Offer(
                    provider="runpod",
                    gpu=entry["id"],
                    region=region,
                    usd_micros_per_hour=price,
                    billing_unit_s=BILLING_UNIT_S,
                    cloud=cloud,
                    memory_gb=memory_gb,
                    has_stock=has_stock,
                )
            )
    return found


def _moment(text: object) -> float | None:
    try:
        moment = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
    # Without a time zone it is the server's, not that of the computer that reads it.
    return moment and (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def moment_in(headers: Mapping[str, str]) -> float | None:
    """The server's own time, if the answer tells it."""
    try:
        return parsedate_to_datetime(headers["Date"]).timestamp()
    except (KeyError, ValueError, TypeError):
        return None


def _no_permission(status: int, said: str) -> NoPermission:
    way_out = "The key is wrong" if status == 401 else "The key lacks permission to read and write pods"
    return NoPermission(f"{said}. {way_out}: correct {KEY_VARIABLE}.")


class EventReader:
    """A log's server-sent events after a cursor, each once, as far as they came whole."""

    def __init__(self, cursor: str) -> None:
        self.cursor = cursor
        self.lines: list[str] = []
        self._id = self._data = ""

    def take(self, line: str) -> None:
        if line.startswith("id:"):
            self._id = line[3:].strip()
        elif line.startswith("data:"):
            self._data = line[5:].strip()
        elif not line and self._data:
            self._end_event()

    def _end_event(self) -> None:
        ident, data, self._id, self._data = self._id, self._data, "", ""
        # A stream that is taken up again may begin with what was seen.
        if ident and _is_not_after(ident, self.cursor):
            return
        try:
            event = json.loads(data)
            # What the platform says, such as why an image is not pulled, must not pass for the machine's own words.
            self.lines.append(("" if event["source"] == "container" else PLATFORM_PREFIX) + str(event["line"]))
        except (ValueError, KeyError, TypeError):
            return
        self.cursor = ident or self.cursor


def _is_not_after(ident: str, cursor: str) -> bool:
    order, seen = _order_of(ident), _order_of(cursor)
    return ident == cursor or (order is not None and seen is not None and order <= seen)


def _order_of(ident: str) -> tuple[float, int] | None:
    """An event's id is a moment, and a number within it. None: it is something else."""
    stamp, _, number = ident.partition("/")
    at_s = _moment(stamp)
    return None if at_s is None else (at_s, int(number) if number.isdecimal() else 0)
