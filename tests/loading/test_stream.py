import hashlib
import threading
import weakref

import pytest
import torch
from requant_tensors import bits

import requant
from requant.errors import CheckpointError, ConfigError
from requant.formats import FORMATS, QuantizedTensor
from requant.loading import Staging, load
from requant.loading.plan import BUDGET
from requant.loading.slabs import SlabPool
from requant.loading.targets import Targets

QKV = "model.layers.0.self_attn.qkv_proj"
PARTS = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
SMALL = Staging(slab_bytes=1 << 10, slabs=3, threads=2)


def reader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("requant-reader")]


class Watch:
    """Counts what it is told, and may stop the load."""

    def __init__(self, error=None):
        self.nbytes, self.error, self.said = 0, error, set()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.left = True

    def advance(self, nbytes, what):
        self.nbytes += nbytes
        self.said.add(what)
        if self.error:
            raise self.error


@pytest.mark.parametrize("staging", [None, SMALL])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("target", FORMATS)
def test_every_part_equals_its_own_quantization(make_tiny, target, dtype, shards, staging):
    tiny = make_tiny(dtype=dtype)
    load(tiny.plan({"global_quant_config": target}, tiny.save(shards)), tiny.model, staging=staging)
    for module in (tiny.model.model.layers[0].self_attn.qkv_proj, tiny.model.model.layers[0].self_attn.o_proj):
        n = sum(module.rows)
        whole = QuantizedTensor(module.weight, module.weight_scale, FORMATS[target], (n, module.k), module.rows)
        for name, part in zip(module.names.parts, whole.split(), strict=True):
            expected = requant.quantize(tiny.tensors[f"{name}.weight"], target)
            assert torch.equal(bits(part.data), bits(expected.data))
            assert torch.equal(bits(part.scale), bits(expected.scale))


@pytest.mark.parametrize("staging", [None, SMALL])
def test_what_is_not_quantized_is_cast(make_tiny, staging):
    tiny = make_tiny(dtype=torch.float32)
    load(tiny.plan({"global_quant_config": "mxfp4"}), tiny.model, staging=staging)
    attention = tiny.model.model.layers[0].self_attn
    expected = torch.cat([tiny.tensors[f"{part}.bias"] for part in PARTS]).bfloat16()
    assert torch.equal(attention.qkv_proj.bias, expected)
    assert torch.equal(tiny.model.model.embed_tokens.weight, tiny.tensors["model.embed_tokens.weight"].bfloat16())
    assert torch.equal(tiny.model.model.layers[0].norm.weight, tiny.tensors["model.layers.0.norm.weight"].bfloat16())
    assert torch.equal(tiny.model.lm_head.weight, tiny.tensors["lm_head.weight"].bfloat16())


def test_without_a_recipe_the_parts_are_stacked(tiny):
    load(tiny.plan(), tiny.model)
    expected = torch.cat([tiny.tensors[f"{part}.weight"] for part in PARTS])
    assert torch.equal(tiny.model.model.layers[0].self_attn.qkv_proj.weight, expected)


def test_a_tied_head(make_tiny):
    tiny = make_tiny(tied=True)
    load(tiny.plan({"global_quant_config": "mxfp4"}), tiny.model)
    assert not list(tiny.model.lm_head.parameters())


def test_a_tied_head_that_is_quantized(make_tiny):
    tiny = make_tiny(tied=True)
    load(tiny.plan({"layer_quant_config": {"lm_head": "ptpc_fp8"}}), tiny.model)
    embedding = tiny.tensors["model.embed_tokens.weight"]
    assert torch.equal(bits(tiny.model.lm_head.weight), bits(requant.quantize(embedding, "ptpc_fp8").data))
    assert torch.equal(tiny.model.model.embed_tokens.weight, embedding)


def test_result(tiny):
    plan = tiny.plan({"global_quant_config": "ptpc_fp8"})
    watch = Watch()
    result = load(plan, tiny.model, progress=watch, staging=SMALL)
    assert watch.nbytes == result.bytes_read == plan.bytes_to_read
    assert f"{PARTS[0]}.weight → ptpc_fp8" in watch.said
    assert "model.layers.0.norm.weight" in " ".join(what for what in watch.said if "→" not in what)
    assert 0 < result.elapsed_seconds < result.load_seconds
    assert result.peak_device_memory > 0
    assert 0 < result.staged_bytes <= 3 * SMALL.slab_bytes
    assert all(module.finished for module in tiny.model.modules() if hasattr(module, "finished"))
    assert not reader_threads()


def test_nothing_quantized_takes_no_time_quantizing(tiny):
    assert load(tiny.plan(), tiny.model).elapsed_seconds == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("model.layers.0.self_attn.k_proj.weight", [3, 70]),
        ("model.embed_tokens.weight", [0, 49]),
        (f"{PARTS[0]}.bias", 5),
    ],
)
def test_values_that_are_not_finite(tiny, name, rows, value):
    tiny.tensors[name][rows] = value
    count, total = int((~tiny.tensors[name].isfinite()).sum()), tiny.tensors[name].numel()
    with pytest.raises(CheckpointError, match=f"tensor {name} of .*: {count} of {total} values are NaN or Inf"):
        load(tiny.plan({"global_quant_config": "mxfp4"}), tiny.model, staging=SMALL)
    assert not any(module.finished for module in tiny.model.modules() if hasattr(module, "finished"))


