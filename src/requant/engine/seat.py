"""What a process is given to be one rank of several: its place, the way to the others, and where signs of life go.

Made by the front end; nothing here needs torch.
"""

import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from typing import Any

_HOST = "127.0.0.1"
_BEAT = 0.25  # Seconds between two signs of life.


class Pulse:
    """Two numbers for each rank, in memory that the front end sees: signs of life, and collectives begun.

    A process that is stopped, or stuck with Python's lock held, gives no more signs of life; one that hangs alone
    begins no more collectives while the others wait for it in the next one.
    """

    def __init__(self, context: SpawnContext, size: int) -> None:
        self.size = size
        self._numbers: Any = context.Array("q", 2 * size, lock=False)

    def alive(self, rank: int) -> int:
        """Signs of life so far; 0: the process has not come far enough to give any."""
        return self._numbers[rank]

    def begun(self, rank: int) -> int:
        """Collectives begun since the engine was ready."""
        return self._numbers[self.size + rank]

    def live(self, rank: int) -> None:
        """Give signs of life from now on, on a thread."""

        def beat() -> None:
            while True:
                self._numbers[rank] += 1
                time.sleep(_BEAT)

        threading.Thread(target=beat, name="requant-pulse", daemon=True).start()

    def begin(self, rank: int) -> None:
        """Count a collective."""
        self._numbers[self.size + rank] += 1


@dataclass
class Seat:
    """One rank's place, before it is taken; it can be sent to a process that is being started.

    Attributes:
        rank: Which one.
        port: Where rank 0 listens.
        pulse: Where signs of life go.
        listener: Of rank 0: the socket on ``port``.
        steps: The pipes on which rank 0 announces its steps: of rank 0 all others' ends to send on, else the one end to
            receive on.
    """

    rank: int
    port: int
    pulse: Pulse
    listener: socket.socket | None
    steps: Sequence[Connection]


def listen(port: int | None) -> socket.socket:
    """Take a port of the loopback interface for rank 0, a free one if none is given; the ranks' processes inherit it.

    Raises:
        OSError: The port is taken.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_HOST, port or 0))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener
