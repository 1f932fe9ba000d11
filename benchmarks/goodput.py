"""How much of a slice is training: its start, its resuming, and what publishing costs, by phase.

`python -m benchmarks.goodput MODEL_FOLDER [--caps 60 300] [--trl-python PYTHON]`. A run's first slice of one step makes
the data ready; then resumed slices of 256-token steps go to their caps in rank 16. Resuming and publishing are timed in
a rank whose adapter has about 20 million parameters. Starts are timed with every start technique and with none, and
beside TRL's script where its Python is given, in turn. Prints one JSON object, and writes it to `benchmarks/results/`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import spread
from benchmarks.trl import examples
from hotlap.config import LoraConfig, RunConfig
from hotlap.data.estimate import shape_of

RESULT = Path(__file__).parent / "results" / "goodput.json"
LARGE_ADAPTER = 20_000_000
START_TECHNIQUES = ("direct_load", "lean_imports", "overlap")
NO_END = 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--caps", type=float, nargs="*", default=[60.0, 300.0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trl-python")
    arguments = parser.parse_args()
    found: dict[str, Any] = {"load_before": os.getloadavg(), "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["HOTLAP_HOME"] = f"{scratch}/home"
        bench = Bench(arguments.model.absolute(), Path(scratch))
        found["start"] = bench.starts(arguments.repeats, arguments.trl_python)
        found["slices"] = [bench.capped(cap_s) for cap_s in arguments.caps]
        found["large adapter"] = bench.large_adapter()
    found["load_after"] = os.getloadavg()
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


class Bench:
    def __init__(self, model: Path, scratch: Path) -> None:
        self.model, self.scratch = model, scratch
        self.data = scratch / "data.jsonl"
        self.data.write_text("".join(json.dumps(row) + "\n" for row in examples(400)))

    def slice(
        self,
        run: str,
        cap_s: float,
        stop_at: int | None = None,
        rank: int = 16,
        every_s: float = 60.0,
        **techniques: Any,
    ) -> Any:
        """A slice's result, and how many checkpoints it published; asked to stop after a step of its own."""
        config = RunConfig.model_validate({
            "base_model": str(self.model), "dataset": str(self.data), "output_dir": str(self.scratch / "runs"),
            "run": run, "seed": 7, "data": {"seq_len": 256}, "model": {"precision": "float32"},
            "lora": {"rank": rank, "alpha": 2.0 * rank}, "train": {"max_steps": NO_END},
            "slice": {"minutes": cap_s / 60}, "techniques": techniques, "checkpoint": {"every_s": every_s},
        })  # fmt: skip
        argv = [sys.executable, "-m", "hotlap.train.slice", json.dumps({"config": config.model_dump(mode="json")})]
        talk = self.scratch / "talk.txt"
        with talk.open("w") as errors:
            process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=errors, text=True)
            assert process.stdout
            num_steps, num_published, result = 0, 0, None
            for line in process.stdout:
                event = json.loads(line) if line.startswith("{") else {}
                num_steps += event.get("event") == "step"
                num_published += event.get("event") == "published"
                if num_steps == stop_at and event.get("event") == "step":
                    process.terminate()
                result = event if event.get("event") == "result" else result
            process.wait()
        if result is None or result["exit_code"] != 75:
            raise SystemExit(f"{run}: {process.returncode}\n{talk.read_text()[-2000:]}")
        return {**result, "num_published": num_published}

    def starts(self, repeats: int, trl_python: str | None) -> dict[str, Any]:
        """From process start to the first step, in resumed slices."""
        off = dict.fromkeys(START_TECHNIQUES, False)
        firsts: dict[str, list[float]] = {"all on": [], "all off": [], "trl": []}
        self.slice("start", 300.0, stop_at=1)
        for _ in range(repeats):
            for name, techniques in (("all on", {}), ("all off", off)):
                timeline = self.slice("start", 300.0, stop_at=1, **techniques)["timeline"]
                firsts[name].append(timeline["first_step_at_s"])
            if trl_python is not None:
                firsts["trl"].append(self._trl_start_s(trl_python))
        found: dict[str, Any] = {name: spread(values) for name, values in firsts.items() if values}
        for other in ("all off", "trl"):
            if firsts[other]:
                ratios = [one / two for one, two in zip(firsts["all on"], firsts[other], strict=True)]
                found[f"all on over {other}"] = spread(ratios)
        return found

    def _trl_start_s(self, trl_python: str) -> float:
        out = self.scratch / "trl.json"
        order = {"model": str(self.model), "data": str(self.data), "out": str(out), "num_steps": 1, "seq_len": 256,
                 "lr": 2e-4, "rank": 16, "num_threads": len(os.sched_getaffinity(0)), "adapter": None}  # fmt: skip
        script = str(Path(__file__).with_name("trl_side.py"))
        subprocess.run([trl_python, "-P", script, json.dumps(order)], check=True, capture_output=True)
        return json.loads(out.read_text())["first_forward_s"]

    def capped(self, cap_s: float) -> dict[str, Any]:
        """A resumed slice that goes to its cap, and the seconds that were no steps."""
        timeline = self.slice("start", cap_s)["timeline"]
        phases_s = {name: spent_s for name, spent_s in timeline["phases_s"].items() if name != "steps" and spent_s}
        left_s = cap_s - timeline["elapsed_s"]
        return {"cap_s": cap_s, "goodput": timeline["goodput"], "of_cap": timeline["phases_s"]["steps"] / cap_s,
                "leftover_s": phases_s, "ended_before_cap_s": left_s, "num_steps": timeline["num_steps"]}  # fmt: skip

    def large_adapter(self) -> dict[str, Any]:
        """Seconds of resuming, of the publish at the end of a slice, and for which one behind the steps holds them
        up, at about 20 million parameters."""
        one_rank = shape_of(self.model).num_adapter_parameters(LoraConfig(rank=1))
        rank = round(LARGE_ADAPTER / one_rank)
        self.slice("large", 300.0, stop_at=2, rank=rank)
        resumed = self.slice("large", 300.0, stop_at=8, rank=rank, every_s=1e6)["timeline"]["phases_s"]
        often = self.slice("large", 300.0, stop_at=8, rank=rank, every_s=0.1)
        num_behind = often["num_published"] - 1
        blocked_s = often["timeline"]["phases_s"]["publish"] - resumed["publish"]
        return {"rank": rank, "resume_s": resumed["resume"], "last_publish_s": resumed["publish"],
                "blocked_s_per_publish": blocked_s / num_behind, "num_behind": num_behind}  # fmt: skip


if __name__ == "__main__":
    main()
