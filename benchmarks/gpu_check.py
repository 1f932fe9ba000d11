"""Whether hotlap keeps its promises on a GPU. One script, from source, in less than six minutes.

`python benchmarks/gpu_check.py`, in a copy of the repository; hotlap itself need not be installed. What it needs is
what a slice needs: Python 3.11, torch 2.6, transformers 5.15, peft 0.19 and pydantic 2.9, or later ones, with what
these bring along; bitsandbytes 0.50 for NF4, which is left out where that is not there. For a machine without a
network, get them where there is one, for its Python and platform: `pip download -d wheels torch transformers peft
pydantic bitsandbytes`, then there `pip install --no-index --find-links wheels` and the same names.

Models are small and random, data is made here, nothing is fetched. Every training is a real slice in a process of its
own. `--device cpu` tries the script itself where there is no GPU. Prints one JSON object and ends with 0 if every check
held, with 1 if one did not, and with 2 if something is missing.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]
NEEDED = {"torch": "2.6", "transformers": "5.15", "peft": "0.19", "pydantic": "2.9"}
FOR_NF4 = {"bitsandbytes": "0.50"}
STEPS = 6
CUT_AT = 3
STAGED_AFTER = 2
SLICE = [sys.executable, "-m", "hotlap.train.slice"]


@dataclass(frozen=True)
class Size:
    hidden: int
    num_layers: int
    seq_len: int
    micro_batch_rows: int
    speed_steps: int
    cap_minutes: float
    gemm: int


SIZES = {"cuda": Size(2048, 8, 1024, 4, 20, 0.5, 8192), "cpu": Size(64, 2, 64, 2, 4, 0.6, 512)}


def lacking(packages: dict[str, str]) -> list[str]:
    """What of the packages is not here, or too old, in words."""
    found: list[str] = []
    for name, least in packages.items():
        try:
            here = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} (not installed)")
            continue
        if [int(part) for part in here.split(".")[:2]] < [int(part) for part in least.split(".")]:
            found.append(f"{name} (here is {here})")
    return found


class Failed(Exception):
    """A promise that was not kept, or could not be tried."""


class Check:
    """A random Llama, its data, and runs of both."""

    def __init__(self, scratch: Path, device: str) -> None:
        self.scratch, self.device, self.size = scratch, device, SIZES[device]
        self.model, self.data = scratch / "model", scratch / "data.jsonl"
        self.num_linear_weights = self._make_model()
        rows = [{"prompt": f"w{i % 97} w{i % 31}", "completion": words(i, self.size.seq_len // 3)} for i in range(96)]
        self.data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def _make_model(self) -> int:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        size = self.size
        shape = {"hidden_size": size.hidden, "intermediate_size": 3 * size.hidden, "num_hidden_layers": size.num_layers}
        tokens = {"vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        heads = {"num_attention_heads": size.hidden // 32, "num_key_value_heads": size.hidden // 64}
        model = LlamaForCausalLM(LlamaConfig(**shape, **tokens, **heads, tie_word_embeddings=True))
        model.save_pretrained(self.model)
        write_tokenizer(self.model)
        return sum(weight.numel() for name, weight in model.named_parameters() if "_proj" in name)

    def config(self, run: str, changes: dict[str, Any]) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "base_model": str(self.model),
            "dataset": str(self.data),
            "output_dir": str(self.scratch / "runs"),
            "run": run,
            "seed": 7,
            "data": {"seq_len": self.size.seq_len},
            "model": {"precision": "bfloat16" if self.device == "cuda" else "float32"},
            "optim": {"lr": 1e-3},
            "train": {"max_steps": STEPS, "micro_batch_rows": self.size.micro_batch_rows},
            "slice": {"minutes": 5.0},
        }
        for section, values in changes.items():
            settings[section] = {**settings.get(section, {}), **values}
        return settings

    def slice(self, run: str, stop_at: int | None = None, **changes: Any) -> dict[str, Any]:
        """One slice's result, with `wall_s`; asked to stop by SIGTERM after a step."""
        order = json.dumps({"config": self.config(run, changes)})
        began_s = time.perf_counter()
        with (self.scratch / "talk.txt").open("w+") as talk:
            process = subprocess.Popen([*SLICE, order], stdout=subprocess.PIPE, stderr=talk, text=True)
            assert process.stdout
            result: dict[str, Any] | None = None
            for line in process.stdout:
                event = json.loads(line) if line.startswith("{") else {}
                if event.get("event") == "step" and event["step"] == stop_at:
                    process.terminate()
                result = event if event.get("event") == "result" else result
            process.wait()
            talk.seek(0)
            words_said = talk.read()
        if result is None or result["exit_code"] not in (0, 75):
            raise Failed(f"{run} ended with {process.returncode}: {words_said[-1500:]}")
        return {**result, "wall_s": time.perf_counter() - began_s}

    def losses(self, run: str) -> list[float]:
        rows = [json.loads(line) for line in (self.scratch / "runs" / run / "metrics.jsonl").read_text().splitlines()]
        return [row["loss"] for row in rows if "loss" in row]

    def digest(self, run: str) -> dict[str, str]:
        folder = self.scratch / "runs" / run
        files = {"adapter": folder / "adapter" / "adapter_model.safetensors", "metrics": folder / "metrics.jsonl"}
        return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}

    # --- the promises ---

    def resumes_exactly(self, name: str, **model: Any) -> dict[str, Any]:
        """A run that was stopped and resumed is the run that was not, bit for bit."""
        self.slice(f"{name}-whole", model=model)
        cut = self.slice(f"{name}-cut", stop_at=CUT_AT, model=model)
        if cut["exit_code"] != 75:
            raise Failed(f"it was to be stopped after step {CUT_AT} of {STEPS} and ended before")
        self.slice(f"{name}-cut", model=model)
        if self.digest(f"{name}-cut") != self.digest(f"{name}-whole"):
            raise Failed(
                f"resumed at {cut['step']}, it differs: {self.losses(f'{name}-cut')} {self.losses(f'{name}-whole')}"
            )
        losses = self.losses(f"{name}-whole")
        return {"losses": losses, "cut_at": cut["step"]}

    def equals_plain(self, name: str, lora: dict[str, Any] | None = None, **techniques: Any) -> dict[str, Any]:
        """In float32 a technique gives the losses of the plain run but for rounding."""
        settings: dict[str, Any] = {"model": {"precision": "float32"}, "lora": lora or {}}
        plain = "plain" if lora is None else f"plain-{name}"
        if not (self.scratch / "runs" / plain).exists():
            self.slice(plain, **settings)
        self.slice(name, techniques=techniques, **settings)
        worst = max(abs(one / other - 1.0) for one, other in zip(self.losses(name), self.losses(plain), strict=True))
        if worst > 1e-4:
            raise Failed(f"losses differ by {worst:.1e}: {self.losses(name)} {self.losses(plain)}")
        return {"largest_relative_difference": worst}

    def staged_equals_plain(self) -> dict[str, Any]:
        """With adapters in the top layer only, all of them train in the tail too: only the path through the frozen
        layers, computed once and kept, differs."""
        top = f"layers.{self.size.num_layers - 1}"
        names = [f"{top}.self_attn.q_proj", f"{top}.self_attn.o_proj", f"{top}.mlp.up_proj", f"{top}.mlp.down_proj"]
        return self.equals_plain("staged", {"target_modules": names}, staged={"after_step": STAGED_AFTER})

    def cap_is_obeyed(self) -> dict[str, Any]:
        minutes = self.size.cap_minutes
        found = self.slice("capped", slice={"minutes": minutes}, train={"max_steps": 1_000_000})
        if found["exit_code"] != 75 or found["wall_s"] > 60 * minutes + 1.0:
            raise Failed(f"exit {found['exit_code']} after {found['wall_s']:.1f} s of {60 * minutes:.0f}")
        timeline = found["timeline"]
        return {"cap_s": 60 * minutes, "wall_s": round(found["wall_s"], 2), "goodput": timeline["goodput"],
                "phases_s": timeline["phases_s"]}  # fmt: skip

    def speed(self, **techniques: Any) -> dict[str, Any]:
        name = "-".join(["speed", *techniques])
        found = self.slice(name, train={"max_steps": self.size.speed_steps}, techniques=techniques)
        rate = found["num_tokens"] / (found["timeline"]["num_steps"] * found["timeline"]["step_p50_s"])
        peak = self.peak_flops()
        # A frozen base: forward, and the gradient of its inputs.
        mfu = round(4 * self.num_linear_weights * rate / peak, 3)
        return {"tokens_per_s": round(rate), "mfu_of_gemm": mfu, "gemm_tflops": round(peak / 1e12, 1),
                "first_step_at_s": found["timeline"]["first_step_at_s"]}  # fmt: skip

    def peak_flops(self) -> float:
        import torch

        width, dtype = self.size.gemm, torch.bfloat16 if self.device == "cuda" else torch.float32
        one = torch.randn(width, width, device=self.device, dtype=dtype)
        times_s: list[float] = []
        for _ in range(8):
            began_s = time.perf_counter()
            float((one @ one)[0, 0])  # reading a value waits for the GPU
            times_s.append(time.perf_counter() - began_s)
        return 2 * width**3 / min(times_s)


