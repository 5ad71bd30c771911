"""`restore_checkpoint` into a copy: what changes, what does not, and that it equals the restore in memory."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from routeguard import find_routes
from routeguard.checkpoint.restore import restore_checkpoint
from routeguard.protect.modes import Interpolate, QKPro
from routeguard.restoration.in_memory import restore
from tests.folders import file_bytes, read_header, routing_mask, snapshot, write_pair
from tests.tuned import tune
from tests.zoo.build import CASES, build

pytestmark = [
    pytest.mark.filterwarnings("ignore:all .* layers of:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]

FAMILIES = [
    "qwen3_next", "qwen3_5", "nemotron_h", "granitemoehybrid", "falcon_h1", "lfm2", "zamba2", "olmo_hybrid",
    "kimi_linear", "gemma3", "llama", "llama/bias", "gpt2", "phi3", "falcon", "deepseek_v3", "jamba", "gpt_oss",
]  # fmt: skip
LAYOUTS = {
    "one file each": ("5GB", "5GB"),
    "tuned sharded": ("5GB", "60KB"),
    "sharded differently": ("40KB", "90KB"),
}


def changed_in_routing_only(tuned: Path, out: Path, **options: Any) -> int:
    """Check every file of the copy byte for byte; returns how many bytes differ, all of them routing."""
    routes = find_routes(tuned, **options)
    changed = 0
    before, after = snapshot(tuned), snapshot(out)
    assert set(after) == {*before, "routeguard/provenance.json"}
    for name in before:
        if not name.endswith(".safetensors"):
            assert before[name] == after[name], name
            continue
        old, new = file_bytes(tuned / name), file_bytes(out / name)
        assert len(old) == len(new) and read_header(tuned / name) == read_header(out / name)
        differs = old != new
        outside = differs & ~routing_mask(tuned / name, routes)
        assert not outside.any(), f"{name}: {outside.sum()} bytes outside of the routing changed"
        changed += int(differs.sum())
    return changed


def reloaded(folder: Path, like: Any) -> Any:
    """The model that transformers loads from a folder, which must fit it exactly."""
    model, info = type(like).from_pretrained(folder, dtype=like.dtype, output_loading_info=True)
    problems = {kind: names for kind, names in info.items() if names}
    assert not problems, problems
    return model


def comes_back(folder: Path, saved: Any) -> bool:
    """Whether transformers itself loads what it saved; of a few classes it does not, or not the same."""
    try:
        assert_equal_models(reloaded(folder, saved), saved)
    except (AssertionError, RuntimeError, OSError):
        return False
    return True


def assert_equal_models(one: Any, other: Any) -> None:
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, different


# -- architectures × layouts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_restored_copy_differs_in_routing_only_and_equals_the_restore_in_memory(
    name: str, layout: str, tmp_path: Path
) -> None:
    base_shards, tuned_shards = LAYOUTS[layout]
    start, tuned = write_pair(name, tmp_path, base_shards=base_shards, tuned_shards=tuned_shards)
    untouched = snapshot(tmp_path / "base"), snapshot(tmp_path / "tuned")
    report = restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out")
    changed = changed_in_routing_only(tmp_path / "tuned", tmp_path / "out")
    in_memory = restore(tuned, start)
    assert_equal_models(reloaded(tmp_path / "out", tuned), tuned)
    assert report.restored.changed_bytes == in_memory.changed_bytes >= changed > 0
    assert [layer.layer for layer in report.restored.layers] == [layer.layer for layer in in_memory.layers]
    for on_disk, held in zip(report.restored.layers, in_memory.layers, strict=True):
        assert on_disk.drift_before == pytest.approx(dict(held.drift_before), rel=1e-4)
    assert (snapshot(tmp_path / "base"), snapshot(tmp_path / "tuned")) == untouched
    if layout != "one file each":
        assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
def test_every_model_type(name: str, tmp_path: Path) -> None:
    start, tuned = write_pair(name, tmp_path, tuned_shards="100KB")
    try:
        find_routes(start)
    except ValueError:  # no full attention: the routes' own tests say which and why
        with pytest.raises(ValueError, match="no full-attention layer"):
            restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out")
        return
    report = restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out")
    changed = changed_in_routing_only(tmp_path / "tuned", tmp_path / "out")
    assert changed > 0 or name == "idefics"  # its text decoder is frozen, so the test's noise leaves it alone
    if comes_back(tmp_path / "tuned", tuned):
        restore(tuned, start)
        assert_equal_models(reloaded(tmp_path / "out", tuned), tuned)
    else:
        assert name in {"nemo_speechlm", "qwen2_5_omni", "shieldgemma2", "youtu"}
    assert not any("not compared" in note for note in report.restored.notes), report.restored.notes


@pytest.mark.parametrize("method", [Interpolate(0.3), Interpolate(1.0), QKPro(0.1), QKPro(0.0)], ids=str)
@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "gpt2", "phi3", "llama/bias", "falcon"])
def test_computed_methods_equal_those_in_memory(name: str, method: Any, tmp_path: Path) -> None:
    start, tuned = write_pair(name, tmp_path, tuned_shards="50KB", dtype=torch.bfloat16)
    report = restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out", method=method)
    assert changed_in_routing_only(tmp_path / "tuned", tmp_path / "out") > 0
    in_memory = restore(tuned, start, method=method)
    assert_equal_models(reloaded(tmp_path / "out", tuned), tuned)
    assert report.restored.changed_bytes == in_memory.changed_bytes
    assert report.restored.method == in_memory.method
    normalised = [note for note in report.restored.notes if "normalised" in note]
    assert normalised == [note for note in in_memory.notes if "normalised" in note]  # one, of all layers
    assert len(normalised) == (isinstance(method, QKPro) and name in {"lfm2", "qwen3_next"})
    recorded = json.loads((tmp_path / "out/routeguard/provenance.json").read_text())["restores"][0]
    assert recorded["method"] == in_memory.method


@pytest.mark.parametrize(
    "choice",
    [{"roles": ("query",)}, {"roles": ("key",)}, {"roles": ("value", "output")}, {"norms": True}, {"layers": [5]}],
    ids=str,
)
def test_roles_layers_and_norms_are_chosen_as_in_memory(choice: dict[str, Any], tmp_path: Path) -> None:
    start, tuned = write_pair("lfm2", tmp_path)
    restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out", **choice)
    assert changed_in_routing_only(tmp_path / "tuned", tmp_path / "out", **choice) > 0
    restore(tuned, start, **choice)
    assert_equal_models(reloaded(tmp_path / "out", tuned), tuned)


# -- what BASE may be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "tuned", "note"),
    [
        (torch.float32, torch.bfloat16, "float32 to bfloat16 (rounded)"),
        (torch.bfloat16, torch.float32, "bfloat16 to float32 (exact)"),
        (torch.float16, torch.bfloat16, "float16 to bfloat16 (rounded)"),
        (torch.float64, torch.float16, "float64 to float16 (rounded)"),
    ],
    ids=str,
)
def test_other_dtypes_are_converted_and_said(base: Any, tuned: Any, note: str, tmp_path: Path) -> None:
    start, model = write_pair("qwen3_next", tmp_path)
    start.to(base).save_pretrained(tmp_path / "base")
    model.to(tuned).save_pretrained(tmp_path / "tuned")
    report = restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out")
    assert any(note in text for text in report.restored.notes), report.restored.notes
    restore(model, start)
    assert_equal_models(reloaded(tmp_path / "out", model), model)


@pytest.mark.parametrize("pair", [("gemma3_text", "gemma3"), ("qwen3_5_text", "qwen3_5")], ids=str)
def test_a_text_only_base_restores_a_multimodal_wrapper(pair: tuple[str, str], tmp_path: Path) -> None:
    text, wrapper = pair
    base, model = build(text), build(wrapper)
    base.save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "tuned")
    report = restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out", insist=True)
    out = reloaded(tmp_path / "out", model)
    source, target = find_routes(base), find_routes(out)
    assert len(source) == len(target) == len(report.restored.tensors)
    old, new = dict(base.named_parameters()), dict(out.named_parameters())
    for route, place in zip(source, target, strict=True):
        assert (route.layer, route.role, route.rows) == (place.layer, place.role, place.rows)
        for begin, end in route.rows or ((0, route.shape[0]),):
            assert torch.equal(old[route.parameter][begin:end], new[place.parameter][begin:end])
            assert not torch.equal(
                dict(model.named_parameters())[place.parameter][begin:end], old[route.parameter][begin:end]
            )


def test_what_a_guarded_run_kept_serves_as_base(tmp_path: Path) -> None:
    from tests.test_verify_checkpoint import keep

    start, tuned = write_pair("qwen3_next", tmp_path, tuned_shards="60KB")
    run = keep(start, tmp_path / "run")
    for name, place in {"a": run, "b": run / "routeguard" / "reference.safetensors"}.items():
        restore_checkpoint(place, tmp_path / "tuned", out=tmp_path / name)
        assert changed_in_routing_only(tmp_path / "tuned", tmp_path / name) > 0
    restore(tuned, start)
    assert_equal_models(reloaded(tmp_path / "a", tuned), tuned)


def test_a_hub_id_is_taken_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    write_pair("lfm2", tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "cache" / "models--some-lab--Some-Base"
    snapshot_folder = repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    (repository / "blobs").mkdir(parents=True)
    snapshot_folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot_folder.name)
    for number, file in enumerate((tmp_path / "base").iterdir()):  # blobs and links, as the Hub's cache has them
        blob = repository / "blobs" / str(number)
        shutil.copy(file, blob)
        (snapshot_folder / file.name).symlink_to(blob)
    restore_checkpoint("some-lab/Some-Base", tmp_path / "tuned", out=tmp_path / "out")
    assert changed_in_routing_only(tmp_path / "tuned", tmp_path / "out") > 0
    with pytest.raises(ValueError, match="not in the cache"):
        restore_checkpoint("some-lab/Other-Base", tmp_path / "tuned", out=tmp_path / "out2")
    # A tuned checkpoint made of links is copied as files.
    restore_checkpoint(tmp_path / "base", snapshot_folder, out=tmp_path / "of-links")
    assert not any(path.is_symlink() for path in (tmp_path / "of-links").iterdir())
    assert snapshot(tmp_path / "of-links").items() >= snapshot(tmp_path / "base").items()


def test_extra_tensors_on_one_side_are_no_obstacle(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_pair("lfm2", tmp_path)
    for side, extra in (("base", "mtp.layers.0.self_attn.q_proj.weight"), ("tuned", "adapter.bias")):
        file = tmp_path / side / "model.safetensors"
        save_file({**load_file(file), extra: torch.randn(4, 4)}, file, metadata={"format": "pt"})
    restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out")
    assert changed_in_routing_only(tmp_path / "tuned", tmp_path / "out") > 0


# -- what comes along, what does not -----------------------------------------------------------------------------------


def test_a_trainer_checkpoint_comes_out_ready_for_inference(tmp_path: Path) -> None:
    start, tuned = write_pair("lfm2", tmp_path)
    checkpoint = tmp_path / "tuned"
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_0.pth", "trainer_state.json"):
        (checkpoint / name).write_bytes(b"state")
    for name in ("tokenizer.json", "chat_template.jinja", "training_args.bin"):
        (checkpoint / name).write_text(name)
    (checkpoint / "assets").mkdir()
    (checkpoint / "assets" / "logo.svg").write_text("<svg/>")
    (checkpoint / "checkpoint-100").mkdir()
    (checkpoint / "checkpoint-100" / "model.safetensors").write_bytes(b"x")
    report = restore_checkpoint(tmp_path / "base", checkpoint, out=tmp_path / "out")
    assert sorted(report.left_out) == [
        "checkpoint-100", "optimizer.pt", "rng_state.pth", "rng_state_0.pth", "scheduler.pt", "trainer_state.json",
    ]  # fmt: skip
    present = set(snapshot(tmp_path / "out"))
    assert {"tokenizer.json", "chat_template.jinja", "training_args.bin", "assets/logo.svg"} <= present
    assert not present & {"optimizer.pt", "checkpoint-100/model.safetensors"}
    assert "optimizer.pt" in str(report)
    restore(tuned, start)
    assert_equal_models(reloaded(tmp_path / "out", tuned), tuned)


def test_provenance_says_what_was_taken_from_where(tmp_path: Path) -> None:
    import hashlib

    write_pair("qwen3_next", tmp_path)
    restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out")
    record = json.loads((tmp_path / "out/routeguard/provenance.json").read_text())
    assert record["schema_version"] == 1
    (facts,) = record["restores"]
    assert facts["base"] == str(tmp_path / "base") and facts["method"] == "QK-Restore"
    for tensor in facts["tensors"]:
        file = tmp_path / "base" / "model.safetensors"
        start, header = read_header(file)
        entry = header[tensor["tensor"]]
        data = file.read_bytes()[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]]
        size = len(data) // entry["shape"][0]
        ranges = tensor["rows"] or [[0, entry["shape"][0]]]
        taken = b"".join(data[begin * size : end * size] for begin, end in ranges)
        assert tensor["sha256"] == hashlib.sha256(taken).hexdigest()
        assert tensor["drift_before"] > 0.1
    restore_checkpoint(tmp_path / "base", tmp_path / "out", out=tmp_path / "again")
    assert len(json.loads((tmp_path / "again/routeguard/provenance.json").read_text())["restores"]) == 2


def test_restoring_what_did_not_move_says_so(tmp_path: Path) -> None:
    write_pair("lfm2", tmp_path)
    shutil.copytree(tmp_path / "base", tmp_path / "same")
    report = restore_checkpoint(tmp_path / "base", tmp_path / "same", out=tmp_path / "out")
    assert report.restored.changed_bytes == 0 and "nothing had moved" in str(report)


def test_the_copy_path_imports_no_torch(tmp_path: Path) -> None:
    write_pair("qwen3_next", tmp_path, tuned_shards="60KB")
    code = (
        "import sys; from routeguard import restore_checkpoint, checkpoint_drift\n"
        f"restore_checkpoint({str(tmp_path / 'base')!r}, {str(tmp_path / 'tuned')!r}, out={str(tmp_path / 'out')!r})\n"
        f"checkpoint_drift({str(tmp_path / 'base')!r}, {str(tmp_path / 'tuned')!r})\n"
        "loaded = {'torch', 'transformers', 'safetensors', 'huggingface_hub', 'matplotlib'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -- refusals: nothing is written --------------------------------------------------------------------------------------


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_models_of_another_meaning_are_refused_unless_insisted_on(tmp_path: Path) -> None:
    write_pair("llama", tmp_path)
    config = json.loads((tmp_path / "tuned/config.json").read_text())
    edit_config(tmp_path / "tuned", rope_parameters={**config["rope_parameters"], "rope_theta": 5e5})
    with pytest.raises(ValueError, match=r"(?s)rope.*insist \(insist=True, --insist\)"):
        restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    report = restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out", insist=True)
    assert any("insisted on" in note for note in report.restored.notes)


def _pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _dcp(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model_fsdp_0").mkdir()
    (folder / "pytorch_model_fsdp_0" / ".metadata").write_bytes(b"")
    (folder / "pytorch_model_fsdp_0" / "__0_0.distcp").write_bytes(b"")


def _zero(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "global_step5").mkdir()
    (folder / "global_step5" / "zero_pp_rank_0_mp_rank_00_model_states.pt").write_bytes(b"")
    (folder / "zero_to_fp32.py").write_text("")


def _not_a_number(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.self_attn.q_proj.weight"][3, 3] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _integers(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.2.self_attn.k_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("side", ["base", "tuned"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_pickles, "save_pretrained"),
        (_dcp, "accelerate merge-weights"),
        (_zero, "zero_to_fp32.py"),
        (_not_a_number, r"NaN or infinite routing weights: .*q_proj.weight in {SIDE}"),
        (_integers, "stored as int8"),
        (lambda f: edit_config(f, quantization_config={"quant_method": "gptq"}), r"quantised \(gptq\)"),
        (lambda f: edit_config(f, quantization_config={"quant_method": "fp8"}), r"quantised \(fp8\)"),
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "model.safetensors").write_bytes(b"12345678"), "not a safetensors file"),
    ],
)  # fmt: skip
def test_what_cannot_be_restored_is_refused_with_the_reason(
    damage: Any, message: str, side: str, tmp_path: Path
) -> None:
    write_pair("lfm2", tmp_path)
    damage(tmp_path / side)
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match=message.replace("{SIDE}", side.upper())):
        restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out")
    assert snapshot(tmp_path) == before and not (tmp_path / "out").exists()


def test_another_model_as_base_is_refused(tmp_path: Path) -> None:
    write_pair("lfm2", tmp_path)
    build("qwen3_next").save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="differ in what gives queries and keys their meaning"):
        restore_checkpoint(tmp_path / "other", tmp_path / "tuned", out=tmp_path / "out")
    with pytest.raises(ValueError, match="is not what this checkpoint was tuned from"):
        restore_checkpoint(tmp_path / "other", tmp_path / "tuned", out=tmp_path / "out", insist=True)
    assert not (tmp_path / "out").exists()


def test_targets_that_would_lose_something_are_refused(tmp_path: Path) -> None:
    write_pair("lfm2", tmp_path)
    base, tuned, taken = tmp_path / "base", tmp_path / "tuned", tmp_path / "taken"
    taken.mkdir()
    (taken / "work.txt").write_text("mine")
    before = snapshot(tmp_path)
    for target, message in (
        ({"out": taken}, "exists already"),
        ({"out": tuned}, "exists already"),
        ({"out": base}, "exists already"),
        ({"out": tuned / "inside"}, "lies inside"),
        ({}, "give either"),
        ({"out": tmp_path / "x", "in_place": True}, "give either"),
        ({"out": tmp_path / "x", "method": "qk_por"}, "closest 'qk_pro'"),
        ({"out": tmp_path / "x", "method": None}, "restores nothing"),
        ({"out": tmp_path / "x", "layers": [0]}, "have no full attention"),
        ({"out": tmp_path / "x", "roles": ("querry",)}, "not understood"),
        ({"out": tmp_path / "x", "roles": ("value",), "method": "qk_pro"}, "solves for queries given keys"),
    ):
        with pytest.raises(ValueError, match=message):
            restore_checkpoint(base, tuned, **target)
    with pytest.raises(ValueError, match="the same folder"):
        restore_checkpoint(tuned, tuned, out=tmp_path / "x")
    (tmp_path / "link").symlink_to(tuned)
    with pytest.raises(ValueError, match="the same folder"):
        restore_checkpoint(tmp_path / "link", tuned, out=tmp_path / "x")
    with pytest.raises(ValueError, match="does not exist"):
        restore_checkpoint(tmp_path / "nowhere", tuned, out=tmp_path / "x")
    with pytest.raises(ValueError, match="is not a folder"):
        restore_checkpoint(base, tmp_path / "nowhere", out=tmp_path / "x")
    (tmp_path / "link").unlink()
    assert snapshot(tmp_path) == before


def test_an_index_that_does_not_fit_its_shards_is_refused(tmp_path: Path) -> None:
    write_pair("lfm2", tmp_path, tuned_shards="60KB")
    index = tmp_path / "tuned" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    names = list(content["weight_map"])
    content["weight_map"][names[0]] = content["weight_map"][names[-1]]
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="disagree on 1 tensors"):
        restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out")


def test_a_model_tuned_again_needs_its_own_base_and_is_not_mixed_up(tmp_path: Path) -> None:
    """Two bases of the same shape: the bytes come from the one that was given."""
    start, _ = write_pair("lfm2", tmp_path)
    other = copy.deepcopy(start)
    tune(other, seed=7)
    other.save_pretrained(tmp_path / "other")
    for name in ("base", "other"):
        restore_checkpoint(tmp_path / name, tmp_path / "tuned", out=tmp_path / f"from-{name}")
    parameter = find_routes(start).parameters[0]
    values = [dict(reloaded(tmp_path / f"from-{n}", start).named_parameters())[parameter] for n in ("base", "other")]
    assert torch.equal(values[0], dict(start.named_parameters())[parameter])
    assert torch.equal(values[1], dict(other.named_parameters())[parameter])
