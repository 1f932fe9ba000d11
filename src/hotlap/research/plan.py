"""What a study does next: a function of its history, its secret and the day, and of nothing else.

So a study that was killed anywhere goes on as if nothing had happened: the next start folds the journal and asks
again.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from statistics import fmean

from hotlap.errors import ChildCrashed, ConfigError, HotlapError, MachineDisturbed, Undecided
from hotlap.research import acceptance, disturbed, proposer, seeds
from hotlap.research.acceptance import Judged, Noise
from hotlap.research.history import DISTURBED, FAILED, OK, SCHEMA, Anchor, Candidate, History, Row, loss_of
from hotlap.research.proposer import Proposal
from hotlap.research.space import Settings, config_hash

_MAX_DISTURBED = 1
_MAX_KILLED = 2
_MAX_LOST = 12
"""Runs of one proposal that may be lost for any reason, the study's own death included, before it is given up."""

_MAX_FAILED_ANCHOR_RUNS = 3
_MAX_DISTURBED_IN_A_ROW = 5
_MANY_DISTURBED, _MOST_DISTURBED_FOR_ONE = 10, 2
"""Of a machine that is quiet now and then: so many, and so many for each run that was not."""

_PLATEAU_PROPOSALS = 10
_PLATEAU_SIGMAS = 0.15
_BARREN_PROPOSALS = 30
"""From a proposer that expects nothing in numbers, so many in a row that moved nothing."""


@dataclass(frozen=True)
class Start:
    """Make a run. `row` goes into the journal first; `config` is what really runs."""

    row: Row
    config: Settings


@dataclass(frozen=True)
class Decide:
    """Write a decision down."""

    row: Row


@dataclass(frozen=True)
class Wait:
    """Nothing can be said before a run that is under way ends."""


@dataclass(frozen=True)
class Finish:
    """Nothing more is to be done: because of `reason`, or since `error`."""

    reason: str
    error: HotlapError | None = None


Action = Start | Decide | Wait | Finish

Propose = Callable[[History, Noise, random.Random], Proposal | None]


# --- search ---


def next_in_search(
    history: History, secret: bytes, today: str, num_judged: int | None, propose: Propose = proposer.propose
) -> Action:
    """Until `num_judged` proposals are judged, or, given none, until nothing better is expected.

    `today` is the UTC date, for the day's limit on trials.
    """
    action = _next_in_search(history, secret, num_judged, propose)
    limit = history.study.trials_per_day
    if isinstance(action, Start) and limit is not None and history.starts_per_day.get(today, 0) >= limit:
        return Finish("day") if not history.open else Wait()
    return action


def _next_in_search(history: History, secret: bytes, num_judged: int | None, propose: Propose) -> Action:
    anchor = history.anchor
    is_ready = len(anchor.runs) >= anchor.num_needed
    for candidate in history.in_progress:
        action = _next_for(candidate, history, secret, is_ready)
        if action is not None:
            return action
    num_open = sum(row["proposal"] is None for row in history.open.values())
    if len(anchor.runs) + num_open < anchor.num_needed:
        return _start_anchor(history, secret)
    if not is_ready:
        return Wait()
    noise = history.noise()
    if error := _noise_trouble(history, noise):
        return Finish("stopped", error)
    is_naive = history.study.acceptance == "naive"
    if not is_naive and _has_drifted(anchor, noise):
        return Decide(_drift_row(history, noise))
    if not is_naive and not num_open and history.num_since_anchor_run >= history.study.sentinel_every:
        return _start_anchor(history, secret)
    return _propose(history, secret, noise, num_judged, propose)


def _propose(history: History, secret: bytes, noise: Noise, num_judged: int | None, propose: Propose) -> Action:
    if num_judged is not None and len(history.candidates) >= num_judged:
        return Wait() if history.in_progress else Finish("trials")
    if num_judged is None and _is_plateau(history, noise):
        return Wait() if history.in_progress else Finish("plateau")
    number = len(history.candidates)
    proposal = propose(history, noise, seeds.source(secret, "proposal", number))
    if proposal is None:
        return Wait() if history.in_progress else Finish("exhausted")
    salt = seeds.word(secret, "salt", number)
    is_placebo = proposer.is_placebo(secret, number, history.study.placebo_every)
    row = {
        **started_row(history, secret, "screen", proposal.config),
        "parent_hash": history.anchor.config_hash,
        **dict(zip(("axis", "old", "new"), proposal.changes[0], strict=True) if len(proposal.changes) == 1 else ()),
        "changes": [list(change) for change in proposal.changes],
        "proposer": proposal.prediction,
        "proposal": number,
        "commitment": seeds.commitment(salt, is_placebo),
    }
    return Start(row, history.anchor.config if is_placebo else proposal.config)


