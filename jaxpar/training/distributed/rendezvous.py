"""Before JAX connects the processes of a run: are they all there, each once? And after: are they still?

JAX's own service waits for whoever comes, and ends a process by an abort where someone does not. So process 0 first
answers on the coordinator's port itself and says in one line what is wrong: to all, by process. The connections stay,
idle until a farewell: one that closes without is a process that died, which the others know at once by the kernel's
word, whatever they compute or compile. A machine that vanishes whole is left to JAX's heartbeats.
"""

import contextlib
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

_HELLO_BYTES = 4096
_HELLO_SECONDS = 5.0
_RETRY_SECONDS = 0.2
_KEEP_ALIVE_SECONDS = 60


@dataclass(frozen=True)
class Rendezvous:
    """HOST:PORT of process 0, as --coordinator has it, and which process this is."""

    coordinator: str
    num_processes: int
    process_id: int

    @property
    def address(self) -> tuple[str, int]:
        """Raises ValueError where the coordinator is not HOST:PORT."""
        host, colon, port = self.coordinator.rpartition(":")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"--coordinator {self.coordinator!r} is not HOST:PORT; write it like 10.0.0.1:12345")
        return host.strip("[]"), int(port)

    @property
    def name(self) -> str:
        return f"process {self.process_id} of {self.num_processes}"

    def bind_address(self) -> str:
        """Where process 0 listens: on the loopback alone if the coordinator is there, else on every interface."""
        family, _, _, _, (host, *_) = self._resolved()
        if not (host.startswith("127.") or host == "::1"):
            host = "0.0.0.0" if family == socket.AF_INET else "::"
        return f"[{host}]:{self.address[1]}" if ":" in host else f"{host}:{self.address[1]}"

    def meet(self, timeout_seconds: float) -> "Peers":
        """Wait until all processes are here. Raises ValueError, the same one in all that came, where they are not."""
        deadline = time.monotonic() + timeout_seconds
        self._resolved()
        return self._host(deadline, timeout_seconds) if self.process_id == 0 else self._join(deadline, timeout_seconds)

    def _resolved(self) -> tuple:
        host, port = self.address
        try:
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise ValueError(f"--coordinator {self.coordinator}: no such host as {host} ({error.strerror})") from None

    def _host(self, deadline: float, timeout_seconds: float) -> "Peers":
        peers: dict[int, socket.socket] = {}
        came: list[socket.socket] = []
        with self._listen() as server:
            try:
                while missing := sorted({*range(1, self.num_processes)} - peers.keys()):
                    server.settimeout(max(deadline - time.monotonic(), 0.001))
                    try:
                        connection, _ = server.accept()
                    except TimeoutError:
                        raise ValueError(
                            f"of {self.num_processes} processes, {_listed(missing)} did not come to "
                            f"{self.coordinator} within {timeout_seconds:g} s; start each with the same --coordinator"
                        ) from None
                    hello = _receive(connection, _HELLO_SECONDS)
                    if "process_id" not in hello:
                        connection.close()  # something else that tries ports
                        continue
                    process_id, num_processes = hello["process_id"], hello["num_processes"]
                    came.append(connection)
                    if num_processes != self.num_processes:
                        raise ValueError(
                            f"process {process_id} was started with --num-processes {num_processes}, process 0 with "
                            f"{self.num_processes}; give all the same"
                        )
                    if process_id == 0 or process_id in peers:
                        raise ValueError(f"two processes have --process-id {process_id}; number them from 0 on")
                    peers[process_id] = connection
            except ValueError as error:
                for connection in came:
                    _send(connection, {"error": str(error)})
                raise
        for connection in peers.values():
            _keep_alive(connection)
            _send(connection, {"all_here": True})
        return Peers(self, peers)

    def _listen(self) -> socket.socket:
        family, kind, protocol, _, _ = self._resolved()
        host, port = self.bind_address().rsplit(":", 1)
        server = socket.socket(family, kind, protocol)
        try:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((host.strip("[]"), int(port)))
            server.listen(self.num_processes)
        except OSError as error:
            server.close()
            raise ValueError(
                f"process 0 cannot listen on port {port} of --coordinator {self.coordinator} ({error.strerror}): "
                "take a free port, and start --process-id 0 once"
            ) from None
        return server

    def _join(self, deadline: float, timeout_seconds: float) -> "Peers":
        reason = "nothing answers there"
        while (left := deadline - time.monotonic()) > 0:
            try:
                connection = socket.create_connection(self.address, timeout=left)
            except OSError as error:
                reason = error.strerror or str(error)
                time.sleep(_RETRY_SECONDS)
                continue
            _send(connection, {"process_id": self.process_id, "num_processes": self.num_processes})
            # Process 0 may have begun to wait later than this process did.
            reply = _receive(connection, left + timeout_seconds)
            if "all_here" in reply:
                _keep_alive(connection)
                return Peers(self, {0: connection})
            connection.close()
            if "error" in reply:
                raise ValueError(reply["error"])
            reason = "what answers there is no process 0 that waits for others"
            time.sleep(_RETRY_SECONDS)
        raise ValueError(
            f"{self.name} did not reach process 0 at {self.coordinator} within {timeout_seconds:g} s: {reason}; "
            "start --process-id 0 there, with the same --coordinator"
        )


@dataclass(frozen=True)
class Peers:
    """Open connections, by process: of process 0 to all the others, of any other to process 0."""

    me: Rendezvous
    connections: Mapping[int, socket.socket]

    def watch(self) -> None:
        """From now on, end this process, saying so, when another one dies; to be called once."""
        threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def farewell(self) -> None:
        """Tell the others that this process ends because it is done."""
        for connection in self.connections.values():
            _send(connection, {"done": True})

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process_id, connection in self.connections.items():
                selector.register(connection, selectors.EVENT_READ, process_id)
            while selector.get_map():
                for key, _ in selector.select():
                    message = _receive(self.connections[key.data], _HELLO_SECONDS)
                    if "done" not in message:
                        self._end(message.get("gone", key.data))
                    selector.unregister(key.fileobj)

    def _end(self, gone: int) -> None:
        for connection in self.connections.values():
            _send(connection, {"gone": gone})
        print(
            f"error: {self.me.name}: process {gone} has gone; the run goes on from its last checkpoint when all are "
            "started again",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def _listed(processes: list[int]) -> str:
    shown = ", ".join(map(str, processes[:8])) + (", ..." if len(processes) > 8 else "")
    return f"process {shown}" if len(processes) == 1 else f"processes {shown}"


def _keep_alive(connection: socket.socket) -> None:
    """Let the kernel send on it now and then: what lies between machines may drop idle connections."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # else the system's two hours
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_SECONDS)


def _send(connection: socket.socket, message: Mapping[str, object]) -> None:
    with contextlib.suppress(OSError):  # whoever has gone is found out by reading
        connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket, timeout_seconds: float) -> dict:
    """A message; {} for anything else, the end of the connection included."""
    connection.settimeout(timeout_seconds)
    line = b""
    with contextlib.suppress(OSError, ValueError):
        while not line.endswith(b"\n") and len(line) < _HELLO_BYTES:
            if not (piece := connection.recv(1)):
                return {}
            line += piece
        message = json.loads(line)
        return message if isinstance(message, dict) else {}
    return {}
