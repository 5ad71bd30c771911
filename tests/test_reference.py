"""Capture, save, load and open references, from everything that can serve as one."""

from __future__ import annotations

import copy
import json
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from routeguard.checkpoint import sidecar, tensors
from routeguard.protect.held import held_parameters
from routeguard.protect.rows import take_rows
from routeguard.restoration import reference as reference_module
from routeguard.restoration.lookup import open_reference
from routeguard.restoration.reference import Reference, capture_reference, load_reference, save_reference
from routeguard.routes.find import find_routes
from tests.tuned import tune
from tests.zoo.build import build

FAMILIES = ["lfm2", "qwen3_next", "phi3", "gpt2", "deepseek_v3", "zamba2", "gemma3", "falcon", "llama"]

pytestmark = pytest.mark.filterwarnings("ignore:all .* layers of:UserWarning")


def held_of(model: nn.Module, **options: Any) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return held_parameters(model, find_routes(model, **options))


def captured(model: nn.Module, **options: Any) -> Reference:
    return capture_reference(model, held_of(model, **options), origin="live weights at step 0")


def assert_equal(one: Reference, other: Reference) -> None:
    assert set(one.tensors) == set(other.tensors)
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, other.tensors[name]), name
    assert dict(one.rows) == dict(other.rows)
    assert dict(one.dims) == dict(other.dims)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_capture_holds_the_rows_and_survives_saving(name: str, tmp_path: Path) -> None:
    model = build(name)
    held = held_of(model)
    reference = captured(model)
    before = {piece.canonical: take_rows(piece.parameter.detach(), piece.rows, piece.dim).clone() for piece in held}
    tune(model)
    for piece in held:  # a copy, not a view: the model has moved, the reference has not
        assert torch.equal(reference.tensors[piece.canonical], before[piece.canonical])
        assert not torch.equal(take_rows(piece.parameter, piece.rows, piece.dim), before[piece.canonical])
    path = tmp_path / "routeguard" / "reference.safetensors"
    save_reference(reference, path)
    loaded = load_reference(path)
    assert_equal(loaded, reference)
    assert loaded.digest == reference.digest == captured(build(name)).digest
    assert loaded.meaning == reference.meaning and loaded.meaning["head_dim"]
    assert dict(loaded.routes) == dict(reference.routes)
    assert loaded.origin == "live weights at step 0"
    assert captured(model).digest != reference.digest
    assert [entry.name for entry in path.parent.iterdir()] == ["reference.safetensors"]


def test_the_digest_sees_values_names_rows_and_dtypes() -> None:
    reference = captured(build("qwen3_next"))
    name = next(name for name, rows in reference.rows.items() if rows is not None)
    moved = {**reference.tensors, name: reference.tensors[name].clone()}
    moved[name].view(-1)[0] = torch.nextafter(moved[name].view(-1)[0], torch.tensor(9.0))
    rows = reference.rows[name]
    assert rows is not None
    changed = [
        replace(reference, tensors=moved),
        replace(reference, rows={**reference.rows, name: ((1, rows[0][1] + 1), *rows[1:])}),
        replace(reference, tensors={k: v.to(torch.float64) for k, v in reference.tensors.items()}),
        replace(
            reference,
            tensors={f"x.{k}": v for k, v in reference.tensors.items()},
            rows={f"x.{k}": v for k, v in reference.rows.items()},
            dims={f"x.{k}": v for k, v in reference.dims.items()},
        ),
    ]
    assert len({reference.digest, *(other.digest for other in changed)}) == 5
    assert replace(reference, origin="elsewhere").digest == reference.digest


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "reference.safetensors"
    save_reference(captured(build("llama")), path)
    whole = path.read_bytes()
    load_reference(path)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match="does not match its own digest"):
        load_reference(path)
    path.write_bytes(whole[:-5])
    with pytest.raises(ValueError, match="cut short or damaged"):
        load_reference(path)


def test_files_that_are_no_references_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "reference.safetensors"
    with pytest.raises(ValueError, match="does not exist"):
        load_reference(path)
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="not a reference that routeguard wrote"):
        load_reference(path)
    save_file({"a": torch.zeros(2)}, path, metadata={"routeguard": json.dumps({"schema_version": 99})})
    with pytest.raises(ValueError, match="schema version 99, this version reads 1"):
        load_reference(path)
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_reference(path)


