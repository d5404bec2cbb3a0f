"""What a quantized model computes: transformers itself with the dequantized weights, and its inputs quantized."""

from pathlib import Path

import pytest
import torch
from requant_transformers import PROMPT, load, make_checkpoint
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from requant.formats import FORMATS
from requant.integrations.transformers import QuantizedExperts, QuantizedLinear
from requant.kernels.activation import dequantize_activation, quantize_activation

DENSE, EXPERTS = ["qwen3", "qwen2"], ["qwen3_moe", "deepseek_v3", "mixtral", "granitemoe", "nemotron_h"]
KINDS = [*DENSE, *EXPERTS, "deepseek_v4", "gpt_oss"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: make_checkpoint(tmp_path_factory.mktemp(kind), kind, torch.float32) for kind in KINDS}


def dequantized(folder: Path, quantized: PreTrainedModel) -> PreTrainedModel:
    """transformers' own model with the values that the quantized weights stand for."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    for path, module in quantized.named_modules():
        own = model.get_submodule(path)
        if isinstance(module, QuantizedLinear):
            own.weight.data = module.quantized.dequantize()
        elif isinstance(module, QuantizedExperts):
            for index, weight in enumerate(module.weights):
                values = module.stack(index).dequantize()
                getattr(own, weight.name).data = values.transpose(1, 2).contiguous() if own.is_transposed else values
    return model


def quantize_inputs(model: PreTrainedModel, quantized: PreTrainedModel) -> None:
    """Let the Linears of a plain model see their inputs as those of the quantized one do."""
    for path, module in quantized.named_modules():
        if isinstance(module, QuantizedLinear) and module.format.activation:
            kind = module.format.activation

            def rounded(_: nn.Module, args: tuple[Tensor], kind: str = kind) -> tuple[Tensor]:
                x = args[0].reshape(-1, args[0].shape[-1])
                return (dequantize_activation(*quantize_activation(x, kind), kind).view(args[0].shape),)

            model.get_submodule(path).register_forward_pre_hook(rounded)


@pytest.mark.parametrize("kind", KINDS)
def test_mxfp4_computes_with_the_dequantized_weights(checkpoints: dict[str, Path], kind: str) -> None:
    """The gates of gpt-oss (interleaved, with biases and limits) and DeepSeek-V4 (limits) among them."""
    model = load(checkpoints[kind], global_quant_config="mxfp4")
    experts = [module for module in model.modules() if isinstance(module, QuantizedExperts)]
    assert bool(experts) == (kind not in DENSE)
    with torch.no_grad():
        expected = dequantized(checkpoints[kind], model)(PROMPT).logits
        torch.testing.assert_close(model(PROMPT).logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["ptpc_fp8", "per_block_fp8"])
@pytest.mark.parametrize("kind", DENSE)
def test_fp8_quantizes_inputs_too(checkpoints: dict[str, Path], kind: str, name: str) -> None:
    model = load(checkpoints[kind], global_quant_config=name)
    other = dequantized(checkpoints[kind], model)
    with torch.no_grad():
        without = other(PROMPT).logits
        quantize_inputs(other, model)
        ours, expected = model(PROMPT).logits, other(PROMPT).logits
    error = ((ours - expected).norm() / expected.norm()).item()
    assert error < 0.2 * ((without - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", ["ptpc_fp8", "per_block_fp8"])
def test_fp8_experts_quantize_inputs_too(checkpoints: dict[str, Path], name: str) -> None:
    """One expert with a gate of its own, beside the same arithmetic written out."""
    experts = load(checkpoints["deepseek_v4"], global_quant_config=name).model.layers[1].mlp.experts
    kind, limit = FORMATS[name].activation or "", 10.0
    x = torch.randn(5, 96)
    chosen, scores = torch.full((5, 1), 2), torch.rand(5, 1)
    rounded = dequantize_activation(*quantize_activation(x, kind), kind)
    gate, up = (rounded @ experts.stack(0)[2].dequantize().T).chunk(2, dim=-1)
    inner = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)
    inner = dequantize_activation(*quantize_activation(inner, kind), kind)
    expected = inner @ experts.stack(1)[2].dequantize().T * scores
    torch.testing.assert_close(experts(x, chosen, scores), expected, rtol=2e-2, atol=2e-2)


def test_a_move_keeps_codes_and_casts_biases(checkpoints: dict[str, Path]) -> None:
    model = load(checkpoints["qwen2"], global_quant_config="ptpc_fp8")
    linear = model.model.layers[0].self_attn.q_proj
    codes, scales = linear.weight.clone(), linear.weight_scale.clone()
    x = torch.randn(7, linear.in_features).bfloat16()
    before = linear(x.float())
    model.to(torch.bfloat16)
    assert linear.weight.dtype == torch.float8_e4m3fn
    assert linear.weight_scale.dtype == torch.float32
    assert linear.bias is not None
    assert linear.bias.dtype == torch.bfloat16
    assert torch.equal(linear.weight.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(linear.weight_scale, scales)
    after = linear(x)
    assert after.dtype == torch.bfloat16
    torch.testing.assert_close(after.float(), before, rtol=1e-2, atol=1e-2 * before.abs().max().item())


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_computes_the_same(checkpoints: dict[str, Path], kind: str, name: str) -> None:
    model = load(checkpoints[kind], torch.bfloat16, global_quant_config=name)
    with torch.no_grad():
        on_cpu = model(PROMPT).logits.float()
        on_gpu = model.to("cuda")(PROMPT.cuda()).logits.float().cpu()
    out = model.generate(PROMPT.cuda(), max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert out.shape[1] == PROMPT.shape[1] + 5
    similar = torch.nn.functional.cosine_similarity(on_cpu.flatten(), on_gpu.flatten(), dim=0)
    assert similar > 0.95


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_quantizes_the_same_weights(checkpoints: dict[str, Path], kind: str, name: str) -> None:
    pytest.importorskip("accelerate", reason="transformers loads onto a device with accelerate only")
    from requant.integrations.transformers import OnlineQuantConfig

    config = OnlineQuantConfig(global_quant_config=name)
    on_gpu = AutoModelForCausalLM.from_pretrained(checkpoints[kind], quantization_config=config, device_map="cuda")
    expected = load(checkpoints[kind], global_quant_config=name).state_dict()
    for key, value in on_gpu.state_dict().items():
        assert torch.equal(value.cpu().view(torch.uint8), expected[key].view(torch.uint8)), key