def _next_for(candidate: Candidate, history: History, secret: bytes, is_ready: bool) -> Action | None:
    """What a proposal on its way needs, or None while it waits."""
    if any(row["proposal"] == candidate.number for row in history.open.values()):
        return None
    last, losses = candidate.rows[-1]["status"], candidate.losses
    if last in FAILED:
        words = candidate.rows[-1]["error_class"] or last
        outcome = "reject_confirm" if losses else "reject_screen"
        return Decide(_decision(history, secret, candidate, outcome, None, f"its run ended {last} ({words})"))
    if last in DISTURBED:
        words = [row["error_class"] for row in candidate.rows if row["status"] in DISTURBED]
        num_killed = sum(word not in ("Disturbed", "StudyDied") for word in words)
        if words.count("Disturbed") > _MAX_DISTURBED or num_killed > _MAX_KILLED or len(words) > _MAX_LOST:
            reason = f"{len(words)} of its runs were lost ({last})"
            return Decide(_decision(history, secret, candidate, "not_judged", None, reason))
        return _start_again(history, secret, candidate)
    if not is_ready:
        return None
    judged = _judge(candidate, history)
    if judged.outcome == "confirm":
        return _start_again(history, secret, candidate)
    return Decide(_decision(history, secret, candidate, judged.outcome, judged, _in_words(judged, history)))


def _judge(candidate: Candidate, history: History) -> Judged:
    rule, s = acceptance.RULES[history.study.acceptance], history.noise().s
    losses, incumbent = candidate.losses, history.anchor.losses
    if len(losses) == 1:
        return acceptance.judge_screen(rule, incumbent, losses[0], s)

    def breaks_tie() -> bool:
        params = (candidate.rows[-1]["params"], history.anchor.runs[-1]["params"])
        return acceptance.prefers_candidate(params, proposer.expected_gain(history, candidate, s))

    return acceptance.judge_confirm(rule, incumbent, (losses[0], losses[1]), s, breaks_tie)


def _start_again(history: History, secret: bytes, candidate: Candidate) -> Start:
    """Another run of a proposal: its second, or one in the place of a disturbed one."""
    role = "confirm" if candidate.losses else "screen"
    kept = (
        "config",
        "config_hash",
        "parent_hash",
        "axis",
        "old",
        "new",
        "changes",
        "proposer",
        "proposal",
        "commitment",
    )
    fresh = started_row(history, secret, role, candidate.first["config"])
    row: Row = {**fresh, **{key: candidate.first[key] for key in kept}, "replicate": len(candidate.rows)}
    is_placebo = proposer.is_placebo(secret, candidate.number, history.study.placebo_every)
    config = history.anchor_named(candidate.first["parent_hash"]).config if is_placebo else row["config"]
    return Start(row, config)


def _start_anchor(history: History, secret: bytes) -> Start:
    is_baseline = len(history.anchors) == 1 and not any(row["outcome"] == "drift_reset" for row in history.decisions)
    is_first = is_baseline and len(history.anchor.runs) < history.anchor.num_needed
    row = started_row(history, secret, "baseline" if is_first else "sentinel", history.anchor.config)
    return Start({**row, "replicate": len(history.anchor.runs)}, history.anchor.config)


def started_row(history: History, secret: bytes, role: str, config: Settings) -> Row:
    """What is written before any run, with seeds of its own."""
    assert history.campaign is not None
    run_id = f"r{history.num_started + 1:06d}"
    return {
        "schema": SCHEMA,
        "kind": "started",
        "run_id": run_id,
        "campaign_id": history.campaign["campaign_id"],
        "role": role,
        "config": config,
        "config_hash": config_hash(config),
        **dict.fromkeys(("parent_hash", "axis", "old", "new", "proposer", "proposal", "commitment")),
        "changes": [],
        **dict.fromkeys(("pair", "arm", "order")),
        # A run's number is never given twice, so neither is a seed.
        "seed_init": seeds.number(secret, run_id, "init"),
        "seed_data": seeds.number(secret, run_id, "data"),
        "replicate": 0,
        "splits": ["search"],
    }


