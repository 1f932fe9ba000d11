"""Statistics of verdicts and ranks, against closed forms, sums, and figures published by others."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotlap.speedrun import compare
from hotlap.speedrun.compare import RunFacts, decide


@pytest.mark.parametrize("t", [-3.0, -0.5, 0.0, 0.1, 1.0, 2.5, 40.0])
def test_tail_equals_the_closed_forms_of_one_and_two_degrees(t: float) -> None:
    assert compare.t_tail(t, 1) == pytest.approx(0.5 - math.atan(t) / math.pi, abs=1e-14)
    assert compare.t_tail(t, 2) == pytest.approx(0.5 - t / (2 * math.sqrt(2 + t * t)), abs=1e-14)


@pytest.mark.parametrize(("freedom", "value"), [(2, 4.302653), (4, 2.776445), (7, 2.364624), (30, 2.042272)])
def test_quantiles_are_those_of_printed_tables(freedom: int, value: float) -> None:
    assert compare.t_quantile(0.025, freedom) == pytest.approx(value, abs=1e-6)


@given(st.integers(1, 60), st.data(), st.floats(0.01, 0.99))
def test_binomial_tail_equals_its_sum(num_rows: int, data: st.DataObject, share: float) -> None:
    num_right = data.draw(st.integers(0, num_rows))
    terms = [math.comb(num_rows, k) * share**k * (1 - share) ** (num_rows - k) for k in range(num_right, num_rows + 1)]
    assert compare.binomial_tail(num_right, num_rows, share) == pytest.approx(math.fsum(terms), abs=1e-12)


PUBLISHED = [
    ([0.6005, 0.5951, 0.5861], 0.57, 0.015),
    ([0.6164, 0.6065, 0.6111], 0.57, 0.0024),
    ([0.5845, 0.5982, 0.6042], 0.57, 0.024),
    ([0.6088, 0.5830, 0.6171], 0.57, 0.042),
    ([0.5891, 0.5898, 0.6080], 0.57, 0.027),
    ([0.5792, 0.5906, 0.5709], 0.57, 0.107),
    ([0.7760, 0.7762, 0.7738], 0.755, 0.0007),
    ([0.7742, 0.7673, 0.7755], 0.755, 0.0105),
]
"""Accuracies of the public contest's records, and what a one-sided t test was published to say of each."""


@pytest.mark.parametrize(("scores", "target", "p_value"), PUBLISHED)
def test_public_records_have_their_published_p_values(scores: list[float], target: float, p_value: float) -> None:
    assert compare.t_test_p(scores, target) == pytest.approx(p_value, rel=0.04)


def test_welch_of_two_public_records() -> None:
    assert compare.welch_p([112.4, 116.0, 110.5], [105.3, 103.4, 103.4]) == pytest.approx(0.02, abs=0.001)


def test_equal_spreads_give_student_s_freedom() -> None:
    first, second = [1.0, 2.0, 3.0, 4.0], [3.0, 4.0, 5.0, 6.0]
    t = 2.0 / math.sqrt(2 * statistics.variance(first) / 4)
    assert compare.welch_p(first, second) == pytest.approx(2 * compare.t_tail(t, 6), abs=1e-14)


def test_interval_of_the_mean() -> None:
    low, high = compare.interval([10.0, 12.0, 14.0])
    assert (low + high) / 2 == pytest.approx(12.0)
    assert (high - low) / 2 == pytest.approx(4.302653 * 2 / math.sqrt(3), abs=1e-5)


def runs_of(*scores: float | None, num_rows: int = 100, is_fresh: bool = True, **changes: object) -> list[RunFacts]:
    return [
        RunFacts(score, num_rows, is_fresh, 1.0, (), f"hash-{number}")
        if not changes
        else RunFacts(**{**vars(RunFacts(score, num_rows, is_fresh, 1.0, (), f"hash-{number}")), **changes})
        for number, score in enumerate(scores)
    ]


LOOKS = (3, 5, 8)


def test_a_clear_case_passes() -> None:
    decision = decide(runs_of(0.95, 0.97, 0.96), 0.8, True, LOOKS, 0.06)
    assert decision.verdict == "pass"
    assert decision.alpha_per_look == pytest.approx(0.02)
    # Student's t with two degrees is the larger of the two tests here.
    t = (0.96 - 0.8) / (0.01 / math.sqrt(3))
    assert decision.p_value == pytest.approx(0.5 - t / (2 * math.sqrt(2 + t * t)), rel=1e-9)


