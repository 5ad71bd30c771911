"""A model id of the Hugging Face Hub as a local folder: from its cache, and only if it is not there, downloaded."""

from __future__ import annotations

import re
from pathlib import Path

from routeguard.storage.folder import safetensors_files

_MODEL_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
_NEEDED = ["*.json", "model*.safetensors"]


def local_folder(place: str | Path) -> Path:
    """The path itself if it exists, or the cached (else downloaded) snapshot of a Hub model id such as "org/name".

    Only JSON and safetensors files are fetched. Raises ValueError when it is neither, or cannot be fetched.
    """
    path = Path(place)
    if path.exists():
        return path
    if not _MODEL_ID.match(str(place)):
        raise ValueError(f"{place} does not exist")
    cached = cached_folder(place)
    if cached is not None:
        try:
            safetensors_files(cached)  # a snapshot may hold only the config and the tokenizer
            return cached
        except ValueError:
            pass
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(place), allow_patterns=_NEEDED))
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{place} does not exist as a path, and as a model id of the Hub it is not in the cache and could not be "
            f"downloaded: {reason}"
        ) from error


def cached_folder(place: str | Path) -> Path | None:
    """The path itself if it exists, or what the local cache has of a Hub model id; None for neither. Downloads nothing.

    A cached snapshot may lack the weights.
    """
    path = Path(place)
    if path.exists():
        return path
    if not _MODEL_ID.match(str(place)):
        return None
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(place), allow_patterns=_NEEDED, local_files_only=True))
    except (OSError, ValueError):
        return None
