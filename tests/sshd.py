"""A box of the tests' own: an sshd on loopback, with keys and a login that nobody else has."""

import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ports import free_port

from hotlap.cloud.local import LocalProvider
from hotlap.config_cloud import SshConfig


def program() -> str | None:
    """Debian's lies outside an ordinary user's PATH."""
    return shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")


class Box:
    """Its home, which is its HOTLAP_HOME as well, is another than that of whoever logs in."""

    def __init__(self, sshd: str, folder: Path, python: str) -> None:
        folder.mkdir(parents=True)
        self._short = tempfile.mkdtemp(prefix="hotlap-ssh-", dir="/tmp")
        self.home = folder / "box-home"
        self.home.mkdir()
        for name in ("host", "login"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True, timeout=30)
        port = free_port()
        host_key = (folder / "host.pub").read_text()
        (folder / "known").write_text(f"[127.0.0.1]:{port} {host_key}")
        (folder / "server").write_text(
            f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder / 'host'}\nPidFile none\nStrictModes no\n"
            f"AuthorizedKeysFile {folder / 'login.pub'}\nPasswordAuthentication no\nUsePAM no\n"
            f"PermitRootLogin prohibit-password\nMaxStartups 100\nSetEnv HOTLAP_HOME={self.home} HOME={self.home}\n"
        )
        (folder / "client").write_text(
            f"Host box\n HostName 127.0.0.1\n Port {port}\n User {getpass.getuser()}\n"
            f" IdentityFile {folder / 'login'}\n IdentitiesOnly yes\n UserKnownHostsFile {folder / 'known'}\n"
            # One connection for all requests; the path of its socket must be short.
            f" ControlMaster auto\n ControlPersist yes\n ControlPath {self._short}/%C\n"
        )
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # where root's sshd separates its privileges
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen([sshd, "-D", "-e", "-f", folder / "server"], stderr=self._log)
        self.settings = SshConfig(host="box", python=python, config_file=str(folder / "client"), usd_per_hour=0.36)
        until_s = time.monotonic() + 30.0
        while not _answers(port):
            assert self._process.poll() is None and time.monotonic() < until_s, (folder / "log").read_text()
            time.sleep(0.02)

    def close(self) -> None:
        """No more logins; what runs there is ended."""
        provider = LocalProvider(home=self.home / "rented")
        for machine in provider.machines().machines:
            provider.terminate(machine.machine_id)
        client = ["ssh", "-F", str(self.settings.config_file), "-O", "exit", "box"]
        subprocess.run(client, check=False, capture_output=True, timeout=30)
        shutil.rmtree(self._short)
        self._process.terminate()
        self._process.wait(timeout=30)
        self._log.close()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def served(folder: Path, python: str) -> Iterator[Box | None]:
    """A box, or None where no sshd is installed."""
    sshd = program()
    if sshd is None:
        yield None
        return
    box = Box(sshd, folder, python)
    yield box
    box.close()
