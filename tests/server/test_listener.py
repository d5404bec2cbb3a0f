"""The port that is served at."""

import asyncio
import socket

import pytest

from requant.errors import ConfigError
from requant.server.config import ServerConfig
from requant.server.launch import _bind


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_small_pieces_are_sent_at_once(host: str) -> None:
    """A connection that waits for acknowledgements before it sends more delays a first token by 40 ms."""
    try:
        listener = _bind(ServerConfig(host=host, server_port=0))
    except ConfigError:
        pytest.skip("this machine has no IPv6")

    async def nodelay() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            found.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(accepted, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            writer.close()
            return await asyncio.wait_for(found, 10)

    assert asyncio.run(nodelay())
