"""What a machine costs, in integers: seconds rounded up to what is billed, micro-dollars rounded up."""

from dataclasses import dataclass, replace

from hotlap.cloud.provider import Offer, Traits

PRICE_TOLERANCE_PERCENT = 5
"""A machine may cost so much more than was quoted; beyond it, it is given back at once."""


@dataclass(frozen=True)
class Amount:
    """GPU-seconds and micro-dollars."""

    gpu_s: int = 0
    usd_micros: int = 0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.gpu_s + other.gpu_s, self.usd_micros + other.usd_micros)

    def __sub__(self, other: "Amount") -> "Amount":
        return Amount(self.gpu_s - other.gpu_s, self.usd_micros - other.usd_micros)

    def beyond(self, other: "Amount") -> "Amount":
        """What of each is more than in `other`."""
        return Amount(max(0, self.gpu_s - other.gpu_s), max(0, self.usd_micros - other.usd_micros))

    def text(self) -> str:
        return f"{self.gpu_s / 60:.1f} GPU-minutes and {usd(self.usd_micros)}"


@dataclass(frozen=True)
class Rate:
    """What one machine costs per second."""

    usd_micros_per_hour: int
    num_gpus: int
    billing_unit_s: int

    def cost(self, seconds: float) -> Amount:
        billed_s = max(0, -int(-seconds // self.billing_unit_s)) * self.billing_unit_s
        return Amount(billed_s * self.num_gpus, -(-billed_s * self.usd_micros_per_hour // 3600))


def rate_of(offer: Offer) -> Rate:
    return Rate(offer.usd_micros_per_hour, offer.num_gpus, offer.billing_unit_s)


def worst_rate(quoted: Rate) -> Rate:
    """At the highest price that is still accepted from the provider."""
    dearest = -(-quoted.usd_micros_per_hour * (100 + PRICE_TOLERANCE_PERCENT) // 100)
    return replace(quoted, usd_micros_per_hour=dearest)


def usd(usd_micros: int) -> str:
    """To the cent, and small amounts to four places: $4.98, $0.0125."""
    return f"${usd_micros / 1e6:,.2f}" if abs(usd_micros) >= 1_000_000 or not usd_micros else f"${usd_micros / 1e6:.4f}"


def ttl_s(cap_s: float, traits: Traits) -> int:
    """The longest life of a machine for one slice: to get ready, the slice's cap, and to leave."""
    return int(-(-(traits.provisioning_s + cap_s + SHUTDOWN_S) // 1))


SHUTDOWN_S = 30.0


def loss_bound_s(ttl: float, reaper_period_s: float, traits: Traits) -> int:
    """How long a machine can live at most if its launcher dies: its TTL, the wait for the reaper, and the proof.
    Where the provider itself keeps the TTL, no reaper is waited for."""
    unwatched_s = 0.0 if traits.has_hard_ttl else reaper_period_s
    return int(-(-(ttl + unwatched_s + traits.proof_s) // 1))
