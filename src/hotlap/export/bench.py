"""How fast a server answers: the frozen prompts at a concurrency, token by token, and two servers side by side.

TTFT is the time from a request to its first token, TPOT the time per token after it. Tokens are counted as the server
counts them, so that several drafted ones in a piece are several.
"""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from hotlap import clock
from hotlap.errors import ProviderFailed
from hotlap.export.task import Say

_PATIENCE_S = 600.0
_DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


@dataclass(frozen=True)
class Load:
    """What is asked: every prompt `num_rounds` times, `concurrency` at once, answers of at most `max_tokens`."""

    prompts: tuple[str, ...]
    concurrency: int
    max_tokens: int
    num_rounds: int


@dataclass(frozen=True)
class Answer:
    """One request in seconds. `num_tokens` are the server's."""

    ttft_s: float
    wall_s: float
    num_tokens: int

    @property
    def tpot_s(self) -> float | None:
        return (self.wall_s - self.ttft_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None


@dataclass(frozen=True)
class Round:
    """Every prompt once."""

    wall_s: float
    answers: tuple[Answer, ...]

    @property
    def tokens_per_s(self) -> float:
        return sum(answer.num_tokens for answer in self.answers) / self.wall_s


@dataclass(frozen=True)
class Drafts:
    """Tokens drafted ahead and those accepted, as vLLM counts them since it started."""

    drafted: float
    accepted: float


@dataclass(frozen=True)
class Measured:
    """What rounds of one server come to."""

    url: str
    model: str
    num_requests: int
    num_tokens: int
    tokens_per_s: float
    """Output tokens in the median round."""
    tokens_per_s_rounds: tuple[float, ...]
    ttft_s: Mapping[str, float]
    """Seconds at p50, p95 and p99."""
    tpot_s: Mapping[str, float]
    acceptance: float | None
    """Accepted of drafted tokens; None where nothing is drafted."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(urls: Sequence[str], models: Sequence[str | None], load: Load, say: Say) -> list[Measured]:
    """Every server under the same load. Several take turns, round by round, in changing order.

    Raises:
        ProviderFailed: a server does not answer, or not with tokens.
    """
    try:
        return asyncio.run(_measure(urls, models, load, say))
    except httpx.HTTPError as error:
        raise ProviderFailed(f"{' and '.join(urls)}: {type(error).__name__} {error}. Is it up?") from error


async def _measure(urls: Sequence[str], models: Sequence[str | None], load: Load, say: Say) -> list[Measured]:
    clients = [httpx.AsyncClient(base_url=url.rstrip("/").removesuffix("/v1"), timeout=_PATIENCE_S) for url in urls]
    names = [name or await _model_of(client) for client, name in zip(clients, models, strict=True)]
    rounds: list[list[Round]] = [[] for _ in urls]
    for client, name in zip(clients, names, strict=True):
        await _answer(client, name, load.prompts[0], load.max_tokens)  # what is only slow once is not measured
    before = [await _drafts(client) for client in clients]
    for number in range(load.num_rounds):
        order = range(len(urls)) if number % 2 == 0 else reversed(range(len(urls)))
        for index in order:
            rounds[index].append(await _round(clients[index], names[index], load))
            say(f"round {number + 1} of {load.num_rounds}: {urls[index]} {rounds[index][-1].tokens_per_s:.1f} tokens/s")
    after = [await _drafts(client) for client in clients]
    for client in clients:
        await client.aclose()
    return [summary(*of) for of in zip(urls, names, rounds, map(_acceptance, before, after), strict=True)]


async def _round(client: httpx.AsyncClient, model: str, load: Load) -> Round:
    gate = asyncio.Semaphore(load.concurrency)

    async def ask(prompt: str) -> Answer:
        async with gate:
            return await _answer(client, model, prompt, load.max_tokens)

    started_s = clock.monotonic_s()
    answers = await asyncio.gather(*map(ask, load.prompts))
    return Round(clock.monotonic_s() - started_s, tuple(answers))


async def _answer(client: httpx.AsyncClient, model: str, prompt: str, max_tokens: int) -> Answer:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started_s = clock.monotonic_s()
    first_s, last_s, num_pieces, num_tokens = None, started_s, 0, 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            text = (await answer.aread()).decode(errors="replace")
            raise ProviderFailed(f"{client.base_url} answered {answer.status_code}: {text[:300]}")
        async for event in _events(answer):
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
            delta = event["choices"][0].get("delta", {}) if event.get("choices") else {}
            if delta.get("content"):
                last_s = clock.monotonic_s()
                first_s = first_s or last_s
                num_pieces += 1
    if first_s is None:
        return Answer(clock.monotonic_s() - started_s, clock.monotonic_s() - started_s, num_tokens)
    return Answer(first_s - started_s, last_s - started_s, num_tokens or num_pieces)


async def _events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.aiter_lines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield json.loads(data)


async def _model_of(client: httpx.AsyncClient) -> str:
    """The model to ask: an adapter if one is served, else the first."""
    answer = await client.get("/v1/models")
    models: list[dict[str, Any]] = answer.json().get("data", []) if answer.status_code == 200 else []
    if not models:
        raise ProviderFailed(f"{client.base_url} lists no model on /v1/models. Name one with --model.")
    return next((each for each in models if each.get("parent")), models[0])["id"]


async def _drafts(client: httpx.AsyncClient) -> Drafts | None:
    answer = await client.get("/metrics")
    return drafts_in(answer.text) if answer.status_code == 200 else None


def drafts_in(metrics: str) -> Drafts | None:
    """From Prometheus' text; None where nothing is counted."""
    found: dict[str, float] = {}
    for line in metrics.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in (_DRAFTED, _ACCEPTED):
            found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
    return Drafts(found[_DRAFTED], found[_ACCEPTED]) if len(found) == 2 else None


def _acceptance(before: Drafts | None, after: Drafts | None) -> float | None:
    if before is None or after is None or after.drafted == before.drafted:
        return None
    return (after.accepted - before.accepted) / (after.drafted - before.drafted)


# --- what it comes to ---


def summary(url: str, model: str, rounds: Sequence[Round], acceptance: float | None) -> Measured:
    answers = [answer for each in rounds for answer in each.answers]
    speeds = [each.tokens_per_s for each in rounds]
    return Measured(
        url=url,
        model=model,
        num_requests=len(answers),
        num_tokens=sum(answer.num_tokens for answer in answers),
        tokens_per_s=percentile(speeds, 50),
        tokens_per_s_rounds=tuple(speeds),
        ttft_s=_percentiles([answer.ttft_s for answer in answers]),
        tpot_s=_percentiles([answer.tpot_s for answer in answers if answer.tpot_s is not None]),
        acceptance=acceptance,
    )


def ratios(first: Measured, second: Measured) -> dict[str, float]:
    """The second's output speed over the first's, round by round: `median`, `least` and `most`."""
    each = [b / a for a, b in zip(first.tokens_per_s_rounds, second.tokens_per_s_rounds, strict=True)]
    return {"median": percentile(each, 50), "least": min(each), "most": max(each)}


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{rank}": percentile(values, rank) for rank in (50, 95, 99)} if values else {}


def percentile(values: Sequence[float], rank: float) -> float:
    """Between the nearest two by their distance (as numpy's default)."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * rank / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
