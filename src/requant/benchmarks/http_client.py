"""One request over HTTP, streamed, with the moments at which its pieces arrive."""

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from requant.benchmarks.metrics import Record
from requant.benchmarks.workload import Sample
from requant.errors import one_line

_DAY = 24 * 3600
_READ_BYTES = 1 << 20
_LONGEST_REASON = 500


def open_session(connections: int) -> aiohttp.ClientSession:
    """A session that keeps up to ``connections`` connections (0: any number) and never gives up on an answer."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=connections, limit_per_host=connections),
        timeout=aiohttp.ClientTimeout(total=_DAY),
        read_bufsize=_READ_BYTES,
    )


class Client:
    """Sends requests to one endpoint.

    Args:
        session: From :func:`open_session`.
        url: The endpoint, of completions or of chat completions.
        model: The model's name.
        chat: It is one of chat completions.
        options: Further fields of each request (``temperature``, ``ignore_eos``).
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, chat: bool, options: dict[str, Any]):
        self._session = session
        self._url = url
        self._chat = chat
        self._common = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **options}

    async def send(self, sample: Sample) -> Record:
        """Send one request and wait for its end. Whatever goes wrong becomes the record's ``error``."""
        record = Record(sample.prompt_len)
        record.start = last = time.perf_counter()
        usage = pieces = 0
        try:
            async with self._session.post(self._url, json=self._body(sample)) as response:
                if response.status != 200:
                    record.error = f"HTTP status {response.status}: {_reason(await response.text())}"
                    return record
                async for event in _events(response):
                    now = time.perf_counter()
                    if "error" in event:
                        record.error = _reason(json.dumps(event))
                        return record
                    usage = (event.get("usage") or {}).get("completion_tokens") or usage
                    text = self._text(event)
                    if text is None:
                        continue
                    if pieces == 0:
                        record.ttft = now - record.start
                    else:
                        record.itl.append(now - last)
                    pieces += 1
                    record.text += text
                    last = now
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
            record.error = one_line(error)
            return record
        record.latency = last - record.start
        record.output_len = usage or pieces
        if not pieces:
            record.error = "the answer ended before its first token"
        return record

    def _body(self, sample: Sample) -> dict[str, Any]:
        if self._chat:
            messages = [{"role": "user", "content": sample.prompt}]
            return {**self._common, "messages": messages, "max_completion_tokens": sample.output_len}
        return {**self._common, "prompt": sample.prompt, "max_tokens": sample.output_len}

    def _text(self, event: dict[str, Any]) -> str | None:
        """The piece of the answer in an event; None if it brings none, as one with the usage or the role alone."""
        choices = event.get("choices")
        if not choices:
            return None
        if not self._chat:
            return choices[0].get("text") or ""
        delta = choices[0].get("delta") or {}
        text = delta.get("content") or delta.get("reasoning_content") or ""
        return None if "role" in delta and not text and not choices[0].get("finish_reason") else text


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to ``[DONE]``."""
    waiting = b""
    async for data in response.content.iter_any():
        *events, waiting = (waiting + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if not line.startswith(b"data:"):
                    continue  # a comment, or another field
                content = line[5:].strip()
                if content == b"[DONE]":
                    return
                yield json.loads(content)


def _reason(body: str) -> str:
    """The message of an error in OpenAI's form, else what there is."""
    try:
        error = json.loads(body).get("error", body)
        body = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        pass  # not JSON, or no object: as it is
    return " ".join(body.split())[:_LONGEST_REASON] or "no reason given"
