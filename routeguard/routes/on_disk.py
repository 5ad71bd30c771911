"""Describe a checkpoint folder to `resolve` from its `config.json` and safetensors headers, without torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from routeguard.routes.layouts import TensorInfo
from routeguard.routes.names import canonical_name

MAX_HEADER_BYTES = 100 * 2**20  # the format's own limit
DTYPE_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool",
}  # fmt: skip


def checkpoint_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a checkpoint folder. Raises ValueError if it is absent, not JSON, or names remote code only."""
    path = folder / "config.json"
    if not path.is_file():
        what = (
            "an adapter folder; give its base model"
            if (folder / "adapter_config.json").is_file()
            else "not a checkpoint"
        )
        raise ValueError(f"{folder} has no config.json ({what})")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict) or not config.get("model_type"):
        raise ValueError(f"{path} does not name a model_type; is it a Hugging Face model config?")
    return config


def checkpoint_tensors(folder: Path) -> dict[str, TensorInfo]:
    """Canonical name to `TensorInfo` (on-disk name) of every tensor of a safetensors checkpoint, sharded or not."""
    tensors: dict[str, TensorInfo] = {}
    for file in safetensors_files(folder):
        for name, entry in read_header(file).items():
            dtype = DTYPE_NAMES.get(entry["dtype"], entry["dtype"].lower())
            tensors[canonical_name(name)] = TensorInfo(name, tuple(entry["shape"]), dtype)
    return tensors


def safetensors_files(folder: Path) -> list[Path]:
    """The shards that the index names, or the only file. ValueError if none, one missing, or one outside."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        for name in names:
            if Path(name).name != name:
                raise ValueError(f"{index} names {name!r}, which is not a file inside the folder")
            if not (folder / name).is_file():
                raise ValueError(f"{index} names {name}, which is missing from {folder}")
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    pickles = sorted(folder.glob("pytorch_model*.bin"))
    if pickles:
        raise ValueError(
            f"{folder} holds pickled weights ({pickles[0].name}); load the model with transformers and call "
            "save_pretrained once to convert them to safetensors"
        )
    raise ValueError(f"{folder} holds no model.safetensors and no model.safetensors.index.json")


def read_header(file: Path) -> dict[str, dict[str, Any]]:
    """A safetensors header (JSON), without the metadata entry. Raises ValueError for a malformed file."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"{file} is not a safetensors file: its header claims {length} bytes, the file has {size}")
        try:
            header = json.loads(stream.read(length))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{file} has a malformed safetensors header: {error}") from None
    if not isinstance(header, dict):
        raise ValueError(f"{file} has a malformed safetensors header: not a JSON object")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if not (
            isinstance(entry, dict) and isinstance(entry.get("dtype"), str) and isinstance(entry.get("shape"), list)
        ):
            raise ValueError(f"{file} has a malformed entry for {name!r}")
    return header
