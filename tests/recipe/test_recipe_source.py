import pytest

from requant.errors import CheckpointError
from requant.recipe import SourceQuantization, source, source_quantization

ACCEPTED = (
    "accepted: no quantization (BF16, FP16 or FP32 weights), 'fp8' in blocks of 128 x 128 with dynamic activations, "
    "'mxfp4', 'quark' with MXFP4 weights only"
)
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
WEIGHT = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": False}
QUARK = {
    "quant_method": "quark",
    "global_quant_config": {"weight": {**WEIGHT, "ch_axis": -1}, "input_tensors": {**WEIGHT, "is_dynamic": True}},
    "layer_quant_config": {},
    "layer_type_quant_config": {},
    "exclude": ["lm_head"],
    "algo_config": None,
}


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
        {"quant_method": "fbgemm_fp8"},
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


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (FP8, SourceQuantization("fp8", "per_block_fp8")),
        (
            {"quant_method": "FP8 ", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
            SourceQuantization("fp8", "per_block_fp8"),
        ),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, SourceQuantization("mxfp4", "mxfp4")),
        (QUARK, SourceQuantization("quark", "mxfp4")),
        ({**QUARK, "layer_quant_config": {"*.experts.*": {"weight": WEIGHT}}}, SourceQuantization("quark", "mxfp4")),
        ({**QUARK, "global_quant_config": {"weight": [WEIGHT]}}, SourceQuantization("quark", "mxfp4")),
        ({**QUARK, "algo_config": [{"name": "gptq"}]}, SourceQuantization("quark", "mxfp4")),
    ],
)
def test_sources_that_load(section, expected):
    assert source_quantization({"quantization_config": section}) == expected


@pytest.mark.parametrize(
    ("section", "given"),
    [
        ({"quant_method": "fp8"}, "quant_method 'fp8' without weight_block_size"),
        ({**FP8, "weight_block_size": [64, 128]}, "quant_method 'fp8' with weight_block_size [64, 128]"),
        ({**FP8, "activation_scheme": "static"}, "quant_method 'fp8' with activation_scheme 'static'"),
        ({**FP8, "fmt": "e5m2"}, "quant_method 'fp8' with fmt 'e5m2'"),
        ({"quant_method": "quark"}, "quant_method 'quark' with global_quant_config whose weight is missing"),
        (
            {**QUARK, "global_quant_config": {"weight": {**WEIGHT, "dtype": "fp8_e4m3"}}},
            "quant_method 'quark' with global_quant_config whose weight has dtype 'fp8_e4m3' (MXFP4: 'fp4')",
        ),
        (
            {**QUARK, "layer_quant_config": {"*.self_attn.*": {"weight": {**WEIGHT, "qscheme": "per_channel"}}}},
            "quant_method 'quark' with layer_quant_config '*.self_attn.*' whose weight has qscheme 'per_channel'",
        ),
        ({**QUARK, "layer_quant_config": [1]}, "quant_method 'quark' with layer_quant_config [1] whose weight is"),
        ({**QUARK, "algo_config": [{"name": "rotation"}]}, "quant_method 'quark' with algo_config 'rotation'"),
    ],
)
def test_kinds_that_do_not_load_say_what_is_in_the_way(section, given):
    with pytest.raises(CheckpointError) as caught:
        source_quantization({"quantization_config": section})
    assert str(caught.value).startswith(f"the checkpoint is quantized already: quantization_config has {given}")
    assert str(caught.value).endswith(ACCEPTED)


def test_a_row_in_the_table_is_a_source_that_loads(monkeypatch):
    monkeypatch.setitem(source.READERS, "fake", lambda section: ("mxfp4", section["flaw"]))
    config = {"quantization_config": {"quant_method": "Fake", "flaw": ""}}
    assert source_quantization(config) == SourceQuantization("fake", "mxfp4")
    config["quantization_config"]["flaw"] = "of a strange kind"
    with pytest.raises(CheckpointError, match="quant_method 'Fake' of a strange kind; accepted: "):
        source_quantization(config)
