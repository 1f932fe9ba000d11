"""What drafting ahead brings: one model served twice by vLLM, without and with n-grams, measured in turns.

`python -m benchmarks.serving RUN VLLM [--form merged]`: starts `hotlap serve` twice, waits for both, and runs
`hotlap bench URL1 --compare URL2`. Ten minutes for SmolLM2-135M on two idle cores. While it runs, no training starts
on this machine.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("vllm", type=Path)
    parser.add_argument("--output-dir", default="runs")
    parser.add_argument("--form", default="merged")
    parser.add_argument("--speculative", default="ngram:5")
    parser.add_argument("--rounds", default="3")
    parser.add_argument("--max-tokens", default="128")
    arguments = parser.parse_args()
    # Not bound to cores: two servers would be bound to the same ones. And each has all of them in its turn, of which
    # vLLM would take one.
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    env = {**settings, "OMP_NUM_THREADS": str(os.cpu_count()), **os.environ}
    servers: list[subprocess.Popen[str]] = []
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))  # by way of `finally`
    try:
        # One after the other: while they compile they take all there is.
        urls = [_serve(arguments, extra, env, servers) for extra in ([], ["--speculative", arguments.speculative])]
        bench = ["bench", urls[0], "--compare", urls[1], "--rounds", arguments.rounds]
        done = subprocess.run([sys.executable, "-m", "hotlap", *bench, "--max-tokens", arguments.max_tokens])
        print(f"load average {os.getloadavg()[0]:.1f}")
        raise SystemExit(done.returncode)
    finally:
        for server in servers:
            server.send_signal(signal.SIGTERM)
        for server in servers:
            server.wait()


def _serve(
    arguments: argparse.Namespace, extra: list[str], env: dict[str, str], servers: "list[subprocess.Popen[str]]"
) -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    argv = [sys.executable, "-m", "hotlap", "serve", arguments.run, "--output-dir", arguments.output_dir]
    argv += ["--form", arguments.form, "--vllm", str(arguments.vllm), "--port", port, *extra]
    argv += ["--", "--max-model-len", "1024"]
    server = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    servers.append(server)
    assert server.stdout and server.stderr
    talk: list[str] = []
    threading.Thread(target=lambda: talk.extend(server.stderr or ()), daemon=True).start()
    url = server.stdout.readline().strip()
    if not url:
        raise SystemExit("".join(talk[-20:]))
    return url.removesuffix("/v1")


if __name__ == "__main__":
    main()
