"""Routes of a saved checkpoint: read without torch, in on-disk names, and the same bytes as in memory."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from routeguard.routes.collection import ROLES, Route, Routes
from routeguard.routes.find import find_routes
from tests.test_routes_table import NO_FULL_LAYER, QUICK
from tests.zoo.build import CASES, build

SWEEP = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
EVERYTHING: dict[str, Any] = {"norms": True, "shared": True, "roles": ROLES}
# On disk the tensors are fused or renamed, so parameters can only be compared by what is in them.
RENAMED = {"dory", "inkling_mm_model", "inkling2", "cosmos3_edge", "molmo2", "hrm_text", "axk2", "deepseek_v4"}


def quiet_routes(model: Any, **options: Any) -> Routes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return find_routes(model, **options)


def distinct_vectors(model: torch.nn.Module) -> None:
    """Fresh norms are all ones; make every vector tell itself apart."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() < 2:
            parameter.data = torch.rand(parameter.shape, generator=generator).to(parameter) + 0.1


def checkpoint_reader(folder: Path) -> Callable[[str], Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    return tensors.__getitem__


def contents(routes: Routes, read: Callable[[str], Tensor]) -> set[tuple[Any, ...]]:
    """Layer, role, kind, flags and the bytes of the rows, for each use of a route."""
    return {
        (layer, route.role, route.kind, route.shared, route.sparse, rows_of(route, read(route.parameter)))
        for route in routes
        for layer in (route.layer, *route.tied_layers)
    }


def rows_of(route: Route, tensor: Tensor) -> bytes:
    if route.rows is None:
        return tensor.float().contiguous().numpy().tobytes()
    parts = [tensor.narrow(route.dim, start, stop - start) for start, stop in route.rows]
    return torch.cat(parts, dim=route.dim).float().contiguous().numpy().tobytes()


@pytest.mark.parametrize("name", SWEEP)
def test_checkpoint_rows_hold_the_bytes_of_the_model(name: str, tmp_path: Path) -> None:
    model = build(name)
    distinct_vectors(model)
    model.save_pretrained(tmp_path)
    if name in NO_FULL_LAYER:
        for source in (model, tmp_path):
            with pytest.raises(ValueError, match="no full-attention layer"):
                find_routes(source)
        return
    in_memory, on_disk = quiet_routes(model, **EVERYTHING), quiet_routes(tmp_path, **EVERYTHING)
    parameters = dict(model.named_parameters())
    saved = contents(on_disk, checkpoint_reader(tmp_path))
    assert saved == contents(in_memory, lambda parameter: parameters[parameter].detach())
    assert on_disk.layer_kinds == in_memory.layer_kinds
    assert on_disk.layers == in_memory.layers

    def geometry(routes: Routes) -> list[tuple[Any, ...]]:
        return [tuple(value for key, value in vars(layer).items() if key != "module") for layer in routes.attention]

    assert geometry(on_disk) == geometry(in_memory)
    if name in RENAMED:
        assert on_disk.parameters != in_memory.parameters


def test_bytes_comparison_notices_other_rows(tmp_path: Path) -> None:
    model = build("gpt_neox")
    model.save_pretrained(tmp_path)
    routes = quiet_routes(tmp_path)
    read = checkpoint_reader(tmp_path)
    data = routes.to_dict()
    data["routes"][0]["rows"] = [[start + 1, stop + 1] for start, stop in data["routes"][0]["rows"]]
    assert contents(Routes.from_dict(data), read) != contents(routes, read)


@pytest.mark.parametrize("name", ["qwen3_next", "deepseek_v3", "zamba2"])
def test_shards_are_read_together(name: str, tmp_path: Path) -> None:
    model = build(name)
    distinct_vectors(model)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="60KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert quiet_routes(tmp_path / "many", **EVERYTHING) == quiet_routes(tmp_path / "one", **EVERYTHING)


def test_no_torch_and_no_transformers_are_imported(tmp_path: Path) -> None:
    build("lfm2").save_pretrained(tmp_path)
    program = (
        "import sys, json; from routeguard import find_routes; routes = find_routes(sys.argv[1]); print(len(routes));"
        "print([name for name in ('torch', 'transformers', 'numpy', 'safetensors') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    count, imported = done.stdout.split("\n")[:2]
    assert int(count) == len(quiet_routes(tmp_path)) > 0
    assert imported == "[]"


def test_code_in_the_folder_never_runs(tmp_path: Path) -> None:
    build("lfm2").save_pretrained(tmp_path)
    witness = tmp_path / "ran"
    (tmp_path / "modeling_trap.py").write_text(f"open({str(witness)!r}, 'w').close()\nraise SystemExit('code ran')\n")
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "modeling_trap.Config", "AutoModelForCausalLM": "modeling_trap.Model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert quiet_routes(tmp_path).layers
    assert not witness.exists()


def config_file(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    path.write_text(json.dumps(config))


def test_raw_hub_configs_without_layer_types(tmp_path: Path) -> None:
    model = build("qwen3_next")
    model.save_pretrained(tmp_path)
    expected = quiet_routes(tmp_path)
    config_file(tmp_path, layer_types=None)
    assert quiet_routes(tmp_path) == expected  # the class's own default, every fourth layer
    config_file(tmp_path, full_attention_interval=2)
    with pytest.raises(ValueError, match=r"calls layers \[1, 5\] full attention, but no query and key"):
        find_routes(tmp_path)


def index_instead(folder: Path, content: str) -> None:
    """An index where the only file was: beside that file nobody reads it."""
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
        (lambda folder: config_file(folder, model_type=None), "does not name a model_type"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no model.safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"abc"), "is not a safetensors file"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"[1] "),
            "malformed safetensors header",
        ),
        (
            lambda folder: index_instead(folder, '{"weight_map": {"a": "../elsewhere.safetensors"}}'),
            "not a file inside the folder",
        ),
        (
            lambda folder: index_instead(folder, '{"weight_map": {"a": "b"}}'),
            "is missing from",
        ),
    ],
)  # fmt: skip
def test_damaged_folders_say_what_is_wrong(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    build("lfm2").save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message):
        find_routes(tmp_path)


def test_pickled_and_adapter_folders_say_what_to_do(tmp_path: Path) -> None:
    build("lfm2").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pickled weights"):
        find_routes(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="an adapter folder"):
        find_routes(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        find_routes(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="needs a model in memory"):
        find_routes(tmp_path, probe=True)