# --- what stands in the way ---


def trouble(ended: Sequence[Row], num_before: int, anchor: Anchor) -> HotlapError | None:
    """Why a command goes no further, if so it is. `num_before` runs had ended before it began: what they came to alone
    stops nobody, so that it can be tried again whenever something was mended."""
    own = ended[num_before:]
    newest = list(takewhile(lambda row: row["status"] != OK, reversed(ended))) if own else []
    killed = [row for row in newest if row["status"] == "killed" and row["exit_code"] is not None]
    if sum(row["proposal"] is None for row in killed) >= _MAX_FAILED_ANCHOR_RUNS:
        return ChildCrashed(
            f"{len(killed)} runs in a row were killed from outside, the last one a {killed[0]['role']}. The system may "
            f"have run out of memory; make the model in [start] smaller, or end whatever kills them."
        )
    return _disturbance(own, newest) or _anchor_trouble(newest, anchor)


def _disturbance(own: Sequence[Row], newest: Sequence[Row]) -> HotlapError | None:
    lost, lost_in_a_row = ([row for row in rows if row["status"] == "invalid_machine"] for rows in (own, newest))
    num_ok = sum(row["status"] == OK for row in own)
    if len(lost_in_a_row) >= _MAX_DISTURBED_IN_A_ROW:
        lost, num_runs = lost_in_a_row, len(newest)
    elif len(lost) >= _MANY_DISTURBED and len(lost) > _MOST_DISTURBED_FOR_ONE * num_ok:
        num_runs = len(own)
    else:
        return None
    return MachineDisturbed(
        f"{len(lost)} of the last {num_runs} runs were disturbed and left out: "
        f"{disturbed.in_words([row['validity'] for row in lost])}. If something else works on this machine, end it "
        f"or wait, and run the same command. If the machine wavers by itself, as rented ones do, set "
        f'study.on_disturbed = "use": such runs then count, with the noise they have, and board and verdicts say how '
        f"many they are."
    )


def _anchor_trouble(newest: Sequence[Row], anchor: Anchor) -> HotlapError | None:
    """Why the anchor cannot be run, if so it is. The newest run comes first."""
    own = [
        row for row in newest if row["role"] in ("baseline", "sentinel") and row["config_hash"] == anchor.config_hash
    ]
    failed = [row for row in own if row["status"] in FAILED]
    if failed and failed[0]["error_class"] == "OrderRefused":
        last_line = failed[0]["error_tail"].strip().rpartition("\n")[2]
        return ConfigError(f"The trial refuses its order ({last_line}). Mend that, and give the study another name.")
    if len(failed) < _MAX_FAILED_ANCHOR_RUNS:
        return None
    row = failed[0]
    how = f"{len(failed)} runs of the {row['role']} failed, the last one ended {row['status']} ({row['error_class']})"
    if row["status"] == "timeout":
        return ChildCrashed(
            f"{how}: it was not over at 1.6 x study.budget_s + 5 s. If this machine is busy with something else, "
            f"wait until it is not; what needs longer to begin gets study.setup_s."
        )
    return ChildCrashed(f"{how}: {last_words(row['error_tail'])}. Change [start], or mend the trial.")


def last_words(tail: str) -> str:
    """The last line that is no progress, which is JSON that ends in a number and may be cut in front."""
    lines = [line.strip() for line in tail.splitlines() if not re.search(r"[\w}]\}\s*$", line)]
    return next((line for line in reversed(lines) if line), "it said nothing else")


def _noise_trouble(history: History, noise: Noise) -> HotlapError | None:
    loss = history.baseline_loss()
    if history.study.acceptance == "naive" or noise.s <= acceptance.NOISIEST_RATIO * loss:
        return None
    return Undecided(
        f"Runs of one configuration differ by {noise.s:.4f} nats per byte (standard deviation), "
        f"{noise.s / loss:.1%} of the loss: this machine is too noisy to tell a change from luck. "
        f"Begin another study, by another name, with a larger study.budget_s or on a quieter machine."
    )


def _has_drifted(anchor: Anchor, noise: Noise) -> bool:
    sentinels = [loss_of(row) for row in anchor.runs[-2:] if row["role"] == "sentinel"]
    earlier = [loss_of(row) for row in anchor.runs[:-2]]
    return len(anchor.runs) > anchor.num_needed and acceptance.has_drifted(earlier, sentinels, noise.s)


