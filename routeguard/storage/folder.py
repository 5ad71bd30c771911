"""Checkpoint folders: their config, which files hold their weights, and where every tensor lies. No torch."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from routeguard.routes.names import canonical_name
from routeguard.storage.header import StoredTensor, read_header

MAX_JSON_BYTES = 100 * 2**20
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")


def checkpoint_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a checkpoint folder. Raises ValueError if it is absent, not JSON, or names no model type."""
    path = folder / "config.json"
    if not path.is_file():
        what = (
            "an adapter folder; give its base model"
            if (folder / "adapter_config.json").is_file()
            else "not a checkpoint"
        )
        raise ValueError(f"{folder} has no config.json ({what}){_how_to_consolidate(folder)}")
    config = read_json(path)
    if not isinstance(config, dict) or not config.get("model_type"):
        raise ValueError(f"{path} does not name a model_type; is it a Hugging Face model config?")
    return config


def stored_checkpoint(folder: Path) -> dict[str, StoredTensor]:
    """Canonical name to `StoredTensor` (with its name on disk) of every tensor of a checkpoint, sharded or not.

    Raises ValueError when files are missing or malformed, or a tensor is in another shard than the index says.
    """
    files = safetensors_files(folder)
    tensors = stored_tensors(files)
    if files[0].name != SINGLE_NAME:
        index = folder / INDEX_NAME
        found = {tensor.name: tensor.file.name for tensor in tensors.values()}
        wrong = [name for name, file in _weight_map(index).items() if found.get(name, file) != file]
        if wrong:
            raise ValueError(
                f"{index} and the shards disagree on {len(wrong)} tensors: {wrong[0]!r} is in {found[wrong[0]]}; "
                "the folder is mixed from two checkpoints"
            )
    return tensors


def stored_tensors(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """`stored_checkpoint` for bare files. ValueError for a malformed file, or a tensor that is there twice."""
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in read_header(file).tensors.values():
            name = canonical_name(tensor.name)
            if name in tensors:
                other = tensors[name]
                raise ValueError(
                    f"{file} holds {tensor.name!r}, and {other.file} holds the same tensor, {other.name!r}"
                )
            tensors[name] = tensor
    return tensors


def safetensors_files(folder: Path) -> list[Path]:
    """`model.safetensors`, or else the shards that the index names: what transformers loads, in its order.

    Raises ValueError if there are none, one is missing, or one lies outside of the folder.
    """
    single = folder / SINGLE_NAME
    if single.is_file():
        return [single]
    index = folder / INDEX_NAME
    if index.is_file():
        names = sorted(set(_weight_map(index).values()))
        for name in names:
            if Path(name).name != name or "\\" in name or name in ("", ".", ".."):
                raise ValueError(f"{index} names {name[:200]!r}, which is not a file inside the folder")
            if not (folder / name).is_file():
                raise ValueError(f"{index} names {name}, which is missing from {folder}")
        return [folder / name for name in names]
    pickles = sorted(folder.glob("pytorch_model*.bin"))
    if pickles:
        source = shlex.quote(str(folder))
        raise ValueError(
            f"{folder} holds pickled weights ({pickles[0].name}), and pickles are not opened. Convert them once:\n  "
            "python -c 'import sys; from transformers import AutoModelForCausalLM as M; "
            'M.from_pretrained(sys.argv[1], dtype="auto").save_pretrained(sys.argv[1] + "-safetensors")\' '
            f"{source}"
        )
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    beside = f" (there are {', '.join(others[:3])}; name the one you mean {SINGLE_NAME})" if others else ""
    raise ValueError(f"{folder} holds no {SINGLE_NAME} and no {INDEX_NAME}{beside}{_how_to_consolidate(folder)}")


def weight_files(folder: Path) -> list[Path]:
    """Every file on the top level that may hold weights, whether or not transformers would load it."""
    patterns = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.npz")
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.name != "training_args.bin"})


def holds_model(folder: Path) -> bool:
    """Whether a folder holds a whole model: a config and weights."""
    return (folder / "config.json").is_file() and any((folder / name).is_file() for name in (SINGLE_NAME, INDEX_NAME))


def is_adapter_folder(folder: Path) -> bool:
    """Whether a folder holds a PEFT adapter and no whole model."""
    whole = (SINGLE_NAME, INDEX_NAME)
    return (folder / "adapter_config.json").is_file() and not any((folder / name).is_file() for name in whole)


def adapter_file(folder: Path) -> Path:
    """The weights of a PEFT adapter folder. Raises ValueError if they are absent or pickled."""
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        pickled = " (the pickled adapter_model.bin is not opened: load the adapter with PEFT and save it again)"
        raise ValueError(
            f"{folder} holds adapter_config.json but no adapter_model.safetensors"
            f"{pickled if (folder / 'adapter_model.bin').is_file() else ''}"
        )
    return file


def tokenizer_files(folder: Path) -> list[Path]:
    """Files of a folder that may hold a tokenizer."""
    return [path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)]


def quantisation_of(config: Mapping[str, Any]) -> str:
    """The method in `quantization_config` ("bitsandbytes", "gptq", "fp8"), "" for a plain checkpoint."""
    settings = config.get("quantization_config") or config.get("compression_config") or config.get("quantization")
    if not settings and isinstance(config.get("text_config"), dict):
        settings = config["text_config"].get("quantization_config")
    if not settings:
        return ""
    return str(settings.get("quant_method") or "an unknown method") if isinstance(settings, dict) else str(settings)


def read_json(path: Path) -> Any:
    """A JSON file of at most 100 MiB. Raises ValueError, with the path, if it is not JSON."""
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; no JSON file of a checkpoint is that large")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def _weight_map(index: Path) -> dict[str, str]:
    content = read_json(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{index} has no weight_map from tensor names to file names")
    return names


def _how_to_consolidate(folder: Path) -> str:
    """For the sharded formats of distributed training: what they are, and the command that makes one checkpoint."""
    states = [folder, *sorted(path for path in folder.glob("pytorch_model_fsdp*") if path.is_dir())]
    dcp = next((state for state in states if (state / ".metadata").is_file() or any(state.glob("*.distcp"))), None)
    if dcp is not None:
        return (
            f". {dcp} is a sharded FSDP checkpoint (torch.distributed.checkpoint). Merge it first:\n"
            f"  accelerate merge-weights {shlex.quote(str(dcp))} {shlex.quote(f'{folder}-merged')}\n"
            "and put config.json and the tokenizer beside the result"
        )
    zero = next(folder.glob("global_step*/*zero_pp_rank*"), None) or next(folder.glob("zero_pp_rank*"), None)
    if zero is not None or (folder / "zero_to_fp32.py").is_file():
        return (
            f". {folder} is a sharded DeepSpeed ZeRO checkpoint. Merge it first, with the script that DeepSpeed put "
            f"there:\n  python {shlex.quote(f'{folder}/zero_to_fp32.py')} {shlex.quote(str(folder))} "
            f"{shlex.quote(f'{folder}-merged')} --safe_serialization\n"
            "and put config.json and the tokenizer beside the result"
        )
    return ""
