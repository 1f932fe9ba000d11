"""Decisions about losses: exact values, the tables of Student's t, and the rates that the rules were chosen for."""

import math

import numpy as np
import pytest

from hotlap.research import acceptance, simulate
from hotlap.research.acceptance import NAIVE, TWO_RUN, judge_confirm, judge_pairs, judge_screen

T_TABLE = [
    *((1, 0.05, 6.3138), (2, 0.05, 2.9200), (7, 0.05, 1.8946), (11, 0.05, 1.7959), (7, 0.025, 2.3646)),
    *((11, 0.01, 2.7181), (30, 0.05, 1.6973), (120, 0.025, 1.9799)),
]
"""Degrees of freedom, upper tail and quantile, from printed tables."""


@pytest.mark.parametrize(("df", "tail", "expected"), T_TABLE)
def test_student_t_is_the_printed_table_s(df: int, tail: float, expected: float) -> None:
    assert acceptance.t_at(tail, df) == pytest.approx(expected, abs=6e-5)
    assert acceptance.t_tail(expected, df) == pytest.approx(tail, rel=2e-4)
    assert acceptance.t_tail(-expected, df) == pytest.approx(1 - tail, rel=2e-4)


def test_pooled_noise_counts_the_prior_as_four_runs() -> None:
    groups = [[1.0, 3.0], [5.0], [2.0, 2.0, 5.0]]
    # (4 * 0.5^2 + 2 + 6) / (4 + 1 + 2)
    noise = acceptance.pooled_noise(groups, prior_s=0.5)
    assert noise == acceptance.Noise(math.sqrt(9 / 7), 7)
    assert acceptance.pooled_noise([], 0.5) == acceptance.Noise(0.5, 4)


def test_screen_and_confirm_at_their_bounds() -> None:
    incumbent = [10.0, 10.0, 10.0, 10.0]
    bound = 0.5 * 2.0 * math.sqrt(1 + 1 / 4)
    assert judge_screen(TWO_RUN, incumbent, 10 - bound - 1e-9, 2.0).outcome == "confirm"
    assert judge_screen(TWO_RUN, incumbent, 10 - bound + 1e-9, 2.0).outcome == "reject_screen"
    bound = 1.0 * 2.0 * math.sqrt(1 / 2 + 1 / 4)
    better = judge_confirm(TWO_RUN, incumbent, (8.0, 12.0 - 2 * bound - 1e-9), 2.0)
    assert (better.outcome, better.moves_anchor) == ("provisional", True)
    assert better.delta == pytest.approx(bound) and better.se == pytest.approx(bound)
    assert judge_confirm(TWO_RUN, incumbent, (8.0, 12.0 - 2 * bound + 1e-9), 2.0).outcome == "tie_kept"
    assert judge_confirm(TWO_RUN, incumbent, (8.0, 20.0), 2.0).outcome == "reject_confirm"


def test_a_tie_goes_to_the_smaller_model_then_to_what_past_runs_favor() -> None:
    assert judge_confirm(TWO_RUN, [10.0], (10.0, 10.0), 1.0, lambda: True).outcome == "tie_swapped"
    asked: list[bool] = []
    judge_confirm(TWO_RUN, [10.0], (0.0, 0.0), 1.0, lambda: asked.append(True) or True)
    assert not asked, "who is clearly better needs no tie-break"
    assert acceptance.prefers_candidate((90, 100), -1.0)
    assert not acceptance.prefers_candidate((110, 100), 1.0)
    assert acceptance.prefers_candidate((100, 100), 0.1) and not acceptance.prefers_candidate((100, 100), 0.0)
    assert acceptance.prefers_candidate((None, None), 0.1)


def test_naive_keeps_whatever_is_below_the_luckiest_run() -> None:
    assert judge_screen(NAIVE, [1.0, 0.99], 0.98999, 5.0).outcome == "provisional"
    assert judge_screen(NAIVE, [1.0, 0.99], 0.995, 5.0).outcome == "reject_screen"


def test_drift_needs_two_sentinels_on_one_side() -> None:
    earlier = [10.0, 10.0, 10.0, 10.0]
    bound = 2.5 * math.sqrt(1.25)
    assert acceptance.has_drifted(earlier, [10 + bound + 0.01, 10 + bound + 0.01], 1.0)
    assert acceptance.has_drifted(earlier, [10 - bound - 0.01, 10 - bound - 0.01], 1.0)
    assert not acceptance.has_drifted(earlier, [10 - bound - 0.01, 10 + bound + 0.01], 1.0)
    assert not acceptance.has_drifted(earlier, [14.0, 10 + bound - 0.01], 1.0)
    assert not acceptance.has_drifted(earlier, [14.0], 1.0)


