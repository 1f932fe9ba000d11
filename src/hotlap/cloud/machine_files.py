"""A local machine on the disk: its folder is there as long as it may live, and readable by every process.

machines/ID/machine.json    what was asked for, and by whom
            guardian.json   the process that watches it
            dead.json       written by the guardian when nothing of the machine runs any more
            log  disk/  volume/
"""

import json
import socket
from pathlib import Path
from typing import Any

from hotlap import clock, durable


class MachineFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "log"
        self.disk = path / "disk"
        self.volume = path / "volume"

    def stage(self, facts: dict[str, Any]) -> None:
        durable.make_dirs(self.disk)
        durable.make_dirs(self.volume)
        durable.write_synced(self.log, b"")
        durable.write_synced(self.path / "machine.json", durable.canonical_json(facts).encode())

    def write_guardian(self, pid: int) -> None:
        word = {"pid": pid, "birth": clock.process_birth(pid), "host": socket.gethostname(), "boot": clock.boot_id()}
        durable.write_synced(self.path / "guardian.json", durable.canonical_json(word).encode())

    def write_dead(self, how: dict[str, Any]) -> None:
        durable.replace(self.path / "dead.json", durable.canonical_json(how).encode())

    def facts(self) -> dict[str, Any]:
        """
        Raises:
            FileNotFoundError: the machine is gone.
        """
        return json.loads((self.path / "machine.json").read_bytes())

    def dead(self) -> dict[str, Any] | None:
        path = self.path / "dead.json"
        return json.loads(path.read_bytes()) if path.exists() else None

    def guardian_pid(self) -> int | None:
        """None when it does not live any more, which after a restart of this machine it does not.

        Raises:
            FileNotFoundError: the machine is gone.
        """
        word = json.loads((self.path / "guardian.json").read_bytes())
        try:
            is_it = word["boot"] == clock.boot_id() and clock.process_birth(word["pid"]) == word["birth"]
        except ProcessLookupError:
            return None
        return word["pid"] if is_it else None

    def is_here(self) -> bool:
        """Whether it runs on this machine, and not on another that shares the disk."""
        return json.loads((self.path / "guardian.json").read_bytes())["host"] == socket.gethostname()
