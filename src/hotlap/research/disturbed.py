"""Signs that the machine was busy with something else, or wavered by itself, while a run was made."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Validity = Mapping[str, Any]
_OF_THE_CONFIGURATION = {"uneven_steps", "zero_loss"}


def flags_of(validity: Validity | None) -> list[str]:
    """All flags of a result, which any program may have written."""
    flags = (validity or {}).get("flags")
    return [str(flag) for flag in flags] if isinstance(flags, list) else []


def disturbances(validity: Validity | None) -> list[str]:
    """The flags that speak of the machine."""
    return [flag for flag in flags_of(validity) if flag not in _OF_THE_CONFIGURATION]


def in_words(runs: Sequence[Validity | None]) -> str:
    """What was measured on runs where it was flagged, from the least to the most."""
    found: list[str] = []
    for flag in dict.fromkeys(flag for validity in runs for flag in disturbances(validity)):
        sentence, measure = _SIGNS.get(flag, (flag, lambda _: None))
        flagged = [validity for validity in runs if validity and flag in disturbances(validity)]
        numbers = [number for number in map(measure, flagged) if number is not None]
        found.append(sentence.format(_span(numbers)) if numbers else flag)
    return "; ".join(found)


def told(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many of the runs that a decision was made from were disturbed: the end of its reason."""
    num_disturbed = sum(bool(row["flags"]) for row in rows)
    return f"; {num_disturbed} of its {len(rows)} runs were disturbed" if num_disturbed else ""


def _span(numbers: Sequence[float]) -> str:
    low, high = f"{min(numbers):.3g}", f"{max(numbers):.3g}"
    return low if low == high else f"{low} to {high}"


def _named(name: str, unit: float = 1.0) -> Callable[[Validity], float | None]:
    def number(validity: Validity) -> float | None:
        value = validity.get(name)
        return value / unit if isinstance(value, int | float) else None

    return number


def _slowdown(validity: Validity) -> float | None:
    before, after = (_named(name)(validity) for name in ("probe_before", "probe_after"))
    return after / before if before and after else None


_SIGNS: Mapping[str, tuple[str, Callable[[Validity], float | None]]] = {
    "wall_over_charged": ("steps took {} times what quiet ones take", _named("wall_over_charged")),
    "probe": ("a product of reference took {} times as long after it as before", _slowdown),
    "cpu_util": ("it had {} of its share of the processor", _named("cpu_util")),
    "psi_avg10": ("work waited for a processor {} % of the time", _named("psi_avg10")),
    "throttled": ("a quota held it back for {} s", _named("throttled_us", 1e6)),
}
"""A flag, in words with its number, and where that number is found."""
