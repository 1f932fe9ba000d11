"""Everything there is to say about a run before it is trained: its examples token by token, its counts, its needs."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotlap import artifacts, runs
from hotlap.config import RunConfig
from hotlap.data.estimate import Duration, Memory, Shape, Speed, duration_of, estimated_speed, memory_of, shape_of
from hotlap.data.facts import Facts
from hotlap.data.packed import PackedDataset, Packing, plan_order
from hotlap.data.prepare import locate, prepare
from hotlap.data.render import Renderer
from hotlap.data.rows import histogram_edges

_SEED_WITHOUT_RUN = 0
_MOST_BYTES_OF_A_CHARACTER = 4


@dataclass(frozen=True)
class Token:
    """One token, or the few that make one character."""

    text: str
    ids: tuple[int, ...]
    is_trained: bool


@dataclass(frozen=True)
class Preview:
    run: str
    seed: int
    is_seed_known: bool
    """Whether the run will have this seed. If not, what the seed draws will be drawn otherwise."""

    packing: Packing
    doubts: list[str]
    """What the chat template does that the run may fail by."""

    examples: list[list[Token]]
    num_steps: int
    num_rows_trained: int
    shape: Shape
    memory: Memory
    available_bytes: int | None
    micro_batch_rows: int
    speed: Speed
    duration: Duration

    @property
    def suggested_micro_batch_rows(self) -> int | None:
        return None if self.available_bytes is None else self.memory.most_rows(self.available_bytes)

    def as_json(self) -> dict[str, Any]:
        held_out = self.packing.held_out
        return {
            "run": self.run,
            "seed": self.seed if self.is_seed_known else None,
            "train": _facts_as_json(self.packing.train),
            "held_out": _facts_as_json(held_out) if held_out else None,
            "num_held_out_also_trained": self.packing.num_also_trained,
            "doubts": self.doubts,
            "num_steps": self.num_steps,
            "tokens_per_epoch": self.packing.train.facts.num_tokens,
            "trained_tokens_per_epoch": self.packing.train.num_trained_tokens,
            "memory": {
                "estimated_for": self.memory.in_words,
                "estimated_peak_bytes": self.memory.peak_bytes(self.micro_batch_rows),
                "micro_batch_rows": self.micro_batch_rows,
                "available_bytes": self.available_bytes,
                "suggested_micro_batch_rows": self.suggested_micro_batch_rows,
            },
            "speed": asdict(self.speed),
            "duration": asdict(self.duration),
            "examples": [[asdict(token) for token in example] for example in self.examples],
        }


def preview(config: RunConfig, num_examples: int, say: Callable[[str], None]) -> Preview:
    """Prepare the data, which training then finds ready, and look at it.

    Raises:
        HotlapError: what training would end with before its first step.
    """
    model_folder, places = artifacts.locate_model(config.base_model), locate(config)
    identity = runs.read_identity(runs.RunFolder(config.run_folder))
    seed, is_seed_known = _seed_of(config, identity)
    packing = prepare(config, seed, places, model_folder, say)
    train = packing.train
    renderer = Renderer(model_folder, config.data, places.chat_template)
    order = plan_order(config, seed, train.num_rows)
    shape = shape_of(model_folder)
    speed = _measured_speed(config) or estimated_speed(shape)
    return Preview(
        run=config.run_name,
        seed=seed,
        is_seed_known=is_seed_known,
        packing=packing,
        doubts=renderer.doubts(),
        examples=[tokens_of(renderer, *example) for example in islice(train.examples(), num_examples)],
        num_steps=order.num_steps,
        num_rows_trained=order.total_rows,
        shape=shape,
        memory=memory_of(shape, config, train, identity and identity.precision),
        available_bytes=_available_bytes(),
        micro_batch_rows=config.train.micro_batch_rows,
        speed=speed,
        duration=duration_of(config, train, order.total_rows, speed),
    )


def tokens_of(renderer: Renderer, tokens_L: npt.NDArray[np.int32], is_trained_L: npt.NDArray[np.bool_]) -> list[Token]:
    """An example token by token; those that only together make a character are one."""
    found: list[Token] = []
    first = 0
    while first < len(tokens_L):
        stop = first + 1
        text = renderer.decode(tokens_L[first:stop].tolist(), shows_special=True)
        while "\ufffd" in text and stop - first < _MOST_BYTES_OF_A_CHARACTER and stop < len(tokens_L):
            stop += 1
            text = renderer.decode(tokens_L[first:stop].tolist(), shows_special=True)
        ids = tuple(int(token) for token in tokens_L[first:stop])
        found.append(Token(text, ids, bool(is_trained_L[first:stop].any())))
        first = stop
    return found


def left_out_rows(facts: Facts) -> Iterator[tuple[int, str, str, str]]:
    """Count, kind, where, and the first one's reason."""
    for entry in facts.left_out:
        yield entry.count, entry.kind, f"{Path(entry.source).name} {entry.where}", entry.reason


def histogram_of(facts: Facts) -> list[tuple[int, int]]:
    """Examples up to so many tokens."""
    return list(zip(histogram_edges(facts.seq_len), facts.histogram, strict=True))


def _facts_as_json(data: PackedDataset) -> dict[str, Any]:
    facts = data.facts
    bins = [{"up_to_tokens": edge, "examples": count} for edge, count in histogram_of(facts)]
    return {**asdict(facts), "fingerprint": data.fingerprint, "fill": round(facts.fill, 4), "histogram": bins}


def _seed_of(config: RunConfig, identity: runs.Identity | None) -> tuple[int, bool]:
    seed = config.seed if config.seed is not None else identity and identity.seed
    return (_SEED_WITHOUT_RUN, False) if seed is None else (seed, True)


def _measured_speed(config: RunConfig) -> Speed | None:
    """Of the newest slice with this base model, of this run if there is one."""
    found: Speed | None = None
    for run in runs.list_runs(Path(config.output_dir)):
        identity = runs.read_identity(run)
        if identity is None or identity.trajectory["base_model"] != config.base_model:
            continue
        for state in runs.all_slices(run):
            tokens_per_s = (state.result or {}).get("tokens_per_s")
            if tokens_per_s:
                found = Speed(float(tokens_per_s), f"measured in slice {state.number} of {run.name}")
        if found and run.name == config.run_name:
            break
    return found


def _available_bytes() -> int | None:
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    lines = dict(line.split(":", 1) for line in path.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024
