"""Smaller forms of a merged model: FP8 for vLLM, made in llm-compressor's environment, and GGUF for llama.cpp."""

import re
import shutil
from pathlib import Path
from typing import Any

from hotlap import child, clock, durable
from hotlap.errors import DONE, ChildCrashed, ConfigError, MissingArtifact, ProofFailed
from hotlap.export import folders, rows, tensors, tools
from hotlap.export.folders import Exported, Tuned
from hotlap.export.task import Say, run_program, run_task

ALLOWED = 0.5
"""How far logits may be from those before, in standard deviations. A guess with room: SmolLM2-135M was at 0.22, and a
scale that is lost gives more than 1."""
_INSIDE = re.compile(r"(^|\.)layers\.\d+\.(self_attn|mlp)\.\w+_proj$")
_PATIENCE_S = 7200.0
_TOWERS = re.compile(r"(^|\.)(vision|audio|image|visual|encoder)\w*\.")


def fp8(tuned: Tuned, say: Say) -> Exported:
    """The run's model with FP8 weights, its dense products only: embeddings, head, norms and other towers stay.

    Raises:
        MissingArtifact: llm-compressor's environment is not here.
        ConfigError: the model has no layers of the kinds that we know.
    """
    python = tools.locate("fp8")
    # What is measured is the step from bfloat16, in which such models are served, to FP8.
    source = folders.merged(tuned, "bfloat16", say).folder
    identity = {**tuned.identity(), "kind": "fp8", "tool": tools.TOOLS["fp8"].requirements[0]}

    def build(staged: Path) -> dict[str, Any]:
        return quantized(python, source, staged, tuned.packed, say)

    return folders.published(folders.folder_of(tuned.run, "fp8"), identity, build, say)


def quantized(python: Path, source: Path, target: Path, packed: dict[str, str], say: Say) -> dict[str, Any]:
    """Write the quantized model into the new folder `target`, and what it cost.

    Raises:
        ConfigError: the model has no layers of the kinds that we know.
        ChildCrashed: llm-compressor did not get to its end.
        ProofFailed: what it made is another model.
    """
    chosen, ignored = divided(source)
    kept, what = rows.loss_rows(packed, source)
    say(f"Rounding {len(chosen)} weights to FP8; {len(ignored)} stay as they are.")
    order = {
        "source": str(source),
        "target": str(target),
        "ignore": ignored,
        "rows": [{"tokens": row.tokens, "is_trained": list(map(int, row.is_trained))} for row in kept],
    }
    program = str(Path(__file__).with_name("compress.py"))
    found = run_program([str(python), program], order, "llm-compressor", lambda line: None)
    folders.sync_all(target, source)
    sizes = {place: sum(path.stat().st_size for path in place.glob("*.safetensors")) for place in (source, target)}
    layers: dict[str, float] = found.pop("layers")
    if sorted(layers) != sorted(f"{name}.weight" for name in chosen):
        raise ConfigError(f"llm-compressor has quantized {len(layers)} weights, and {len(chosen)} were meant.")
    if not found["error_to_before"] <= ALLOWED:
        raise ProofFailed(
            f"The FP8 model, loaded back, is another model: its logits are {found['error_to_before']:.3g} standard "
            f"deviations away (allowed {ALLOWED:g}). Nothing is published."
        )
    worst = max(layers, key=lambda name: layers[name])
    say(
        f"{sizes[source] / 1e6:,.1f} MB in bfloat16, {sizes[target] / 1e6:,.1f} MB in FP8. Largest error of a weight: "
        f"{layers[worst]:.2%} ({worst}). Loss on {what}: {found['val_loss_before']:.4f} in bfloat16, "
        f"{found['val_loss_fp8']:.4f} in FP8."
    )
    return {
        **found,
        "loss_rows": what,
        "bytes_before": sizes[source],
        "bytes": sizes[target],
        "layer_error_largest": layers[worst],
        "layer_error_mean": sum(layers.values()) / len(layers),
        "layer_errors": layers,
    }


def gguf(tuned: Tuned, kind: str, llama_quantize: Path | None, say: Say) -> Exported:
    """The run's model as one GGUF file: `f16`, `q8_0`, or `q4_k_m` by the user's llama.cpp.

    Raises:
        ConfigError: the model has no place in the format as we write it.
        ProofFailed: the file, loaded back, is another model.
        MissingArtifact: llama.cpp is needed, and not here.
    """
    program = _llama_quantize(llama_quantize) if kind == "q4_k_m" else None
    source = folders.merged(tuned, "base", say).folder
    name = f"{tuned.run.name}-{kind}.gguf"

    def build(staged: Path) -> dict[str, Any]:
        durable.make_dirs(staged)
        order = {"source": str(source), "target": str(staged / name), "type": kind}
        if program is None:
            return {"file": name, **run_task("hotlap.export.gguf", order, "The conversion", say)}
        half = gguf(tuned, "f16", None, say)
        argv = [program, str(half.folder / half.facts["file"]), str(staged / name), kind.upper()]
        end = child.run_child(argv, clock.Deadline(clock.monotonic_s() + _PATIENCE_S), on_talk=say)
        if end.exit_code != DONE or not (staged / name).exists():
            raise ChildCrashed(f"{program} ended with exit code {end.exit_code}. Its last words stand above.")
        durable.sync_file(staged / name)
        return {"file": name, "bytes": (staged / name).stat().st_size, "made_of": half.facts["file"]}

    identity = {**tuned.identity(), "kind": f"gguf-{kind}"}
    return folders.published(folders.folder_of(tuned.run, f"gguf-{kind}"), identity, build, say)


def _llama_quantize(given: Path | None) -> str:
    found = str(given) if given else shutil.which("llama-quantize")
    if found is None:
        raise MissingArtifact(
            "q4_k_m is made by llama.cpp, and there is no llama-quantize on the PATH. Install llama.cpp, name it with "
            "--llama-quantize, or take --type q8_0."
        )
    return found


def divided(folder: Path) -> tuple[list[str], list[str]]:
    """Modules of a model that are quantized, and those with weights that are not.

    Raises:
        ConfigError: none is to be quantized.
    """
    entries = tensors.all_entries(folder).values()
    modules = [entry.name.removesuffix(".weight") for entry in entries if entry.name.endswith(".weight")]
    chosen = [name for name in modules if _INSIDE.search(name) and not _TOWERS.search(name)]
    if not chosen:
        raise ConfigError(
            f"{folder} has no layers with self_attn and mlp projections, so it is not known what to quantize. "
            f"Serve the merged model."
        )
    # A tied head is no tensor of its own, and would be taken for a quantized one by whoever loads the model.
    ignored = {*modules, "lm_head"} - set(chosen)
    return chosen, sorted(name for name in ignored if not name.endswith("norm"))  # which are never quantized
