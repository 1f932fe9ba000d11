"""What an emulated API takes and gives: create bodies checked as the server would, entries as the server shows them."""

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from hotlap.testing.faults import Active
from hotlap.testing.machines import Pod

Profile = Literal["2026-08", "2026-10"]
Checker = Callable[[Mapping[str, Any]], list[str]]

MAX_BODY_BYTES = 102_400
MAX_ENV = 50

_FIELDS: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "image": str,
    "gpu": dict,
    "cpu": dict,
    "cloud": str,
    "dataCenterIds": list,
    "env": dict,
    "args": str,
    "disk": int,
    "mounts": dict,
    "ports": list,
    "registry": (str, type(None)),
    "startSsh": bool,
    "startJupyter": bool,
    "globalNetworking": bool,
    "templateId": str,
}
_LATER_FIELDS: dict[str, type | tuple[type, ...]] = {"entrypoint": list, "cmd": list}
_GPU_FIELDS = {"id", "count", "allowedCudaVersions", "minCudaVersion"}
_LATER_GPU_FIELDS = {"minRamPerGpu", "minVcpuCountPerGpu"}


def complaints(body: Mapping[str, Any], profile: Profile) -> list[str]:
    """What the server's contract finds wrong with a create; each begins with the field's name."""
    fields = {**_FIELDS, **(_LATER_FIELDS if profile == "2026-10" else {})}
    found = [f"{name}: unknown field" for name in body if name not in fields]
    found += [
        f"{name}: wrong type" for name, value in body.items() if name in fields and not _is_a(value, fields[name])
    ]
    if not isinstance(body.get("name"), str) or not body["name"]:
        found.append("name: is required")
    if "image" not in body and "templateId" not in body:
        found.append("image: is required")
    if body.get("cloud", "SECURE") not in ("SECURE", "COMMUNITY"):
        found.append("cloud: must be SECURE or COMMUNITY")
    found += _gpu_complaints(body.get("gpu"), profile) + _mount_complaints(body.get("mounts"))
    env = body.get("env")
    if isinstance(env, dict) and not all(isinstance(value, str) for value in env.values()):
        found.append("env: values must be strings")
    if isinstance(body.get("disk"), int) and body["disk"] < 1:
        found.append("disk: must be at least 1")
    return found


def _is_a(value: object, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _gpu_complaints(gpu: object, profile: Profile) -> list[str]:
    if not isinstance(gpu, dict):
        return []
    known = _GPU_FIELDS | (_LATER_GPU_FIELDS if profile == "2026-10" else set())
    found = [f"gpu.{name}: unknown field" for name in gpu if name not in known]
    if not isinstance(gpu.get("id"), str):
        found.append("gpu.id: is required")
    versions = [*gpu.get("allowedCudaVersions", ()), *([gpu["minCudaVersion"]] if "minCudaVersion" in gpu else ())]
    found += [f"gpu: {version} is no CUDA version" for version in versions if not re.fullmatch(r"\d+\.\d+", version)]
    return found


def _mount_complaints(mounts: object) -> list[str]:
    if not isinstance(mounts, dict):
        return []
    found = [f"mounts.{name}: unknown field" for name in mounts if name not in ("persistent", "network")]
    for mount in mounts.get("network", ()):
        if set(mount) != {"volumeId", "path"}:
            found.append("mounts.network: takes volumeId and path")
    if len(mounts.get("network", ())) > 1:
        found.append("mounts.network: at most one")
    return found


def rule_breaches(body: Mapping[str, Any], num_bytes: int) -> str | None:
    """A rule that the contract's schema does not hold; answered with 400."""
    if ("gpu" in body) == ("cpu" in body):
        return "exactly one of gpu and cpu must be set"
    if len(body.get("env", ())) > MAX_ENV:
        return f"at most {MAX_ENV} environment variables"
    if num_bytes > MAX_BODY_BYTES:
        return f"the request has more than {MAX_BODY_BYTES} bytes"
    return None


# --- entries ---

_ACTIONS = {
    "PROVISIONING": ["stop", "terminate"],
    "STARTING": ["stop", "terminate"],
    "RUNNING": ["stop", "restart", "terminate"],
    "EXITED": ["start", "terminate"],
    "ERROR": ["start", "terminate"],
    "TERMINATED": [],
}


def entry_of(pod: Pod, now_s: float, faults: Active) -> dict[str, Any]:
    """A machine as create, get and list answer it."""
    body = pod.body
    entry: dict[str, Any] = {
        "id": pod.pod_id,
        "name": pod.name,
        "status": "REBALANCING" if "unknown_status" in faults else pod.status,
        "actions": _ACTIONS[pod.status],
        "image": body.get("image", ""),
        "args": body.get("args", ""),
        "disk": body.get("disk", 20),
        "mounts": body.get("mounts", {}),
        "ports": body.get("ports", []),
        "env": body.get("env", {}),
        "registry": body.get("registry"),
        "cloud": body.get("cloud", "SECURE"),
        "dataCenterId": pod.data_center,
        "cudaVersion": "12.8" if "gpu" in body else None,
        "ssh": {"proxy": None, "direct": None},
        "template": body.get("templateId"),
        "cost": 0.0 if pod.status in ("EXITED", "TERMINATED") else pod.usd_per_hour,
        "locked": pod.locked,
        "globalNetworking": {"enabled": False},
        "runtime": _runtime_of(pod, now_s, faults),
        "createdAt": rfc3339(pod.created_at_s),
        "startedAt": None if pod.started_at_s is None else rfc3339(pod.started_at_s),
    }
    if "gpu" in body:
        entry["gpu"] = {"id": body["gpu"]["id"], "count": body["gpu"].get("count", 1)}
    else:
        entry["cpu"] = {**body["cpu"], "memory": 4}
    if pod.cluster:
        entry["cluster"] = {"id": "cluster-1", "rank": 0}
    return _with_lies(entry, faults)


def _with_lies(entry: dict[str, Any], faults: Active) -> dict[str, Any]:
    if "zero_cost" in faults:
        entry["cost"] = 0.0
    if "null_cost" in faults:
        entry["cost"] = None
    if "hides_env" in faults:
        del entry["env"]
    return entry


def _runtime_of(pod: Pod, now_s: float, faults: Active) -> dict[str, Any] | None:
    if pod.status != "RUNNING" or not pod.has_runtime or pod.container is None or pod.started_at_s is None:
        return None
    uptime_s = 1 if "uptime_backwards" in faults else int(now_s - pod.started_at_s)
    gpus = [{"util": 97, "memoryUtil": 41}] if "gpu" in pod.body else []
    return {
        "uptime": uptime_s,
        "gpus": gpus,
        "cpu": {"util": 12},
        "memory": {"util": 8},
        "ports": [],
    }


def rfc3339(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def seconds_of(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