def _is_plateau(history: History, noise: Noise) -> bool:
    newest = list(history.candidates.values())[-_PLATEAU_PROPOSALS:]
    gains = [candidate.first["proposer"]["ei"] for candidate in newest]
    if any(gain is None for gain in gains):
        judged = [row for row in history.decisions if row["proposal"] is not None][-_BARREN_PROPOSALS:]
        return len(judged) == _BARREN_PROPOSALS and not any(row["moves_anchor"] for row in judged)
    return len(gains) == _PLATEAU_PROPOSALS and all(gain < _PLATEAU_SIGMAS * noise.s for gain in gains)


# --- decisions as rows ---


def _decision(
    history: History, secret: bytes, candidate: Candidate, outcome: str, judged: Judged | None, reason: str
) -> Row:
    is_placebo = proposer.is_placebo(secret, candidate.number, history.study.placebo_every)
    parent, anchor = candidate.first["parent_hash"], history.anchor
    if is_placebo and parent != anchor.config_hash:  # beside another proposal that was kept: no longer A against A
        outcome, judged, reason = "not_judged", None, "a placebo whose anchor has moved on"
    noise = history.noise()
    own, theirs = [row for row in candidate.rows if row["status"] == OK], anchor.runs[-acceptance.SENTINELS_KEPT :]
    reason += disturbed.told([*own, *theirs]) if judged else ""
    return {
        **decision_head(history, outcome, reason, noise),
        "proposal": candidate.number,
        "candidate_hash": candidate.first["config_hash"],
        "ran_hash": parent if is_placebo else candidate.first["config_hash"],
        "incumbent_hash": anchor.config_hash,
        "run_ids_candidate": [row["run_id"] for row in own],
        "run_ids_incumbent": [row["run_id"] for row in theirs],
        "delta": judged.delta if judged else None,
        "se": judged.se if judged else None,
        "t": judged.delta / judged.se if judged and judged.se > 0 else None,
        "p": acceptance.t_tail(judged.delta / judged.se, noise.df) if judged and judged.se > 0 else None,
        "moves_anchor": judged is not None and judged.moves_anchor,
        "placebo": is_placebo,
        "salt": seeds.word(secret, "salt", candidate.number),
    }


def decision_head(history: History, outcome: str, reason: str, noise: Noise) -> Row:
    """What every decision's row has."""
    rule = acceptance.RULES[history.study.acceptance]
    return {
        "schema": SCHEMA,
        "kind": "decision",
        "decision_id": f"d{len(history.decisions) + 1:06d}",
        "rule_version": acceptance.RULE_VERSION,
        "thresholds": asdict(rule),
        "s_pooled": noise.s,
        "df": noise.df,
        "outcome": outcome,
        "reason": reason,
        **dict.fromkeys(("proposal", "candidate_hash", "ran_hash", "incumbent_hash", "delta", "se", "t", "p", "salt")),
        "moves_anchor": False,
        "placebo": False,
    }


def _drift_row(history: History, noise: Noise) -> Row:
    anchor = history.anchor
    before, after = fmean(map(loss_of, anchor.runs[:-2])), fmean(map(loss_of, anchor.runs[-2:]))
    reason = (
        f"two sentinels in a row at {after:.4f}, where the anchor stood at {before:.4f}: the machine has changed, and "
        f"the anchor is measured anew"
    )
    last_good = anchor.runs[-3]["run_id"]
    head = decision_head(history, "drift_reset", reason, noise)
    return {**head, "incumbent_hash": anchor.config_hash, "runs_in_doubt_since": last_good}


def _in_words(judged: Judged, history: History) -> str:
    if history.study.acceptance == "naive":
        return f"{'below' if judged.moves_anchor else 'not below'} the record, once: {judged.delta:+.4f} nats per byte"
    words = {
        "reject_screen": "one run, not promising",
        "provisional": "better beyond its standard error",
        "reject_confirm": "its second run did not bear the first one out",
        "tie_kept": "no difference to speak of",
        "tie_swapped": "no difference to speak of, and smaller or favored by past runs",
    }
    return f"{words[judged.outcome]}: {judged.delta:+.4f} ± {judged.se:.4f} nats per byte"
