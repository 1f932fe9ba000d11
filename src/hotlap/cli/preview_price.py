"""What a run would cost on what can be rented now: per kind of GPU its time, its slices, and the most they cost.

The time assumes a share of the GPU's peak that nobody has measured for hotlap; the price of a slice does not depend on
it: it is the worst case that a launch would hold.
"""

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotlap.cloud.provider import Offer
    from hotlap.config import CloudConfig, RunConfig
    from hotlap.data.preview import Preview

_SHARE_OF_PEAK = 0.3
_SLICE_OVERHEAD_S = 60.0

_PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 80GB HBM3": 989.0,
    "H100 PCIe": 756.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A40": 150.0,
    "RTX 6000 Ada": 364.0,
    "RTX A6000": 155.0,
    "RTX A5000": 111.0,
    "RTX 5090": 210.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
}
"""Dense bfloat16 with float32 sums, in 10^12 operations a second, as the maker's data sheets have it. A name that
begins with another's comes first."""


@dataclass(frozen=True)
class Price:
    """Of one kind of machine. `seconds` and `num_slices` are None where its speed is not known."""

    provider: str
    gpu: str
    cloud: str | None
    usd_micros_per_hour: int
    seconds: float | None
    num_slices: int | None
    slice_usd_micros: int

    @property
    def usd_micros(self) -> int | None:
        return None if self.num_slices is None else self.num_slices * self.slice_usd_micros

    def in_words(self) -> str:
        from hotlap.cloud.money import usd

        where = f"{self.provider} {self.cloud.lower()} cloud" if self.cloud else self.provider
        rate = f"{self.gpu} ({where}), {usd(self.usd_micros_per_hour)} an hour: a slice costs at most "
        rate += usd(self.slice_usd_micros)
        if self.seconds is None or self.num_slices is None or self.usd_micros is None:
            return f"{rate}; how many it takes is not known for this kind"
        slices = f"{self.num_slices:,} slice{'s' if self.num_slices > 1 else ''}"
        return f"{rate}; about {self.seconds:,.0f} s in {slices}, so at most {usd(self.usd_micros)}"


def prices(found: "Preview", config: "RunConfig", provider_name: str, cloud: "CloudConfig") -> list[Price]:
    """The cheapest offer of each kind, cheapest run first, those of unknown speed last.

    Raises:
        HotlapError: the provider cannot be asked.
    """
    from hotlap.cloud import rental

    cheapest: dict[tuple[str, str | None], Offer] = {}
    with closing(rental.open_provider(provider_name, cloud)) as provider:
        offers, ttl_s = provider.offers(), rental.ttl_of(config, provider)
    for offer in offers:
        kind = (offer.gpu, offer.cloud)
        if kind not in cheapest or offer.usd_micros_per_hour < cheapest[kind].usd_micros_per_hour:
            cheapest[kind] = offer
    rows = [_price(found, config, offer, ttl_s) for offer in cheapest.values()]
    return sorted(rows, key=lambda row: (row.usd_micros is None, row.usd_micros or row.slice_usd_micros))


def _price(found: "Preview", config: "RunConfig", offer: "Offer", ttl_s: float) -> Price:
    from hotlap.cloud.money import rate_of, worst_rate

    seconds = found.duration.seconds if offer.provider == "local" else _seconds_on(offer.gpu, found)
    steps_s = max(1.0, config.slice.cap_s - _SLICE_OVERHEAD_S)
    return Price(
        provider=offer.provider,
        gpu=offer.gpu,
        cloud=offer.cloud,
        usd_micros_per_hour=offer.usd_micros_per_hour,
        seconds=seconds,
        num_slices=None if seconds is None else max(1, math.ceil(seconds / steps_s)),
        slice_usd_micros=worst_rate(rate_of(offer)).cost(ttl_s).usd_micros,
    )


def _seconds_on(gpu: str, found: "Preview") -> float | None:
    peak = next((tflops for name, tflops in _PEAK_TFLOPS.items() if name in gpu), None)
    if peak is None:
        return None
    return 4.0 * found.shape.num_parameters * found.duration.num_tokens / (_SHARE_OF_PEAK * peak * 1e12)


def rows_of(priced: list[Price]) -> Iterator[tuple[str, str]]:
    if any(row.provider != "local" and row.seconds is not None for row in priced):
        yield "prices", f"times assume {_SHARE_OF_PEAK:.0%} of a GPU's peak, which nobody has measured for hotlap"
    for row in priced:
        yield "price", row.in_words()
