"""Restores on disk at the edges that a cold review found: each of these was wrong once."""

from __future__ import annotations

import json
import shutil
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from routeguard import checkpoint_drift, find_routes, restore_checkpoint, undo_restore, verify_checkpoint
from routeguard.checkpoint import in_place
from routeguard.checkpoint.in_place import undo_path
from routeguard.storage.header import read_header
from routeguard.storage.locks import folder_lock
from tests.folders import snapshot, write_pair
from tests.test_restore_checkpoint import assert_equal_models, changed_in_routing_only, edit_config, reloaded
from tests.test_verify_checkpoint import keep
from tests.zoo.build import build

pytestmark = [
    pytest.mark.filterwarnings("ignore:all .* layers of:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]


# -- which weights a folder's are --------------------------------------------------------------------------------------


def test_one_file_beside_an_index_is_the_model_as_for_transformers(tmp_path: Path) -> None:
    from routeguard.restoration.in_memory import restore

    start, tuned = write_pair("lfm2", tmp_path)
    tuned.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    for file in (tmp_path / "sharded").glob("model*"):
        shutil.copy(file, tmp_path / "tuned")
    report = restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out")
    restore(tuned, start)
    assert_equal_models(reloaded(tmp_path / "out", tuned), tuned)
    assert any(name.startswith("model-0000") for name in report.left_out)  # tuned copies do not come along
    index = tmp_path / "tuned" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))  # stale: nobody reads it
    restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "again")


def test_other_copies_of_the_weights_stay_behind_and_are_named(tmp_path: Path) -> None:
    write_pair("lfm2", tmp_path)
    others = ["model.fp16.safetensors", "consolidated.safetensors", "pytorch_model.bin", "model.gguf", "ema.pt"]
    for name in others:
        (tmp_path / "tuned" / name).write_bytes(b"weights")
    (tmp_path / "tuned" / ".git").mkdir()
    (tmp_path / "tuned" / ".git" / "HEAD").write_text("x")
    report = restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out")
    assert set(report.left_out) == {*others, ".git"} and "consolidated.safetensors" in str(report)
    assert not {*others, ".git/HEAD"} & set(snapshot(tmp_path / "out"))


def test_an_index_may_name_tensors_that_are_gone(tmp_path: Path) -> None:
    write_pair("lfm2", tmp_path, tuned_shards="60KB")
    index = tmp_path / "tuned" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.rotary_emb.inv_freq"] = next(iter(content["weight_map"].values()))
    index.write_text(json.dumps(content))
    restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out")
    assert changed_in_routing_only(tmp_path / "tuned", tmp_path / "out") > 0


@pytest.mark.parametrize("side", ["base", "tuned"])
@pytest.mark.parametrize("where", ["beside", "inside"])
def test_a_whole_model_with_an_adapter_is_refused(where: str, side: str, tmp_path: Path) -> None:
    write_pair("lfm2", tmp_path)
    if where == "beside":
        (tmp_path / side / "adapter_config.json").write_text("{}")
    else:
        file = tmp_path / side / "model.safetensors"
        extra = {"model.layers.2.self_attn.q_proj.lora_A.default.weight": torch.zeros(4, 4)}
        save_file({**load_file(file), **extra}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="holds a whole model and an adapter"):
        restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out")
    for compare in (checkpoint_drift, verify_checkpoint):
        with pytest.raises(ValueError, match="holds a whole model and an adapter"):
            compare(tmp_path / "base", tmp_path / "tuned")


def test_a_base_with_weights_of_its_own_is_taken_at_its_own(tmp_path: Path) -> None:
    """BASE is the output of a guarded first stage: what it kept is the start of that stage, not of this one."""
    start, tuned = write_pair("lfm2", tmp_path)
    keep(start, tmp_path / "stage1")
    tuned.save_pretrained(tmp_path / "stage1")
    build("lfm2", seed=5).save_pretrained(tmp_path / "stage2")
    report = restore_checkpoint(tmp_path / "stage1", tmp_path / "stage2", out=tmp_path / "out")
    assert verify_checkpoint(tmp_path / "out", tmp_path / "tuned").ok
    assert any("also holds routeguard/reference.safetensors" in note for note in report.restored.notes)
    kept = tmp_path / "stage1" / "routeguard" / "reference.safetensors"
    restore_checkpoint(kept, tmp_path / "stage2", out=tmp_path / "other")
    assert verify_checkpoint(tmp_path / "other", tmp_path / "base").ok