def test_an_interrupted_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "reference.safetensors"
    first, model = captured(build("llama")), build("llama")
    save_reference(first, path)
    tune(model)

    def stop(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(reference_module.os, "replace", stop)
    with pytest.raises(OSError, match="disk full"):
        save_reference(captured(model), path)
    assert load_reference(path).digest == first.digest
    assert os.listdir(tmp_path) == ["reference.safetensors"]


def test_shared_storage_is_kept_once_and_can_be_saved(tmp_path: Path) -> None:
    model = build("llama")
    held = held_of(model)
    tied = replace(held[0], name="elsewhere.weight", parameter=nn.Parameter(held[0].parameter.detach()))
    reference = capture_reference(model, [held[0], tied], origin="tied")
    assert reference.num_bytes == held[0].num_bytes
    assert reference.tensors["elsewhere.weight"] is reference.tensors[held[0].canonical]
    save_reference(reference, tmp_path / "r.safetensors")
    assert_equal(load_reference(tmp_path / "r.safetensors"), reference)


def test_zamba_is_held_once_although_used_by_several_layers() -> None:
    reference = captured(build("zamba"))
    assert len(reference.tensors) == 2
    assert all(routes[0].tied_layers for routes in reference.routes.values())


def test_parameters_without_values_here_are_refused() -> None:
    with pytest.raises(ValueError, match="meta device"):
        captured(build("llama", device="meta"))
    model = build("llama")
    held = held_of(model)
    held[0].parameter.ds_id = 3
    with pytest.raises(ValueError, match=r"split over processes \(ZeRO\)"):
        capture_reference(model, held)


def all_sources(start: Any, folder: Path) -> dict[str, Any]:
    """The same start in every form that is accepted."""
    start.save_pretrained(folder / "whole")
    start.save_pretrained(folder / "sharded", max_shard_size="40KB")
    assert len(list((folder / "sharded").glob("model-*.safetensors"))) > 1
    state = {name: tensor.contiguous() for name, tensor in start.state_dict().items()}
    unshared = {name: tensor.clone() for name, tensor in state.items()}
    save_file(unshared, folder / "weights.safetensors")
    reference = captured(start)
    save_reference(reference, folder / "run" / "routeguard" / "reference.safetensors")
    return {
        "model": start,
        "state dict": state,
        "state dict of a wrapper": {f"module._orig_mod.{name}": tensor for name, tensor in state.items()},
        "folder": folder / "whole",
        "sharded folder": str(folder / "sharded"),
        "file": folder / "weights.safetensors",
        "reference": reference,
        "sidecar": folder / "run" / "routeguard" / "reference.safetensors",
        "sidecar folder": folder / "run" / "routeguard",
        "run folder": folder / "run",
    }


@pytest.mark.parametrize("name", [*FAMILIES, "hrm_text", "zamba"])
def test_every_source_gives_the_same_reference(name: str, tmp_path: Path) -> None:
    start = build(name)
    expected = captured(start)
    model = copy.deepcopy(start)
    tune(model)
    held = held_of(model)
    for kind, source in all_sources(start, tmp_path).items():
        opened = open_reference(source, model, held)
        assert_equal(opened, expected)
        assert opened.digest == expected.digest, kind
        if kind not in ("state dict", "state dict of a wrapper", "file"):
            assert opened.meaning == expected.meaning, kind
    live = open_reference(model, model, held)
    digest = live.digest
    assert digest != expected.digest
    tune(model)  # a reference is a copy: it does not move with the model that it came from
    assert replace(live).digest == digest


def test_narrower_rows_can_be_read_from_a_wider_sidecar() -> None:
    model = build("phi3")
    wide = captured(model)
    queries = held_of(model, roles=("query",))
    assert_equal(open_reference(wide, model, queries), captured(model, roles=("query",)))
    with pytest.raises(ValueError, match=r"rows \[64, 96\) of .*qkv_proj.weight are wanted"):
        open_reference(captured(model, roles=("query",)), model, held_of(model, roles=("key",)))


def test_only_the_held_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3_next")
    model.save_pretrained(tmp_path)
    read: list[int] = []
    plain = tensors.read_rows

    def counted(*arguments: Any) -> bytearray:
        data = plain(*arguments)
        read.append(len(data))
        return data

    monkeypatch.setattr(tensors, "read_rows", counted)
    assert open_reference(tmp_path, model, held_of(model)).num_bytes == sum(read)


def test_a_text_only_base_serves_its_multimodal_wrapper(tmp_path: Path) -> None:
    wrapper = build("gemma3")
    text = build("gemma3_text")
    text.model.load_state_dict(wrapper.model.language_model.state_dict())
    held = held_of(wrapper)
    text.save_pretrained(tmp_path)
    opened = open_reference(tmp_path, wrapper, held)
    assert_equal(opened, captured(wrapper))
    assert "matched by layer and role, not by name" in opened.notes[-1]


def test_another_model_is_refused(tmp_path: Path) -> None:
    model = build("lfm2")
    held = held_of(model)
    with pytest.raises(ValueError, match="lacks 4 of the tensors asked for") as caught:
        open_reference(build("gpt2"), model, held)
    assert "model.layers.2.self_attn.q_proj.weight [64, 48]" in str(caught.value)
    state = model.state_dict()
    wrong = {**state, "model.layers.2.self_attn.k_proj.weight": torch.zeros(16, 48)}
    with pytest.raises(ValueError, match=r"k_proj.weight \[32, 48\] \(there it has shape \[16, 48\]\)"):
        open_reference(wrong, model, held)
    del wrong["model.layers.2.self_attn.k_proj.weight"]
    with pytest.raises(ValueError, match=r"lacks 1 of the tensors .*\n.*closest there"):
        open_reference(wrong, model, held)


def test_things_that_are_no_reference_are_refused(tmp_path: Path) -> None:
    model = build("llama")
    held = held_of(model)
    (tmp_path / "weights.bin").write_bytes(b"x")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    cases: list[tuple[Any, str]] = [
        ({}, "is empty"),
        ({"a": 1}, "holds int under 'a'"),
        (3, "reference is a int"),
        ("no/such/path", "does not exist"),
        (tmp_path / "weights.bin", "is no safetensors file"),
        (tmp_path, "has no config.json"),
        (tmp_path / "adapter", "no adapter_model.safetensors"),
    ]
    for source, message in cases:
        with pytest.raises(ValueError, match=message):
            open_reference(source, model, held)


def test_integer_weights_on_disk_are_refused(tmp_path: Path) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.int8)}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="stored as int8; a reference needs floating-point weights"):
        open_reference(tmp_path, model, held_of(model))


def test_the_digest_on_disk_is_the_digest_in_memory(tmp_path: Path) -> None:
    from routeguard.storage.folder import stored_tensors

    path = tmp_path / "r.safetensors"
    reference = captured(build("gpt2").to(torch.bfloat16))
    save_reference(reference, path)
    assert sidecar.digest_on_disk(sidecar.read_facts(path), stored_tensors([path])) == reference.digest
