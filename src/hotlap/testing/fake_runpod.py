"""A stand-in for RunPod's REST API on loopback: `with FakeRunpod() as cloud: ... cloud.url ...`.

Time is a clock that the test moves, chance is seeded, faults come from a script, and an independent meter tells what
everything really cost. With `LocalProcesses` as its runtime it runs the containers' commands on this machine, in real
time. `python -m hotlap.testing.fake_runpod --port 8999 --folder DIR` serves one by itself. Under `/_ctl` a test in
another process moves the clock (`POST /_ctl/advance`), adds faults (`POST /_ctl/faults`), and reads meter, machines
and requests (`GET /_ctl/meter`, `/_ctl/pods`, `/_ctl/requests`, `/_ctl/clock`).
"""

import argparse
import contextlib
import json
import random
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from hotlap import clock
from hotlap.testing.bodies import Profile
from hotlap.testing.containers import LocalProcesses, Runtime, scripted
from hotlap.testing.fake_clock import FakeClock
from hotlap.testing.faults import Active, Fault, FaultScript, fault_from
from hotlap.testing.machines import INSTANT, Park, Pod, Timings
from hotlap.testing.meter import Meter
from hotlap.testing.routes import NO_CAPACITY, NO_FUNDS, Account, Answer, Request, Routes, answer_json, problem

_WINDOWS = (("minute", 60.0), ("hour", 3600.0), ("day", 86_400.0))
_TICK_S = 0.05
_DETAILS = {401: "the API key is not valid", 402: NO_FUNDS, 403: "no permission", 410: "gone", 429: "too many requests"}


@dataclass(frozen=True)
class Recorded:
    """A request as it came, without its key and without what the machine's environment holds."""

    at_s: float
    route: str
    ident: str
    status: int | None
    """None: the connection was cut."""

    body: dict[str, Any] | None


class FakeRunpod:
    """One emulated account on one loopback port."""

    def __init__(
        self,
        clock_: FakeClock | None = None,
        *,
        runtime: Runtime | None = None,
        folder: Path | None = None,
        python: str = sys.executable,
        timings: Timings | None = None,
        faults: Iterable[Fault] = (),
        profile: Profile = "2026-10",
        seed: int = 0,
        port: int = 0,
        per_minute: int = 60,
    ) -> None:
        """Without a clock time is real. With a `folder` the containers' commands run, below it, where an image's
        `python3` is `python`."""
        self.clock = clock_
        self.account = Account()
        self.meter = Meter()
        self.requests: list[Recorded] = []
        chance = random.Random(seed)
        if runtime is None:
            runtime = LocalProcesses(folder, self._pod_env, python) if folder else scripted()
        timings = timings or (INSTANT if folder else Timings())
        self.park = Park(timings, runtime, chance, self.meter, lambda: self.account.pod_key_allows)
        self.script = FaultScript(faults, chance)
        self.profile: Profile = profile
        self._routes = Routes(self.park, self.account, profile)
        self._began_s = self.now_s()
        self._quotas = (per_minute, per_minute * 50, per_minute * 833)
        self._counted: deque[float] = deque()
        self._turn = threading.Lock()
        self._server = _server_for(self, port)
        self._stopping = threading.Event()

    @property
    def url(self) -> str:
        """What `HOTLAP_RUNPOD_URL` takes."""
        return f"{self.root}/v2"

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def now_s(self) -> float:
        return self.clock.now_s() if self.clock else clock.wall_s()

    def advance(self, seconds: float) -> None:
        """Let time pass, and everything happen that is due in it."""
        assert self.clock, "this cloud lives in real time"
        self.clock.sleep_s(seconds)
        self.settle()

    def settle(self) -> None:
        with self._turn:
            self.park.settle(self.now_s())

    def add(self, *faults: Fault) -> None:
        with self._turn:
            self.script.faults.extend(faults)

    def alive(self) -> list[Pod]:
        """Machines that exist, whatever a listing shows."""
        self.settle()
        return self.park.alive(self.now_s())

    def usd_micros(self) -> int:
        self.settle()
        return self.meter.usd_micros(self.now_s())

    def calls(self, route: str) -> list[Recorded]:
        return [request for request in self.requests if request.route == route]

    def _pod_env(self, pod_id: str) -> dict[str, str]:
        key = self.park.pods[pod_id].key
        return {"RUNPOD_POD_ID": pod_id, "RUNPOD_API_KEY": key, "RUNPOD_DC_ID": "US-KS-2", "RUNPOD_GPU_COUNT": "1"}

    # --- serving ---

    def __enter__(self) -> "FakeRunpod":
        self._threads = [threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)]
        if self.clock is None:
            self._threads.append(threading.Thread(target=self._tick, daemon=True))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._server.shutdown()
        for thread in self._threads:
            thread.join(timeout=5.0)
        self._server.server_close()
        self.park.close()

    def _tick(self) -> None:
        while not self._stopping.wait(_TICK_S):
            self.settle()

    def take(self, request: Request) -> tuple[Answer | None, Active]:
        """The answer, None for a connection that is cut, and the faults under which it travels."""
        with self._turn:
            now_s = self.now_s()
            self.park.settle(now_s)
            route, ident = self._routes.route_of(request)
            faults = self.script.on(route, now_s - self._began_s)
            answer = self._answer(request, route, ident, faults, now_s)
            self.park.settle(now_s)
            status = answer.status if answer else None
            self.requests.append(Recorded(now_s, route, ident, status, _redacted(request)))
            if answer:
                answer.headers |= self._headers(now_s)
            return answer, faults

    def _answer(self, request: Request, route: str, ident: str, faults: Active, now_s: float) -> Answer | None:
        if not request.path.startswith("/v1"):
            if refused := self._routes.refused(request, route, ident):
                return refused
            if over := self._over_quota(now_s):
                return over
        if "drop_before" in faults:
            return None
        if (fault := faults.get("status")) or (fault := faults.get("html")):
            return _error(fault)
        if "capacity" in faults and route == "POST /v2/pods":
            return problem(400, NO_CAPACITY)
        answer = self._routes.handle(request, route, ident, faults, now_s)
        if (fault := faults.get("status_after")) or (fault := faults.get("html_after")):
            return _error(fault)
        return None if "drop_after" in faults or "commit_late" in faults else answer

    def _over_quota(self, now_s: float) -> Answer | None:
        while self._counted and self._counted[0] <= now_s - _WINDOWS[-1][1]:
            self._counted.popleft()
        for (name, length_s), quota in zip(_WINDOWS, self._quotas, strict=True):
            oldest = self._counted[-quota] if len(self._counted) >= quota else None
            if oldest is not None and oldest > now_s - length_s:
                answer = problem(429, f"the quota of this {name} is used up")
                answer.headers["Retry-After"] = str(max(1, round(oldest + length_s - now_s)))
                return answer
        self._counted.append(now_s)
        return None

    def _headers(self, now_s: float) -> dict[str, str]:
        states: list[str] = []
        for (name, length_s), quota in zip(_WINDOWS, self._quotas, strict=True):
            used = sum(at_s > now_s - length_s for at_s in self._counted)
            states.append(f'"{name}";r={max(0, quota - used)};t={length_s:.0f}')
        policy = (f'"{name}";q={quota};w={w:.0f}' for (name, w), quota in zip(_WINDOWS, self._quotas, strict=True))
        return {
            "Date": format_datetime(datetime.fromtimestamp(now_s, UTC), usegmt=True),
            "RateLimit": ", ".join(states),
            "RateLimit-Policy": ", ".join(policy),
        }

    # --- for tests in other processes ---

    def control(self, request: Request) -> Answer:
        what = request.path.removeprefix("/_ctl/")
        tree = json.loads(request.body or b"null")
        if what == "advance":
            self.advance(float(tree["seconds"]))
        elif what == "faults":
            self.add(*map(fault_from, tree))
        views: dict[str, Callable[[], object]] = {
            "advance": self.now_s,
            "clock": self.now_s,
            "faults": lambda: len(self.script.faults),
            "meter": lambda: {"usd_micros": self.usd_micros(), "machines": self.meter.rows(self.now_s())},
            "pods": lambda: [{"id": pod.pod_id, "name": pod.name, "status": pod.status} for pod in self.alive()],
            "requests": lambda: [[row.at_s, row.route, row.ident, row.status] for row in self.requests],
        }
        return answer_json(views[what]()) if what in views else problem(404, f"the controls are {sorted(views)}")