# -- the same meaning in other words -----------------------------------------------------------------------------------


def test_configs_of_other_versions_of_transformers_are_compared_by_what_they_mean(tmp_path: Path) -> None:
    write_pair("llama", tmp_path)
    config = json.loads((tmp_path / "base/config.json").read_text())
    rope = config.pop("rope_parameters")
    (tmp_path / "base/config.json").write_text(json.dumps({**config, "rope_theta": rope["rope_theta"]}))
    restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "same")
    (tmp_path / "base/config.json").write_text(json.dumps(config))  # the default, left out
    edit_config(tmp_path / "tuned", rope_parameters={**rope, "rope_theta": 5e6})
    with pytest.raises(ValueError, match="rope"):
        restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "other")


@pytest.mark.parametrize("name", ["gemma3_text", "phi3", "llama4_text", "qwen2", "olmo3"])
def test_the_spelling_of_transformers_4_means_the_same(name: str, tmp_path: Path) -> None:
    write_pair(name, tmp_path)
    config = json.loads((tmp_path / "base/config.json").read_text())
    rope = config.pop("rope_parameters")
    theta = rope.get("full_attention", rope)["rope_theta"]
    if name == "gemma3_text":
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    if name == "llama4_text":
        config["no_rope_layers"] = []
    if name == "qwen2":
        del config["use_sliding_window"]
    for rope_theta in (theta, 123.0):
        (tmp_path / "base/config.json").write_text(json.dumps({**config, "rope_theta": rope_theta}))
        if rope_theta == theta:
            report = restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "same")
            assert not any("not compared" in note for note in report.restored.notes)
            continue
        with pytest.raises(ValueError, match="rope"):
            restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "other")


def test_a_base_with_biases_that_tuned_lacks_is_refused(tmp_path: Path) -> None:
    build("llama/bias").save_pretrained(tmp_path / "base")
    build("llama").save_pretrained(tmp_path / "tuned")
    with pytest.raises(ValueError, match="has biases that TUNED lacks"):
        restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out", insist=True)


# -- in place ----------------------------------------------------------------------------------------------------------


def test_undo_waits_for_nobody_and_interferes_with_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pair("lfm2", tmp_path)
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    before = snapshot(tuned)
    real, refused = in_place.apply_patches, []

    def interrupted(patches: Any, **options: Any) -> None:
        real(patches[:1], **options)
        with pytest.raises(ValueError, match="by another process") as found:
            undo_restore(tuned)
        refused.append(str(found.value))
        real(patches[1:], **options)

    monkeypatch.setattr(in_place, "apply_patches", interrupted)
    restore_checkpoint(base, tuned, in_place=True)
    monkeypatch.undo()
    assert len(refused) == 1 and verify_checkpoint(tuned, base).ok
    with folder_lock(tuned) as held, pytest.raises(ValueError, match="by another process"):
        assert held
        undo_restore(tuned)
    undo_restore(tuned)
    assert snapshot(tuned) == before


def test_a_half_restored_folder_is_not_verified(tmp_path: Path) -> None:
    write_pair("lfm2", tmp_path)
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    restore_checkpoint(base, tuned, in_place=True)
    assert verify_checkpoint(tuned, base).ok
    (tuned / "routeguard" / "provenance.json").unlink()  # as where it was killed between the rows and the record
    with pytest.raises(ValueError, match="interrupted in-place restore"):
        verify_checkpoint(tuned, base)
    undo_restore(tuned)
    assert not verify_checkpoint(tuned, base).ok


