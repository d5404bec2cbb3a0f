import pytest

from requant.errors import CheckpointError
from requant.formats import FORMATS
from requant.formats.storage import store
from requant.recipe import Decision

BLOCK, PTPC, MXFP4 = FORMATS["per_block_fp8"], FORMATS["ptpc_fp8"], FORMATS["mxfp4"]


def decided(target, reason=""):
    return Decision("layer", target, "global_quant_config" if target else "", reason)


@pytest.mark.parametrize("source", [None, BLOCK])
@pytest.mark.parametrize("target", FORMATS)
def test_a_target_is_quantized_unless_it_is_there_already(target, source):
    storage = store(decided(target), [source, source])
    assert storage.format is FORMATS[target]
    there = source is not None and source.name == target
    assert storage.quantized == (not there)
    assert storage.reason == ("per_block_fp8 in the checkpoint already, which is its target" if there else "")
    assert not storage.note


@pytest.mark.parametrize("source", [None, BLOCK, MXFP4])
def test_a_layer_that_the_recipe_keeps_is_what_the_checkpoint_has(source):
    storage = store(decided(None, "excluded by 'x'"), [source] * 3)
    assert storage.format is source
    assert not storage.quantized
    assert storage.reason.startswith("excluded by 'x'")


def test_one_part_that_is_there_already_does_not_keep_the_others():
    storage = store(decided("per_block_fp8"), [BLOCK, None, BLOCK])
    assert (storage.format, storage.quantized, storage.reason) == (BLOCK, True, "")


def test_a_kept_layer_of_mixed_parts_is_dequantized_and_that_is_said():
    storage = store(decided(None, "no rule matches"), [BLOCK, None])
    assert (storage.format, storage.quantized, storage.reason) == (None, False, "no rule matches")
    assert "dequantized" in storage.note


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("ptpc_fp8", "mxfp4 in the checkpoint, passed through unchanged, not quantized to ptpc_fp8"),
        ("mxfp4", "mxfp4 in the checkpoint already, which is its target"),
        (None, "no rule matches; mxfp4 in the checkpoint, passed through unchanged"),
    ],
)
def test_mxfp4_passes_through_with_a_note(target, reason):
    storage = store(decided(target, "" if target else "no rule matches"), [MXFP4, MXFP4])
    assert (storage.format, storage.quantized, storage.reason) == (MXFP4, False, reason)
    assert storage.note == "mxfp4 in the checkpoint, passed through unchanged"


@pytest.mark.parametrize("other", [None, BLOCK])
def test_mxfp4_beside_other_parts_of_a_layer(other):
    with pytest.raises(CheckpointError, match=r"the parts of layer are .*mxfp4.* accepted: all of them mxfp4, or none"):
        store(decided("mxfp4"), [MXFP4, other])
