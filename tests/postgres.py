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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ports import free_port

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
        self.port = free_port()
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
        """As `ledger.url` has it. The wire reads along, so nothing is encrypted."""
        address = f"127.0.0.1:{port or self.port}/postgres"
        return (
            f"postgresql://hotlap:{IN_URL}@{address}?sslmode=disable&gssencmode=disable&options=-csearch_path%3D{name}"
        )

    def make_url(self) -> str:
        return self.url_of(self.make_book())


class Talk:
    """One connection: how many questions were asked and answered, and the one whose answer nobody will hear."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client, self.server = client, server
        for end in (client, server):  # messages are passed on one by one, and each would wait for the other end's word
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.num_asked = self.num_answered = 0
        self.deaf_to: int | None = None

    def questions(self) -> Iterator[tuple[bytes, bool]]:
        """Each message of the client, and whether the server answers it: only the first has no kind in front."""
        for message in messages(self.client, has_kind=False):
            is_question = self.num_asked == 0 or message[:1] in (b"Q", b"S", b"p")
            self.num_asked += is_question
            yield message, is_question

    def pass_answers_on(self) -> None:
        for message in messages(self.server, has_kind=True):
            is_unheard = self.deaf_to is not None and self.num_answered >= self.deaf_to - 1
            asks_for_password = message[:1] == b"R" and int.from_bytes(message[5:9], "big") in (10, 11)
            self.num_answered += asks_for_password or message[:1] == b"Z"
            if not is_unheard:
                self.client.sendall(message)
            elif self.num_answered == self.deaf_to:
                return

    def close(self) -> None:
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def messages(source: socket.socket, has_kind: bool) -> Iterator[bytes]:
    """Whole messages of PostgreSQL's protocol 3, however their bytes arrive (several statements may be under way)."""
    buffer = b""
    while more := source.recv(65536):
        buffer += more
        while len(buffer) >= (head := int(has_kind)) + 4:
            end = head + int.from_bytes(buffer[head : head + 4], "big")
            if len(buffer) < end:
                break
            yield buffer[:end]
            buffer, has_kind = buffer[end:], True


class Wire:
    """A proxy that cuts the connection at the n-th question from the client: before it arrives, or after it did and
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
                talk = Talk(client, socket.create_connection(("127.0.0.1", self._to)))
                for pass_on in (self._pass_questions_on, Talk.pass_answers_on):
                    threading.Thread(target=self._until_it_ends, args=(pass_on, talk), daemon=True).start()

    def _until_it_ends(self, pass_on: Callable[[Talk], None], talk: Talk) -> None:
        with contextlib.suppress(OSError):
            pass_on(talk)
        talk.close()

    def _pass_questions_on(self, talk: Talk) -> None:
        for message, is_question in talk.questions():
            if is_question and self._is_the_one():
                if not self.is_after:
                    return
                talk.deaf_to = talk.num_asked
            talk.server.sendall(message)

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
