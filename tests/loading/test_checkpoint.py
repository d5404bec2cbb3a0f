import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils._safetensors import SafetensorsFileMetadata, SafetensorsRepoMetadata
from huggingface_hub.utils._safetensors import TensorInfo as RemoteTensor

from requant.errors import CheckpointError
from requant.loading import inspect, locate, read_config, read_headers


def response(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co/some/model"))


def test_a_local_folder_is_taken_as_it_is(tiny):
    assert locate(str(tiny.folder)) == tiny.folder


@pytest.mark.parametrize("model", ["./missing", "/no/such/folder", "~/no-such-folder", "a/b/c"])
def test_missing_folder(model):
    with pytest.raises(CheckpointError, match=f"no such folder: {model}"):
        locate(model)


@pytest.mark.parametrize("model", ["x" * 5000, "~nosuchuser/model"])
def test_a_name_that_cannot_be_looked_for(model):
    with pytest.raises(CheckpointError, match=f"cannot look for {model}: ."):
        locate(model)


def test_a_folder_that_may_not_be_entered(monkeypatch):
    def forbid(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.is_dir", forbid)
    with pytest.raises(CheckpointError, match="cannot look for /root/model: Permission denied"):
        locate("/root/model")


def test_a_file_is_no_folder(tmp_path):
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(CheckpointError, match="is a file; --model takes a folder"):
        locate(str(file))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (hub_errors.RepositoryNotFoundError("no", response=response(404)), "nor a repository on the Hugging Face Hub"),
        (hub_errors.GatedRepoError("no", response=response(403)), "some/model is gated"),
        (hub_errors.RevisionNotFoundError("no", response=response(404)), "some/model has no revision 'v1'"),
        (hub_errors.HfHubHTTPError("a\nb", response=response(500)), "cannot download some/model: a$"),
        (hub_errors.HFValidationError("no"), "neither an existing folder nor a Hugging Face id"),
        (hub_errors.LocalEntryNotFoundError("no"), "Hub cannot be reached"),
        (hub_errors.OfflineModeIsEnabled("no"), "Hub cannot be reached"),
        (httpx.ConnectError("no"), "Hub cannot be reached"),
        (OSError("disk full"), "cannot download some/model: disk full"),
    ],
)
def test_what_the_hub_raises_becomes_one_line(monkeypatch, error, message):
    def raise_error(*args, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", raise_error)
    with pytest.raises(CheckpointError, match=message):
        locate("some/model", "v1")


def test_download_takes_weights_and_tokenizer_but_no_code(monkeypatch, tmp_path):
    asked = {}

    def download(model, **options):
        asked.update(options, model=model)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate("some/model", "v1") == tmp_path
    files = ["config.json", "model-1.safetensors", "tokenizer.model", "merges.txt", "chat_template.jinja"]
    unwanted = ["modeling.py", "pytorch_model.bin", "original/model.safetensors", "consolidated.safetensors"]
    chosen = list(
        huggingface_hub.utils.filter_repo_objects(
            files + unwanted, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
        )
    )
    assert chosen == files
    assert (asked["model"], asked["revision"]) == ("some/model", "v1")


def test_inspecting_an_id_downloads_no_weight(monkeypatch, tiny):
    local = tiny.save(shards=2)
    asked = {}

    def download(model, **options):
        asked.update(options)
        return str(tiny.folder)

    def metadata(model, **options):
        files: dict = {}
        for info in local.tensors.values():
            tensor = RemoteTensor(info.dtype, list(info.shape), (info.start, info.start + info.nbytes))
            files.setdefault(info.file.name, {})[info.name] = tensor
        weight_map = {info.name: info.file.name for info in local.tensors.values()}
        parsed = {file: SafetensorsFileMetadata({}, tensors) for file, tensors in files.items()}
        return SafetensorsRepoMetadata(None, True, weight_map, parsed)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", metadata)
    assert inspect("some/model") == local
    assert not any("safetensors" in pattern for pattern in asked["allow_patterns"])


def test_inspecting_a_folder_reads_its_headers(tiny):
    tiny.save()
    assert inspect(str(tiny.folder)) == read_headers(tiny.folder)


def test_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json in"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 96}')
    assert read_config(tmp_path) == {"hidden_size": 96}
