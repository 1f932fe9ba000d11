"""The emulated API: which route a request takes, and what it answers. Faults of the answer itself are not here."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hotlap.testing.bodies import Profile, complaints, entry_of, rfc3339, rule_breaches, seconds_of
from hotlap.testing.catalog import data_centers, gpu_entry, gpus, has_room, price_of
from hotlap.testing.faults import Active
from hotlap.testing.machines import LogLine, Park, Pod

_PAGE = 100
_BILLING_LAG_S = 3600.0


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass
class Answer:
    status: int
    body: bytes = b""
    kind: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict[str, str])


def answer_json(value: object, status: int = 200) -> Answer:
    return Answer(status, json.dumps(value).encode())


def problem(status: int, detail: str, errors: list[str] | None = None, title: str = "") -> Answer:
    tree: dict[str, Any] = {"title": title or f"Error {status}", "status": status, "detail": detail}
    if errors:
        tree["errors"] = errors
    return Answer(status, json.dumps(tree).encode(), "application/problem+json")


NO_CAPACITY = "There are no longer any instances available with the requested specifications. Please try again later."
NO_FUNDS = "Your account balance is too low to deploy this pod."


@dataclass
class Account:
    """Whose keys open what."""

    keys: dict[str, str] = field(default_factory=lambda: {"full-key": "full", "read-key": "read", "pods-key": "pods"})
    """`full`, or `read` for reading only, or `pods` for everything but the account itself."""

    balance_usd: float = 25.0
    pod_key_allows: str = "terminate"
    """What a machine's own key may do to it: `terminate`, `stop` or `nothing`."""

    sold_out: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """Kinds of GPU that a data center has none of now, as (GPU id, center id)."""


