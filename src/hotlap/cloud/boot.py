"""First on a rented machine, before anything is installed: run the job once, end it in time, then end the machine.

    python3 -S -I boot.py JOB [ARGUMENT...]

Standard library only, and it stands alone, so that its text can travel in the create request. Its environment is the
tags (`HOTLAP_LEASE`, `HOTLAP_NONCE`, `HOTLAP_NOT_AFTER`) and `HOTLAP_CAP_S`, the job's longest life. Optional are
`HOTLAP_VOLUME` (where the once-marker outlives the container), `HOTLAP_HEARTBEAT_S`, `HOTLAP_GRACE_S`,
`HOTLAP_LINGER_S` (from the result to self-termination), `HOTLAP_LEAVES` (set where nothing is started again: then this
process ends by itself, and the machine with it) and `HOTLAP_CA_BUNDLE`. The platform adds `RUNPOD_POD_ID` and
`RUNPOD_API_KEY`, a key that can do no more than end this machine; the job does not get it.

Lines on standard output, each `HOTLAP: ` and JSON: `boot`, then `refused`, or the job's own lines with a `heartbeat`
now and then and one `result` at the end. A command that exits is started again by the platform, so this one never
exits by itself there: it holds, and leaves only when it is told to by SIGTERM.
"""

import contextlib
import ctypes
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any
from urllib.parse import quote, urlsplit

LINE_PREFIX = "HOTLAP: "
DEFAULT_URL = "https://api.runpod.io/v2"
OVERRAN = 124
_STOPPED_BY_SIGTERM = 143
_TICK_S = 0.1
_CALL_TIMEOUT_S = 15.0
_FIRST_RETRY_S, _LONGEST_RETRY_S = 30.0, 600.0
_PR_SET_CHILD_SUBREAPER = 36


# --- decisions ---


@dataclass(frozen=True)
class Orders:
    """What the environment says; None where it says nothing that can be read."""

    lease_id: str
    nonce: str
    not_after_s: float | None
    cap_s: float | None
    volume: str | None
    heartbeat_s: float
    grace_s: float
    linger_s: float
    leaves: bool


def orders_of(env: Mapping[str, str]) -> Orders:
    return Orders(
        lease_id=re.sub(r"[^A-Za-z0-9._-]", "_", env.get("HOTLAP_LEASE", "")) or "none",
        nonce=env.get("HOTLAP_NONCE", ""),
        not_after_s=_number(env.get("HOTLAP_NOT_AFTER")),
        cap_s=_number(env.get("HOTLAP_CAP_S")),
        volume=env.get("HOTLAP_VOLUME") or None,
        heartbeat_s=_number(env.get("HOTLAP_HEARTBEAT_S")) or 10.0,
        grace_s=_number(env.get("HOTLAP_GRACE_S")) or 5.0,
        linger_s=_number(env.get("HOTLAP_LINGER_S")) or 15.0,
        leaves=bool(env.get("HOTLAP_LEAVES")),
    )


def _number(text: str | None) -> float | None:
    return float(text) if text and re.fullmatch(r"-?[0-9]{1,15}(\.[0-9]{1,9})?", text) else None


def refusal(orders: Orders, now_s: float) -> tuple[str, str] | None:
    """Why the job may not start, as a reason word and in words, or None."""
    if orders.not_after_s is None or orders.cap_s is None:
        return "undated", "HOTLAP_NOT_AFTER or HOTLAP_CAP_S is missing or no number, so the job would have no end."
    if now_s >= orders.not_after_s:
        return "late", f"The machine's time was over {now_s - orders.not_after_s:.0f} s ago."
    return None


def seconds_to_run(orders: Orders, now_s: float) -> float:
    """From now to the job's end: its cap, or less if the machine's own time is over sooner."""
    assert orders.cap_s is not None and orders.not_after_s is not None
    return max(0.0, min(orders.cap_s, orders.not_after_s - now_s))


def result_of(told: Mapping[str, Any] | None, returncode: int, did_overrun: bool) -> dict[str, Any]:
    """The one result line: what the job told of itself, unless its end shows that it was not so."""
    if told is not None and told.get("exit_code") == returncode:
        return dict(told)
    if did_overrun:
        message = "The job did not end by its cap, or by the machine's time, and was ended."
        return {**(told or {}), "exit_code": OVERRAN, "reason": "overran", "message": message}
    if returncode == 0:
        return {**(told or {}), "exit_code": 0, "reason": "done", "message": "The job is done."}
    if returncode < 0:
        message = f"The job was ended by signal {-returncode} ({signal.strsignal(-returncode)}) from outside."
        return {**(told or {}), "exit_code": 6, "reason": "crash", "message": message}
    message = f"The job ended with exit code {returncode} and no result of its own."
    return {**(told or {}), "exit_code": returncode, "reason": "crash", "message": message}


