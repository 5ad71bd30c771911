"""Large checkpoints of a hybrid, written quickly: lfm2's names, random weights in bfloat16, and a start beside them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from routeguard import find_routes
from routeguard.storage.folder import stored_checkpoint
from routeguard.storage.header import read_header
from routeguard.storage.row_bytes import write_rows
from routeguard.storage.writer import Outgoing, write_safetensors

SHARD_BYTES = 2 * 10**9
BLOCK = 16 * 2**20  # bytes that are written at a time


def make_checkpoint(folder: Path, gigabytes: float, *, seed: int) -> tuple[int, int]:
    """Write a checkpoint with lfm2's names, full attention in every fourth layer. Returns (bytes, routing bytes)."""
    hidden = 1024 if gigabytes < 2 else 3072
    inner, kv, vocabulary = 4 * hidden, hidden // 4, 16_384
    per_layer = 2 * (3 * hidden * inner + 4 * hidden * hidden)
    num_layers = max(4, round((gigabytes * 1e9 - 2 * vocabulary * hidden) / per_layer))
    kinds = ["full_attention" if at % 4 == 2 else "conv" for at in range(num_layers)]
    config = {
        "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "hidden_size": hidden, "intermediate_size": inner,
        "block_auto_adjust_ff_dim": False, "num_hidden_layers": num_layers, "num_attention_heads": hidden // 64,
        "num_key_value_heads": kv // 64, "layer_types": kinds, "vocab_size": vocabulary, "conv_L_cache": 3,
        "dtype": "bfloat16", "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for at, kind in enumerate(kinds):
        layer = f"model.layers.{at}"
        shapes |= {f"{layer}.operator_norm.weight": (hidden,), f"{layer}.ffn_norm.weight": (hidden,)}
        shapes |= {f"{layer}.feed_forward.w{n}.weight": (inner, hidden) for n in (1, 3)}
        shapes[f"{layer}.feed_forward.w2.weight"] = (hidden, inner)
        if kind == "conv":
            shapes |= {
                f"{layer}.conv.in_proj.weight": (3 * hidden, hidden),
                f"{layer}.conv.conv.weight": (hidden, 1, 3),
            }
            shapes[f"{layer}.conv.out_proj.weight"] = (hidden, hidden)
        else:
            shapes |= {f"{layer}.self_attn.{n}_layernorm.weight": (64,) for n in "qk"}
            shapes |= {f"{layer}.self_attn.{n}_proj.weight": (kv, hidden) for n in "kv"}
            shapes |= {f"{layer}.self_attn.{n}.weight": (hidden, hidden) for n in ("q_proj", "out_proj")}
    shapes["model.embedding_norm.weight"] = (hidden,)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_bytes(os.urandom(2_000_000))
    block = _weights(seed)
    shards: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        length = 2 * int(np.prod(shape))
        if size + length > SHARD_BYTES and shards[-1]:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += length
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        outgoing = [
            Outgoing(n, "bfloat16", shapes[n], 2 * int(np.prod(shapes[n])), _filled(block, shapes[n])) for n in names
        ]
        write_safetensors(folder / file, outgoing, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    total = sum(2 * int(np.prod(shape)) for shape in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    routing = sum(2 * int(np.prod(s)) for n, s in shapes.items() if "self_attn.q_proj" in n or "self_attn.k_proj" in n)
    return total, routing


def make_base(tuned: Path, base: Path, *, seed: int) -> None:
    """The start of a checkpoint: its own routing rows, and holes where nothing is read, so that it takes no cache."""
    base.mkdir()
    for path in tuned.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, base / path.name)
            continue
        header = read_header(path)
        with path.open("rb") as source, (base / path.name).open("wb") as target:
            target.write(source.read(header.data_start))
            target.truncate(path.stat().st_size)
    data = _weights(seed)
    stored = stored_checkpoint(base)
    for route in find_routes(base):
        tensor = stored[route.parameter]
        with tensor.file.open("r+b") as stream:
            write_rows(stream, tensor, route.rows, route.dim, _filled(data, tensor.shape))


def _weights(seed: int) -> bytes:
    """A block of random bfloat16 weights, which fills every tensor over and over."""
    values = np.random.default_rng(seed).normal(0, 0.02, BLOCK // 2).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def _filled(block: bytes, shape: Sequence[int]) -> list[bytes]:
    left = 2 * int(np.prod(shape))
    return [block[: min(len(block), left - at)] for at in range(0, left, len(block))]
