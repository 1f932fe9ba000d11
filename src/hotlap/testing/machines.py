"""The emulated machines: their states in time, what is seen of them when, and what their containers say."""

import heapq
import itertools
import math
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from hotlap.testing.containers import Birth, Container, EndSelf, Exit, Line, Runtime, argv_of
from hotlap.testing.faults import Active
from hotlap.testing.meter import Meter

Status = Literal["PROVISIONING", "STARTING", "RUNNING", "EXITED", "ERROR", "TERMINATED"]
Action = Literal["starting", "running", "error", "exited", "killed", "boot", "vanish"]
Span = tuple[float, float, float]
"""Shortest, longest and most likely seconds."""


@dataclass(frozen=True)
class Timings:
    visible_get_s: float = 0.3
    visible_list_s: float = 2.0
    provisioning: Span = (5.0, 20.0, 10.0)
    starting: Span = (10.0, 60.0, 20.0)
    first_line: Span = (1.0, 5.0, 2.0)
    restart_s: float = 2.0
    gone_get_s: float = 0.5
    gone_list_s: float = 3.0
    stop_grace_s: float = 5.0


INSTANT = Timings(0.0, 0.0, (0.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0), 0.5, 0.0, 0.0, 1.0)
"""For containers that really run."""


@dataclass(frozen=True)
class LogLine:
    at_s: float
    number: int
    source: Literal["container", "system"]
    text: str


@dataclass
class Pod:
    pod_id: str
    body: dict[str, Any]
    usd_per_hour: float
    created_at_s: float
    visible_list_s: float
    visible_get_s: float
    data_center: str | None
    key: str
    """The key that the platform injects; it ends this machine and does nothing else."""

    status: Status = "PROVISIONING"
    started_at_s: float | None = None
    ended_at_s: float | None = None
    num_boots: int = 0
    locked: bool = False
    cluster: bool = False
    has_runtime: bool = True
    log: list[LogLine] = field(default_factory=list[LogLine])
    marks: set[str] = field(default_factory=set[str])
    container: Container | None = None
    due: list[tuple[float, int, Action]] = field(default_factory=list[tuple[float, int, Action]])

    @property
    def name(self) -> str:
        return self.body["name"]

    def is_alive(self, now_s: float) -> bool:
        """Whether it exists, whatever is seen of it."""
        return self.created_at_s <= now_s and self.ended_at_s is None


