"""Every rank's weights and scales are the slices of the unsharded result, bit for bit.

What is expected is made without the code that shards: :func:`requant.quantize` of each whole checkpoint matrix,
unpacked to one code an element, and plain slices of that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil

import numpy as np
import pytest
import torch
from requant_ranks import run_ranks
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import requant
from requant.errors import CheckpointError
from requant.layers.embedding import OutputHead
from requant.layers.experts import Experts
from requant.layers.latent import LatentProjection
from requant.layers.linear import column_linear, merged_linear, qkv_linear
from requant.layers.row_linear import RowLinear
from requant.loading import Staging, load, make_plan, read_headers
from requant.loading.cache import USABLE, Entry, Identity, Store, layout, make_writer
from requant.models.attention import head_shares
from requant.parallel import Ranks
from requant.recipe import Recipe

FORMATS = ["ptpc_fp8", "per_block_fp8", "mxfp4"]
GROUPS = {"ptpc_fp8": (1, 0), "per_block_fp8": (128, 128), "mxfp4": (1, 32)}
SIZES = [1, 2, 4]
TINY = Staging(slab_bytes=20_000, slabs=3, threads=2)


@dataclass
class Piece:
    """What a rank must have of one checkpoint matrix, in the order in which they stack."""

    tensor: str
    rows: range
    columns: range
    expert: int | None = None


@dataclass
class Kind:
    """One kind of layer: its checkpoint matrices, the layer of a rank, and what that rank must have."""

    tensors: dict[str, tuple[int, ...]]
    make: Callable[[Ranks], nn.Module]
    pieces: Callable[[int, int, bool], dict[str, list[Piece]]]


def share(size: int, ranks: int, rank: int) -> range:
    """As numpy splits an array: the larger ones first."""
    part = np.array_split(np.arange(size), ranks)[rank]
    return range(int(part[0]), int(part[-1]) + 1)


def column(tensors: dict[str, int], k: int, make: Callable[[Ranks], nn.Module]) -> Kind:
    def pieces(size: int, rank: int, ep: bool) -> dict[str, list[Piece]]:
        return {"weight": [Piece(name, share(n, size, rank), range(k)) for name, n in tensors.items()]}

    return Kind({name: (n, k) for name, n in tensors.items()}, make, pieces)


def row(n: int, k: int) -> Kind:
    def make(ranks: Ranks) -> nn.Module:
        return RowLinear("m.down", k, n, ranks, ranks.shares(k, "size"))

    def pieces(size: int, rank: int, ep: bool) -> dict[str, list[Piece]]:
        return {"weight": [Piece("m.down", range(n), share(k, size, rank))]}

    return Kind({"m.down": (n, k)}, make, pieces)


def qkv(heads: int, kv_heads: int, dim: int, k: int) -> Kind:
    def make(ranks: Ranks) -> nn.Module:
        own = head_shares(heads, kv_heads, ranks)[ranks.rank]
        return qkv_linear("m.qkv", k, heads, kv_heads, dim, own=own if ranks.size > 1 else None)

    def pieces(size: int, rank: int, ep: bool) -> dict[str, list[Piece]]:
        each = heads // kv_heads
        if size <= kv_heads:
            keys = share(kv_heads, size, rank)
            queries = range(keys.start * each, keys.stop * each)
        else:
            per_key = size // kv_heads
            keys = range(rank // per_key, rank // per_key + 1)
            queries = share(each, per_key, rank % per_key)
            queries = range(keys.start * each + queries.start, keys.start * each + queries.stop)
        rows = {"m.q_proj": queries, "m.k_proj": keys, "m.v_proj": keys}
        return {"weight": [Piece(t, range(r.start * dim, r.stop * dim), range(k)) for t, r in rows.items()]}

    whole = {"m.q_proj": heads * dim, "m.k_proj": kv_heads * dim, "m.v_proj": kv_heads * dim}
    return Kind({name: (n, k) for name, n in whole.items()}, make, pieces)


def replicated(rows: dict[str, int], k: int) -> Kind:
    return Kind(
        {f"m.{name}": (n, k) for name, n in rows.items()},
        lambda ranks: merged_linear("m.fused", k, rows),
        lambda size, rank, ep: {"weight": [Piece(f"m.{name}", range(n), range(k)) for name, n in rows.items()]},
    )


def latent(heads: int, dim: int, k: int) -> Kind:
    def make(ranks: Ranks) -> nn.Module:
        return LatentProjection("m.kv_b", heads, k, dim // 2, dim - dim // 2, ranks.split(heads, "heads"))

    def pieces(size: int, rank: int, ep: bool) -> dict[str, list[Piece]]:
        own = share(heads, size, rank)
        return {"weight": [Piece("m.kv_b", range(own.start * dim, own.stop * dim), range(k))]}

    return Kind({"m.kv_b": (heads * dim, k)}, make, pieces)


def experts(e: int, hidden: int, inner: int, stacked: bool) -> Kind:
    def make(ranks: Ranks) -> nn.Module:
        return Experts("m.experts", e, hidden, inner, "silu", ranks=ranks)

    def pieces(size: int, rank: int, ep: bool) -> dict[str, list[Piece]]:
        own = share(e, size, rank) if ep else range(e)
        part = range(inner) if ep else share(inner, size, rank)
        w13, w2 = [], []
        for expert in own:
            for name in ("gate_proj", "up_proj"):
                w13.append(Piece(f"m.experts.{expert}.{name}", part, range(hidden), expert - own.start))
            w2.append(Piece(f"m.experts.{expert}.down_proj", range(hidden), part, expert - own.start))
        return {"w13_weight": w13, "w2_weight": w2}

    tensors: dict[str, tuple[int, ...]] = {}
    for expert in range(e):
        for name in ("gate_proj", "up_proj"):
            tensors[f"m.experts.{expert}.{name}"] = (inner, hidden)
        tensors[f"m.experts.{expert}.down_proj"] = (hidden, inner)
    kind = Kind(tensors, make, pieces)
    kind.stacked = stacked  # type: ignore[attr-defined]
    return kind


KINDS = {
    "column": column({"m.q_b": 330}, 200, lambda ranks: column_linear("m.q_b", 200, {"q_b": 330}, "size", ranks=ranks)),
    "merged, a block split in 4": column(
        {"m.gate": 200, "m.up": 200}, 96,
        lambda ranks: column_linear("m.gate_up", 96, {"gate": 200, "up": 200}, "size", ranks=ranks),
    ),
    "row of 96 columns a rank": row(150, 384),
    "row of 192 columns a rank": row(40, 768),
    "row of odd columns": row(130, 332 + 7),
    "row inside one group": row(17, 50),
    "qkv": qkv(8, 4, 24, 136),
    "qkv, keys replicated": qkv(6, 2, 40, 100),
    "qkv, uneven": qkv(10, 5, 24, 64),
    "replicated": replicated({"q_a": 150, "kv_a": 41}, 100),
    "latent": latent(6, 56, 72),
    "vocabulary": column({"lm_head": 301}, 100, lambda ranks: OutputHead("lm_head", 301, 100, ranks=ranks)),
    "experts": experts(5, 136, 192, stacked=False),
    "experts of 96, together": experts(4, 130, 384, stacked=True),
    "experts of odd size": experts(4, 64, 75, stacked=False),
}  # fmt: skip


def unpack(data: Tensor, name: str, k: int) -> Tensor:
    """One code an element, uint8 [N, K']: K, and what the storage has beyond it."""
    data = data.view(torch.uint8)
    if name != "mxfp4":
        return data
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


@cache
def source(shape: tuple[int, ...], seed: int) -> Tensor:
    """Values of many magnitudes, rows and columns that differ, zeros and a row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-6, 6, shape, generator=generator))
    weight[torch.rand(shape, generator=generator) < 0.02] = 0
    weight[shape[0] // 2] = 0
    return weight.to(torch.bfloat16)


def write(folder, kind: Kind, source_format: str) -> dict[str, Tensor]:
    """Write the checkpoint; returns the values that are quantized, bfloat16."""
    tensors, values = {}, {}
    for seed, (name, shape) in enumerate(kind.tensors.items()):
        weight = source(shape, seed)
        if source_format == "bf16":
            tensors[f"{name}.weight"] = weight
        else:
            q = requant.quantize(weight, source_format)
            suffix = "weight_scale_inv" if source_format == "per_block_fp8" else "weight_scale"
            tensors[f"{name}.weight"], tensors[f"{name}.{suffix}"] = q.data, q.scale
            weight = q.dequantize(torch.bfloat16)
        values[name] = weight
    if getattr(kind, "stacked", False):
        tensors = together(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return values


def together(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of all experts, as transformers names them."""
    count = 1 + max(int(name.split(".")[2]) for name in tensors)
    out = {}
    for suffix in sorted({name.partition("_proj.weight")[2] for name in tensors}):

        def get(expert: int, part: str, suffix: str = suffix) -> Tensor:
            return tensors[f"m.experts.{expert}.{part}_proj.weight{suffix}"]

        gate_up = [torch.cat([get(i, "gate"), get(i, "up")]) for i in range(count)]
        out[f"m.experts.gate_up_proj{suffix}"] = torch.stack(gate_up)
        out[f"m.experts.down_proj{suffix}"] = torch.stack([get(i, "down") for i in range(count)])
    return out  # fmt: skip


def load_ranks(folder, kind, size, format, source_format, ep, run_bytes, device, cached=None, after=None):
    sections = {
        "per_block_fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "mxfp4": {"quant_method": "mxfp4"},
    }
    config = {"quantization_config": sections[source_format]} if source_format in sections else {}
    target = {"lm_head": format} if "lm_head" in kind.tensors else {"*": format}
    recipe = Recipe.parse({"layer_quant_config": target} if format else {})

    def run(ranks: Ranks) -> nn.Module:
        model = nn.ModuleDict({"layer": kind.make(ranks)})
        plan = make_plan(
            model, read_headers(folder), recipe, name="m", config=config, dtype=torch.bfloat16,
            device=torch.device(device), ranks=ranks, run_bytes=run_bytes, cached=cached,
        )  # fmt: skip
        result = load(plan, model, staging=TINY)
        assert not (cached and any(step.converts for step in plan.steps))
        if after:
            after(plan, model)
        assert result.bytes_read == plan.bytes_to_read >= plan.bytes_wanted
        assert result.bytes_sent == 4 * sum(len(step.rows) for step in plan.steps if step.together)
        assert plan.layers[0].bytes_after == sum(
            p.nbytes for name, p in model["layer"].named_parameters() if "bias" not in name
        )
        return model["layer"].cpu()

    return run_ranks(size, run, expert_parallel=ep)


def check(layer: nn.Module, parameter: str, pieces: Sequence[Piece], values: dict[str, Tensor], format: str | None):
    data = layer.get_parameter(parameter).data
    if format is None:
        wanted = [values[p.tensor][p.rows.start : p.rows.stop, p.columns.start : p.columns.stop] for p in pieces]
        assert torch.equal(data.view(-1, data.shape[-1]), torch.cat(wanted))
        return
    scale = layer.get_parameter(f"{parameter}_scale").data
    row_group, column_group = GROUPS[format]
    data, scale = data.view(-1, data.shape[-1]), scale.view(-1, scale.shape[-1])
    at = scale_at = 0
    for piece in pieces:
        rows, columns = piece.rows, piece.columns
        k = values[piece.tensor].shape[1]
        whole = requant.quantize(values[piece.tensor], format)
        codes = unpack(whole.data, format, k)
        group = column_group or 1
        first = columns.start // group * group
        own = unpack(data[at : at + len(rows)], format, k)
        wanted = codes[rows.start : rows.stop, columns.start : columns.stop]
        lead = columns.start - first
        assert torch.equal(own[:, lead : lead + len(columns)], wanted)
        assert not own[:, :lead].any()
        assert not own[:, lead + len(columns) :].any()
        stored = min(ceil(columns.stop / group) * group, k) - first
        assert own.shape[1] == (ceil(stored / 32) * 32 if format == "mxfp4" else stored)
        blocks = range(rows.start // row_group, ceil(rows.stop / row_group))
        groups = range(first // group, ceil(columns.stop / group)) if column_group else range(1)
        wanted = whole.scale[blocks.start : blocks.stop, groups.start : groups.stop]
        got = scale[scale_at : scale_at + len(blocks)]
        assert torch.equal(got.view(torch.uint8), wanted.contiguous().view(torch.uint8).view(len(blocks), -1))
        at, scale_at = at + len(rows), scale_at + len(blocks)
    assert (at, scale_at) == (data.shape[0], scale.shape[0]), "there is more than there should be"


CASES = [
    (kind, format, source_format)
    for kind in KINDS
    for format in [*FORMATS, None]
    for source_format in ["bf16", "per_block_fp8"]
] + [(kind, "mxfp4", "mxfp4") for kind in KINDS]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("kind", "format", "source_format"), CASES)
def test_ranks_have_the_slices_of_the_unsharded_result(kind, format, source_format, device, tmp_path):
    spec = KINDS[kind]
    values = write(tmp_path, spec, source_format)
    if format is None and source_format != "bf16":
        format = source_format  # kept
    for size in SIZES:
        for ep in [False, True] if "experts" in kind and size > 1 else [False]:
            for run_bytes in [16 * 1024, 1] if size > 1 else [1]:
                layers, sent = load_ranks(tmp_path, spec, size, format, source_format, ep, run_bytes, device)
                for rank, layer in enumerate(layers):
                    for parameter, pieces in spec.pieces(size, rank, ep).items():
                        check(layer, parameter, pieces, values, format)
                compares = format == "ptpc_fp8" and run_bytes == 1 and not ep
                expected = {"max": 4 * row_parallel_rows(spec)} if compares and row_parallel_rows(spec) else {}
                assert sent == (expected if size > 1 else {})
    check_partition(spec)


def splits_bytes(spec: Kind, format: str, size: int, ep: bool) -> bool:
    """Whether two codes of a byte belong to two ranks."""
    runs = [piece.columns for rank in range(size) for p in spec.pieces(size, rank, ep).values() for piece in p]
    return format == "mxfp4" and any(run.start % 2 for run in runs)


def check_entry(entry: Entry, spec: Kind, values: dict[str, Tensor], format: str) -> None:
    """Whole matrices as one rank would quantize them, whoever wrote them; read without any code of requant's."""
    stored: dict[str, Tensor] = {}
    for file in entry.folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            stored |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    stacked = getattr(spec, "stacked", False)
    assert len(stored) == 2 * len(spec.tensors)
    for name, (n, _) in spec.tensors.items():
        key = f"{name}.weight"
        if stacked:
            _, _, expert, part = name.split(".")
            first = {
                "gate_proj": 2 * int(expert) * n,
                "up_proj": (2 * int(expert) + 1) * n,
                "down_proj": int(expert) * n,
            }
            key = f"m.experts.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}[{first[part]}]"
        wanted = requant.quantize(values[name], format)
        assert torch.equal(stored[key].view(torch.uint8), wanted.data.view(torch.uint8)), key
        assert torch.equal(stored[f"{key}_scale"], wanted.scale), key


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("source_format", ["bf16", "per_block_fp8"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_entry_is_for_any_number_of_ranks(kind, format, source_format, device, tmp_path, monkeypatch):
    if format == source_format:
        return  # nothing is quantized, and so nothing is cached
    monkeypatch.setattr(layout, "FILE_BYTES", 10_000)
    spec = KINDS[kind]
    values = write(tmp_path, spec, source_format)
    layouts = [(size, ep) for size in SIZES for ep in ([False, True] if "experts" in kind and size > 1 else [False])]
    for size, ep in layouts:
        store, identity = Store(tmp_path / f"cache-{size}-{ep}"), Identity("f", {})
        store.check_writable()

        def keep(plan, model, store=store, identity=identity):
            writer = make_writer(store, identity, plan, model, nonce=7)
            writer.start()
            writer.wait()

        load_ranks(tmp_path, spec, size, format, source_format, ep, 1, device, after=keep)
        entry = store.find(identity)
        if splits_bytes(spec, format, size, ep):
            assert entry is None
            assert all(state.state != USABLE for state in store.states())
            continue
        assert entry is not None
        with entry:
            check_entry(entry, spec, values, format)
            for other, other_ep in layouts:
                layers, sent = load_ranks(
                    tmp_path, spec, other, format, source_format, other_ep, 1, device, cached=entry
                )
                assert not sent
                for rank, layer in enumerate(layers):
                    for parameter, pieces in spec.pieces(other, rank, other_ep).items():
                        check(layer, parameter, pieces, values, format)


def row_parallel_rows(spec: Kind) -> int:
    """Rows of the matrices whose columns are spread."""
    return sum(shape[0] for name, shape in spec.tensors.items() if name.endswith(("m.down", "down_proj")))


def check_partition(spec: Kind) -> None:
    """What is expected of the ranks covers every matrix, so that no mistake in it can hide a missing piece."""
    for size in SIZES:
        for name, shape in spec.tensors.items():
            covered = torch.zeros(shape, dtype=torch.bool)
            for rank in range(size):
                for pieces in spec.pieces(size, rank, False).values():
                    for piece in pieces:
                        if piece.tensor == name:
                            covered[piece.rows.start : piece.rows.stop, piece.columns.start : piece.columns.stop] = True
            assert covered.all()


@pytest.mark.parametrize("run_bytes", [16 * 1024, 1])
@pytest.mark.parametrize("format", FORMATS)
def test_a_nan_in_one_ranks_share_is_an_error(format, run_bytes, tmp_path):
    spec = row(40, 512)
    write(tmp_path, spec, "bf16")
    weight = source((40, 512), 0).clone()
    weight[3, 500] = torch.nan
    save_file({"m.down.weight": weight}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor m.down.weight of .*: 1 of \d+ values are NaN or Inf"):
        load_ranks(tmp_path, spec, 4, format, "bf16", False, run_bytes, "cpu")