def words(number: int, length: int) -> str:
    return " ".join(f"w{(number * 7 + place * (1 + number % 5)) % 500}" for place in range(length))


def write_tokenizer(folder: Path) -> None:
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{i}": 4 + i for i in range(500)}}
    added = [
        {"id": i, "content": word, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True} for word, i in list(vocabulary.items())[:4]
    ]  # fmt: skip
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, **kind}))


def attempts(check: Check) -> dict[str, Callable[[], dict[str, Any]]]:
    nf4 = {"quantization": "nf4", "precision": "bfloat16" if check.device == "cuda" else "float32"}
    found: dict[str, Callable[[], dict[str, Any]]] = {
        "slices, resumed exactly": lambda: check.resumes_exactly("dense"),
        "nf4 slices, resumed exactly": lambda: check.resumes_exactly("nf4", **nf4),
        "fused equals plain": lambda: check.equals_plain("fused", fused_projections=True),
        "chunked loss equals plain": lambda: check.equals_plain("chunked", chunked_loss=True),
        "staged equals plain": check.staged_equals_plain,
        "the cap is obeyed": check.cap_is_obeyed,
        "speed, plain": check.speed,
        "speed, fused and chunked": lambda: check.speed(fused_projections=True, chunked_loss=True),
    }
    if lacking(FOR_NF4):
        print(f"NF4 is left out: {lacking(FOR_NF4)[0]}.", file=sys.stderr)
        del found["nf4 slices, resumed exactly"]
    return found


