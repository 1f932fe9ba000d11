"""Open a run: write its identity at the first slice, hold every later one to it."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotlap import artifacts, clock, runs
from hotlap.config import RunConfig
from hotlap.data import packed, prepare
from hotlap.errors import ConfigError, HotlapError, MissingArtifact, RunChanged
from hotlap.train.context import Context

Say = Callable[[str], None]

# Where base model and data lie may differ from slice to slice; what they are is compared by their pins.
_PLACES = ("base_model", "dataset", "data.eval_dataset", "data.chat_template", "lora.init_from", "seed")

# What is kept of the slice for leaving when the data is not ready in it.
_KEPT_S = 5.0


@dataclass(frozen=True)
class OpenedRun:
    identity: runs.Identity
    model_folder: Path
    packing: packed.Packing
    order: packed.Order


def open_run(run: runs.RunFolder, context: Context, require_lock: Callable[[], None]) -> OpenedRun:
    """The run's identity, base model and packed data.

    Raises:
        RunChanged: settings, data or base model differ from those the run began with.
        MissingArtifact: the base model or the data is not on this machine.
    """
    config = context.config
    model_folder = artifacts.locate_model(config.base_model)
    context.preload.read_ahead(model_folder)
    places = prepare.locate(config)
    identity = runs.read_identity(run)
    if identity is None:
        return _begin(run, context, model_folder, places, require_lock)
    _require_unchanged(run, identity, context, model_folder, places)
    packing = _packing(identity, context, model_folder, places)
    return OpenedRun(identity, model_folder, packing, _order(identity, config))


def _begin(
    run: runs.RunFolder,
    context: Context,
    model_folder: Path,
    places: prepare.Places,
    require_lock: Callable[[], None],
) -> OpenedRun:
    config = context.config
    seed = config.seed if config.seed is not None else context.draw_seed()
    packing = _prepared(context, seed, model_folder, places)
    order = packed.plan_order(config, seed, packing.train.num_rows)
    context.preload.finish()  # it would disturb what is measured now
    # torch is not needed to open a run later, and takes seconds to import.
    from hotlap.train.base import choose_precision

    identity = runs.Identity(
        trajectory=config.trajectory,
        seed=seed,
        base_pins=artifacts.pins_to_json(artifacts.pin(model_folder)),
        data_pins={name: artifacts.pins_to_json(artifacts.pin(path)) for name, path in places.named.items()},
        packed=_fingerprints(packing),
        num_rows=packing.train.num_rows,
        num_steps=order.num_steps,
        num_threads=config.slice.num_threads or _num_cores(),
        created_at=clock.utc_text(clock.wall_s()),
        precision=choose_precision(config.model, context.say),
        init_pins=_init_pins(config, context.say),
    )
    require_lock()
    identity.write(run)
    return OpenedRun(identity, model_folder, packing, order)


def _init_pins(config: RunConfig, say: Say) -> dict[str, Any]:
    if config.lora.init_from is None:
        return {}
    say(f"Warm start: the adapter begins with the values of {config.lora.init_from}, the optimizer fresh, at step 0.")
    return _pinned_adapter(Path(config.lora.init_from))


def _pinned_adapter(folder: Path) -> dict[str, Any]:
    """
    Raises:
        MissingArtifact: there is no adapter.
    """
    if not (folder / "adapter_model.safetensors").is_file():
        raise MissingArtifact(
            f"lora.init_from: {folder} holds no adapter_model.safetensors. Give a PEFT adapter's folder."
        )
    return artifacts.pins_to_json(artifacts.pin(folder))


def _num_cores() -> int:
    """Cores this process may use; macOS does not tell that, only how many there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _fingerprints(packing: packed.Packing) -> dict[str, str]:
    both = {"train": packing.train, "held_out": packing.held_out}
    return {name: dataset.fingerprint for name, dataset in both.items() if dataset is not None}


def _order(identity: runs.Identity, config: RunConfig) -> packed.Order:
    return packed.plan_order(config, identity.seed, identity.num_rows)


def _prepared(context: Context, seed: int, model_folder: Path, places: prepare.Places) -> packed.Packing:
    deadline = context.deadline.keeping(_KEPT_S)
    if deadline.is_over():
        raise ConfigError(
            f"The slice's {context.config.slice.minutes:g} minutes are too few to begin with the data, so no number of "
            f"slices would finish this run. Raise slice.minutes."
        )
    return prepare.prepare(context.config, seed, places, model_folder, context.say, deadline)


def _packing(identity: runs.Identity, context: Context, model_folder: Path, places: prepare.Places) -> packed.Packing:
    """By the stored fingerprints, which reads no source; rebuilt where the cache does not have them."""
    opened = {name: packed.open_packed(fingerprint) for name, fingerprint in identity.packed.items()}
    if all(dataset is not None for dataset in opened.values()):
        train = opened["train"]
        assert train is not None
        return packed.Packing(train, opened.get("held_out"))
    packing = _prepared(context, identity.seed, model_folder, places)
    if _fingerprints(packing) != identity.packed:
        raise RunChanged(
            f"The data packs to {_fingerprints(packing)}, and this run began with {identity.packed}: this version of "
            f"hotlap or of the tokenizer works otherwise. Finish it where it began, or start a new run with --run."
        )
    return packing


def _require_unchanged(
    run: runs.RunFolder, identity: runs.Identity, context: Context, model_folder: Path, places: prepare.Places
) -> None:
    differences = list(_changed_settings(identity, context.config))
    for what, path, pins in [
        ("base model", model_folder, identity.base_pins),
        *((name, path, identity.data_pins.get(name, {})) for name, path in places.named.items()),
        *(([("lora.init_from", Path(start), identity.init_pins)]) if (start := context.config.lora.init_from) else ()),
    ]:
        differences += [f"{what}: {text}" for text in artifacts.changed(path, artifacts.pins_from_json(pins))]
    if missing := sorted(set(identity.data_pins) - set(places.named)):
        differences.append(f"{missing[0]}: part of the run, but not given now")
    if differences:
        num_steps = _horizon_now(identity, context, model_folder, places)
        if num_steps not in (None, identity.num_steps):
            differences.append(f"the run's horizon is {identity.num_steps} steps and would be {num_steps}")
        raise RunChanged(
            f"{run.name} began with something else: {'; '.join(differences)}. "
            f"Put it back to go on with this run, or start another one with --run NAME."
        )


def _changed_settings(identity: runs.Identity, config: RunConfig) -> Iterator[str]:
    then, now = _flat(identity.trajectory), _flat(config.trajectory)
    for key in sorted(set(then) | set(now)):
        if key not in _PLACES and _placeless(then.get(key)) != _placeless(now.get(key)):
            yield f"{key} is {then.get(key)} in the run and {now.get(key)} now"
    if config.seed is not None and config.seed != identity.seed:
        yield f"seed is {identity.seed} in the run and {config.seed} now"


def _horizon_now(identity: runs.Identity, context: Context, model_folder: Path, places: prepare.Places) -> int | None:
    """The steps of a run of what is given now; None if that is no run."""
    config = context.config
    if config.train.max_steps is not None:
        return config.train.max_steps
    try:
        packing = _prepared(context, identity.seed, model_folder, places)
    except (HotlapError, clock.OutOfTime):
        return None
    return packed.plan_order(config, identity.seed, packing.train.num_rows).num_steps


def _placeless(value: Any) -> Any:
    """The value without where mixed data sets lie."""
    if not isinstance(value, list):
        return value
    return [{k: v for k, v in item.items() if k != "dataset"} if isinstance(item, dict) else item for item in value]


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