class Park:
    """Every machine. Time comes from outside: `settle` brings all of them up to a moment."""

    def __init__(
        self,
        timings: Timings,
        runtime: Runtime,
        chance: random.Random,
        meter: Meter,
        pod_key_allows: Callable[[], str],
    ) -> None:
        self.timings, self.runtime, self.meter = timings, runtime, meter
        self.pods: dict[str, Pod] = {}
        self._chance = chance
        self._numbers = itertools.count(1)
        self._pod_key_allows = pod_key_allows

    # --- what the routes do ---

    def create(self, body: dict[str, Any], now_s: float, usd_per_hour: float, faults: Active) -> Pod:
        timings = self.timings
        created_s = now_s + faults.value("commit_late", 0.0)
        late_s = faults.value("visible_late", 0.0)
        pod = Pod(
            pod_id="".join(self._chance.choices("abcdefghijkmnpqrstuvwxyz23456789", k=14)),
            body=body,
            usd_per_hour=usd_per_hour * faults.value("price", 1.0),
            created_at_s=created_s,
            visible_get_s=created_s + max(late_s, timings.visible_get_s),
            visible_list_s=created_s + max(late_s, timings.visible_list_s),
            data_center=next(iter(body.get("dataCenterIds", ())), "US-KS-2"),
            key=f"pod-{self._chance.getrandbits(96):024x}",
            has_runtime="null_runtime" not in faults,
        )
        self.pods[pod.pod_id] = pod
        self.meter.begin(pod.pod_id, created_s, math.ceil(pod.usd_per_hour * 1e6), body.get("disk", 20))
        self._plan(pod, faults)
        return pod

    def _plan(self, pod: Pod, faults: Active) -> None:
        starts_s = pod.created_at_s + self._draw(self.timings.provisioning)
        runs_s = starts_s + self._draw(self.timings.starting)
        if "stuck_provisioning" in faults:
            starts_s = runs_s = math.inf
        if "stuck_starting" in faults:
            runs_s = math.inf
            pod.log.append(LogLine(starts_s + 1.0, next(self._numbers), "system", "error pulling image: not found"))
        if "null_runtime" in faults:
            pod.log.append(LogLine(runs_s, next(self._numbers), "system", "still pulling image"))
        ends: list[tuple[float, Action]] = [(starts_s, "starting"), (runs_s, "running")]
        if fault := faults.get("goes_error"):
            ends.append((pod.created_at_s + fault.value, "error"))
        if fault := faults.get("goes_exited"):
            ends.append((pod.created_at_s + fault.value, "exited"))
        if fault := faults.get("vanishes"):
            ends.append((pod.created_at_s + fault.value, "vanish"))
        if fault := faults.get("restarts"):
            ends.append((runs_s + fault.value, "killed"))
        for at_s, action in ends:
            self._schedule(pod, at_s, action)

    def delete(self, pod: Pod, now_s: float) -> None:
        if pod.ended_at_s is None:
            self._stop_container(pod)
            pod.status, pod.ended_at_s, pod.due = "TERMINATED", now_s, []
            self.meter.end(pod.pod_id, now_s)

    def stop(self, pod: Pod, now_s: float) -> None:
        if pod.container:
            pod.container.signal(signal.SIGTERM)
        self._schedule(pod, now_s + self.timings.stop_grace_s, "exited")

    def start(self, pod: Pod, now_s: float) -> None:
        pod.status = "STARTING"
        self.meter.begin(pod.pod_id, now_s, math.ceil(pod.usd_per_hour * 1e6), pod.body.get("disk", 20))
        self._schedule(pod, now_s + self._draw(self.timings.starting), "running")

    def restart(self, pod: Pod, now_s: float) -> None:
        self._schedule(pod, now_s, "killed")

    def listed(self, now_s: float) -> list[Pod]:
        """What a listing would show, the oldest first. A deleted machine stays for a moment."""
        gone_s = self.timings.gone_list_s
        return [
            pod
            for pod in self.pods.values()
            if pod.visible_list_s <= now_s and (pod.ended_at_s is None or now_s < pod.ended_at_s + gone_s)
        ]

    def found(self, pod_id: str, now_s: float) -> Pod | None:
        pod = self.pods.get(pod_id)
        if pod is None or pod.visible_get_s > now_s:
            return None
        is_there = pod.ended_at_s is None or now_s < pod.ended_at_s + self.timings.gone_get_s
        return pod if is_there else None

    def alive(self, now_s: float) -> list[Pod]:
        return [pod for pod in self.pods.values() if pod.is_alive(now_s)]

    def close(self) -> None:
        """Kill every container that runs."""
        for pod in self.pods.values():
            self._stop_container(pod)

    # --- time ---

    def settle(self, now_s: float) -> None:
        for pod in list(self.pods.values()):
            if pod.ended_at_s is None and pod.created_at_s <= now_s:
                self._settle(pod, now_s)

    def _settle(self, pod: Pod, now_s: float) -> None:
        while pod.ended_at_s is None:
            # A container that ends before then is due for a restart earlier than what is due now.
            self._listen(pod, min(now_s, pod.due[0][0]) if pod.due else now_s)
            if not pod.due or pod.due[0][0] > now_s:
                return
            at_s, _, action = heapq.heappop(pod.due)
            self._apply(pod, action, at_s)

    def _apply(self, pod: Pod, action: Action, at_s: float) -> None:
        if action == "starting" and pod.status == "PROVISIONING":
            pod.status = "STARTING"
        elif action == "running" and pod.status == "STARTING":
            pod.status, pod.started_at_s = "RUNNING", at_s
            self._boot(pod, at_s)
        elif action == "boot" and pod.status == "RUNNING":
            self._boot(pod, at_s)
        elif action == "killed" and pod.container:
            self._stop_container(pod)
            self._schedule(pod, at_s + self.timings.restart_s, "boot")
        elif action in ("exited", "error"):
            self._stop_container(pod)
            pod.status = "EXITED" if action == "exited" else "ERROR"
            self.meter.stop_computing(pod.pod_id, at_s)
        elif action == "vanish":
            self.delete(pod, at_s)

    def _boot(self, pod: Pod, at_s: float) -> None:
        if not pod.has_runtime:
            return
        pod.num_boots += 1
        pod.started_at_s = at_s
        birth = Birth(
            pod_id=pod.pod_id,
            number=pod.num_boots,
            at_s=at_s,
            env=pod.body.get("env", {}),
            argv=argv_of(pod.body),
            marks=pod.marks,
            first_line_s=self._draw(self.timings.first_line),
        )
        pod.container = self.runtime(birth)

    def _listen(self, pod: Pod, until_s: float) -> None:
        for happening in pod.container.until(until_s) if pod.container else []:
            if isinstance(happening, Line):
                pod.log.append(LogLine(happening.at_s, next(self._numbers), "container", happening.text))
            elif isinstance(happening, Exit):
                pod.container = None
                self._schedule(pod, happening.at_s + self.timings.restart_s, "boot")
                return
            else:
                self._end_self(pod, happening)

    def _end_self(self, pod: Pod, happening: EndSelf) -> None:
        if self._pod_key_allows() == "terminate":
            self.delete(pod, happening.at_s)
        elif self._pod_key_allows() == "stop":
            self.stop(pod, happening.at_s)

    def _stop_container(self, pod: Pod) -> None:
        if pod.container:
            pod.container.kill()
            pod.container = None

    def _schedule(self, pod: Pod, at_s: float, action: Action) -> None:
        if at_s < math.inf:
            heapq.heappush(pod.due, (at_s, next(self._numbers), action))

    def _draw(self, span: Span) -> float:
        shortest, longest, likely = span
        return shortest if shortest == longest else self._chance.triangular(shortest, longest, likely)
