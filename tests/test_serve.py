"""Serving: what a server is told, who may train meanwhile, and the figures of a benchmark against a real server."""

import importlib.util
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from ports import free_port
from safetensors.numpy import save

from hotlap import clock, durable, errors, guard
from hotlap.cli import cli
from hotlap.export import bench, serve
from hotlap.export.serve import Plan, Speculation
from hotlap.report import chart, serving

# --- B34: can this be served as an adapter? ---


def write_adapter(folder: Path, rank: int = 8, extra: str = "", **fields: Any) -> Path:
    durable.make_dirs(folder)
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{name}.lora_A.weight": np.zeros((rank, 4)), f"{name}.lora_B.weight": np.zeros((4, rank))}
    if extra:
        tensors[f"base_model.model.{extra}"] = np.zeros((2, 2))
    config = {"peft_type": "LORA", "r": rank, "base_model_name_or_path": "org/base", "bias": "none", **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(save(tensors))
    return folder


def test_b34_a_plain_adapter_is_served_with_room_for_its_rank(tmp_path: Path) -> None:
    for rank, room in ((8, "8"), (32, "32"), (48, "64")):
        adapter = write_adapter(tmp_path / str(rank), rank)
        argv = serve.vllm_argv(["vllm"], Plan("mine", tmp_path, adapter))
        assert argv[argv.index("--max-lora-rank") + 1] == room
        assert f"mine={adapter}" in argv


@pytest.mark.parametrize(
    ("extra", "fields", "why"),
    [
        ("lm_head.weight", {}, "lm_head.weight, which was trained in full.*export merge"),
        ("lm_head.lora_A.weight", {}, "the embedding or the output head.*export merge"),
        ("", {"bias": "lora_only"}, "trained biases.*export merge"),
        ("", {"use_dora": True}, "a DoRA adapter.*export merge"),
        ("", {"base_model_name_or_path": None}, "does not say which base model"),
        ("", {"r": 600}, "has rank 600"),
    ],
)
def test_b34_what_a_server_cannot_take_is_refused_before_one_is_rented(
    tmp_path: Path, extra: str, fields: dict[str, Any], why: str
) -> None:
    with pytest.raises(errors.ConfigError, match=why):
        serve.rank_if_servable(write_adapter(tmp_path, extra=extra, **fields))


# --- speculation ---


def parsed(text: str, own_drafter: str | None = None) -> Speculation:
    return serve.parse_speculation(text, lambda: own_drafter, lambda ref: Path("/models") / ref)


def test_ways_to_draft() -> None:
    assert parsed("ngram:4") == Speculation("ngram", 4)
    assert parsed("mtp:2") == Speculation("mtp", 2)
    assert parsed("mtp:2", "google/g-assistant") == Speculation("mtp", 2, "/models/google/g-assistant")
    assert parsed("mtp:3:org/other") == Speculation("mtp", 3, "/models/org/other")
    assert parsed("draft:org/small") == Speculation("draft", 5, "/models/org/small")
    assert parsed("draft:package:a==1#m.gguf:7") == Speculation("draft", 7, "/models/package:a==1#m.gguf")
    for bad in ("mtp", "mtp:0", "ngram:x", "ngram:2:m", "draft:", "eagle:2"):
        with pytest.raises(errors.UsageError, match="mtp:2"):
            parsed(bad)


def test_gemma_4_has_its_assistant_beside_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma4"}')
    assert serve.drafter_of("google/gemma-4-E4B-it@main", tmp_path) == "google/gemma-4-E4B-it-assistant"
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_next"}')
    assert serve.drafter_of("Qwen/x", tmp_path) is None


def test_transformers_serve_is_not_asked_for_what_it_cannot_do(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="merged models"):
        serve.transformers_argv(["t"], Plan("m", tmp_path, tmp_path))
    with pytest.raises(errors.ConfigError, match="drafts no tokens"):
        serve.transformers_argv(["t"], Plan("m", tmp_path, speculation=Speculation("ngram", 2)))


PLANS = [
    Plan("mine", Path("/models/merged"), host="0.0.0.0", port=8001),
    Plan("mine", Path("/models/base"), speculation=Speculation("ngram", 4), extra=("--max-model-len", "1024")),
    Plan("mine", Path("/models/base"), speculation=Speculation("mtp", 2, "/models/assistant")),
    Plan("mine", Path("/models/base"), speculation=Speculation("draft", 5, "/models/small")),
]
PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
for argv in json.loads(sys.argv[1]):
    found = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    validate_parsed_serve_args(found)
    lora = [[each.name, each.path] for each in found.lora_modules or []]
    kept = ("model", "host", "port", "served_model_name", "enable_lora", "max_lora_rank", "speculative_config")
    print("found:" + json.dumps({**{name: getattr(found, name) for name in kept}, "lora_modules": lora}))
"""


@pytest.mark.long
def test_the_pinned_vllm_s_own_parser_takes_what_we_say(tmp_path: Path) -> None:
    python = os.environ.get("HOTLAP_TEST_VLLM_PYTHON")
    if python is None:
        pytest.skip("HOTLAP_TEST_VLLM_PYTHON names no Python that has vLLM 0.32 (see docs/serving.md)")
    plans = [*PLANS, Plan("mine", Path("/models/base"), write_adapter(tmp_path, 24))]
    argvs = [serve.vllm_argv([], plan) for plan in plans]
    done = subprocess.run([python, "-c", PARSE, json.dumps(argvs)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("found:")]
    assert [each["model"] for each in found] == [str(plan.model) for plan in plans]
    assert (found[0]["host"], found[0]["port"], found[0]["served_model_name"]) == ("0.0.0.0", 8001, ["mine"])
    methods = [(each["speculative_config"] or {}).get("method") for each in found]
    assert methods == [None, "ngram", "mtp", "draft_model", None]
    assert found[4]["lora_modules"] == [["mine", str(tmp_path)]] and found[4]["max_lora_rank"] == 32


# --- a server that runs ---

SERVER = """
import sys, http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{}")
    def log_message(self, *rest): pass
print("loading", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
SERVE = """
import sys
from pathlib import Path
from hotlap.export import serve
plan = serve.Plan("mine", Path("m"), port=int(sys.argv[1]))
def say(text):
    print(text, flush=True)
serve.run([sys.executable, *sys.argv[2:]], plan, float(60), lambda: say("ready"), say)
"""


def wait_for_line(process: "subprocess.Popen[str]", wanted: str) -> None:
    assert process.stdout
    for line in process.stdout:
        if line.strip() == wanted:
            return
    raise AssertionError(f"ended without {wanted!r}")


def test_nothing_is_trained_while_a_server_of_ours_lives_and_a_dead_one_is_not_fatal(home: Path) -> None:
    """The marker is there before the server answers, goes with Ctrl-C, and counts for nothing after a SIGKILL."""
    marks = home / "serving"
    port = free_port()
    argv = [sys.executable, "-c", SERVE, str(port), "-c", SERVER, str(port)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        wait_for_line(process, "ready")
        assert list(guard.own_servers()) == [
            f"hotlap serve (process {process.pid}) serves mine on port {port} from this machine"
        ]
        with pytest.raises(errors.GuardRefused, match="serves mine"):
            guard.require_not_serving()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
        assert list(marks.iterdir()) == [] and list(guard.own_servers()) == []
    finally:
        process.kill()
        process.wait()
        assert process.stdout
        process.stdout.close()
    dead = {"pid": process.pid, "birth": "1", "boot": clock.boot_id(), "what": "x"}
    (marks / "1.json").write_text(json.dumps(dead))
    (marks / "2.json").write_text("torn")
    (marks / "3.json").write_text(
        json.dumps({**dead, "pid": os.getpid(), "birth": clock.process_birth(os.getpid()), "boot": "b"})
    )
    assert list(guard.own_servers()) == []


DEAF = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("pids", os.getppid(), os.getpid(), engine.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_server_outlives_the_serve_that_wanted_it(how: signal.Signals, home: Path) -> None:
    """One that does not listen while it starts, as vLLM, with a process of its own."""
    code = SERVE.replace("plan =", "serve.GRACE_S = 0.05; plan =")
    argv = [sys.executable, "-c", code, str(free_port()), "-c", DEAF]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    with process:
        line = next(line for line in process.stdout if line.startswith("pids"))
        watched = [os.pidfd_open(int(pid)) for pid in line.split()[1:]]
        process.send_signal(how)
        assert process.wait(timeout=60) == (-how if how == signal.SIGKILL else 0)
    for each in watched:
        assert select.select([each], [], [], 60.0)[0], "it lives on"
        os.close(each)


def test_a_server_that_is_ended_from_outside_is_told_so(home: Path) -> None:
    argv = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    with pytest.raises(errors.ChildCrashed, match="ended by SIGKILL from outside"):
        serve.run(argv, Plan("mine", Path("m"), port=free_port()), 60.0, lambda: None, lambda line: None)


def test_a_server_that_ends_by_itself_is_told_with_its_last_words(home: Path) -> None:
    plan = Plan("mine", Path("m"), port=free_port())
    argv = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with pytest.raises(errors.ChildCrashed, match="exit code 1: no such model"):
        serve.run(argv, plan, 60.0, lambda: None, lambda line: None)
    assert list((home / "serving").iterdir()) == []


def test_a_server_that_does_not_end_when_it_is_asked_is_ended(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It never answers either, so `ready_s` is what asks it."""
    monkeypatch.setattr(serve, "GRACE_S", 0.05)
    pids: list[int] = []
    plan = Plan("mine", Path("m"), port=free_port())
    monkeypatch.setattr(serve, "is_healthy", lambda url: bool(pids.append(os.getpid())))
    with pytest.raises(errors.ChildCrashed, match="did not answer on"):
        serve.run([sys.executable, "-c", DEAF], plan, 0.0, lambda: None, lambda line: None)
    assert pids and list((home / "serving").iterdir()) == []


# --- the benchmark ---


class Talker(BaseHTTPRequestHandler):
    """Answers in pieces of two tokens, as a server that drafts does, and counts what it drafted."""

    protocol_version = "HTTP/1.1"
    num_answers = 0
    at_once = 0
    most_at_once = 0
    turn = threading.Lock()

    def do_GET(self) -> None:
        if self.path == "/metrics":
            count = type(self).num_answers
            text = f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {8.0 * count}\n'
            text += f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {6.0 * count}\nother 1\n'
            return self._send(text.encode())
        models = [{"id": "base"}, {"id": "mine", "parent": "base"}]
        return self._send(json.dumps({"data": models}).encode())

    def do_POST(self) -> None:
        kind = type(self)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["model"] != "mine":
            return self.send_error(404)
        with self.turn:
            kind.num_answers += 1
            kind.at_once += 1
            kind.most_at_once = max(kind.most_at_once, kind.at_once)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for _ in range(4):
            self._event({"choices": [{"delta": {"content": "ab"}}]})
            time.sleep(0.002)
        self._event({"choices": [], "usage": {"completion_tokens": 8}})
        self.wfile.write(b"data: [DONE]\n\n")
        with self.turn:
            kind.at_once -= 1
        return None

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def _send(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *rest: Any) -> None:
        pass


@pytest.fixture
def talker() -> Iterator[tuple[str, type[Talker]]]:
    handler = type("Talker", (Talker,), {"turn": threading.Lock()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_benchmark_counts_the_server_s_tokens_and_takes_turns(talker: tuple[str, type[Talker]]) -> None:
    url, handler = talker
    said: list[str] = []
    load = bench.Load(("one", "two", "three"), concurrency=2, max_tokens=8, num_rounds=2)
    first, second = bench.measure([url, f"{url}/v1"], [None, "mine"], load, said.append)
    assert first.model == second.model == "mine"
    assert (first.num_requests, first.num_tokens) == (6, 48)
    assert first.acceptance == pytest.approx(0.75)
    assert handler.most_at_once <= 2
    assert [line.split()[4] for line in said] == [url, f"{url}/v1", f"{url}/v1", url]
    assert 0 < first.ttft_s["p50"] <= first.ttft_s["p99"]
    assert set(bench.ratios(first, second)) == {"median", "least", "most"}
    with pytest.raises(errors.ProviderFailed, match="answered 404"):
        bench.measure([url], ["base"], load, said.append)


def test_a_benchmark_is_drawn(talker: tuple[str, type[Talker]], tmp_path: Path) -> None:
    """By the command; the same picture for the same numbers."""
    url, plot = talker[0], tmp_path / "bench.svg"
    words = ["bench", url, "--compare", f"{url}/v1", "--model", "mine", "--rounds", "1", "--concurrency", "8"]
    done = CliRunner().invoke(cli, [*words, "--prompts", "repetitive", "--plot", str(plot), "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert set(report) == {"repetitive"} and set(report["repetitive"]["ratio"]) == {"median", "least", "most"}
    texts = {"".join(node.itertext()).strip() for node in ElementTree.parse(plot).iter() if node.tag.endswith("text")}
    assert {"Output", "Time to first token", "Time per further token", "p50", "p95", "p99"} <= texts
    assert {"repetitive, server 1", "repetitive, server 2"} <= texts
    servers = report["repetitive"]["servers"]
    drawn = serving.charts(report)
    speeds, waits, _ = drawn
    assert plot.read_bytes() == chart.svg_of(drawn)
    assert [line.y for line in speeds.lines] == [server["tokens_per_s_rounds"] for server in servers]
    assert waits.rows()[0] == ["p50", *(server["ttft_s"]["p50"] for server in servers)]
    servers.pop()
    assert serving.charts(report)[0].header() == ["round", "repetitive"]


def test_two_servers_are_printed_with_the_ratio_and_its_spread(talker: tuple[str, type[Talker]]) -> None:
    url = talker[0]
    words = ["bench", url, "--compare", f"{url}/v1", "--rounds", "2", "--prompts", "repetitive", "--concurrency", "8"]
    done = CliRunner().invoke(cli, [*words, "--model", "mine"])
    header, *rows, ratio = done.stdout.splitlines()
    assert done.exit_code == 0 and len(rows) == 2 and all(row.split()[-1] == "0.750" for row in rows)
    assert all(column in header for column in ("tokens/s", "ttft p50 s", "ttft p99 s", "tpot p95 s", "accepted"))
    number = r"\d+\.\d\d"
    assert re.fullmatch(
        f"repetitive: the second server gives {number} times the output tokens/s of the first "
        f"\\({number} to {number}, by round\\)",
        ratio,
    )


def test_figures_by_hand() -> None:
    answers = (bench.Answer(0.5, 2.5, 5), bench.Answer(1.5, 1.5, 1))
    rounds = [bench.Round(3.0, answers), bench.Round(6.0, answers), bench.Round(2.0, answers)]
    found = bench.summary("u", "m", rounds, None)
    assert (found.tokens_per_s, found.num_tokens) == (2.0, 18)
    assert (found.ttft_s["p50"], found.ttft_s["p95"], found.tpot_s["p99"]) == (1.0, 1.5, 0.5)
    doubled = bench.summary("v", "m", [bench.Round(each.wall_s / 2, answers) for each in rounds], None)
    assert bench.ratios(found, doubled) == {"median": 2.0, "least": 2.0, "most": 2.0}
    values = np.random.default_rng(0).random(17).tolist()
    assert [bench.percentile(values, rank) for rank in (0, 37, 95, 100)] == pytest.approx(
        np.percentile(values, (0, 37, 95, 100)).tolist()
    )
    assert bench.drafts_in("vllm:spec_decode_num_draft_tokens_total 1\n") is None


def test_all_that_transformers_serve_wants_is_asked_for_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With only some of its packages it would end in a traceback of its own."""
    find = importlib.util.find_spec
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "openai" else find(name))
    with pytest.raises(errors.MissingArtifact, match=r"transformers serve lacks .*openai.*transformers\[serving\]"):
        serve.find_engine("auto", None)
