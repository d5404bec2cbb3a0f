"""Start the server with a recipe, ask it one question through the OpenAI client, and show what was quantized."""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import openai

QUESTION = "What is the capital of France?"
FORMATS = ("ptpc_fp8", "per_block_fp8", "mxfp4")


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_until_ready(server: subprocess.Popen[bytes], url: str, seconds: float = 300.0) -> None:
    """Return when the server answers /health; stop the demo if it ends before."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if server.poll() is not None:
            sys.exit(f"demo: the server ended with exit code {server.returncode}; its messages stand above")
        try:
            if httpx.get(f"{url}/health", timeout=2.0).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    sys.exit(f"demo: the server was not ready after {seconds:.0f} s")


def ask(model: str, fmt: str) -> tuple[str, dict]:
    """Serve ``model`` with ``fmt`` everywhere but in the head; the answer to the question, and the report."""
    recipe = {"global_quant_config": fmt, "exclude_layer": ["lm_head"]}
    port = free_port()
    with tempfile.TemporaryDirectory() as reports:
        command = [sys.executable, "-m", "requant.entrypoints.openai_server", "--model", model]
        command += ["--host", "127.0.0.1", "--server-port", str(port), "--max-model-len", "2048"]
        command += ["--online_quant_config", json.dumps(recipe), "--online-quant-info-dir", reports]
        server = subprocess.Popen(command)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(server, url)
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
            answer = client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": QUESTION}], temperature=0.0, max_tokens=40
            )
            report = json.loads(next(Path(reports).glob("online_quant_info_*.json")).read_text())
        finally:
            server.terminate()
            server.wait(timeout=30)
    return answer.choices[0].message.content or "", report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a local folder or a Hugging Face id")
    parser.add_argument("--format", choices=FORMATS, action="append", help="default: each of them")
    arguments = parser.parse_args()
    lines = []
    for fmt in arguments.format or FORMATS:
        answer, report = ask(arguments.model, fmt)
        before = sum(layer["bytes_before"] for layer in report["layers"])
        after = sum(layer["bytes_after"] for layer in report["layers"])
        lines.append(
            f"{fmt:14} {report['num_layers']} layers, {before / 1e6:.0f} -> {after / 1e6:.0f} MB, "
            f"loaded in {report['load_seconds']:.1f} s: {answer.strip()!r}"
        )
    print(f"\n{QUESTION}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
