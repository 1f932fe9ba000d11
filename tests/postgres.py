"""A PostgreSQL server of the tests' own, and a wire to it that can be cut."""

import contextlib
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PASSWORD = "hunter2@secret"
IN_URL = "hunter2%40secret"


def programs() -> Path | None:
    """The folder of the server's programs, where they are installed."""
    found = shutil.which("initdb")
    places = [Path(found).resolve().parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return next((place for place in reversed(places) if (place / "initdb").exists()), None)


class Server:
    """It refuses to run as root, so then it belongs to `nobody`, in a folder that it can reach."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        self.folder = Path(tempfile.mkdtemp(prefix="hotlap-postgres-", dir="/tmp"))
        self._as_user: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            self._as_user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            os.chown(self.folder, nobody.pw_uid, nobody.pw_gid)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        word = self.folder / "word"
        word.write_text(PASSWORD)
        word.chmod(0o644)
        self._run(
            "initdb", "-D", "data", "-U", "hotlap", "-A", "scram-sha-256", "--pwfile=word", "--no-sync", "-E", "UTF8"
        )
        self.start()

    def _run(self, program: str, *args: str) -> None:
        env = {"PATH": os.environ["PATH"], "LC_ALL": "C"}
        # The server keeps what it inherits open, so its words go to a file and not to a pipe.
        log = self.folder / f"{program}.log"
        with log.open("wb") as out:
            done = subprocess.run(
                [self._programs / program, *args],
                cwd=self.folder,
                env=env,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                timeout=60,
                **self._as_user,
            )
        assert done.returncode == 0, log.read_text()

    def start(self) -> None:
        # What is killed is the server, not the machine under it, so its disk need not be waited for.
        options = (
            f"-p {self.port} -h 127.0.0.1 -k {self.folder} -c max_connections=120 -c shared_buffers=16MB -c fsync=off"
        )
        self._run("pg_ctl", "-D", "data", "-w", "-l", "server.log", "-o", options, "start")

    def stop(self, mode: str = "fast") -> None:
        self._run("pg_ctl", "-D", "data", "-w", "-m", mode, "stop")

    def close(self) -> None:
        with contextlib.suppress(AssertionError):
            self.stop("immediate")
        shutil.rmtree(self.folder)

    def make_book(self) -> str:
        """The name of an empty schema; a database of its own would take seconds."""
        import psycopg

        name = f"book_{secrets.token_hex(4)}"
        login = {"host": "127.0.0.1", "port": self.port, "user": "hotlap", "password": PASSWORD}
        with psycopg.connect(**login, dbname="postgres", autocommit=True) as db:
            db.execute(f"CREATE SCHEMA {name}")
        return name

    def url_of(self, name: str, port: int | None = None) -> str:
        """As `ledger.url` has it."""
        address = f"127.0.0.1:{port or self.port}/postgres"
        return f"postgresql://hotlap:{IN_URL}@{address}?options=-csearch_path%3D{name}"

    def make_url(self) -> str:
        return self.url_of(self.make_book())


class Wire:
    """A proxy that cuts the connection at the n-th message from the client: before it arrives, or after it did and
    its answer is ready. From then on it is whole, or stays dead."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.cut_at: int | None = None
        self.is_after = self.stays_dead = self.was_cut = False
        self.num_seen = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def arm(self, cut_at: int | None, is_after: bool = False, stays_dead: bool = False) -> None:
        self.cut_at, self.is_after, self.stays_dead = cut_at, is_after, stays_dead
        self.num_seen, self.was_cut = 0, False

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.was_cut and self.stays_dead:
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self._to))
                deaf = threading.Event()
                for source, target, is_client in ((client, server, True), (server, client, False)):
                    args = (source, target, is_client, deaf)
                    threading.Thread(target=self._pass_on, args=args, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_client: bool, deaf: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if is_client and self._is_the_one():
                    if not self.is_after:
                        break
                    deaf.set()  # the server's next answer is the last, and nobody will hear it
                if not is_client and deaf.is_set():
                    break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _is_the_one(self) -> bool:
        self.num_seen += 1
        if self.cut_at is None or self.was_cut or self.num_seen != self.cut_at:
            return False
        self.was_cut = True
        return True


def served() -> Iterator[Server | None]:
    """A server, or None where it is not installed."""
    place = programs()
    if place is None:
        yield None
        return
    server = Server(place)
    yield server
    server.close()
