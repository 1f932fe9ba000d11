"""How large configurations are, before any of them runs: a trial's program is asked, and a study's caps are kept.

A program that knows answers `--sizes`: it reads `{"data", "configs"}` and prints a list of `{"params",
"expected_mem_mb"}`, one for each configuration.
"""

import json
import subprocess
from collections.abc import Sequence
from typing import Any

from hotlap.errors import ConfigError
from hotlap.research.executor import command_of
from hotlap.research.space import Settings, StudyConfig, config_hash

_TIMEOUT_S = 120.0


class Caps:
    """A study's caps on the size of a configuration. Without any, nothing is asked and everything fits."""

    def __init__(self, study: StudyConfig) -> None:
        self._study = study
        self._limits = {
            name: limit
            for name, limit in (("params", study.max_params), ("expected_mem_mb", study.max_mem_mb))
            if limit is not None
        }
        self._known: dict[str, dict[str, Any]] = {}

    def fits(self, configs: Sequence[Settings]) -> list[bool]:
        """Which of them keep to the caps. A program is asked once for all those it has not been asked for yet.

        Raises:
            ConfigError: the program does not tell sizes.
        """
        if not self._limits or not configs:
            return [True] * len(configs)
        new = {name: config for config in configs if (name := config_hash(config)) not in self._known}
        if new:
            self._known |= dict(zip(new, self._ask(list(new.values())), strict=True))
        return [self._is_within(self._known[config_hash(config)]) for config in configs]

    def require_start(self, start: Settings) -> None:
        """
        Raises:
            ConfigError: the baseline itself is larger than the study allows.
        """
        if not self.fits([start])[0]:
            size = self._known[config_hash(start)]
            told = ", ".join(f"{name} {size[name]:,}, of at most {limit:,.0f}" for name, limit in self._limits.items())
            raise ConfigError(f"The baseline is too large: {told}. Make it smaller in [start], or raise the caps.")

    def _is_within(self, size: dict[str, Any]) -> bool:
        return all(size[name] <= limit for name, limit in self._limits.items())

    def _ask(self, configs: Sequence[Settings]) -> list[dict[str, Any]]:
        question = json.dumps({"data": self._study.data, "configs": configs})
        command = [*command_of(self._study.program), "--sizes"]
        try:
            done = subprocess.run(
                command, input=question, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S
            )
            answer = json.loads(done.stdout[done.stdout.index("[") :])
            if len(answer) == len(configs) and all(
                isinstance(size[name], int | float) for size in answer for name in self._limits
            ):
                return answer
        except (subprocess.TimeoutExpired, ValueError, KeyError, TypeError):
            pass
        raise ConfigError(
            f"study.max_params and study.max_mem_mb need a program that answers --sizes (docs/research.md), and "
            f"{self._study.program} does not. Remove them."
        )