def test_a_verification_in_numbers() -> None:
    gains = [1.0, 2.0, 1.5, 0.5, 1.0, 2.0, 1.5, 0.5]
    proof = judge_pairs(gains, s=0.4)
    # mean 1.25; (4 * 2 * 0.16 + 2.5) / (4 + 7) = 0.343636; t_0.95 with 11 degrees of freedom: 1.7959
    se = math.sqrt((1.28 + 2.5) / 11 / 8)
    assert proof.effect == 1.25 and proof.se == pytest.approx(se)
    assert proof.low == pytest.approx(1.25 - 1.7959 * se, abs=1e-4)
    assert (proof.verdict, proof.num_pairs, proof.passed_at) == ("verified", 8, 4)
    assert judge_pairs(gains[:4], 0.4).verdict is None
    assert judge_pairs([0.1, -0.1] * 4, 0.4).verdict == "not_verified"


def test_a_pass_at_the_second_look_only() -> None:
    gains = [0.3, -0.2, 0.4, 0.1, 0.5, 0.6, 0.4, 0.6]
    proof = judge_pairs(gains, 0.3)
    assert (proof.verdict, proof.passed_at) == ("verified", 8)


def test_pairs_alternate() -> None:
    assert "".join("".join(acceptance.order_of(pair)) for pair in range(4)) == "ICCIICCI"


# --- rates, as the research that chose the rules gives them; 4,000 cases: three standard errors are at most 0.024 ---

MOVES = [
    (-1.0, 0.01, 1.08),
    (0.0, 0.13, 1.31),
    (0.5, 0.29, 1.48),
    (1.0, 0.50, 1.65),
    (2.0, 0.86, 1.90),
    (3.0, 0.98, 1.99),
]


@pytest.mark.parametrize(("gain", "share", "runs"), MOVES)
def test_how_often_the_anchor_moves(gain: float, share: float, runs: float) -> None:
    rate = simulate.anchor_moves(TWO_RUN, gain, 4, 4000, np.random.default_rng(7))
    assert rate.share == pytest.approx(share, abs=0.03)
    assert rate.runs == pytest.approx(runs, abs=0.04)


PROOFS = [(0.0, 0.0, 0.04), (1.0, 0.0, 0.56), (2.0, 0.0, 0.98), (0.0, 1.0, 0.06), (1.0, 1.0, 0.52), (2.0, 1.0, 0.97)]


@pytest.mark.parametrize(("gain", "drift", "share"), PROOFS)
def test_how_often_a_claim_is_proven(gain: float, drift: float, share: float) -> None:
    """Also on a machine whose mood changes as much as runs differ: the pairs alternate."""
    rate = simulate.verification(gain, drift, 2000, np.random.default_rng(7))
    assert rate.share == pytest.approx(share, abs=0.045)


def test_placebos_move_the_anchor_at_most_15_and_are_proven_at_most_5_in_100() -> None:
    """10,000 pairs of a configuration with itself."""
    moved = simulate.anchor_moves(TWO_RUN, 0.0, 4, 10_000, np.random.default_rng(3))
    proven = simulate.verification(0.0, 0.0, 10_000, np.random.default_rng(3))
    assert moved.share + 2 * moved.se <= 0.15
    assert proven.share + 2 * proven.se <= 0.05


def test_naive_reports_gains_that_are_not_there_and_two_runs_report_fewer() -> None:
    """100 runs. Naive: 6.5 true, 2.1 phantom, half of what it keeps is no gain. Two runs: 6.6 and 0.6."""
    naive = simulate.campaigns(NAIVE, 100, 300, np.random.default_rng(5))
    two = simulate.campaigns(TWO_RUN, 100, 300, np.random.default_rng(5))
    assert naive.phantom == pytest.approx(2.06, abs=0.35) and two.phantom == pytest.approx(0.59, abs=0.25)
    assert naive.false_share == pytest.approx(0.465, abs=0.06) and two.false_share == pytest.approx(0.255, abs=0.05)
    assert naive.true_gain == pytest.approx(6.50, abs=0.6) and two.true_gain == pytest.approx(6.60, abs=0.6)