def refuse(why: str) -> NoReturn:
    print(f"gpu_check: {why}", file=sys.stderr)
    raise SystemExit(2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=sorted(SIZES), default="cuda")
    parser.add_argument("--only", nargs="*", help="words of the checks to make")
    arguments = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036  (nothing was installed, so nobody has asked)
        refuse(f"Python 3.11 or later is needed, and this is {sys.version.split()[0]}.")
    if found := lacking(NEEDED):
        wanted = " ".join(f"'{name}>={least}'" for name, least in NEEDED.items())
        refuse(f"Lacking: {', '.join(found)}. Run: pip install {wanted}")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        refuse("torch sees no CUDA device here. --device cpu tries the script without one.")
    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    began_s = time.perf_counter()
    checks: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["HOTLAP_HOME"] = f"{scratch}/home"
        check = Check(Path(scratch), arguments.device)
        for name, attempt in attempts(check).items():
            if arguments.only and not any(word in name for word in arguments.only):
                continue
            since_s = time.perf_counter()
            try:
                facts = {"held": True, **attempt()}
            except Failed as error:
                facts = {"held": False, "why": str(error)}
            checks[name] = {**facts, "took_s": round(time.perf_counter() - since_s, 1)}
            print(f"{name}: {'held' if facts['held'] else facts['why']}", file=sys.stderr, flush=True)
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    held = bool(checks) and all(facts["held"] for facts in checks.values())
    took_s = round(time.perf_counter() - began_s, 1)
    print(json.dumps({"held": held, "device": device, "torch": torch.__version__, "took_s": took_s, "checks": checks}))
    raise SystemExit(0 if held else 1)


if __name__ == "__main__":
    main()
