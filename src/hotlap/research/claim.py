"""Whether the anchor is better than the last proven configuration: pairs of fresh runs, made for this question alone.

The runs had no part in the search. Both arms of a pair run back to back with the same data seed, in an order that
alternates, and are compared on the locked split, which nothing else looks at.
"""

import math
from collections.abc import Sequence
from statistics import correlation, fmean

from hotlap.errors import Undecided, UsageError
from hotlap.research import acceptance, disturbed, seeds
from hotlap.research.acceptance import Noise
from hotlap.research.history import FAILED, OK, Anchor, History, Row, loss_of
from hotlap.research.plan import Action, Decide, Finish, Start, Wait, decision_head, started_row

_MAX_FAILED_PAIRS = 4
_UNSOUND = ("nan", "diverged", "oom")
VERDICTS = ("verified", "not_verified")


def next_in_verification(history: History, secret: bytes) -> Action:
    """Pairs of fresh runs of the anchor and of the last proven configuration, until there is a verdict."""
    if history.campaign is None or len(history.anchor.runs) < history.anchor.num_needed:
        return Finish("stopped", UsageError("Nothing has been searched yet; run `hotlap research STUDY` first."))
    candidate, incumbent = history.anchor, _proven(history)
    if any(row["candidate_hash"] == candidate.config_hash for row in history.decisions if row["outcome"] in VERDICTS):
        return Finish("judged")
    if candidate.config_hash == incumbent.config_hash:
        what = "the last proven configuration" if history.verified else "the baseline"
        return Finish("stopped", UsageError(f"There is nothing to prove: the anchor is {what}. Search on first."))
    if history.open:
        return Wait()
    pairs = history.pairs_of(candidate.config_hash)
    whole = {number: arms for number, arms in pairs.items() if _is_whole(arms)}
    newest = max(pairs, default=-1)
    if unsound := [arms["C"] for arms in pairs.values() if "C" in arms and arms["C"]["status"] in _UNSOUND]:
        # Left out as void pairs, its failures would make a record of what sometimes trains.
        words = f"its run {unsound[0]['run_id']} ended {unsound[0]['status']}, where a record never fails"
        return Finish("stopped", Undecided(f"Not proven: {words}. Search on for a steadier configuration."))
    if pairs and len(pairs[newest]) == 1 and all(row["status"] == OK for row in pairs[newest].values()):
        return _start_arm(history, secret, newest, candidate, incumbent)
    noise = history.noise()
    if len(whole) >= acceptance.NUM_PAIRS:
        return Decide(_verdict_row(history, noise, candidate, incumbent, list(whole.values())))
    failed = [arms for arms in pairs.values() if any(row["status"] in FAILED for row in arms.values())]
    if len(failed) > _MAX_FAILED_PAIRS:
        words = f"{len(failed)} of {len(pairs)} pairs have a run that failed"
        return Finish("stopped", Undecided(f"Not decided: {words}. See the journal for their statuses."))
    return _start_arm(history, secret, newest + 1, candidate, incumbent)


def _proven(history: History) -> Anchor:
    """The configuration that a claim is measured against."""
    if history.verified is None:
        return history.anchors[0]
    return history.anchor_named(history.verified["candidate_hash"])


def _is_whole(arms: dict[str, Row]) -> bool:
    return set(arms) == {"I", "C"} and all(row["status"] == OK for row in arms.values())


def _start_arm(history: History, secret: bytes, pair: int, candidate: Anchor, incumbent: Anchor) -> Start:
    done = history.pairs_of(candidate.config_hash).get(pair, {})
    order = len(done)
    arm = acceptance.order_of(pair)[order]
    config = candidate.config if arm == "C" else incumbent.config
    row = started_row(history, secret, "verify", config)
    names = {"number": pair, "candidate_hash": candidate.config_hash, "incumbent_hash": incumbent.config_hash}
    shared = seeds.number(secret, "pair", candidate.config_hash, pair, "data")
    return Start(
        {**row, "pair": names, "arm": arm, "order": order, "seed_data": shared, "splits": ["search", "lock"]}, config
    )


def _verdict_row(
    history: History, noise: Noise, candidate: Anchor, incumbent: Anchor, pairs: Sequence[dict[str, Row]]
) -> Row:
    own = [_locked(arms["C"]) for arms in pairs]
    other = [_locked(arms["I"]) for arms in pairs]
    gains = [b - a for a, b in zip(own, other, strict=True)]
    proof = acceptance.judge_pairs(gains, noise.s)
    assert proof.verdict is not None
    gap = fmean(_gap(arms["C"]) - _gap(arms["I"]) for arms in pairs)
    num_claims = 1 + sum(row["outcome"] in VERDICTS for row in history.decisions)
    is_varied = len(set(own)) > 1 and len(set(other)) > 1
    reason = (
        f"{proof.num_pairs} pairs on the locked split: gain {proof.effect:+.4f} nats per byte, 90 % interval "
        f"{proof.low:+.4f} to {proof.high:+.4f}{disturbed.told([row for arms in pairs for row in arms.values()])}"
    )
    return {
        **decision_head(history, proof.verdict, reason, noise),
        "candidate_hash": candidate.config_hash,
        "ran_hash": candidate.config_hash,
        "incumbent_hash": incumbent.config_hash,
        "config": candidate.config,
        "run_ids_candidate": [arms["C"]["run_id"] for arms in pairs],
        "run_ids_incumbent": [arms["I"]["run_id"] for arms in pairs],
        "delta": proof.effect,
        "se": proof.se,
        "t": proof.t,
        "p": proof.p,
        "p_of_all_claims": min(1.0, proof.p * num_claims),
        "interval_90": [proof.low, proof.high],
        "num_pairs": proof.num_pairs,
        "passed_at": proof.passed_at,
        "rho": correlation(own, other) if is_varied else None,
        "gap": gap,
        "is_gap_wide": abs(gap) > 3 * noise.s,
    }


def _locked(row: Row) -> float:
    loss = row["val_lock_nats_per_byte"]
    assert loss is not None and math.isfinite(loss), row["run_id"]
    return float(loss)


def _gap(row: Row) -> float:
    return _locked(row) - loss_of(row)
