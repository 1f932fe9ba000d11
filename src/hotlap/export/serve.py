"""Serve a model through vLLM or `transformers serve`, as a child process, OpenAI-compatible.

While it runs, this machine is marked as one that serves, and trains nothing.
"""

import importlib.util
import json
import os
import shutil
import signal
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotlap import child, clock, guard
from hotlap.errors import ChildCrashed, ConfigError, MissingArtifact, UsageError
from hotlap.export import tensors
from hotlap.export.task import Say

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks up to which vLLM can be told to make room."""
DRAFT_TOKENS = 5
_LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
"""How many last tokens an n-gram drafter looks for in what was said before."""
GRACE_S = 30.0
"""How long a server may take to end; vLLM does not listen while it starts."""
_VLLM = "vllm.entrypoints.openai.api_server"
_SERVING = ("accelerate", "fastapi", "openai", "rich", "starlette", "transformers", "uvicorn")
"""What `transformers serve` looks for before it starts: with one of them missing it ends in a traceback."""
_POLL_S = 0.5
_YEAR_S = 365 * 86_400.0


@dataclass(frozen=True)
class Speculation:
    """Tokens drafted ahead, `num_tokens` at a time: `mtp` by the model's own drafter, `ngram` by what stands in the
    text already, `draft` by a smaller model. `model` is the drafter's folder, where there is one."""

    method: str
    num_tokens: int
    model: str | None = None

    def vllm_json(self) -> str:
        fields: dict[str, Any] = {"num_speculative_tokens": self.num_tokens}
        match self.method:
            case "ngram":
                fields |= {"method": "ngram", **_LOOKUP}
            case "mtp":
                fields |= {"method": "mtp", **({"model": self.model} if self.model else {})}
            case _:
                fields |= {"method": "draft_model", "model": self.model}
        return json.dumps(fields, sort_keys=True)


@dataclass(frozen=True)
class Plan:
    """What is served: a model folder under `name`; with `adapter` that, and the model alone as `base`."""

    name: str
    model: Path
    adapter: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    speculation: Speculation | None = None
    extra: tuple[str, ...] = ()
    """Options for the server as they are."""

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        return f"http://{host}:{self.port}"


# --- what is asked for ---


def parse_speculation(
    text: str, drafter_of_base: Callable[[], str | None], locate: Callable[[str], Path]
) -> Speculation:
    """`mtp:N`, `mtp:N:MODEL`, `ngram:N`, `draft:MODEL` or `draft:MODEL:N`, with the drafter's folder found.

    Raises:
        UsageError: it is none of them.
        MissingArtifact: the drafter is not here.
    """
    method, _, rest = text.partition(":")
    if method == "draft" and rest:
        model, _, number = rest.rpartition(":")
        ref, num = (model, int(number)) if model and number.isdecimal() else (rest, DRAFT_TOKENS)
        return Speculation("draft", num, str(locate(ref)))
    number, _, ref = rest.partition(":")
    if method not in ("mtp", "ngram") or not number.isdecimal() or not int(number) or (method == "ngram" and ref):
        raise UsageError(
            f"--speculative {text!r} is not known. Say mtp:2 (the model's own drafter), mtp:2:MODEL, ngram:4, "
            f"draft:MODEL or draft:MODEL:5."
        )
    if method == "ngram":
        return Speculation("ngram", int(number))
    drafter = ref or drafter_of_base()
    return Speculation("mtp", int(number), str(locate(drafter)) if drafter else None)


def drafter_of(base_ref: str, base: Path) -> str | None:
    """Where a model's own drafter comes from: Gemma 4 has its assistant beside it; others carry it in themselves."""
    kind: str = json.loads((base / "config.json").read_bytes()).get("model_type", "")
    return f"{base_ref.partition('@')[0]}-assistant" if kind.startswith("gemma4") else None


def rank_if_servable(adapter: Path) -> int:
    """The rank that vLLM has to make room for.

    Raises:
        ConfigError: a server cannot take this adapter beside its base; the message says what can be done.
    """
    fields: dict[str, Any] = json.loads((adapter / "adapter_config.json").read_bytes())
    if not fields.get("base_model_name_or_path"):
        raise ConfigError(f"{adapter} does not say which base model it belongs to. Name it in adapter_config.json.")
    names = [entry.name for entry in tensors.entries_of(adapter / "adapter_model.safetensors")[0]]
    pairs = (".lora_A.weight", ".lora_B.weight")
    odd = [name for name in names if not name.endswith(pairs)]
    heads = [name for name in names if ".lm_head." in name or ".embed_tokens." in name]
    why = None
    if fields.get("use_dora"):
        why = "it is a DoRA adapter"
    elif fields.get("bias", "none") != "none":
        why = "it has trained biases"
    elif odd:
        why = f"it holds {odd[0].removeprefix('base_model.model.')}, which was trained in full"
    elif heads:
        why = "it changes the embedding or the output head"
    if why is not None:
        raise ConfigError(
            f"{adapter} cannot be served as an adapter: {why}. Run `hotlap export merge RUN`, then serve it with "
            f"--form merged."
        )
    rank = max([fields["r"], *(fields.get("rank_pattern") or {}).values()])
    if rank > VLLM_RANKS[-1]:
        raise ConfigError(f"{adapter} has rank {rank}, and servers take at most {VLLM_RANKS[-1]}. Merge it.")
    return rank


