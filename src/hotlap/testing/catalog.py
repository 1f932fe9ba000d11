"""What the emulated cloud rents out, and for how much."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

_GPUS: tuple[tuple[str, str, int, float, float], ...] = (
    ("NVIDIA H100 80GB HBM3", "H100 SXM", 80, 2.99, 2.69),
    ("NVIDIA A100-SXM4-80GB", "A100 SXM", 80, 1.89, 1.59),
    ("NVIDIA L40S", "L40S", 48, 0.86, 0.79),
    ("NVIDIA GeForce RTX 4090", "RTX 4090", 24, 0.69, 0.34),
)
"""Id, name, memory in GB, dollars an hour in the secure and in the community cloud."""

_CPU_USD_PER_HOUR = 0.06
_CENTERS = (("US-KS-2", "US Kansas 2", "NORTH_AMERICA"), ("EU-RO-1", "EU Romania 1", "EUROPE"))

SoldOut = Collection[tuple[str, str]]
"""Kinds of GPU that a data center has none of now, as (GPU id, center id)."""


def data_centers(sold_out: SoldOut) -> list[dict[str, Any]]:
    return [
        {
            "id": ident,
            "name": name,
            "region": region,
            "globalNetwork": True,
            "networkVolumeTypes": ["STANDARD"],
            "compliance": [],
            "gpuAvailability": [
                {"id": gpu[0], "name": gpu[1], "availability": _level(gpu[0], ident, sold_out)} for gpu in _GPUS
            ],
        }
        for ident, name, region in _CENTERS
    ]


def has_room(gpu: str, centers: Sequence[str], sold_out: SoldOut) -> bool:
    """Whether one of these data centers (none named: any) has such a GPU."""
    return any((gpu, center) not in sold_out for center in centers or [center[0] for center in _CENTERS])


def _level(gpu: str, center: str, sold_out: SoldOut) -> str:
    return "NONE" if (gpu, center) in sold_out else "HIGH"


def gpus(query: Mapping[str, str], sold_out: SoldOut) -> list[dict[str, Any]]:
    return [_entry(gpu, query, sold_out) for gpu in _GPUS]


def gpu_entry(ident: str, query: Mapping[str, str], sold_out: SoldOut) -> dict[str, Any] | None:
    return next((_entry(gpu, query, sold_out) for gpu in _GPUS if gpu[0] == ident), None)


def price_of(body: Mapping[str, Any]) -> float | None:
    """Dollars an hour of what a create asks for; None for what is not rented out."""
    if "cpu" in body:
        return _CPU_USD_PER_HOUR
    prices = {gpu[0]: {"SECURE": gpu[3], "COMMUNITY": gpu[4]} for gpu in _GPUS}
    price = prices.get(body["gpu"]["id"], {}).get(body.get("cloud", "SECURE"))
    return None if price is None else price * body["gpu"].get("count", 1)


def _entry(gpu: tuple[str, str, int, float, float], query: Mapping[str, str], sold_out: SoldOut) -> dict[str, Any]:
    ident, name, memory, secure, community = gpu
    entry: dict[str, Any] = {
        "id": ident,
        "name": name,
        "pool": None,
        "manufacturer": "NVIDIA",
        "memory": memory,
        "secure": True,
        "community": True,
        "price": {"secure": secure, "community": community},
        "maxCount": {"secure": 8, "community": 4},
    }
    if query.get("include") == "AVAILABILITY":
        entry["availability"] = "HIGH" if has_room(ident, (), sold_out) else "NONE"
        entry["dataCenters"] = [
            {"id": center[0], "name": center[1], "availability": _level(ident, center[0], sold_out)}
            for center in _CENTERS
        ]
    return entry
