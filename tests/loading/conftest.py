"""A tiny model that satisfies the protocols of loading, and checkpoints for it."""

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from requant.formats import Format
from requant.loading import Checkpoint, Plan, make_plan, read_headers
from requant.parallel import Placement
from requant.recipe import LayerNames, Recipe

HIDDEN, VOCAB, ROWS = 96, 50, {"q_proj": 200, "k_proj": 72, "v_proj": 40}


class Weights(nn.Module):
    """A plain module with one parameter."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.placements = (Placement(f"{name}.weight", shape),)

    def build(self, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = nn.Parameter(torch.empty(self.placements[0].shape, dtype=dtype, device=device), False)


class Matrices(nn.Module):
    """A quantizable module made of stacked matrices."""

    def __init__(
        self, name: str, parts: Mapping[str, int], k: int, bias: bool = False, tied_to: Weights | None = None
    ) -> None:
        super().__init__()
        self.names = LayerNames(name, tuple(parts), protected=name if name == "lm_head" else None)
        self.tied = tied_to is not None
        self.rows, self.k, self.bias_wanted = tuple(parts.values()), k, bias
        placements, offset = [], 0
        for part, n in parts.items():
            placements.append(Placement(f"{part}.weight", (n, k), "weight", offset))
            if bias:
                placements.append(Placement(f"{part}.bias", (n,), "bias", offset))
            offset += n
        self.placements = tied_to.placements if tied_to else tuple(placements)
        self.finished = False

    def match_checkpoint(self, tensors: Container[str]) -> None:
        pass

    def activation(self, format: Format | None) -> str | None:
        return format.activation if format else None

    def layout_bytes(self, format: Format | None, dtype: torch.dtype, device: torch.device) -> int:
        n = sum(self.rows)
        return n * self.k * 4 if format and device.type == "cpu" else 0

    def build(self, format: Format | None, dtype: torch.dtype, device: torch.device) -> None:
        if self.tied and format is None:
            return
        n = sum(self.rows)
        if format is None:
            self.weight = nn.Parameter(torch.empty(n, self.k, dtype=dtype, device=device), False)
        else:
            scales = [format.scale_shape(rows, self.k) for rows in self.rows]
            data = torch.empty(format.data_shape(n, self.k), dtype=format.data_dtype, device=device)
            scale = torch.empty(
                (sum(rows for rows, _ in scales), scales[0][1]), dtype=format.scale_dtype, device=device
            )
            self.weight, self.weight_scale = nn.Parameter(data, False), nn.Parameter(scale, False)
        if self.bias_wanted:
            self.bias = nn.Parameter(torch.zeros(n, dtype=dtype, device=device), False)

    def finish(self) -> None:
        assert not self.finished
        self.finished = True


class TinyModel(nn.Module):
    """Embedding, one layer with a fused and a single matrix, a head."""

    def __init__(self, tied: bool, layers: int = 1) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = Weights("model.embed_tokens", (VOCAB, HIDDEN))
        self.model.layers = nn.ModuleList()
        for i in range(layers):
            layer, name = nn.Module(), f"model.layers.{i}"
            layer.norm = Weights(f"{name}.norm", (HIDDEN,))
            layer.self_attn = nn.Module()
            parts = {f"{name}.self_attn.{part}": rows for part, rows in ROWS.items()}
            layer.self_attn.qkv_proj = Matrices(f"{name}.self_attn.qkv_proj", parts, HIDDEN, bias=True)
            own = f"{name}.self_attn.o_proj"
            layer.self_attn.o_proj = Matrices(own, {own: HIDDEN}, 200)
            self.model.layers.append(layer)
        self.lm_head = Matrices(
            "lm_head", {"lm_head": VOCAB}, HIDDEN, tied_to=self.model.embed_tokens if tied else None
        )


class Tiny:
    """A tiny model with a checkpoint folder of its own."""

    def __init__(self, folder: Path, tied: bool = False, dtype: torch.dtype = torch.bfloat16, layers: int = 1) -> None:
        self.folder, self.tied, self.layers = folder, tied, layers
        self.model = TinyModel(tied, layers)
        generator = torch.Generator().manual_seed(0)
        self.tensors: dict[str, torch.Tensor] = {}
        for module in self.model.modules():
            for placement in getattr(module, "placements", ()):
                if placement.tensor not in self.tensors:
                    values = torch.randn(placement.shape, generator=generator)
                    self.tensors[placement.tensor] = values.to(dtype)

    def save(self, shards: int = 1) -> Checkpoint:
        """Write the checkpoint and read its headers."""
        names = list(self.tensors)
        if shards == 1:
            save_file(self.tensors, self.folder / "model.safetensors")
        else:
            import json

            where = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
            for shard in set(where.values()):
                save_file({n: self.tensors[n] for n in names if where[n] == shard}, self.folder / shard)
            (self.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        return read_headers(self.folder)

    def plan(self, recipe: Any = None, checkpoint: Checkpoint | None = None, **changes: Any) -> Plan:
        """Plan the model on the CPU in bfloat16."""
        arguments: dict[str, Any] = {
            "name": "tiny",
            "config": {},
            "dtype": torch.bfloat16,
            "device": torch.device("cpu"),
        }
        return make_plan(self.model, checkpoint or self.save(), Recipe.parse(recipe), **(arguments | changes))


@pytest.fixture
def make_tiny(tmp_path: Path):
    def make(**options: Any) -> Tiny:
        return Tiny(tmp_path, **options)

    return make


@pytest.fixture
def tiny(make_tiny) -> Tiny:
    return make_tiny()


@pytest.fixture
def matrices() -> type[Matrices]:
    return Matrices
