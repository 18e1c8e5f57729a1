"""A TCP link to a board that can be cut and mended: what a reboot or a pulled cable looks like."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self


class CutLink:
    """Passes connections on from a loopback port to `target_port`, while it is not cut.

    `cut()` ends all connections at once and refuses new ones until `mend()`. `cut_after_bytes`
    cuts by itself when that many bytes went to the board since it was set.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_cut = False
        self.cuts = 0
        self.bytes_to_board = 0
        self.cut_after_bytes: int | None = None

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cut()
        self._listener.close()

    def cut(self) -> None:
        with self._lock:
            self._is_cut = True
            self.cuts += 1
            connections, self._open = self._open, set()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def mend(self) -> None:
        self._is_cut = False

    def mend_later(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self.mend)
        timer.daemon = True
        timer.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._is_cut:
                near.close()
                continue
            far = socket.create_connection(("127.0.0.1", self._target_port))
            with self._lock:
                self._open |= {near, far}
            for source, sink, to_board in ((near, far, True), (far, near, False)):
                threading.Thread(
                    target=self._pass_on, args=(source, sink, to_board), daemon=True
                ).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, to_board: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                sink.sendall(data)
                if not to_board:
                    continue
                self.bytes_to_board += len(data)
                limit = self.cut_after_bytes
                if limit is not None and self.bytes_to_board >= limit:
                    self.cut_after_bytes = None
                    self.cut()
                    self.mend_later(1.0)
        for connection in (source, sink):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
