import argparse
from dataclasses import fields
from typing import Any

import pytest

from requant.console import Parser
from requant.engine.config import PARTS, EngineConfig
from requant.entrypoints.arguments import add_engine_flags, add_server_flags, engine_config, server_config
from requant.errors import ConfigError
from requant.server.config import ServerConfig


def parse(*args: str) -> argparse.Namespace:
    parser = Parser(allow_abbrev=False)
    add_engine_flags(parser)
    add_server_flags(parser)
    return parser.parse_args(args)


def test_defaults_are_the_dataclasses() -> None:
    parsed = parse("--model", "M")
    assert engine_config(parsed) == EngineConfig.create(model="M")
    assert server_config(parsed) == ServerConfig()


SAMPLES: dict[str, tuple[list[str], Any]] = {
    "model": (["M"], "M"),
    "tokenizer": (["T"], "T"),
    "revision": (["main"], "main"),
    "trust_remote_code": ([], True),
    "dtype": (["float32"], "float32"),
    "max_model_len": (["77"], 77),
    "seed": (["-3"], -3),
    "enforce_eager": ([], True),
    "online_quant_config": (['{"global_quant_config": "ptpc_fp8"}'], '{"global_quant_config": "ptpc_fp8"}'),
    "online_quant_info_dir": (["/tmp"], "/tmp"),
    "online_quant_cache": (["/tmp/cache"], "/tmp/cache"),
    "block_size": (["32"], 32),
    "gpu_memory_utilization": (["0.5"], 0.5),
    "kv_cache_memory_bytes": (["1024"], 1024),
    "no_enable_prefix_caching": ([], True),
    "max_num_seqs": (["3"], 3),
    "max_num_batched_tokens": (["4096"], 4096),
    "device": (["cpu"], "cpu"),
    "tensor_parallel_size": (["4"], 4),
    "deterministic_tp": ([], True),
    "worker_timeout": (["5"], 5),
    "enable_expert_parallel": ([], True),
    "port": (["5679"], 5679),
    "host": (["::1"], "::1"),
    "server_port": (["7778"], 7778),
    "served_model_name": (["a", "b"], ("a", "b")),
    "chat_template": (["{{ x }}"], "{{ x }}"),
    "log_level": (["debug"], "debug"),
    "method": (["mtp"], "mtp"),
    "num_speculative_tokens": (["3"], 3),
}
COMPANIONS = {"num_speculative_tokens": ["--method", "mtp"]}  # without which an option makes no sense


def option_names() -> list[str]:
    return [field.name for part in [*PARTS.values(), ServerConfig] for field in fields(part)]


@pytest.mark.parametrize("name", option_names())
@pytest.mark.parametrize("spelling", ["dashes", "underscores", "equals"])
def test_every_option_is_a_flag(name: str, spelling: str) -> None:
    values, expected = SAMPLES[name]
    flag = "--" + (name if spelling == "underscores" else name.replace("_", "-"))
    given = [f"{flag}={values[0]}"] if spelling == "equals" and len(values) == 1 else [flag, *values]
    parsed = parse("--model", "M", *given, *COMPANIONS.get(name, []))
    parts = [*vars(engine_config(parsed)).values(), server_config(parsed)]
    (part,) = [part for part in parts if name in {field.name for field in fields(part)}]
    assert getattr(part, name) == expected


def test_the_value_of_a_flag_is_left_as_it_is() -> None:
    assert server_config(parse("--chat_template=--a_b")).chat_template == "--a_b"
    assert parse("--model", "my_model").model == "my_model"


def test_the_documented_command_line() -> None:
    recipe = '{"global_quant_config":"ptpc_fp8","exclude_layer":["lm_head","*.gate.*"]}'
    parsed = parse(
        "--model", "M", "-tp", "1", "--port", "5679", "--server-port", "7778", "--online_quant_config", recipe
    )
    config = engine_config(parsed)
    assert (config.parallel.tensor_parallel_size, config.parallel.port) == (1, 5679)
    assert config.quant.online_quant_config == recipe
    assert server_config(parsed).server_port == 7778


def configs(*args: str) -> tuple[EngineConfig, ServerConfig]:
    parsed = parse(*args)
    return engine_config(parsed), server_config(parsed)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "--model is ''"),
        (["--model"], "argument --model: expected one argument"),
        (["--model", "M", "--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--model", "M", "stray"], "unrecognized arguments: stray"),
        (["--mod", "M"], "unrecognized arguments: --mod"),
        (["--model", "M", "--max-model-len", "many"], "argument --max-model-len: invalid int value: 'many'"),
        (["--model", "M", "--max-model-len", "1"], "--max-model-len is 1; accepted: 2 or more"),
        (["--model", "M", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--model", "M", "--seed", str(2**64)], f"--seed is {2**64}; accepted: a whole number of 64 bits"),
        (["--model", "M", "--seed", str(-(2**63) - 1)], "accepted: a whole number of 64 bits"),
        (["--model", "M", "--method", "eagle"], "argument --method: invalid choice: 'eagle' (choose from"),
        (["--model", "M", "--method", "mtp", "--num-speculative-tokens", "0"], "-tokens is 0; accepted: 1 to 8"),
        (["--model", "M", "--method", "mtp", "--num-speculative-tokens", "9"], "-tokens is 9; accepted: 1 to 8"),
        (["--model", "M", "--num-speculative-tokens", "3"], "is 3; accepted: none without --method mtp"),
        (["--model", "M", "-tp", "0"], "--tensor-parallel-size is 0; accepted: 1 to 1024"),
        (["--model", "M", "--port", "0"], "--port is 0; accepted: 1 to 65535"),
        (["--model", "M", "--server-port", "70000"], "--server-port is 70000; accepted: 0 to 65535"),
        (["--model", "M", "--block-size", "12"], "--block-size is 12; accepted: a power of two"),
        (["--model", "M", "--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization is 1.5"),
        (["--model", "M", "--log-level", "loud"], "argument --log-level: invalid choice: 'loud'"),
    ],
)
def test_bad_command_lines(args: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configs(*args)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
