"""Finding a checkpoint: a local folder, or a Hugging Face id."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub as hub
from huggingface_hub import errors as hub_errors

from requant.errors import CheckpointError, one_line
from requant.loading.headers import Checkpoint, TensorInfo, collect, read_headers

# Configuration and tokenizer; never code (*.py) and never pickles (*.bin).
_METADATA = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
_WEIGHTS = ["*.safetensors"]
# Subfolders and Mistral's consolidated files hold the same weights under other names.
_DUPLICATES = ["*/*", "consolidated*"]


def locate(model: str, revision: str | None = None) -> Path:
    """The folder of a checkpoint, downloaded if ``model`` is a Hugging Face id (``Qwen/Qwen3-8B``).

    Args:
        model: A local folder or a Hugging Face id.
        revision: Branch, tag or commit of a Hugging Face id.

    Raises:
        CheckpointError: The folder or the repository does not exist, or the network does not answer.
    """
    return _local(model) or _download(model, revision, _METADATA + _WEIGHTS)


def locate_metadata(model: str, revision: str | None = None) -> Path:
    """As :func:`locate`, but of a Hugging Face id only configuration and tokenizer are downloaded.

    Raises:
        CheckpointError: As :func:`locate`.
    """
    return _local(model) or _download(model, revision, _METADATA)


def inspect(model: str, revision: str | None = None) -> Checkpoint:
    """A checkpoint's headers, for which no weight is downloaded.

    ``folder`` of the result holds configuration and tokenizer in any case, weights only if it is local.

    Raises:
        CheckpointError: As :func:`locate` and :func:`~requant.loading.headers.read_headers`.
    """
    folder = _local(model)
    if folder:
        return read_headers(folder)
    folder = _download(model, revision, _METADATA)
    with _explained(model, revision):
        remote = hub.get_safetensors_metadata(model, revision=revision)
    # The header's own length is not told, so positions are relative to the first tensor; only their order is used.
    files = (
        [
            TensorInfo(
                name, t.dtype, tuple(t.shape), folder / file, t.data_offsets[0], t.data_offsets[1] - t.data_offsets[0]
            )
            for name, t in metadata.tensors.items()
        ]
        for file, metadata in remote.files_metadata.items()
    )
    return collect(folder, files)


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a checkpoint.

    Raises:
        CheckpointError: It is missing or not a JSON object.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"no config.json in {folder}") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    return config


def _local(model: str) -> Path | None:
    """The local folder that ``model`` names, or None if it can only be a Hugging Face id."""
    try:
        path = Path(model).expanduser()
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, RuntimeError) as error:  # too long a name, a folder that may not be entered, an unknown ~user
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"cannot look for {model}: {reason}") from error
    if is_folder:
        return path
    if exists:
        raise CheckpointError(f"{model} is a file; --model takes a folder or a Hugging Face id")
    if model.startswith((".", "/", "~", "\\")) or model.count("/") > 1:
        raise CheckpointError(f"no such folder: {model}")
    return None


def _download(model: str, revision: str | None, patterns: list[str]) -> Path:
    with _explained(model, revision):
        return Path(
            hub.snapshot_download(model, revision=revision, allow_patterns=patterns, ignore_patterns=_DUPLICATES)
        )


@contextmanager
def _explained(model: str, revision: str | None) -> Iterator[None]:
    """Turn what the Hub's client raises into one line."""
    try:
        yield
    except hub_errors.HFValidationError as error:
        raise CheckpointError(f"{model!r} is neither an existing folder nor a Hugging Face id (OWNER/NAME)") from error
    except hub_errors.GatedRepoError as error:
        raise CheckpointError(
            f"{model} is gated: accept its terms on huggingface.co and log in (hf auth login)"
        ) from error
    except hub_errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{model} is neither an existing folder nor a repository on the Hugging Face Hub"
        ) from error
    except hub_errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{model} has no revision {revision!r} on the Hugging Face Hub") from error
    except hub_errors.NotASafetensorsRepoError as error:
        raise CheckpointError(f"{model} has no weights in safetensors files; other kinds are not read") from error
    except hub_errors.SafetensorsParsingError as error:
        raise CheckpointError(f"{model} has a corrupt safetensors file: {one_line(error)}") from error
    except (hub_errors.LocalEntryNotFoundError, hub_errors.OfflineModeIsEnabled, httpx.TransportError) as error:
        raise CheckpointError(
            f"{model} is not a folder here, and the Hugging Face Hub cannot be reached to look for it there"
        ) from error
    except (hub_errors.HfHubHTTPError, OSError) as error:
        raise CheckpointError(f"cannot download {model}: {one_line(error)}") from error