def test_a_run_below_the_target_fails_as_the_public_contest_has_it() -> None:
    decision = decide(runs_of(0.95, 0.79, 0.96), 0.8, True, LOOKS, 0.05)
    assert decision.verdict == "fail" and "run 2" in decision.reasons[0]


def test_a_broken_rule_fails_whatever_the_scores() -> None:
    decision = decide(runs_of(0.99, 0.99, 0.99, complaints=("too large",)), 0.8, True, LOOKS, 0.05)
    assert decision.verdict == "fail" and len(decision.reasons) == 3


@pytest.mark.parametrize("number", [1, 2, 4, 7])
def test_no_verdict_between_the_looks(number: int) -> None:
    decision = decide(runs_of(*[0.97 + 0.001 * n for n in range(number)]), 0.8, True, LOOKS, 0.05)
    assert decision.verdict == "undecided"
    assert number + decision.more_runs in LOOKS


def test_close_to_the_target_more_runs_are_asked_for_until_the_last_look() -> None:
    three = decide(runs_of(0.81, 0.83, 0.80), 0.8, True, LOOKS, 0.05)
    assert (three.verdict, three.more_runs) == ("undecided", 2)
    eight = decide(runs_of(*[0.81, 0.83, 0.80] * 2, 0.81, 0.80), 0.8, True, LOOKS, 0.05)
    assert (eight.verdict, eight.more_runs) == ("undecided", 0)


def test_the_public_fifth_record_is_undecided() -> None:
    runs = runs_of(0.5792, 0.5906, 0.5709, num_rows=1319, is_fresh=False)
    assert decide(runs, 0.57, True, LOOKS, 0.05).verdict == "undecided"


def test_runs_without_spread_are_held_against_the_number_of_rows() -> None:
    """Three perfect runs of four rows each prove little, whatever a t test says."""
    few = decide(runs_of(1.0, 1.0, 1.0, num_rows=4), 0.8, True, LOOKS, 0.05)
    assert few.verdict == "undecided"
    assert few.p_value == pytest.approx(0.8**12)
    assert decide(runs_of(1.0, 1.0, 1.0, num_rows=100), 0.8, True, LOOKS, 0.05).verdict == "pass"


def test_one_adapter_for_every_seed_is_no_evidence() -> None:
    runs = runs_of(0.97, 0.98, 0.99, adapter_sha256="same")
    assert decide(runs, 0.8, True, LOOKS, 0.05).verdict == "undecided"
    two = [*runs_of(0.97, 0.98), *runs_of(0.99, adapter_sha256="hash-1")]
    assert decide(two, 0.8, True, LOOKS, 0.05).verdict == "undecided"


def test_a_loss_is_better_below_its_target() -> None:
    good = decide(runs_of(1.01, 1.02, 1.00), 1.2, False, LOOKS, 0.05)
    assert good.verdict == "pass"
    assert good.p_value == pytest.approx(compare.t_test_p([-1.01, -1.02, -1.00], -1.2))
    assert decide(runs_of(1.01, 1.21, 1.00), 1.2, False, LOOKS, 0.05).verdict == "fail"


def test_a_recipe_at_the_target_passes_no_more_often_than_alpha() -> None:
    """2,000 recipes whose true accuracy is the target, each looked at up to three times."""
    draw = random.Random(0)
    num_passed = 0
    for _ in range(2000):
        runs: list[RunFacts] = []
        for number in range(8):
            right = sum(draw.random() < 0.8 for _ in range(100))
            runs += [RunFacts(right / 100, 100, True, 1.0, (), str(number))]
            verdict = decide(runs, 0.8, True, LOOKS, 0.05).verdict
            if verdict == "pass":
                num_passed += 1
            if verdict != "undecided":
                break
    assert num_passed / 2000 <= 0.05


def test_ranks_are_shared_below_the_spread() -> None:
    slow, fast, fast_too, middle = [30.0, 31.0, 32.0], [10.0, 10.4, 10.8], [10.3, 10.6, 11.0], [20.0, 20.1, 20.2]
    assert compare.ranks([slow, fast, fast_too, middle]) == [4, 1, 1, 3]
    assert compare.welch_p(fast, fast_too) > compare.TIE_P
    assert compare.ranks([]) == []
