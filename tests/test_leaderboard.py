"""What a contest shows: the page with its chart, the README's block, and claims that were measured otherwise."""

import datetime
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from hotlap.speedrun import claims
from hotlap.speedrun.leaderboard import (
    END,
    START,
    Board,
    Entry,
    chart,
    over_baseline,
    page,
    product,
    progression,
    section,
    with_block,
)
from hotlap.speedrun.ratio import Work, factors, ratio_interval

EVIL = "<script>alert('1')</script> | x `c` [a](javascript:1)"


def entry(
    date: str,
    time_s: float,
    author: str = "ada",
    rank: int = 1,
    name: str = "001-ada",
    work: Work | None = None,
    number: int | None = None,
) -> Entry:
    return Entry(
        rank=rank,
        submission=name,
        times_s=(time_s - 0.5, time_s, time_s + 0.5),
        score=0.9,
        cost="-",
        author=author,
        description=EVIL,
        date=date,
        regime="warm",
        proof="report.json",
        is_imported=False,
        work=work,
        number=datetime.date.fromisoformat(date).toordinal() if number is None else number,
        is_disturbed=False,
    )


def board(*entries: Entry, is_provisional: bool = False) -> Board:
    others = ((EVIL, "fail"),)
    return Board("micro", EVIL, 0.8, True, "hotlap/tiny", is_provisional, entries, (), others)


def test_only_what_was_faster_than_all_before_is_progress() -> None:
    slow, fast, slower, fastest = (
        entry("2026-01-01", 100.0), entry("2026-01-03", 50.0), entry("2026-02-01", 60.0), entry("2026-03-01", 9.0)
    )  # fmt: skip
    assert progression(board(fastest, fast, slower, slow)) == [slow, fast, fastest]


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, attrs))


def test_the_page_runs_nothing_and_fetches_nothing() -> None:
    text = page([board(entry("2026-01-01", 100.0, EVIL), entry("2026-01-05", 50.0)), board()])
    tags = Tags(text).found
    assert {"table", "svg", "path", "circle"} <= {tag for tag, _ in tags}
    assert not {"script", "link", "img", "iframe", "a", "image", "use"} & {tag for tag, _ in tags}
    assert not [name for _, attrs in tags for name, _ in attrs if name.startswith("on") or name in ("src", "href")]
    assert "default-src 'none'" in text and "url(" not in text
    assert text.count("&lt;script&gt;alert(&#x27;1&#x27;)&lt;/script&gt;") >= 3
    assert "No record yet." in text


@pytest.mark.parametrize("dates", [["2026-01-01"], ["2026-01-01", "2026-01-01"], ["2026-01-01", "2026-06-30"]])
def test_the_chart_is_well_formed_and_stays_inside(dates: list[str]) -> None:
    steps = [entry(date, 800.0 / 5**number, EVIL) for number, date in enumerate(dates)]
    root = ElementTree.fromstring(chart(steps))
    width, height = (float(text) for text in root.attrib["viewBox"].split()[2:])
    circles = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter("circle")]
    assert len(circles) == len(dates)
    assert all(0 < x < width and 0 < y < height for x, y in circles)
    assert [y for _, y in circles] == sorted(y for _, y in circles)  # faster is lower
    assert EVIL in str(root.findtext("circle/title"))


README = f"# Ours\n\n{START}old{END}\n\nafter\n"


def test_a_readme_gets_its_block_between_the_marks_and_nowhere_else() -> None:
    text = with_block(README, [board(entry("2026-01-01", 12.34)), board(is_provisional=True)])
    assert text.startswith(f"# Ours\n\n{START}\n## Leaderboard\n\n**micro**: ")
    assert text.endswith(f"{END}\n\nafter\n")
    assert "| 1 | 001-ada | 12.3 ± 0.5 s | 0.9000 | - | - | ada | 2026-01-01 |" in text
    assert "old" not in text and "provisional" not in text and "product" not in text
    assert with_block(text, [board(entry("2026-01-01", 12.34)), board(is_provisional=True)]) == text
    assert with_block("# No marks\n", [board()]) == "# No marks\n"


def test_a_readme_without_records_of_this_contest_has_no_empty_section() -> None:
    public = replace(entry("2026-01-01", 21.6), is_imported=True)
    assert with_block(README, [board(), board(public)]) == f"# Ours\n\n{START}\n{END}\n\nafter\n"


SLOW, FAST = Work(180_000, 1_600.0, is_measured=False), Work(60_000, 50.0, is_measured=True)


def test_a_ratio_is_the_product_of_what_it_is_made_of() -> None:
    """By hand: 1,800 s are 1,600 s of steps and 200 s around them. With a third of the tokens they are 533.3 + 200,
    with 1,200 tokens/s 50 + 200, and with 10 s around them 60."""
    found = factors(1800.0, SLOW, 60.0, FAST)
    assert found
    assert (found.tokens, found.speed, found.fixed) == pytest.approx(
        (1800 / 733.333, 733.333 / 250, 250 / 60), rel=1e-6
    )
    assert found.tokens * found.speed * found.fixed == pytest.approx(1800 / 60)
    assert factors(1800.0, SLOW, 40.0, FAST) is None  # fewer seconds in all than in its steps


