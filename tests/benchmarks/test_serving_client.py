"""The benchmark's client against a server whose every byte the test decides, and the command against that."""

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import requant_fakes

from requant.benchmarks.benchmark_serving import main
from requant.benchmarks.http_client import Client, open_session
from requant.benchmarks.metrics import Record
from requant.benchmarks.workload import Sample

DONE = "[DONE]"


def piece(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": finish}]}


def chat(**delta: str) -> dict[str, Any]:
    return {"choices": [{"delta": delta, "finish_reason": None}]}


USAGE = {"choices": [], "usage": {"completion_tokens": 7}}


class Server(ThreadingHTTPServer):
    """Answers each request with the next script, the last one for ever: a list of events, or (status, body)."""

    def __init__(self, *scripts: Any) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.scripts, self.bodies, self.lock = list(scripts), [], threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append((self.path, body))
            script = self.server.scripts.pop(0) if len(self.server.scripts) > 1 else self.server.scripts[0]
        if isinstance(script, tuple):
            self.send_response(script[0])
            self.send_header("Content-Length", str(len(script[1])))
            self.end_headers()
            self.wfile.write(script[1].encode())
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in script:
            if event is None:
                self.close_connection = True
                return  # in the middle of the stream
            data = event if isinstance(event, bytes) else f"data: {self.shown(event)}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")

    @staticmethod
    def shown(event: Any) -> str:
        return event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Any]:
    servers = []

    def start(*scripts: Any) -> Server:
        server = Server(*scripts)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def send(url: str, chat: bool = False) -> Record:
    async def once() -> Record:
        async with open_session(1) as session:
            return await Client(session, url, "m", chat, {"temperature": 0.0}).send(Sample("hello", 5, 7))

    return asyncio.run(once())


def test_a_completion(serve: Any) -> None:
    server = serve([piece("a"), piece("b"), piece("", "length"), USAGE, DONE])
    record = send(f"{server.url}/v1/completions")
    assert record.error is None
    assert record.text == "ab"
    assert record.output_len == 7  # as the server counts, not by pieces
    assert len(record.itl) == 2
    assert record.latency == pytest.approx(record.ttft + sum(record.itl))
    path, body = server.bodies[0]
    assert path == "/v1/completions"
    assert body == {
        "model": "m",
        "prompt": "hello",
        "max_tokens": 7,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_chat_begins_with_its_text_and_not_with_its_role(serve: Any) -> None:
    server = serve([chat(role="assistant", content=""), chat(content="a"), chat(reasoning_content="b"), DONE])
    record = send(f"{server.url}/v1/chat/completions", chat=True)
    assert record.error is None
    assert (record.text, record.output_len, len(record.itl)) == ("ab", 2, 1)  # no usage: pieces are counted
    assert server.bodies[0][1]["messages"] == [{"role": "user", "content": "hello"}]
    assert server.bodies[0][1]["max_completion_tokens"] == 7


def test_events_may_be_cut_anywhere_and_have_company(serve: Any) -> None:
    whole = (
        b": a comment\r\n\r\nevent: x\r\ndata: " + json.dumps(piece("né"), ensure_ascii=False).encode() + b"\r\n\r\n"
    )
    cut = whole.index("é".encode()) + 1
    record = send(serve([whole[:cut], whole[cut:], piece("b"), DONE]).url)
    assert record.error is None
    assert record.text == "néb"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ((503, json.dumps({"error": {"message": "too\nbusy"}})), "HTTP status 503: too busy"),
        ((404, json.dumps({"error": "no such model"})), "HTTP status 404: no such model"),
        ((500, "<html>broken"), "HTTP status 500: <html>broken"),
        ((500, ""), "HTTP status 500: no reason given"),
        ([piece("a"), {"error": {"message": "engine died"}}], "engine died"),
        ([DONE], "the answer ended before its first token"),
        ([piece("a"), None], "not completed|payload"),
        ([b"data: {broken\n\n"], "Expecting|double quotes"),
    ],
)
def test_what_goes_wrong_is_kept(serve: Any, script: Any, reason: str) -> None:
    record = send(serve(script).url)
    assert record.error is not None
    assert re.search(reason, record.error), record.error


def test_nobody_listens() -> None:
    record = send("http://127.0.0.1:9")
    assert record.error is not None
    assert "127.0.0.1:9" in record.error


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    requant_fakes.make_tokenizer(folder)
    return folder


def bench(model: Path, url: str, *more: str) -> int:
    return main(["--model", str(model), "--base_url", url, "--random-input-len=8", "--num-prompts=6", *more])


