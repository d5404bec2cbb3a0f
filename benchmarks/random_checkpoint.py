"""Write a checkpoint of random weights with the dimensions of a public model.

    python benchmarks/random_checkpoint.py --config benchmarks/configs/qwen3-30b-a3b.json --output-dir /dev/shm/q30
    python benchmarks/random_checkpoint.py --config benchmarks/configs/deepseek-v3.json --layers 4 --output-dir v3

Matrices are normally distributed with a deviation of 0.02, norms are 1, biases 0; BF16, one file a layer, the MTP layer
included where the configuration has one. Values come from the GPU where there is one. No tokenizer is written.
"""

import argparse
import json
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from requant.models.registry import model_class
from requant.parallel import Placement

_STD = 0.02


def placements(config: Any, architectures: list[str]) -> dict[str, Placement]:
    """The tensors of a checkpoint, by name."""
    made = model_class(architectures)
    drafts = "mtp" in signature(made).parameters and getattr(config, "num_nextn_predict_layers", 0)
    model = made(config, **({"mtp": True} if drafts else {}))
    found = {}
    for layer in (*model.quantizable(), *model.plain()):
        found.update({placement.tensor: placement for placement in layer.placements})
    embedding = found["model.embed_tokens.weight"]
    return found | dict.fromkeys(model.copies, embedding)


def values(name: str, placement: Placement, device: torch.device) -> Tensor:
    """Random ones, of whatever kind the name says."""
    dtype = placement.dtype or torch.bfloat16
    if name.endswith("bias"):
        return torch.zeros(placement.shape, dtype=dtype)
    if len(placement.shape) == 1:
        return torch.ones(placement.shape, dtype=dtype)
    return (torch.randn(placement.shape, device=device, dtype=torch.float32) * _STD).to(dtype).cpu()


def group_of(name: str) -> str:
    """``model.layers.3`` of what is in a layer, else ``""``."""
    parts = name.split(".")
    return ".".join(parts[:3]) if len(parts) > 3 and parts[2].isdigit() else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="a config.json")
    parser.add_argument("--layers", type=int, help="only so many layers (default: the configuration's)")
    parser.add_argument("--output-dir", type=Path, required=True)
    arguments = parser.parse_args()
    raw = json.loads(arguments.config.read_text())
    if arguments.layers:
        raw["num_hidden_layers"] = arguments.layers
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    (arguments.output_dir / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = AutoConfig.from_pretrained(arguments.output_dir)
    groups: dict[str, dict[str, Placement]] = defaultdict(dict)
    for name, placement in placements(config, raw["architectures"]).items():
        groups[group_of(name)][name] = placement
    begin, files, total = time.perf_counter(), {}, 0
    with ThreadPoolExecutor(6) as pool:
        waiting = []
        for index, tensors in enumerate(groups.values()):
            made = {name: values(name, placement, device) for name, placement in tensors.items()}
            total += sum(tensor.nbytes for tensor in made.values())
            file = f"model-{index:05d}.safetensors"
            files.update(dict.fromkeys(made, file))
            waiting.append(pool.submit(save_file, made, arguments.output_dir / file, {"format": "pt"}))
            del made
            if len(waiting) > 8:  # no more than that is held in memory
                waiting.pop(0).result()
        for future in waiting:
            future.result()
    index_file = arguments.output_dir / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": files}, indent=2) + "\n")
    print(f"{total / 1e9:.1f} GB in {len(files)} tensors, {time.perf_counter() - begin:.1f} s: {arguments.output_dir}")


if __name__ == "__main__":
    main()