class Routes:
    """Everything under `/v2` and `/graphql`, on one park of machines."""

    def __init__(self, park: Park, account: Account, profile: Profile) -> None:
        self._park, self._account = park, account
        self._profile: Profile = profile
        self._volumes: dict[str, dict[str, Any]] = {}
        self._handlers: dict[str, Callable[[Request, str, Active, float], Answer]] = {
            "POST /v2/pods": self._create,
            "GET /v2/pods": self._list,
            "GET /v2/pods/{id}": self._get,
            "PATCH /v2/pods/{id}": self._patch,
            "DELETE /v2/pods/{id}": self._delete,
            "POST /v2/pods/{id}/action": self._act,
            "GET /v2/pods/{id}/logs": self._logs,
            "GET /v2/catalog/gpus": self._gpus,
            "GET /v2/catalog/gpus/{id}": self._gpu,
            "GET /v2/catalog/datacenters": self._data_centers,
            "GET /v2/network-volumes": self._list_volumes,
            "POST /v2/network-volumes": self._create_volume,
            "GET /v2/network-volumes/{id}": self._get_volume,
            "DELETE /v2/network-volumes/{id}": self._delete_volume,
            "GET /v2/billing/pods": self._billing,
            "GET /v2/account/ssh-keys": lambda *_: answer_json({"keys": []}),
            "POST /graphql": self._graphql,
        }

    def route_of(self, request: Request) -> tuple[str, str]:
        """The route's name, `METHOD /path/{id}`, and the id."""
        for name in self._handlers:
            method, _, path = name.partition(" ")
            pattern = re.escape(path).replace(re.escape("{id}"), "([^/]+)")
            if method == request.method and (match := re.fullmatch(pattern, request.path)):
                return name, match[1] if match.groups() else ""
        return f"{request.method} {request.path}", ""

    def refused(self, request: Request, route: str, ident: str) -> Answer | None:
        """What the key is not good for, or None."""
        key = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        pod = self._park.pods.get(ident)
        if pod is not None and key == pod.key:
            allowed = {"terminate": ("DELETE", "POST", "GET"), "stop": ("POST", "GET"), "nothing": ("GET",)}
            is_allowed = request.method in allowed[self._account.pod_key_allows]
            return None if is_allowed else problem(403, "this key may not do that")
        scope = self._account.keys.get(key)
        if scope is None:
            return problem(401, "the API key is not valid")
        if scope == "read" and request.method != "GET" and route != "POST /graphql":
            return problem(403, "the API key has no write permission")
        if scope == "pods" and request.path.startswith(("/v2/account", "/v2/billing")):
            return problem(403, "the API key has no permission for the account")
        return None

    def handle(self, request: Request, route: str, ident: str, faults: Active, now_s: float) -> Answer:
        handler = self._handlers.get(route)
        if handler is None:
            gone = request.path.startswith("/v1")
            return problem(410, "REST v1 is retired") if gone else problem(404, f"no route {route}")
        return handler(request, ident, faults, now_s)

    # --- machines ---

    def _create(self, request: Request, _ident: str, faults: Active, now_s: float) -> Answer:
        try:
            body: Any = json.loads(request.body)
        except ValueError:
            return problem(400, "the body is no JSON")
        if self._profile == "2026-10" and len(request.body) > 102_400:
            return problem(413, "the request is too large")
        if found := complaints(body, self._profile):
            return problem(422, found[0], found)
        if breach := rule_breaches(body, len(request.body)):
            return problem(400, breach)
        usd_per_hour = price_of(body)
        if usd_per_hour is None:
            return problem(400, "there is no such GPU type in this cloud")
        if self._account.balance_usd < usd_per_hour:
            return problem(402, NO_FUNDS)
        missing = [mount["volumeId"] for mount in body.get("mounts", {}).get("network", ())]
        if missing and missing[0] not in self._volumes:
            return problem(404, f"network volume {missing[0]} does not exist")
        centers: list[str] = body.get("dataCenterIds", [])
        if missing:
            center = self._volumes[missing[0]]["dataCenter"]
            if body.get("cloud", "SECURE") != "SECURE" or center not in (centers or [center]):
                return problem(400, f"network volume {missing[0]} is reached from the secure cloud in {center} only")
            centers = [center]
        if "gpu" in body and not has_room(body["gpu"]["id"], centers, self._account.sold_out):
            return problem(400, NO_CAPACITY)
        pod = self._park.create(body, now_s, usd_per_hour, faults)
        pod.locked, pod.cluster = "locked" in faults, "cluster" in faults
        if "twice" in faults:
            self._park.create(body, now_s, usd_per_hour, Active(()))
        return answer_json(entry_of(pod, now_s, faults), 201)

    def _list(self, request: Request, _ident: str, faults: Active, now_s: float) -> Answer:
        wants_clusters = request.query.get("includeClusterPods") == "true"
        pods = [pod for pod in self._park.listed(now_s) if wants_clusters or not pod.cluster]
        if "omit" in faults:
            pods = []
        if self._profile == "2026-08":
            return answer_json({"pods": [entry_of(pod, now_s, faults) for pod in pods]})
        limit = min(_PAGE, int(request.query.get("limit") or _PAGE))
        begin = int(request.query.get("cursor", "c0").removeprefix("c") or 0)
        page = pods[begin : begin + limit]
        has_next = begin + limit < len(pods) and "misses_pages" not in faults
        cursor: str | None = f"c{begin + limit}" if has_next else None
        if "repeats_cursor" in faults and begin > 0:
            has_next, cursor = True, f"c{begin}"
        pagination = {"hasNextPage": has_next, "nextCursor": cursor}
        return answer_json({"pods": [entry_of(pod, now_s, faults) for pod in page], "pagination": pagination})

    def _find(self, ident: str, now_s: float) -> Pod | Answer:
        return self._park.found(ident, now_s) or problem(404, "pod not found")

    def _get(self, _request: Request, ident: str, faults: Active, now_s: float) -> Answer:
        pod = self._find(ident, now_s)
        return pod if isinstance(pod, Answer) else answer_json(entry_of(pod, now_s, faults))

    def _patch(self, request: Request, ident: str, faults: Active, now_s: float) -> Answer:
        pod = self._find(ident, now_s)
        if isinstance(pod, Answer):
            return pod
        changes = json.loads(request.body)
        if pod.cluster:
            return problem(409, "the pod belongs to a cluster")
        pod.locked = changes.pop("locked", pod.locked)
        pod.body |= changes
        if {"env", "image", "args"} & set(changes):
            self._park.restart(pod, now_s)
        return answer_json(entry_of(pod, now_s, faults))

    def _delete(self, _request: Request, ident: str, faults: Active, now_s: float) -> Answer:
        pod = self._find(ident, now_s)
        if isinstance(pod, Answer):
            return pod
        if "not_found" in faults:
            return problem(404, "pod not found")
        if pod.cluster or pod.locked:
            return problem(409, "the pod belongs to a cluster" if pod.cluster else "the pod is locked")
        if "no_effect" not in faults:
            self._park.delete(pod, now_s)
        return Answer(204)

    def _act(self, request: Request, ident: str, faults: Active, now_s: float) -> Answer:
        action = json.loads(request.body).get("action")
        if action == "terminate":
            return self._delete(request, ident, faults, now_s)
        pod = self._find(ident, now_s)
        if isinstance(pod, Answer):
            return pod
        allowed = entry_of(pod, now_s, Active(()))["actions"]
        if action not in allowed or pod.locked:
            return problem(409, f"{action} is not allowed in state {pod.status}")
        {"stop": self._park.stop, "start": self._park.start, "restart": self._park.restart}[action](pod, now_s)
        return answer_json(entry_of(pod, now_s, faults))

    def _logs(self, request: Request, ident: str, faults: Active, now_s: float) -> Answer:
        pod = self._find(ident, now_s)
        if isinstance(pod, Answer):
            return pod
        source = request.query.get("source")
        lines = [line for line in pod.log if line.at_s <= now_s and source in (None, line.source)]
        lines = _after_cursor(lines, request)
        if "cut" in faults:
            lines = lines[: len(lines) // 2]
        if "duplicates" in faults:
            lines = [line for line in lines for _ in range(2)]
        return Answer(200, "".join(map(_server_sent, lines)).encode(), "text/event-stream")

    # --- the rest ---

    def _gpus(self, request: Request, _ident: str, _faults: Active, _now_s: float) -> Answer:
        return answer_json({"gpus": gpus(request.query, self._account.sold_out)})

    def _gpu(self, request: Request, ident: str, _faults: Active, _now_s: float) -> Answer:
        entry = gpu_entry(ident, request.query, self._account.sold_out)
        return answer_json(entry) if entry else problem(404, "there is no such GPU type")

    def _data_centers(self, _request: Request, _ident: str, _faults: Active, _now_s: float) -> Answer:
        return answer_json({"dataCenters": data_centers(self._account.sold_out)})

    def _list_volumes(self, _request: Request, _ident: str, _faults: Active, _now_s: float) -> Answer:
        return answer_json({"networkVolumes": list(self._volumes.values())})

    def _create_volume(self, request: Request, _ident: str, _faults: Active, _now_s: float) -> Answer:
        body = json.loads(request.body)
        if unknown := sorted(set(body) - {"name", "size", "dataCenter", "type"}):
            return problem(422, f"{unknown[0]}: unknown field")
        if not 10 <= body.get("size", 0) <= 4096:
            return problem(422, "size: must be from 10 to 4096")
        ident = f"vol{len(self._volumes) + 1:06d}"
        self._volumes[ident] = {"id": ident, "type": "STANDARD", **body}
        return answer_json(self._volumes[ident], 201)

    def _get_volume(self, _request: Request, ident: str, _faults: Active, _now_s: float) -> Answer:
        found = self._volumes.get(ident)
        return answer_json(found) if found else problem(404, "network volume not found")

    def _delete_volume(self, _request: Request, ident: str, _faults: Active, _now_s: float) -> Answer:
        return Answer(204) if self._volumes.pop(ident, None) else problem(404, "network volume not found")

    def _billing(self, request: Request, _ident: str, _faults: Active, now_s: float) -> Answer:
        """One record a machine, as of an hour ago."""
        known_s = now_s - _BILLING_LAG_S
        records: list[dict[str, Any]] = []
        for pod in self._park.pods.values():
            dollars = self._park.meter.usd_micros(known_s, pod.pod_id) / 1e6
            if dollars and request.query.get("podId") in (None, pod.pod_id):
                span = {"startTime": rfc3339(pod.created_at_s), "endTime": rfc3339(known_s)}
                records.append({**span, "podId": pod.pod_id, **_amounts(dollars)})
        totals = _amounts(sum(record["totalAmount"] for record in records))
        query = {"bucketSize": "hour", "podId": request.query.get("podId")}
        counts = {"recordCount": len(records), "uniquePodCount": len(records)}
        return answer_json({"records": records, "metadata": {"query": query, **counts, "totals": totals}})

    def _graphql(self, request: Request, _ident: str, _faults: Active, now_s: float) -> Answer:
        if b"mutation" in request.body:
            return answer_json({"errors": [{"message": "mutations are retired"}]})
        per_hour = sum(pod.usd_per_hour for pod in self._park.alive(now_s))
        me = {"clientBalance": self._account.balance_usd, "currentSpendPerHr": per_hour, "spendLimit": 80}
        return answer_json({"data": {"myself": me}})


def _amounts(dollars: float) -> dict[str, float]:
    return {"totalAmount": dollars, "gpuAmount": dollars, "cpuAmount": 0.0, "diskAmount": 0.0}


def _cursor_of(line: LogLine) -> str:
    return f"{rfc3339(line.at_s)}/{line.number:012d}"


def _server_sent(line: LogLine) -> str:
    data = json.dumps({"ts": rfc3339(line.at_s), "source": line.source, "line": line.text})
    return f"id: {_cursor_of(line)}\ndata: {data}\n\n"


def _after_cursor(lines: list[LogLine], request: Request) -> list[LogLine]:
    if cursor := request.headers.get("last-event-id"):
        stamp, _, number = cursor.partition("/")
        if number:
            return [line for line in lines if (line.number > int(number))]
        return [line for line in lines if line.at_s >= seconds_of(stamp)]
    if since := request.query.get("since"):
        return [line for line in lines if line.at_s >= seconds_of(since)]
    tail = int(request.query.get("tail") or _PAGE)
    return lines[-tail:] if tail else []
