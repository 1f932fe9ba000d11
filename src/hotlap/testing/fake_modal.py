"""Modal's gRPC server on loopback, as small as hotlap's use of it: the real SDK talks to it (`environment`).

Sandboxes run their command as processes of this machine, as in the other emulator. The wire protocol is Modal's own and
private, read from the SDK 1.6; nothing here was compared with the live service. Requests that hotlap does not make are
answered as not implemented.
"""

import asyncio
import base64
import hashlib
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from google.protobuf import empty_pb2
from grpclib import GRPCError, Status
from grpclib.const import Cardinality, Handler
from grpclib.server import Server
from modal_proto import api_pb2 as pb
from modal_proto.api_grpc import ModalClientBase

from hotlap import clock, durable
from hotlap.testing.containers import Birth, Container, Exit, Line, LocalProcesses

_TICK_S = 0.02
_ENDS = pb.GenericResult
_QUEUED_TICK_S = 0.05
_NOTHING = hashlib.sha256(b"").hexdigest()
BLOCK_BYTES = 8 << 20
"""A volume's files are fetched in such blocks."""

_PAGE = 2
"""So few that a few machines are several pages."""


@dataclass
class Sandbox:
    """One sandbox. `definition` is what the SDK asked for."""

    sandbox_id: str
    created_at_s: float
    definition: Any
    tags: dict[str, str]
    env: dict[str, str]
    container: Container | None = None
    lines: list[str] = field(default_factory=list[str])
    result: Any = None

    def end(self, status: int, exit_code: int = 0) -> None:
        if self.result is None:
            self.result = pb.GenericResult(status=status, exitcode=exit_code)  # pyright: ignore[reportArgumentType]
            if self.container:
                self.container.kill()


