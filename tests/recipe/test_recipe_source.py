import pytest

from requant.errors import CheckpointError
from requant.recipe import SourceQuantization, source, source_quantization

ACCEPTED = "accepted: no quantization (BF16, FP16 or FP32 weights)"


@pytest.mark.parametrize(
    "config",
    [{}, {"quantization_config": None}, {"quantization_config": {}}, {"text_config": {"hidden_size": 8}}],
)
def test_unquantized(config):
    assert source_quantization(config) is None


@pytest.mark.parametrize(
    "section",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "awq"},
        {"quant_method": "compressed-tensors", "config_groups": {}},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "mxfp4"},
        {"quant_method": "quark"},
    ],
)
@pytest.mark.parametrize(
    ("wrap", "where"),
    [
        (lambda s: {"quantization_config": s}, "quantization_config"),
        (lambda s: {"compression_config": s}, "compression_config"),
        (lambda s: {"text_config": {"quantization_config": s}}, "text_config.quantization_config"),
    ],
)
def test_other_sources_are_refused_by_name(section, wrap, where):
    with pytest.raises(CheckpointError) as caught:
        source_quantization(wrap(section))
    method = section["quant_method"]
    assert str(caught.value) == f"the checkpoint is quantized already: {where} has quant_method {method!r}; {ACCEPTED}"


@pytest.mark.parametrize(
    ("section", "given"),
    [
        ({"bits": 4}, "no quant_method"),
        ({"quant_method": None}, "quant_method None"),
        ({"quant_method": 8}, "method 8"),
    ],
)
def test_a_section_without_a_usable_method_is_not_ignored(section, given):
    with pytest.raises(CheckpointError, match=given):
        source_quantization({"quantization_config": section})


def test_a_section_that_is_no_object():
    with pytest.raises(CheckpointError, match=r"quantization_config of the checkpoint is a str; accepted: an object"):
        source_quantization({"quantization_config": "fp8"})


def test_a_row_in_the_table_is_a_source_that_loads(monkeypatch):
    monkeypatch.setitem(source.READERS, "fake", lambda section: SourceQuantization(section["quant_method"].lower()))
    assert source_quantization({"quantization_config": {"quant_method": "Fake"}}) == SourceQuantization("fake")
    with pytest.raises(CheckpointError, match=r"'gptq'; accepted: no quantization \(.*\), 'fake'$"):
        source_quantization({"quantization_config": {"quant_method": "gptq"}})