def _redacted(request: Request) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        body = json.loads(request.body)
        if isinstance(body, dict):
            return {**body, "env": dict.fromkeys(body["env"], "…")} if "env" in body else body
    return None


def _error(fault: Fault) -> Answer:
    status = int(fault.value)
    if fault.kind in ("html", "html_after"):
        return Answer(status, b"<html><body><h1>Bad gateway</h1></body></html>", "text/html")
    answer = problem(status, fault.detail or _DETAILS.get(status, "something went wrong"))
    if status == 429:
        answer.headers["Retry-After"] = f"{fault.retry_after_s:g}"
    return answer


def _server_for(cloud: FakeRunpod, port: int) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else every answer waits 40 ms for the client's acknowledgement

        def handle_any(self) -> None:
            parts = urlsplit(self.path)
            length = int(self.headers.get("Content-Length") or 0)
            request = Request(
                self.command,
                unquote(parts.path),
                dict(parse_qsl(parts.query)),
                {name.lower(): value for name, value in self.headers.items()},
                self.rfile.read(length),
            )
            if request.path.startswith("/_ctl/"):
                self.give(cloud.control(request), Active(()))
                return
            answer, faults = cloud.take(request)
            if fault := faults.get("slow"):
                clock.sleep_s(fault.value)
            if answer is None:
                self.cut()
            else:
                self.give(answer, faults)

        do_GET = do_POST = do_PATCH = do_DELETE = do_PUT = handle_any

        def give(self, answer: Answer, faults: Active) -> None:
            self.send_response_only(answer.status)
            headers = {"Content-Type": answer.kind, "Content-Length": str(len(answer.body)), **answer.headers}
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if "truncate" in faults:
                self.wfile.write(answer.body[: len(answer.body) // 2])
                self.cut()
            else:
                self.wfile.write(answer.body)

        def cut(self) -> None:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)

        def log_message(self, format: str, *args: object) -> None:
            return

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

        def handle_error(self, request: Any, client_address: Any) -> None:
            return

    return Server(("127.0.0.1", port), Handler)


def main() -> None:
    parser = argparse.ArgumentParser(description="An emulated RunPod on loopback; its key is full-key.")
    parser.add_argument("--port", type=int, default=8999)
    parser.add_argument("--folder", type=Path, help="run the containers' commands below this folder, in real time")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell that starts it behind has SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    fake = None if options.folder else FakeClock()
    with contextlib.suppress(KeyboardInterrupt), FakeRunpod(fake, folder=options.folder, port=options.port) as cloud:
        print(f"HOTLAP_RUNPOD_URL={cloud.url} RUNPOD_API_KEY=full-key", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
