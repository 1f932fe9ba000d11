"""The worker: an order in, one slice through the watchdog, machine lines out, one result at the end."""

import json
from typing import Any

import pytest

from hotlap import supervise
from hotlap.child import ChildEnd
from hotlap.cloud import worker
from hotlap.cloud.provider import event_in
from hotlap.config import RunConfig
from hotlap.errors import ConfigError

pytestmark = pytest.mark.long


def order_of(cap_s: float = 60.0, **changes: object) -> str:
    config = {"base_model": "m", "dataset": "d.jsonl", "run": "r", **changes}
    return json.dumps({"config": config, "cap_s": cap_s})


@pytest.mark.parametrize(("cap_s", "expected_s"), [(60.0, 60.0), (1000.0, 300.0)])
def test_the_smaller_cap_holds(cap_s: float, expected_s: float) -> None:
    assert worker.config_of(order_of(cap_s)).slice.cap_s == pytest.approx(expected_s)


@pytest.mark.parametrize("order", ["", "{}", "[]", order_of(-1.0), order_of(1.0, surprise=True), '{"config": 1}'])
def test_an_order_that_cannot_be_read_is_a_result(order: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError):
        worker.config_of(order)
    assert worker.main([order]) == 2
    (line,) = capsys.readouterr().out.splitlines()
    event = event_in(line)
    assert event and (event["event"], event["exit_code"], event["reason"]) == ("result", 2, "config")


def end_of(exit_code: int, reason: str, result: dict[str, Any] | None) -> supervise.SliceEnd:
    return supervise.SliceEnd(4, exit_code, reason, 12.0, result, ChildEnd(exit_code, 1, 12.0, result, "last words"))


@pytest.mark.parametrize(
    ("exit_code", "reason", "told", "expected"),
    [
        (0, "done", {"event": "result", "exit_code": 0, "message": "m", "step": 9}, (0, "done", "m")),
        (75, "slice_over", {"event": "result", "exit_code": 75, "message": "m"}, (75, "slice_over", "m")),
        (124, "overran", None, (124, "overran", "The slice gave no account of itself. last words")),
        (-9, "killed", None, (6, "killed", "The slice gave no account of itself. last words")),
    ],
)
def test_the_result_is_what_the_parent_saw(
    exit_code: int, reason: str, told: dict[str, Any] | None, expected: tuple[int, str, str]
) -> None:
    result = worker.result_of(end_of(exit_code, reason, told))
    assert (result["exit_code"], result["reason"], result["message"]) == expected
    assert result["slice_number"] == 4 and (told is None or result.get("step") == told.get("step"))


def test_events_and_result_are_machine_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_slice(config: RunConfig, on_event: Any, on_talk: Any, began_s: float) -> supervise.SliceEnd:
        on_event({"event": "step", "step": 1})
        on_talk("some talk")
        return end_of(75, "slice_over", {"event": "result", "exit_code": 75, "message": "again"})

    monkeypatch.setattr(supervise, "run_slice", run_slice)
    assert worker.main([order_of()]) == 75
    seen = capsys.readouterr()
    events = [event_in(line) for line in seen.out.splitlines()]
    assert [event and event["event"] for event in events] == ["step", "result"]
    assert seen.err == "some talk\n"