def test_the_interval_of_a_ratio_is_welch_s_of_the_logarithms() -> None:
    """Two by two values whose logarithms have one spread: Student's t with 2 degrees of freedom is 4.302653."""
    low, high = ratio_interval([math.exp(3.0), math.exp(3.2)], [math.exp(1.0), math.exp(1.2)])
    assert (math.log(low), math.log(high)) == pytest.approx((2 - 4.302653 * 0.1 * math.sqrt(2),
                                                             2 + 4.302653 * 0.1 * math.sqrt(2)), abs=1e-6)  # fmt: skip
    assert ratio_interval([20.0, 20.0], [10.0, 10.0]) == pytest.approx((2.0, 2.0))


def test_records_stand_in_the_readme_with_their_ratio_its_parts_and_ties() -> None:
    baseline = entry("2026-01-01", 1800.0, "hotlap", 3, "c1-000-baseline", SLOW)
    first, second = (entry("2026-01-05", 60.0, who, 1, f"00{n}-{who}", FAST) for n, who in ((1, "ada"), (2, "bob")))
    shown = board(first, second, baseline)
    lines = with_block(README, [shown]).splitlines()
    ratio = r"30\.0x \(29\.\d to 30\.\d\) \| 2\.45 x 2\.93 x 4\.17 \\\* \| ada \| 2026-01-05"
    (line,) = [line for line in lines if "| ada |" in line]
    assert re.fullmatch(rf"\| 1, tied \| 001-ada \| 60\.0 ± 0\.5 s \| 0\.9000 \| {ratio} \|", line), line
    assert any(line.startswith("| 1, tied | 002-bob | 60.0") and "| bob |" in line for line in lines)
    own = "| 3 | c1-000-baseline | 1800.0 ± 0.5 s | 0.9000 | the baseline | 180,000 tokens, 112 tokens/s, 200.0 s \\* |"
    assert any(line.startswith(own) for line in lines), lines
    assert "\\* Tokens and seconds of steps as the author says them." in "\n".join(lines)
    assert "| 1, tied | 60.0 ± 0.5 s | 0.9000 | 30.0x (2" in section(shown)
    assert "No record yet." in section(board()) and "| rank |" not in section(board())


def test_a_time_that_was_disturbed_says_so_wherever_it_stands() -> None:
    """A baseline that shared its machine is too slow, and flatters all others."""
    shown = board(replace(entry("2026-01-01", 1800.0, name="000-baseline"), is_disturbed=True))
    for text in (section(shown), with_block(README, [shown]), page([shown])):
        assert "1800.0 ± 0.5 s, disturbed" in text


def test_notes_that_say_more_seconds_of_steps_than_there_were_make_no_product() -> None:
    wrong = entry("2026-01-01", 1800.0, name="000-baseline", work=replace(SLOW, steps_s=1_900.0))
    first = entry("2026-01-05", 60.0, work=FAST)
    assert [product(board(first, wrong), each) for each in (wrong, first)] == ["", ""]


def test_the_first_submission_with_number_zero_is_the_baseline() -> None:
    """On one day, whatever others call themselves."""
    baseline = entry("2026-01-01", 1800.0, rank=3, name="c1-000-baseline", number=0)
    other = entry("2026-01-01", 90.0, rank=2, name="000-eve", number=1)
    first = entry("2026-01-01", 60.0, rank=1, number=2)
    assert board(first, other, baseline).baseline_of(first) is baseline
    assert [each.time_s for each in progression(board(first, other, baseline))] == [1800.0, 90.0, 60.0]


def test_times_of_another_kind_of_start_are_no_ratio() -> None:
    cold = replace(entry("2026-01-01", 700.0, name="000-baseline", rank=2), regime="cold")
    assert over_baseline(board(entry("2026-01-02", 20.0), cold), entry("2026-01-02", 20.0)) == ""


MEASURED = {
    "time_seconds_mean": 20.0,
    "time_seconds_interval": [19.0, 23.0],
    "score_mean": 0.58,
    "num_tokens_mean": 6000.0,
    "steps_s_mean": None,
}


@pytest.mark.parametrize(
    ("config", "notes", "told"),
    [
        ({}, "It took 5 s at first.\nTimes vary.", []),
        ({"self_reported": {"mean_train_seconds": 22.9, "accuracies": [0.57, 0.60]}}, "", []),
        (
            {"self_reported": {"mean_train_seconds": 17.9}},
            "",
            ["config.yaml claims a time of 17.9 s; measured was 20 s"],
        ),
        (
            {"self_reported": {"accuracies": [0.61, 0.63]}},
            "",
            ["config.yaml claims a score of 0.62; measured was 0.58"],
        ),
        ({}, "# x\n- Time: 12.5 s\n**Score**: 58.4 %", ["NOTES.md:2 claims a time of 12.5 s; measured was 20 s"]),
        ({}, "score: 0.7", ["NOTES.md:1 claims a score of 0.7; measured was 0.58"]),
        ({}, f"time{' :' * 200}5", []),
        ({}, "Time: 1,815 s", ["NOTES.md:1 claims a time of 1815 s; measured was 20 s"]),
        ({}, "Tokens: 9,000\nSteps: 3 s", ["NOTES.md:1 claims tokens of 9000; measured was 6000"]),
    ],
)
def test_claims_are_held_against_what_was_measured(config: dict[str, object], notes: str, told: list[str]) -> None:
    assert claims.disagreements(claims.claims(config, notes), MEASURED) == told


def test_notes_say_what_a_program_does_in_its_steps() -> None:
    assert claims.work_in("# x\n- Tokens: 186,000\n- Steps: 1,640.5 s\n") == Work(186_000, 1640.5, is_measured=False)
    assert claims.work_in("Tokens: 186,000") is None and claims.work_in("Tokens: 5\nSteps: 0") is None