def may_carry_a_key(url: str) -> bool:
    """A key is sent over TLS only, or to this machine itself."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:  # no address at all
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and host in ("127.0.0.1", "localhost", "::1"))


def event_line(event: str, **facts: Any) -> str:
    return LINE_PREFIX + json.dumps({"event": event, **facts})


def result_in(line: str) -> dict[str, Any] | None:
    """The facts of a result line; None for any other."""
    if not line.startswith(LINE_PREFIX):
        return None
    try:
        facts = json.loads(line[len(LINE_PREFIX) :])
    except ValueError:
        return None
    return facts if isinstance(facts, dict) and facts.pop("event", None) == "result" else None


# --- acts ---


class Speaker:
    """Whole lines on standard output, from any thread, without the secret."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._turn = threading.Lock()

    def say(self, line: str) -> None:
        text = line.replace(self._secret, "[redacted]") if self._secret else line
        with self._turn, contextlib.suppress(OSError, ValueError):
            sys.stdout.write(text + "\n")
            sys.stdout.flush()


class Stops:
    """Whether somebody asked this machine to stop; the job's group is told at once."""

    def __init__(self) -> None:
        self.is_asked = False
        self.group: int | None = None

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self.is_asked = True
        self.tell_job()

    def tell_job(self, number: int = signal.SIGTERM) -> None:
        if self.group is not None:
            _signal_group(self.group, number)


def main(argv: Sequence[str]) -> None:
    began_s, now_s = time.monotonic(), time.time()
    orders = orders_of(os.environ)
    key = os.environ.get("RUNPOD_API_KEY", "")
    speaker, stops, boot_id = Speaker(key), Stops(), secrets.token_hex(8)
    stops.install()
    _adopt_orphans()
    speaker.say(event_line("boot", boot_id=boot_id, lease=orders.lease_id, nonce=orders.nonce, now_s=round(now_s, 3)))
    refused = refusal(orders, now_s) or _claim(orders)
    if refused:
        speaker.say(event_line("refused", boot_id=boot_id, reason=refused[0], message=refused[1]))
    else:
        deadline_s = began_s + seconds_to_run(orders, now_s)
        try:
            result = _run_job(argv, orders, deadline_s, boot_id, speaker, stops)
        except Exception as error:  # noqa: BLE001  (a boot that dies is started again, and nobody hears why)
            stops.tell_job(signal.SIGKILL)
            message = f"Boot itself failed, which is a bug: {type(error).__name__}: {error}."
            result = {"exit_code": 1, "reason": "unexpected", "message": message}
        speaker.say(event_line("result", **{**result, "boot_id": boot_id}))
    _hold(orders, speaker, stops, key)


def _claim(orders: Orders) -> tuple[str, str] | None:
    """Take the lease's one right to run. The marker lies on the volume where there is one; a container's own disk
    may be wiped by a restart, and then whoever watches the log sees a second boot."""
    home = Path(orders.volume) if orders.volume else Path.cwd()
    marker = home / ".hotlap-once" / orders.lease_id
    try:
        marker.parent.mkdir(exist_ok=True)
        marker.mkdir()
        for folder in (marker.parent, home):
            _sync(folder)
    except FileExistsError:
        return "again", f"The job of lease {orders.lease_id} was started here before; {marker} says so."
    except OSError as error:
        return "volume", f"{marker} cannot be made ({error.strerror}), so the job could not be kept from running twice."
    return None


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _run_job(
    argv: Sequence[str], orders: Orders, deadline_s: float, boot_id: str, speaker: Speaker, stops: Stops
) -> dict[str, Any]:
    env = {name: value for name, value in os.environ.items() if name != "RUNPOD_API_KEY"}
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
    except (OSError, IndexError) as error:
        return {"exit_code": 127, "reason": "crash", "message": f"The job cannot be started: {error}."}
    stops.group = process.pid
    if stops.is_asked:
        stops.tell_job()
    assert process.stdout is not None
    told: list[dict[str, Any]] = []
    reader = threading.Thread(target=_forward, args=(process.stdout, speaker, told), daemon=True)
    reader.start()
    did_overrun = _watch(process, orders, deadline_s, boot_id, speaker, stops)
    _signal_group(process.pid, signal.SIGKILL)
    returncode = process.wait()
    stops.group = None
    _kill_orphans()
    reader.join(timeout=2.0)
    return result_of(told[-1] if told else None, returncode, did_overrun)


