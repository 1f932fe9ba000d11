"""What all past runs say about a configuration that has not run: a small Gaussian process over the unit cube.

N configurations that ran, D coordinates, C candidates. Losses are nats per byte. Rasmussen and Williams 2006,
chapters 2 and 5; expected improvement as in Jones, Schonlau and Welch 1998.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_LENGTHS = (0.25, 0.5, 1.0, 2.0)
_SIGNALS = (4.0, 16.0, 64.0, 256.0)
"""Grid of the kernel's two parameters: length scale, and variance in units of the noise's."""

_OUTLIER_SIGMAS = 15.0
_FAILURE_WORSE_SIGMAS = 2.0
_NEAR = 0.15
_MAX_POINTS = 400


@dataclass(frozen=True)
class Evidence:
    """What ran: `points` (N, D), mean losses (N,), how many runs each is the mean of (N,), and where runs failed."""

    points: Array
    losses: Array
    counts: Array
    failed: Array
    """(F, D)"""

    def with_runs(self, points: Array, losses: Array, count: float) -> "Evidence":
        """As if these had run too, each so many times."""
        return Evidence(
            np.concatenate([self.points, points]),
            np.concatenate([self.losses, losses]),
            np.concatenate([self.counts, np.full(len(points), count)]),
            self.failed,
        )


class Surrogate:
    """The posterior after `evidence`, with the noise `s` of one run."""

    def __init__(self, evidence: Evidence, s: float, center: Array) -> None:
        near = _nearest(evidence.points, center)
        self._points, losses = evidence.points[near], evidence.losses[near]
        counts = evidence.counts[near]
        # A blow-up says "not here", not how deep the hole is.
        losses = np.minimum(losses, np.median(losses) + _OUTLIER_SIGMAS * s)
        if len(evidence.failed):
            worst = losses.max() + _FAILURE_WORSE_SIGMAS * s
            self._points = np.concatenate([self._points, evidence.failed])
            losses = np.concatenate([losses, np.full(len(evidence.failed), worst)])
            counts = np.concatenate([counts, np.ones(len(evidence.failed))])
        self._noise = s**2 / counts
        self._losses = losses
        distances = _distances(self._points, self._points)
        fits = [self._fit(distances, length, ratio * s**2) for length in _LENGTHS for ratio in _SIGNALS]
        self._fitted = max(fits, key=lambda fit: fit.log_likelihood)

    def _fit(self, distances: Array, length: float, signal: float) -> "_Fit":
        covariance = signal * _matern(distances / length) + np.diag(self._noise)
        inverse = np.linalg.inv(covariance).astype(np.float64)
        ones = np.ones(len(distances))
        mean = float(ones @ inverse @ self._losses / (ones @ inverse @ ones))
        weights = inverse @ (self._losses - mean)
        _, log_det = np.linalg.slogdet(covariance)
        log_likelihood = -0.5 * float((self._losses - mean) @ weights) - 0.5 * float(log_det)
        return _Fit(length, signal, mean, inverse, weights, log_likelihood)

    def predict(self, points: Array) -> tuple[Array, Array]:
        """Mean and standard deviation (C,) of the noiseless loss."""
        fit = self._fitted
        covariance = fit.signal * _matern(_distances(points, self._points) / fit.length)
        mean = fit.mean + covariance @ fit.weights
        variance = fit.signal - np.einsum("cn,nm,cm->c", covariance, fit.inverse, covariance)
        return mean, np.sqrt(np.maximum(variance, 1e-18))


@dataclass(frozen=True)
class _Fit:
    length: float
    signal: float
    mean: float
    inverse: Array
    weights: Array
    log_likelihood: float


def expected_improvement(mean: Array, sd: Array, best: float) -> Array:
    """How much lower than `best` a loss is expected to be, counting no gain as nothing (C,)."""
    z = (best - mean) / sd
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    return (best - mean) * _normal_cdf(z) + sd * density


def feasibility(points: Array, evidence: Evidence) -> Array:
    """A score in (0, 1] (C,): near 1 unless more runs failed close by than ended well."""
    good = _closeness(points, evidence.points)
    bad = _closeness(points, evidence.failed)
    return (1.0 + good) / (1.0 + good + bad)


def _closeness(points: Array, others: Array) -> Array:
    if not len(others):
        return np.zeros(len(points))
    return np.exp(-((_distances(points, others) / _NEAR) ** 2)).sum(axis=1)


def _nearest(points: Array, center: Array) -> NDArray[Any]:
    """Rows of the points that are closest to `center`: a fit costs the cube of their number."""
    return np.sort(np.argsort(np.linalg.norm(points - center, axis=1), kind="stable")[:_MAX_POINTS])


def _distances(a: Array, b: Array) -> Array:
    return np.sqrt(np.maximum(((a[:, None, :] - b[None, :, :]) ** 2).sum(axis=2), 0.0))


def _matern(scaled: Array) -> Array:
    """Matérn's kernel with smoothness 5/2."""
    root = math.sqrt(5) * scaled
    return (1 + root + root**2 / 3) * np.exp(-root)


def _normal_cdf(z: Array) -> Array:
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z])