def test_a_folder_of_records_that_is_a_link_is_refused(tmp_path: Path) -> None:
    write_pair("lfm2", tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "tuned" / "routeguard").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is a link"):
        restore_checkpoint(tmp_path / "base", tmp_path / "tuned", in_place=True)
    assert not any((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("content", ["{}", "[]", '{"schema_version": 1}', '{"schema_version": 1, "restores": [{}]}'])
def test_a_damaged_record_is_no_traceback_and_can_be_moved_away(content: str, tmp_path: Path) -> None:
    write_pair("lfm2", tmp_path)
    before = snapshot(tmp_path / "tuned")
    restore_checkpoint(tmp_path / "base", tmp_path / "tuned", in_place=True)
    record = tmp_path / "tuned" / "routeguard" / "provenance.json"
    record.write_text(content)
    with pytest.raises(ValueError, match="move it away and try again"):
        undo_restore(tmp_path / "tuned")
    record.unlink()
    undo_restore(tmp_path / "tuned")
    assert snapshot(tmp_path / "tuned") == before


@pytest.mark.parametrize("change", [{"files": None}, {"entries": [{}]}, {"identity": 3}, {"entries": None}], ids=str)
def test_a_damaged_undo_file_is_no_traceback(change: dict[str, Any], tmp_path: Path) -> None:
    write_pair("lfm2", tmp_path)
    restore_checkpoint(tmp_path / "base", tmp_path / "tuned", in_place=True)
    undo = undo_path(tmp_path / "tuned")
    facts = json.loads(read_header(undo).metadata["routeguard_undo"])
    save_file(load_file(undo), undo, metadata={"routeguard_undo": json.dumps({**facts, **change})})
    with pytest.raises(ValueError, match="is damaged"):
        undo_restore(tmp_path / "tuned")


# -- hostile values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["name", "metadata", "escapes"])
def test_long_strings_in_a_header_take_memory_in_proportion(where: str, tmp_path: Path) -> None:
    long = ("\\n" if where == "escapes" else "x") * 2_000_000
    content = (f'{{"{long}": 1}}' if where == "name" else f'{{"__metadata__": {{"a": "{long}"}}}}').encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(content)) + content)
    tracemalloc.start()
    try:
        if where == "name":
            with pytest.raises(ValueError, match="no flat object"):
                read_header(path)
        else:
            read_header(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * len(content)


@pytest.mark.parametrize("name", ["a\\ud800", "a\\u001b[31m", "a\\u0000"])
def test_names_that_no_tensor_has_are_refused(name: str, tmp_path: Path) -> None:
    content = f'{{"{name}": {{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}}}'.encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(content)) + content + b"x")
    with pytest.raises(ValueError, match="characters that no tensor name has"):
        read_header(path)


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 0},
        {"num_attention_heads": []},
        {"num_attention_heads": {}},
        {"num_hidden_layers": 10**9},
    ],
    ids=str,
)
def test_configs_with_impossible_values_are_no_traceback(change: dict[str, Any], tmp_path: Path) -> None:
    write_pair("llama", tmp_path)
    edit_config(tmp_path / "tuned", **change)
    with pytest.raises(ValueError):
        restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_messages_that_say_what_to_do(tmp_path: Path) -> None:
    write_pair("lfm2", tmp_path)
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    with pytest.raises(ValueError, match="lies inside BASE"):
        restore_checkpoint(base, tuned, out=base / "fixed")
    (tuned / "quantize_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"quantised \(gptq\)"):
        restore_checkpoint(base, tuned, out=tmp_path / "out")
    (tuned / "quantize_config.json").unlink()
    (tuned / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ValueError, match="git lfs pull"):
        restore_checkpoint(base, tuned, out=tmp_path / "out")
    (tuned / "model.safetensors").rename(tuned / "model.fp16.safetensors")
    with pytest.raises(ValueError, match=r"there are model\.fp16\.safetensors"):
        restore_checkpoint(base, tuned, out=tmp_path / "out")


# -- drift and verify --------------------------------------------------------------------------------------------------


def test_the_smallest_change_is_a_change_and_nan_is_refused(tmp_path: Path) -> None:
    start, _ = write_pair("lfm2", tmp_path)
    (route, *_) = find_routes(start)
    file = tmp_path / "tuned" / "model.safetensors"
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    tensors[route.parameter][0, 0] = 0.0
    save_file(tensors, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    tensors[route.parameter][0, 0] = 1e-23
    save_file(tensors, file, metadata={"format": "pt"})
    found = checkpoint_drift(tmp_path / "base", tmp_path / "tuned")
    assert found.tensors[0].num_changed_rows == 1 and "nothing has moved" not in str(found)
    tensors[route.parameter][0, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="NaN or infinite"):
        checkpoint_drift(tmp_path / "base", tmp_path / "tuned")


def test_a_rounded_restore_is_verified(tmp_path: Path) -> None:
    _, tuned = write_pair("lfm2", tmp_path)
    tuned.to(torch.bfloat16).save_pretrained(tmp_path / "tuned")
    restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out")
    assert verify_checkpoint(tmp_path / "out", tmp_path / "base").ok
    assert not verify_checkpoint(tmp_path / "tuned", tmp_path / "base").ok