class _Files(MutableMapping[str, bytes]):
    """The one volume: a folder, which sandboxes see as theirs."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __getitem__(self, key: str) -> bytes:
        path = self._root / key
        if not path.is_file():
            raise KeyError(key)
        return path.read_bytes()

    def at_s(self, key: str) -> int:
        """When a file was written, in whole seconds."""
        return int((self._root / key).stat().st_mtime)

    def __setitem__(self, key: str, data: bytes) -> None:
        durable.make_dirs((self._root / key).parent)
        durable.replace(self._root / key, data)

    def __delitem__(self, key: str) -> None:
        durable.disk.remove(self._root / key)

    def __iter__(self) -> Iterator[str]:
        files = (path for path in self._root.rglob("*") if path.is_file() and not path.is_symlink())
        return iter(sorted(path.relative_to(self._root).as_posix() for path in files))

    def __len__(self) -> int:
        return len(list(iter(self)))


class _Silent:
    """Stands for a service, of which only the routes are wanted."""

    def __getattr__(self, _name: str) -> None:
        return None


class FakeModal:
    """`with FakeModal(folder) as cloud:` serves it. `cloud.environment` is what the SDK must find in its own.

    Attributes:
        faults: per request's name, how often it fails from now on, and with what: `lost` does the work and breaks off
            before the answer, `no_capacity` never schedules what is made, and a gRPC status word refuses.
        blocks_sent: where in their files the blocks began that were fetched.
        requests: what was asked, in order, by name.
    """

    def __init__(self, folder: Path) -> None:
        self.sandboxes: dict[str, Sandbox] = {}
        self.apps: set[str] = set()
        self.volumes: set[str] = set()
        self.secrets: dict[str, dict[str, str]] = {}
        self.contents: dict[str, bytes] = {}
        self.files = _Files(folder / "volume")
        self.requests: list[str] = []
        self.blocks_sent: list[int] = []
        self.faults: dict[str, list[str]] = {}
        self.url = self._blocks_url = ""
        self._folder = folder
        self._run = LocalProcesses(folder, lambda sandbox_id: {"RUNPOD_POD_ID": sandbox_id})
        self._loop = asyncio.new_event_loop()
        self._is_over = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._is_up = threading.Event()

    @property
    def environment(self) -> dict[str, str]:
        return {
            "MODAL_SERVER_URL": self.url,
            "MODAL_TOKEN_ID": "ak-fake",
            "MODAL_TOKEN_SECRET": "as-fake",
            "MODAL_CONFIG_PATH": str(self._folder / "modal.toml"),
        }

    def __enter__(self) -> "FakeModal":
        self._thread.start()
        while not self._is_up.wait(0.1):
            assert self._thread.is_alive(), "the server did not start"
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_over = True
        self._thread.join(timeout=30.0)
        for sandbox in self.sandboxes.values():
            sandbox.end(_ENDS.GENERIC_STATUS_TERMINATED)

    def alive(self) -> list[Sandbox]:
        return [each for each in self.sandboxes.values() if each.result is None]

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        server = Server([self])
        await server.start("127.0.0.1", 0)
        (listener,) = server._server.sockets  # pyright: ignore
        blocks = await asyncio.start_server(self._send_block, "127.0.0.1", 0)
        self._blocks_url = f"http://127.0.0.1:{blocks.sockets[0].getsockname()[1]}"
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._is_up.set()
        while not self._is_over:
            self._let_time_pass()
            await asyncio.sleep(_TICK_S)
        server.close()
        blocks.close()
        await server.wait_closed()

    async def _send_block(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Where a volume's bytes are fetched from: plain HTTP, outside the protocol."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        key, begin, end = head.split()[1].lstrip("/").split("/")
        data = self.files[unquote(key)][int(begin) : int(end)]
        self.blocks_sent.append(int(begin))
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        await writer.drain()
        writer.close()

    def _let_time_pass(self) -> None:
        for sandbox in self.alive():
            if sandbox.container is None:
                continue
            for happening in sandbox.container.until(clock.wall_s()):
                if isinstance(happening, Line):
                    sandbox.lines.append(happening.text)
                elif isinstance(happening, Exit):
                    sandbox.end(_ENDS.GENERIC_STATUS_SUCCESS)
            if clock.wall_s() >= sandbox.created_at_s + sandbox.definition.timeout_secs:
                sandbox.end(_ENDS.GENERIC_STATUS_TIMEOUT)

    # --- the wire ---

    def __mapping__(self) -> dict[str, Handler]:
        """Every route of the protocol, answered by the method of its name here, if there is one."""
        routes: dict[str, Handler] = ModalClientBase.__mapping__(_Silent())  # pyright: ignore[reportArgumentType]
        return {
            route: Handler(self._answering(route.rpartition("/")[2], handler), *handler[1:])
            for route, handler in routes.items()
        }

    def _answering(self, name: str, handler: Handler) -> Callable[[Any], Any]:
        method = getattr(self, f"_{name}", None)

        async def answer(stream: Any) -> None:
            request = await stream.recv_message()
            self.requests.append(name)
            if method is None:
                raise GRPCError(Status.UNIMPLEMENTED, f"the fake has no {name}")
            fault = self.faults[name].pop(0) if self.faults.get(name) else ""
            if fault and fault not in ("lost", "no_capacity"):
                raise GRPCError(Status[fault], "as the test wants it")
            if handler.cardinality is Cardinality.UNARY_STREAM:
                async for message in method(request):
                    await stream.send_message(message)
                return
            reply = await method(request)
            if fault == "no_capacity":
                queued = self.sandboxes[reply.sandbox_id]
                if queued.container:
                    queued.container.kill()
                queued.container = None
            if fault == "lost":
                raise GRPCError(Status.UNAVAILABLE, "the connection broke")
            await stream.send_message(reply)

        return answer

    async def _ClientHello(self, _request: Any) -> Any:
        return pb.ClientHelloResponse()

    async def _AuthTokenGet(self, _request: Any) -> Any:
        claims = base64.urlsafe_b64encode(json.dumps({"exp": clock.wall_s() + 3600}).encode()).decode().rstrip("=")
        return pb.AuthTokenGetResponse(token=f"e30.{claims}.none")

    async def _AppGetOrCreate(self, request: Any) -> Any:
        if request.object_creation_type == pb.OBJECT_CREATION_TYPE_CREATE_IF_MISSING:
            self.apps.add(request.app_name)
        if request.app_name not in self.apps:
            raise GRPCError(Status.NOT_FOUND, f"no app {request.app_name}")
        return pb.AppGetOrCreateResponse(app_id="ap-" + "1" * 22)

    async def _EnvironmentGetOrCreate(self, _request: Any) -> Any:
        settings = pb.EnvironmentSettings(image_builder_version="2025.06")
        metadata = pb.EnvironmentMetadata(name="main", settings=settings)
        return pb.EnvironmentGetOrCreateResponse(environment_id="en-" + "1" * 22, metadata=metadata)

    async def _ImageGetOrCreate(self, _request: Any) -> Any:
        built = pb.GenericResult(status=_ENDS.GENERIC_STATUS_SUCCESS)
        return pb.ImageGetOrCreateResponse(image_id="im-" + "1" * 22, result=built, metadata=pb.ImageMetadata())

    async def _VolumeGetOrCreate(self, request: Any) -> Any:
        if request.object_creation_type == pb.OBJECT_CREATION_TYPE_CREATE_IF_MISSING:
            self.volumes.add(request.deployment_name)
        if request.deployment_name not in self.volumes:
            raise GRPCError(Status.NOT_FOUND, f"no volume {request.deployment_name}")
        return pb.VolumeGetOrCreateResponse(volume_id="vo-" + "1" * 22, metadata=pb.VolumeMetadata())

    async def _MountPutFile(self, request: Any) -> Any:
        if request.data or request.sha256_hex == _NOTHING:
            self.contents[request.sha256_hex] = request.data
        return pb.MountPutFileResponse(exists=request.sha256_hex in self.contents)

    async def _VolumePutFiles(self, request: Any) -> Any:
        for file in request.files:
            self.files[file.filename.lstrip("/")] = self.contents[file.sha256_hex]
        return empty_pb2.Empty()

    async def _VolumeListFiles(self, request: Any) -> AsyncIterator[Any]:
        folder = request.path.strip("/")
        for key in self.files:
            if not folder or key == folder or key.startswith(f"{folder}/"):
                data = self.files[key]
                yield pb.VolumeListFilesResponse(
                    entries=[pb.FileEntry(path=key, type=pb.FileEntry.FILE, size=len(data), mtime=self.files.at_s(key))]
                )

    async def _VolumeGetFile2(self, request: Any) -> Any:
        key = request.path.strip("/")
        if key not in self.files:
            raise GRPCError(Status.NOT_FOUND, f"no file {key}")
        size = len(self.files[key])
        edges = [request.start, *range((request.start // BLOCK_BYTES + 1) * BLOCK_BYTES, size, BLOCK_BYTES), size]
        place = f"{self._blocks_url}/{quote(key, safe='')}"
        urls = [f"{place}/{begin}/{end}" for begin, end in itertools.pairwise(edges) if begin < end]
        return pb.VolumeGetFile2Response(get_urls=urls, size=size, start=request.start, len=size - request.start)

    async def _SecretGetOrCreate(self, request: Any) -> Any:
        if request.deployment_name and request.deployment_name not in self.secrets:
            raise GRPCError(Status.NOT_FOUND, f"no secret {request.deployment_name}")
        secret_id = f"st-{len(self.secrets):022d}"
        self.secrets[secret_id] = dict(request.env_dict) or self.secrets.get(request.deployment_name, {})
        return pb.SecretGetOrCreateResponse(secret_id=secret_id, metadata=pb.SecretMetadata())

    async def _SandboxCreate(self, request: Any) -> Any:
        definition = request.definition
        if any(each.definition.name == definition.name for each in self.alive()):
            raise GRPCError(Status.ALREADY_EXISTS, f"a sandbox named {definition.name} is running")
        env = {name: value for ident in definition.secret_ids for name, value in self.secrets[ident].items()}
        sandbox_id = f"sb-{len(self.sandboxes):022d}"
        tags = {each.tag_name: each.tag_value for each in request.tags}
        made = Sandbox(sandbox_id, clock.wall_s(), definition, tags, env)
        birth = Birth(
            pod_id=sandbox_id, number=1, argv=tuple(definition.entrypoint_args), env=env, at_s=made.created_at_s
        )
        made.container = self._run(birth)
        self.sandboxes[sandbox_id] = made
        return pb.SandboxCreateResponse(sandbox_id=sandbox_id)

    async def _SandboxGetTaskId(self, request: Any) -> Any:
        sandbox = self._found(request.sandbox_id)
        until_s = clock.monotonic_s() + request.timeout
        while sandbox.container is None and sandbox.result is None and clock.monotonic_s() < until_s:
            await asyncio.sleep(_QUEUED_TICK_S)
        if sandbox.container is None:
            return pb.SandboxGetTaskIdResponse()
        return pb.SandboxGetTaskIdResponse(task_id=f"ta-{sandbox.sandbox_id[3:]}")

    async def _SandboxListV2(self, request: Any) -> Any:
        until_s = request.before_timestamp or float("inf")
        rows = [each for each in self.alive() if each.created_at_s < until_s]
        rows = sorted(rows, key=lambda each: each.created_at_s, reverse=True)[
            :2
        ]  # a small page, so that there are more
        found = [pb.SandboxInfo(id=each.sandbox_id, created_at=each.created_at_s) for each in rows]
        return pb.SandboxListResponse(sandboxes=found)

    async def _SandboxTagsGet(self, request: Any) -> Any:
        tags = self._found(request.sandbox_id).tags
        rows = [pb.SandboxTag(tag_name=name, tag_value=value) for name, value in tags.items()]
        return pb.SandboxTagsGetResponse(tags=rows)

    async def _SandboxGetFromNameV2(self, _request: Any) -> Any:
        raise GRPCError(Status.NOT_FOUND, "sandboxes with a GPU are of the first version")

    async def _SandboxGetFromName(self, request: Any) -> Any:
        for each in self.alive():
            if each.definition.name == request.sandbox_name:
                return pb.SandboxGetFromNameResponse(sandbox_id=each.sandbox_id)
        raise GRPCError(Status.NOT_FOUND, f"no sandbox {request.sandbox_name}")

    async def _SandboxWait(self, request: Any) -> Any:
        sandbox = self._found(request.sandbox_id)
        until_s = clock.monotonic_s() + request.timeout
        while sandbox.result is None and clock.monotonic_s() < until_s:
            await asyncio.sleep(_TICK_S)
        return pb.SandboxWaitResponse(result=sandbox.result or pb.GenericResult())

    async def _SandboxTerminate(self, request: Any) -> Any:
        self._found(request.sandbox_id).end(_ENDS.GENERIC_STATUS_TERMINATED)
        return pb.SandboxTerminateResponse()

    async def _SandboxGetLogs(self, request: Any) -> AsyncIterator[Any]:
        sandbox = self._found(request.sandbox_id)
        number = int(request.last_entry_id or 0)
        until_s = clock.monotonic_s() + request.timeout
        while clock.monotonic_s() < until_s and not self._is_over:
            while number < len(sandbox.lines):
                text = sandbox.lines[number] + "\n"
                number += 1
                yield pb.TaskLogsBatch(entry_id=str(number), items=[pb.TaskLogs(data=text)])
            if sandbox.result is not None:
                yield pb.TaskLogsBatch(entry_id=str(number), eof=True)
                return
            await asyncio.sleep(_TICK_S)

    def _found(self, sandbox_id: str) -> Sandbox:
        if sandbox_id not in self.sandboxes:
            raise GRPCError(Status.NOT_FOUND, f"no sandbox {sandbox_id}")
        return self.sandboxes[sandbox_id]