def test_several_damaged_tensors(tiny):
    for part in PARTS:
        tiny.tensors[f"{part}.weight"][0, 0] = float("nan")
    with pytest.raises(
        CheckpointError, match=r"1 of \d+ values are NaN or Inf \(as bfloat16\); so are values of 2 more"
    ):
        load(tiny.plan(), tiny.model)


def test_values_that_overflow_the_models_dtype(make_tiny):
    tiny = make_tiny(dtype=torch.float32)
    tiny.tensors["model.layers.0.norm.weight"][0] = 1e6
    with pytest.raises(CheckpointError, match=r"norm\.weight of .*: 1 of 96 values are NaN or Inf \(as float16\)"):
        load(tiny.plan(dtype=torch.float16), tiny.model)


def test_the_files_are_only_read(make_tiny):
    tiny = make_tiny()
    plan = tiny.plan({"global_quant_config": "mxfp4"}, tiny.save(shards=2))
    files = sorted(tiny.folder.iterdir())
    for file in files:
        file.chmod(0o444)
    tiny.folder.chmod(0o555)

    def state():
        return [(f, f.stat().st_mtime_ns, f.stat().st_mode, hashlib.sha256(f.read_bytes()).digest()) for f in files]

    before = state()
    load(plan, tiny.model)
    tiny.folder.chmod(0o755)
    assert state() == before
    assert sorted(tiny.folder.iterdir()) == files


def test_file_that_shrinks_after_the_plan(tiny):
    plan = tiny.plan()
    last = plan.steps[-1].tensor
    with last.file.open("r+b") as file:
        file.truncate(last.start + 1)
    with pytest.raises(CheckpointError, match=f"{last.file} is truncated: it ends within tensor {last.name}"):
        load(plan, tiny.model, staging=SMALL)
    assert not reader_threads()


def test_file_that_vanishes_after_the_plan(tiny):
    plan = tiny.plan()
    plan.steps[0].tensor.file.unlink()
    with pytest.raises(CheckpointError, match=r"cannot read tensor .* of .*: No such file"):
        load(plan, tiny.model, staging=SMALL)
    assert not reader_threads()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("broken")])
def test_interruption_stops_the_readers_and_says_where(tiny, error):
    with pytest.raises(type(error)) as caught:
        load(tiny.plan(), tiny.model, progress=Watch(error), staging=SMALL)
    assert not reader_threads()
    assert any("loading stopped at tensor" in note for note in caught.value.__notes__)


@pytest.fixture
def slabs(monkeypatch):
    """Weak references to every slab that a load takes."""
    taken, take = [], SlabPool.take

    def record(pool):
        slab = take(pool)
        taken.append(weakref.ref(slab))
        return slab

    monkeypatch.setattr(SlabPool, "take", record)
    return taken


def out_of_memory(*_):
    raise torch.OutOfMemoryError("16 GiB were asked for")


def test_a_load_that_fails_holds_nothing(tiny, slabs):
    """Not even while somebody holds the error, as an interactive session does."""
    with pytest.raises(ValueError, match="broken") as caught:
        load(tiny.plan(), tiny.model, progress=Watch(ValueError("broken")), staging=SMALL)
    assert slabs
    assert not list(tiny.model.parameters())
    assert not any(slab() is not None for slab in slabs)
    assert "_fill" in str(caught.getrepr(style="native")), "where it came from is still to be seen"
    load(tiny.plan(), tiny.model)
    assert list(tiny.model.parameters())


def test_the_devices_memory_runs_out_on_the_way(tiny, slabs, monkeypatch):
    plan = tiny.plan({"global_quant_config": "mxfp4"})
    monkeypatch.setattr(Targets, "fill", out_of_memory)
    with pytest.raises(ConfigError, match=r"memory of cpu ran out while loading, at tensor \S+ of \S+safetensors$"):
        load(plan, tiny.model, staging=SMALL)
    assert not reader_threads()
    assert not list(tiny.model.parameters())
    assert not any(slab() is not None for slab in slabs)


def test_the_devices_memory_runs_out_in_the_layout_step(tiny, monkeypatch):
    monkeypatch.setattr(type(tiny.model.model.layers[0].self_attn.qkv_proj), "finish", out_of_memory)
    with pytest.raises(ConfigError, match=f"memory of cpu ran out in the layout step of {QKV}$"):
        load(tiny.plan(), tiny.model)
    assert not list(tiny.model.parameters())


def test_the_hosts_memory_runs_out(tiny, monkeypatch):
    monkeypatch.setattr(SlabPool, "take", out_of_memory)
    with pytest.raises(ConfigError, match=r"host's memory ran out before tensor .* of .*: there is none for a slab"):
        load(tiny.plan(), tiny.model, staging=SMALL)
    assert not reader_threads()


def test_default_staging_stays_within_the_budget():
    for device in ("cpu", "cuda"):
        staging = Staging.of(torch.device(device))
        assert staging.slab_bytes * staging.slabs <= BUDGET // 2
        assert staging.slabs >= 2 * staging.threads or device == "cpu"