# --- the commands ---


def vllm_argv(program: Sequence[str], plan: Plan) -> list[str]:
    argv = [*program, "--model", str(plan.model), "--host", plan.host, "--port", str(plan.port)]
    if plan.adapter is None:
        argv += ["--served-model-name", plan.name]
    else:
        rank = rank_if_servable(plan.adapter)
        room = next(each for each in VLLM_RANKS if each >= rank)
        argv += ["--served-model-name", "base", "--enable-lora", "--max-lora-rank", str(room)]
        argv += ["--lora-modules", f"{plan.name}={plan.adapter}"]
    if plan.speculation is not None:
        argv += ["--speculative-config", plan.speculation.vllm_json()]
    if not guard.has_accelerator() and "--dtype" not in plan.extra:
        argv += ["--dtype", "float32"]  # bfloat16 without units for it takes a hundred times as long
    return [*argv, *plan.extra]


def transformers_argv(program: Sequence[str], plan: Plan) -> list[str]:
    """
    Raises:
        ConfigError: it is asked for what `transformers serve` cannot do.
    """
    if plan.speculation is not None:
        raise ConfigError("transformers serve drafts no tokens ahead. Install vLLM, or leave --speculative out.")
    if plan.adapter is not None:
        raise ConfigError(
            "transformers serve takes merged models. Run `hotlap export merge RUN` first, or install vLLM."
        )
    return [*program, "serve", str(plan.model), "--host", plan.host, "--port", str(plan.port), *plan.extra]


def find_engine(engine: str, vllm: Path | None) -> tuple[str, list[str]]:
    """`vllm` or `transformers`, and how to run it.

    Raises:
        MissingArtifact: what was asked for is not installed.
    """
    beside = Path(sys.executable).with_name("vllm")
    found = str(vllm) if vllm else shutil.which("vllm") or (str(beside) if beside.exists() else None)
    if engine in ("auto", "vllm") and found:
        # Not the program itself: the builds for processors go by another name, which it does not find.
        python = Path(found).resolve().with_name("python")
        if not python.exists():
            raise MissingArtifact(f"{found} has no python beside it. Name with --vllm the one in vLLM's environment.")
        return "vllm", [str(python), "-m", _VLLM]
    if engine == "vllm":
        raise MissingArtifact(
            "vLLM is not installed here. Install it in an environment of its own, and name --vllm PATH."
        )
    if missing := [name for name in _SERVING if not importlib.util.find_spec(name)]:
        raise MissingArtifact(
            f"Nothing here can serve: there is no vLLM, and transformers serve lacks {', '.join(missing)}. Install "
            f"vLLM in an environment of its own and name --vllm PATH, or run: pip install 'transformers[serving]'"
        )
    return "transformers", [sys.executable, "-m", "transformers.cli.transformers"]


# --- running it ---


def run(argv: Sequence[str], plan: Plan, ready_s: float, on_ready: Callable[[], None], say: Say) -> None:
    """Serve until somebody asks to stop. `on_ready` is called once the server answers. The server, and all that it
    starts, ends with this process, however that ends (`keeper`; on macOS, unless this is killed outright).

    Raises:
        ChildCrashed: it ended by itself, or did not answer within `ready_s`.
    """
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    keeper = [sys.executable, "-m", "hotlap.export.keeper", str(os.getpid()), str(GRACE_S)]
    forever = clock.Deadline(clock.monotonic_s() + _YEAR_S)
    with guard.serving(f"{plan.name} on port {plan.port}"), child.passing_on_stops() as stops:
        watch = _Watch(plan.url, clock.Deadline(clock.monotonic_s() + ready_s), on_ready)
        thread = threading.Thread(target=watch.run, daemon=True)
        thread.start()
        end = child.run_child([*keeper, *argv], forever, lambda event: None, say, env, stops)
        watch.is_over.set()
        thread.join(timeout=5)
    if watch.gave_up:
        raise ChildCrashed(
            f"The server did not answer on {plan.url} within {ready_s:.0f} s. Its last words stand above."
        )
    if end.was_asked_to_stop:
        return
    end.raise_if_killed("The server")
    last_line = (end.last_words.splitlines() or ["it said nothing"])[-1]
    raise ChildCrashed(f"The server ended by itself with exit code {end.exit_code}: {last_line}")


class _Watch:
    """Asks a starting server until it answers, and gives it up at the deadline."""

    def __init__(self, url: str, deadline: clock.Deadline, on_ready: Callable[[], None]) -> None:
        self._url, self._deadline, self._on_ready = url, deadline, on_ready
        self.is_over = threading.Event()
        self.gave_up = False

    def run(self) -> None:
        while not self.is_over.wait(_POLL_S):
            if is_healthy(self._url):
                return self._on_ready()
            if self._deadline.is_over():
                self.gave_up = True
                return os.kill(os.getpid(), signal.SIGTERM)  # which is passed on to the server
        return None


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False