def _forward(stream: IO[bytes], speaker: Speaker, told: list[dict[str, Any]]) -> None:
    """Pass the job's lines on; its result is kept back, for there is one only, and it comes last."""
    with stream:
        for raw in stream:
            line = raw.decode(errors="replace").rstrip("\n")
            facts = result_in(line)
            if facts is None:
                speaker.say(line)
            else:
                told.append(facts)


def _watch(
    process: "subprocess.Popen[bytes]",
    orders: Orders,
    deadline_s: float,
    boot_id: str,
    speaker: Speaker,
    stops: Stops,
) -> bool:
    """Wait for the job's end. True: its deadline ended it, by the warning before it or by the kill."""
    beat_s = time.monotonic() + orders.heartbeat_s
    is_warned = False
    kill_s = deadline_s
    while process.poll() is None:
        # The wall clock too: on a machine that was suspended the monotonic one stood still.
        now_s = max(time.monotonic(), deadline_s + time.time() - (orders.not_after_s or 0.0))
        if stops.is_asked:
            kill_s = min(kill_s, now_s + orders.grace_s)
        if now_s >= kill_s:
            # A busy machine may sleep through the warning and wake up past the deadline.
            is_warned |= now_s >= deadline_s
            break
        if not is_warned and now_s >= deadline_s - orders.grace_s:
            is_warned = True
            stops.tell_job()
        if time.monotonic() >= beat_s:
            speaker.say(event_line("heartbeat", boot_id=boot_id))
            beat_s += orders.heartbeat_s
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_TICK_S)
    return is_warned


def _hold(orders: Orders, speaker: Speaker, stops: Stops, key: str) -> None:
    """Stay, so that nothing is started again, and meanwhile try to end the machine. Returns when told to stop, or
    where leaving is its end."""
    pod_id = os.environ.get("RUNPOD_POD_ID", "")
    next_s, retry_s = time.monotonic() + orders.linger_s, _FIRST_RETRY_S
    while not stops.is_asked and not (orders.leaves and time.monotonic() >= next_s):
        if key and pod_id and time.monotonic() >= next_s:
            _end_machine(pod_id, key, speaker)
            next_s, retry_s = time.monotonic() + retry_s, min(2 * retry_s, _LONGEST_RETRY_S)
        time.sleep(_TICK_S)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)


def _end_machine(pod_id: str, key: str, speaker: Speaker) -> None:
    """One climb of the ladder: delete, or else stop. Neither is trusted; whoever watches from outside decides."""
    url = os.environ.get("HOTLAP_RUNPOD_URL") or DEFAULT_URL
    if not may_carry_a_key(url):
        speaker.say(event_line("self_end", rung="hold", status=None, message="The address is not HTTPS: no key sent."))
        return
    pod = f"{url.rstrip('/')}/pods/{quote(pod_id, safe='')}"
    for rung, method, address, body in (("delete", "DELETE", pod, None), ("stop", "POST", pod + "/action", b"stop")):
        status = _call(method, address, key, body)
        speaker.say(event_line("self_end", rung=rung, status=status))
        if status is not None and (200 <= status < 300 or status == 404):
            return


def _call(method: str, url: str, key: str, action: bytes | None) -> int | None:
    """The answer's status; None if there was no answer."""
    import http.client
    import ssl
    import urllib.error
    import urllib.request

    data = None if action is None else json.dumps({"action": action.decode()}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, data=data, method=method, headers=headers)
    try:
        # A proxy of the machine's environment must not see the key.
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if url.startswith("https"):
            context = ssl.create_default_context(cafile=os.environ.get("HOTLAP_CA_BUNDLE") or None)
            handlers.append(urllib.request.HTTPSHandler(context=context))
        opener = urllib.request.build_opener(*handlers)
        with opener.open(request, timeout=_CALL_TIMEOUT_S) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except (OSError, ValueError, http.client.HTTPException):
        return None


# --- processes ---


def process_ids() -> list[int]:
    """Every process, as Linux lists them; elsewhere none. `glob` would look at each, and raise when one ends just then:
    the kernel says of it that there is no such process, not that there is no such file."""
    with contextlib.suppress(FileNotFoundError):
        return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return []


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _adopt_orphans() -> None:
    """A job's child that left its group becomes ours when its parent dies, instead of nobody's."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _kill_orphans() -> None:
    for _ in range(100):
        pids = list(_children())
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        time.sleep(0.01)


def _children() -> Generator[int]:
    for pid in process_ids():
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1]) == os.getpid():
                yield pid


if __name__ == "__main__":
    main(sys.argv[1:])
    # Told to stop, so the platform is ending this container and will not start it again.
    os._exit(_STOPPED_BY_SIGTERM)
