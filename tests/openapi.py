"""Holds requests against the provider's own API file, which lies outside the repository."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest

SPEC = Path(__file__).parents[2] / "shared" / "runpod" / "openapi-v2.json"

LATER_QUERY = {("GET", "/v2/pods"): {"limit", "cursor"}}
LATER_BODY = {("POST", "/v2/pods"): {"cmd", "entrypoint"}}
"""What came after the file of August: clients in use send it (research note, 1.3 and 1.4)."""

_HEADERS_OF_HTTP = {
    *("host", "accept", "accept-encoding", "authorization", "connection", "user-agent"),
    *("content-length", "content-type"),
}


@contextmanager
def holding_every_client() -> Iterator[None]:
    """Until it ends, every request of every client in this process is one that the file describes. One that is not
    fails where it is made, and again at the end, since a sweep goes on whatever befalls a provider."""
    from hotlap.cloud.runpod import Runpod

    begin, odd = Runpod.__init__, list[str]()

    def hold(request: httpx.Request) -> None:
        request.read()
        found = complaints(request)
        odd.extend(found)
        assert found == []

    def begin_held(client: Runpod, *given: Any, **named: Any) -> None:
        begin(client, *given, **named)
        client._http.event_hooks["request"].append(hold)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runpod, "__init__", begin_held)
        yield
    assert odd == []


@cache
def spec() -> dict[str, Any]:
    return json.loads(SPEC.read_text())


def complaints(request: httpx.Request) -> list[str]:
    """What the file finds wrong with a request; an empty list for a good one."""
    path, operation = _operation(request.method, request.url.raw_path.partition(b"?")[0].decode())
    if operation is None:
        return [f"{request.method} {request.url.path}: no such operation"]
    found: list[str] = []
    known = [_resolved(parameter) for parameter in operation.get("parameters", [])]
    queries = {parameter["name"]: parameter for parameter in known if parameter["in"] == "query"}
    for name, text in request.url.params.items():
        if name in queries:
            found += _errors(_value(text, queries[name]), queries[name]["schema"])
        elif name not in LATER_QUERY.get((request.method, path), set()):
            found.append(f"{path}: query {name} is unknown")
    headers = {parameter["name"].lower() for parameter in known if parameter["in"] == "header"}
    found += [f"{path}: header {name} is unknown" for name in request.headers if name not in _HEADERS_OF_HTTP | headers]
    return found + _body_complaints(request, path, operation)


def _body_complaints(request: httpx.Request, path: str, operation: dict[str, Any]) -> list[str]:
    content = _resolved(operation.get("requestBody", {})).get("content", {})
    if not request.content:
        return [f"{path}: a body is required"] if operation.get("requestBody", {}).get("required") else []
    if "application/json" not in content:
        return [f"{path}: takes no body"]
    body = json.loads(request.content)
    later = LATER_BODY.get((request.method, path), set())
    older = {name: value for name, value in body.items() if name not in later}
    exec_forms = [body[name] for name in later & set(body)]
    odd = [f"{words!r} is no list of words" for words in exec_forms if not all(isinstance(word, str) for word in words)]
    return [*odd, *_errors(older, content["application/json"]["schema"])]


def _operation(method: str, path: str) -> tuple[str, dict[str, Any] | None]:
    words = path.split("/")
    for pattern, operations in spec()["paths"].items():
        parts = pattern.split("/")
        fits = len(parts) == len(words) and all(
            part == unquote(word) or (part.startswith("{") and word) for part, word in zip(parts, words, strict=True)
        )
        if fits and method.lower() in operations:
            return pattern, operations[method.lower()]
    return path, None


def _resolved(tree: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in tree:
        here: Any = spec()
        for word in tree["$ref"].removeprefix("#/").split("/"):
            here = here[word]
        tree = here
    return tree


def _value(text: str, parameter: dict[str, Any]) -> object:
    kind = _resolved(parameter["schema"]).get("type")
    if kind == "array":
        return text.split(",")
    if kind == "boolean":
        return {"true": True, "false": False}.get(text, text)
    return int(text) if kind == "integer" and text.isdecimal() else text


def _errors(value: object, schema: dict[str, Any]) -> list[str]:
    import jsonschema

    whole = {**schema, "components": spec()["components"]}
    return [error.message for error in jsonschema.Draft202012Validator(whole).iter_errors(value)]
