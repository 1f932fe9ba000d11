"""How smooth the dashboard and a study's page stay: 1,000 machines that change, 10,000 trials.

    python -m benchmarks.dashboard

In a real Chromium, whose longest task on the main thread is what a person would feel. Two minutes on two idle cores.
"""

import json
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

from hotlap import clock
from hotlap.report import page, study
from hotlap.report.dashboard import Stops, listen, make_app
from hotlap.report.live import Verdicts
from hotlap.research import simulate
from hotlap.research.space import StudyConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from browser import Browser, browsing

NUM_MACHINES, NUM_TRIALS, WATCH_S = 1000, 10_000, 15.0
_TASKS = """
window.shows = []; const parse = JSON.parse; JSON.parse = (text) => { const from = performance.now();
  queueMicrotask(() => { document.body.offsetHeight; window.shows.push(performance.now() - from); });
  return parse(text); };
window.tasks = []; new PerformanceObserver((list) => {
  for (const task of list.getEntries()) window.tasks.push(task.duration); }).observe({entryTypes: ["longtask"]});
window.frames = []; let last = performance.now(); (function tick() { const now = performance.now();
  window.frames.push(now - last); last = now; requestAnimationFrame(tick); })();"""


def machines(chance: random.Random) -> list[dict[str, Any]]:
    now_s = clock.wall_s()
    states = ("running", "starting", "provisioning")
    return [
        {
            "key": f"{at:016x}",
            "run": f"run-{at}",
            "machine": f"pod-{at}",
            "provider": "runpod",
            "gpu": "L40S",
            "owner": "me",
            "state": chance.choice(states),
            "began_s": now_s - at % 300,
            "ends_at_s": now_s + at,
            "usd_micros_per_hour": 860_000,
            "worst_usd_micros": 117_000,
            "may_stop": True,
            "problems": "",
        }
        for at in range(NUM_MACHINES)
    ]


def watch_machines(browser: Browser) -> None:
    chance = random.Random(1)
    began = machines(chance)
    day = {"charged": {"gpu_s": 5, "usd_micros": 5}, "limit": {"gpu_s": 9, "usd_micros": 9}}
    texts = {"left_text": "4", "limit_text": "9", "num_open": NUM_MACHINES, "resets_at": "soon"}

    def sections() -> dict[str, Any]:
        for row in chance.sample(began, 100):
            row["state"] = chance.choice(("running", "exited"))
        verdicts: dict[str, Any] = {"studies": [], "newest": []}
        return {"machines": began, "slices": [], "verdicts": verdicts, "budget": {**day, **texts}, "troubles": []}

    listener = listen("127.0.0.1", 0)
    config = uvicorn.Config(make_app(sections, Stops(lambda *_: "")), log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    began_s = time.monotonic()
    browser.open(f"http://127.0.0.1:{listener.getsockname()[1]}/")
    browser.wait(f"document.querySelectorAll('#machines tbody tr').length === {NUM_MACHINES}")
    print(f"dashboard, {NUM_MACHINES} machines: all shown {time.monotonic() - began_s:.2f} s after opening")
    browser.run(_TASKS)
    time.sleep(WATCH_S)
    tell(browser, f"  {WATCH_S:.0f} s, 100 machines change a second")
    print(f"  quickest of all messages: {browser.run('Math.min(...window.shows)'):.0f} ms to show, with layout")
    server.force_exit = server.should_exit = True
    browser.open("about:blank")
    thread.join()


def tell(browser: Browser, what: str) -> None:
    frames = sorted(browser.run("window.frames"))
    tasks = browser.run("window.tasks")
    print(
        f"{what}: frame p50 {frames[len(frames) // 2]:.0f} ms, p99 {frames[int(len(frames) * 0.99)]:.0f} ms, longest "
        f"{frames[-1]:.0f} ms; {len(tasks)} tasks over 50 ms, longest {max(tasks, default=0):.0f} ms"
    )


def watch_trials(browser: Browser, folder: Path) -> None:
    journal = folder / "studies" / "big" / "experiments.jsonl"
    journal.parent.mkdir(parents=True)
    trial = {"kind": "run", "status": "ok", "val_search_nats_per_byte": 1.0, "config": {"x": [0.1] * 100}}
    journal.write_text(f"{json.dumps(trial)}\n" * NUM_TRIALS)
    verdicts = Verdicts(folder / "studies", folder / "records")
    times_s: list[float] = []
    for _ in range(2):
        began_s = time.monotonic()
        assert verdicts.section()["studies"][0]["num_runs"] == NUM_TRIALS
        times_s.append(time.monotonic() - began_s)
    print(f"dashboard, {NUM_TRIALS} trials: read in {times_s[0]:.2f} s, looked at again in {times_s[1] * 1e3:.2f} ms")

    history = simulate.search(StudyConfig(name="s"), simulate.draw_bowl(np.random.default_rng(1)), 30, 1)
    # The numbers of a study of that size: its own, again and again.
    runs = (history.runs * (NUM_TRIALS // len(history.runs) + 1))[:NUM_TRIALS]
    history.runs[:] = runs
    began_s = time.monotonic()
    html = page.render(study.page_of("big", history, "now"))
    path = folder / "study.html"
    path.write_text(html)
    print(f"report, {NUM_TRIALS} trials: made in {time.monotonic() - began_s:.2f} s, {len(html) / 1e6:.1f} MB")
    began_s = time.monotonic()
    browser.open(path.as_uri())
    browser.wait("document.documentElement.dataset.drawn === 'yes'")
    print(f"  drawn {time.monotonic() - began_s:.2f} s after opening")
    browser.run(_TASKS)
    browser.run("(async () => { for (let y = 0; y < document.body.scrollHeight; y += 300) { scrollTo(0, y); "
                "await new Promise(requestAnimationFrame); } })()")  # fmt: skip
    tell(browser, "  scrolling through it")
    browser.run(_TASKS)
    browser.run("(async () => { for (const figure of document.querySelectorAll('figure')) { figure.scrollIntoView(); "
                "await new Promise((done) => setTimeout(done, 1000)); } })()")  # fmt: skip
    tell(browser, "  resting 1 s at each chart, which is then drawn")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, browsing(Path(folder)) as browser:
        browser.look_like()
        watch_machines(browser)
        watch_trials(browser, Path(folder))


if __name__ == "__main__":
    main()