def test_failures_are_counted_and_shown(serve: Any, model: Path, tmp_path: Path, capsys: Any) -> None:
    good, busy = [piece("a"), piece("b"), USAGE, DONE], (503, json.dumps({"error": {"message": "busy"}}))
    server = serve(good, good, busy, good, busy, good)
    more = ["--max-concurrency=1", "--save-result", f"--result-dir={tmp_path}", "--result-filename=r.json"]
    assert bench(model, server.url, *more, "--percentile-metrics=ttft,e2el", "--metric-percentiles=50,99.9") == 0
    out = capsys.readouterr().out
    assert "2 failed: HTTP status 503: busy" in out
    assert out.count("P99.9") == 2
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (4, 2, 28)
    assert result["max_concurrency"] == 1
    assert result["request_rate"] == "inf"
    assert "p99.9_e2el_ms" in result
    assert "mean_itl_ms" not in result
    assert "errors" not in result
    assert len(server.bodies) == 7  # the first is sent twice, once to see whether anybody answers


def test_every_request_with_its_times(serve: Any, model: Path, tmp_path: Path) -> None:
    server = serve([piece("a"), piece("b"), USAGE, DONE])
    assert bench(model, server.url, "--save-result", "--save-detailed", f"--result-dir={tmp_path}", "--ignore-eos") == 0
    (file,) = tmp_path.glob("openai-infqps-*.json")
    result = json.loads(file.read_text())
    for key in ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors"):
        assert len(result[key]) == 6
    assert all(body["ignore_eos"] for _, body in server.bodies)


def test_warm_up_requests_are_not_measured(serve: Any, model: Path, tmp_path: Path) -> None:
    server = serve([piece("a"), USAGE, DONE])
    assert bench(model, server.url, "--num-warmups=9", "--save-result", f"--result-dir={tmp_path}") == 0
    assert len(server.bodies) == 1 + 9 + 6
    (file,) = tmp_path.glob("*.json")
    assert json.loads(file.read_text())["completed"] == 6


def test_all_fail(serve: Any, model: Path, capsys: Any) -> None:
    server = serve([piece("a"), USAGE, DONE], (500, "broken"))
    assert bench(model, server.url) == 1
    said = capsys.readouterr()
    assert "6 failed: HTTP status 500: broken" in said.out
    assert "all 6 requests failed" in said.err


def test_a_first_request_that_fails_ends_it(serve: Any, model: Path, tmp_path: Path, capsys: Any) -> None:
    server = serve((404, json.dumps({"error": {"message": "the model `x` does not exist"}})))
    assert bench(model, server.url, "--save-result", f"--result-dir={tmp_path}") == 2
    assert len(server.bodies) == 1
    assert "does not answer a first request: HTTP status 404: the model `x` does not exist" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-prompts=0"], "--num-prompts is 0; accepted: 1 or more"),
        (["--random-range-ratio=1"], "--random-range-ratio is 1.0; accepted: 0 up to below 1"),
        (["--request-rate=0"], "--request-rate is 0.0; accepted: above 0, or inf"),
        (["--burstiness=0"], "--burstiness is 0.0; accepted: above 0"),
        (["--percentile-metrics=ttft,speed"], "--percentile-metrics is 'ttft,speed'; accepted: some of ttft,tpot"),
        (["--metric-percentiles=101"], "--metric-percentiles is '101'; accepted: numbers from 0 to 100"),
        (["--metric-percentiles=a"], "--metric-percentiles is 'a'; accepted: numbers from 0 to 100"),
        (["--goodput", "itl:5"], "--goodput is 'itl:5'; accepted: METRIC:MS with one of ttft, tpot, e2el"),
        (["--goodput", "ttft"], "--goodput is 'ttft'; accepted: METRIC:MS"),
        (["--backend=tgi"], "invalid choice: 'tgi'"),
        (["--endpoint=v1"], "--endpoint is 'v1'; accepted: a path"),
        (["--base-url=localhost:8000"], "--base-url is 'localhost:8000'; accepted: http://HOST:PORT"),
        (["--random-input-len=0"], "--random-input-len is 0; accepted: 1 or more, without a prefix"),
        (["--max-concurrency=0"], "--max-concurrency is 0"),
        (["--result-dir=/proc/nothing", "--save-result"], "cannot write the result to /proc/nothing/"),
    ],
)
def test_bad_input(model: Path, flags: list[str], message: str, capsys: Any) -> None:
    assert main(["--model", str(model), *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_no_tokenizer(tmp_path: Path, capsys: Any) -> None:
    assert main(["--model", str(tmp_path)]) == 2
    assert "no tokenizer can be loaded" in capsys.readouterr().err
