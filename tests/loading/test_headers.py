import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from requant.errors import CheckpointError
from requant.loading import read_headers
from requant.loading.headers import read_header


def write(file: Path, header: object, data: bytes = b"") -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    return file


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_tensors_lie_where_the_library_finds_them(tmp_path):
    tensors = {
        "b": torch.randn(3, 5),
        "a": torch.randn(7).bfloat16(),
        "f": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = read_headers(tmp_path)
    content = (tmp_path / "model.safetensors").read_bytes()
    assert set(checkpoint.tensors) == set(tensors)
    with safe_open(tmp_path / "model.safetensors", "pt") as library:
        for name, info in checkpoint.tensors.items():
            expected = library.get_tensor(name)
            assert info.shape == tuple(expected.shape)
            assert info.dtype == library.get_slice(name).get_dtype()
            raw = content[info.start : info.start + info.nbytes]
            assert raw == expected.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_shards_come_through_the_index(tiny):
    checkpoint = tiny.save(shards=3)
    assert set(checkpoint.tensors) == set(tiny.tensors)
    assert len({info.file for info in checkpoint.tensors.values()}) == 3


def test_files_without_an_index_are_all_read(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "two.safetensors")
    assert set(read_headers(tmp_path).tensors) == {"a", "b"}


def test_one_tensor_in_two_files(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor a is in two files: .*one\.safetensors and .*two\.safetensors"):
        read_headers(tmp_path)


def test_no_weights(tmp_path):
    with pytest.raises(CheckpointError, match=r"no weights in .*neither model\.safetensors nor"):
        read_headers(tmp_path)


def test_missing_shard(tiny):
    tiny.save(shards=2)
    (tiny.folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"shard model-00002-of-00002\.safetensors, .* is missing"):
        read_headers(tiny.folder)


def test_tensor_missing_from_its_shard(tiny):
    tiny.save(shards=2)
    index = tiny.folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map["ghost.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"tensor ghost\.weight is missing from .*model-00001"):
        read_headers(tiny.folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nonsense", "is not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "no 'weight_map'"),
        ('{"weight_map": {"a": 1}}', "tensor a is in 1, not in a file of that folder"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "not in a file of that folder"),
        ('{"weight_map": {"a": ".."}}', "not in a file of that folder|is missing"),
    ],
)
def test_corrupt_index(tmp_path, content, message):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        read_headers(tmp_path)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{nonsense", b"", "its header is not JSON"),
        (b"\xff\xfe{}", b"", "its header is not JSON"),
        ([], b"", "not a JSON object"),
        ({"a": {"dtype": "F32"}}, b"", "tensor a lacks a valid dtype, shape or data_offsets"),
        ({"a": entry("F32", [-1], 0, 4)}, bytes(4), "tensor a lacks a valid"),
        ({"a": entry("F32", [True], 0, 4)}, bytes(4), "tensor a lacks a valid"),
        ({"a": entry("X7", [1], 0, 4)}, bytes(4), "tensor a has the unknown dtype 'X7'"),
        ({"a": entry("F32", [2], 0, 4)}, bytes(4), r"tensor a takes 4 bytes, but F32 \[2\] needs 8"),
        ({"a": entry("F32", [1], 4, 0)}, bytes(4), r"tensor a takes -4 bytes"),
        ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 2, 6)}, bytes(6), "tensor b overlaps another"),
        ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 8, 12)}, bytes(12), "tensor b has a hole before it"),
        ({"a": entry("F32", [1], 0, 4)}, bytes(9), "5 bytes follow its last tensor"),
        (b'{"a": {}, "a": {}}', b"", "a is in its header twice"),
    ],
)
def test_corrupt_file(tmp_path, header, data, message):
    file = write(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_headers(tmp_path)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_truncated_within_a_tensor(tiny):
    tiny.save()
    file = tiny.folder / "model.safetensors"
    last = max(read_header(file), key=lambda info: info.start)
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=f"is truncated: .* tensor {last.name} is cut off"):
        read_headers(tiny.folder)


@pytest.mark.parametrize(("content", "message"), [(b"", "is truncated"), (b"\x10\0\0\0\0\0\0\0{}", "is truncated")])
def test_truncated_within_the_header(tmp_path, content, message):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_headers(tmp_path)


def test_absurd_header_length(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match="a safetensors header is not 18446744073709551615 bytes long"):
        read_headers(tmp_path)
