"""What every part of a slice is given."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hotlap import clock
from hotlap.config import RunConfig
from hotlap.train.preload import Preload
from hotlap.train.stop import StopSignals
from hotlap.train.timeline import Timeline


@dataclass(frozen=True)
class Context:
    """`emit` takes events for machines, `say` talk for people; `draw_seed` is asked once in a run's life."""

    config: RunConfig
    deadline: clock.Deadline
    stop: StopSignals
    timeline: Timeline
    emit: Callable[[dict[str, Any]], None]
    say: Callable[[str], None]
    draw_seed: Callable[[], int]
    preload: Preload = field(default_factory=Preload)
