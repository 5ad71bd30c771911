"""`verify_checkpoint` on saved models and adapters, and the torch-free reading below it."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from routeguard.checkpoint.compare import num_differing, num_nonzero, why_not_comparable
from routeguard.checkpoint.verify import verify_checkpoint
from routeguard.protect.held import held_parameters
from routeguard.protect.rows import take_rows
from routeguard.restoration.in_memory import restore
from routeguard.restoration.reference import capture_reference, save_reference
from routeguard.routes.find import find_routes
from routeguard.storage.folder import stored_tensors
from routeguard.storage.row_bytes import Slice, locate_rows, read_rows, row_chunks
from tests.tuned import start_and_tuned, tune
from tests.zoo.build import build

FAMILIES = [
    "lfm2",
    "qwen3_next",
    "phi3",
    "gpt2",
    "deepseek_v3",
    "zamba",
    "zamba2",
    "gemma3",
    "falcon",
    "hrm_text",
    "llama",
]

pytestmark = [
    pytest.mark.filterwarnings("ignore:all .* layers of:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]


def keep(model: Any, run: Path, **options: Any) -> Path:
    """Write the sidecar of a guarded run, as the guard does."""
    held = held_parameters(model, find_routes(model, **options))
    save_reference(capture_reference(model, held, origin="step 0"), run / "routeguard" / "reference.safetensors")
    return run


# -- whole checkpoints -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_a_restored_checkpoint_is_verified_and_a_tuned_one_is_not(name: str, tmp_path: Path) -> None:
    start, model = start_and_tuned(name)
    start.save_pretrained(tmp_path / "start")
    model.save_pretrained(tmp_path / "tuned")
    run = keep(start, tmp_path / "run")
    restore(model, start)
    model.save_pretrained(tmp_path / "restored", max_shard_size="40KB")
    for against in (tmp_path / "start", run, run / "routeguard", run / "routeguard" / "reference.safetensors"):
        good = verify_checkpoint(tmp_path / "restored", against)
        assert good.ok and good.checks, str(good)
        assert "OK: every row equals its start" in str(good) and "how far" not in str(good)
        bad = verify_checkpoint(tmp_path / "tuned", against)
        assert not bad.ok and len(bad.mismatches) == len(bad.checks) == len(good.checks)
        assert all(check.num_differing > 0.9 * check.num_elements for check in bad.checks)
        assert "CHANGED" in str(bad) and f"how far: routeguard drift BASE {tmp_path / 'tuned'}" in str(bad)
    assert not verify_checkpoint(tmp_path / "restored", tmp_path / "start", roles=("value", "output")).ok


def test_one_changed_entry_is_found(tmp_path: Path) -> None:
    start = build("qwen3_next")
    start.save_pretrained(tmp_path / "start")
    folder = tmp_path / "changed"
    start.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    query = tensors["model.layers.3.self_attn.q_proj.weight"]
    query[20, 3] += 1  # an output-gate row of head 0: not routing
    save_file(tensors, file, metadata={"format": "pt"})
    assert verify_checkpoint(folder, tmp_path / "start").ok
    query[33, 3] = torch.nextafter(query[33, 3], torch.tensor(9.0))  # a query row of head 1
    save_file(tensors, file, metadata={"format": "pt"})
    report = verify_checkpoint(folder, tmp_path / "start")
    (check,) = report.mismatches
    assert (check.layer, check.role, check.num_differing) == (3, "query", 1)
    assert json.loads(json.dumps(report.to_dict()))["ok"] is False


def test_norms_layers_and_roles_choose_what_is_compared(tmp_path: Path) -> None:
    start, model = start_and_tuned("lfm2")
    start.save_pretrained(tmp_path / "start")
    restore(model, start)
    model.save_pretrained(tmp_path / "restored")
    assert verify_checkpoint(tmp_path / "restored", tmp_path / "start").ok
    norms = verify_checkpoint(tmp_path / "restored", tmp_path / "start", norms=True)
    assert {check.kind for check in norms.mismatches} == {"norm"}
    assert {
        check.layer for check in verify_checkpoint(tmp_path / "restored", tmp_path / "start", layers=[5]).checks
    } == {5}
    with pytest.raises(ValueError, match="layers \\[0\\] have no full attention"):
        verify_checkpoint(tmp_path / "restored", tmp_path / "start", layers=[0])
    with_norms = keep(start, tmp_path / "run", norms=True)  # what the run held is compared without asking
    assert {check.kind for check in verify_checkpoint(tmp_path / "restored", with_norms).mismatches} == {"norm"}


def test_a_run_that_held_less_is_compared_on_what_it_held(tmp_path: Path) -> None:
    start, model = start_and_tuned("lfm2")
    run = keep(start, tmp_path / "run", layers=[2])
    restore(model, start, layers=[2])
    model.save_pretrained(tmp_path / "restored")
    report = verify_checkpoint(tmp_path / "restored", run)
    assert report.ok and {check.layer for check in report.checks} == {2}
    assert "not held by the run, not compared: layer 5 key, layer 5 query" in str(report)


def test_equal_values_in_another_dtype_are_equal(tmp_path: Path) -> None:
    start = build("llama").to(torch.bfloat16)
    start.save_pretrained(tmp_path / "bf16")
    start.float().save_pretrained(tmp_path / "fp32")
    build("llama").save_pretrained(tmp_path / "unrounded")
    for one, other in (("bf16", "fp32"), ("fp32", "bf16")):
        report = verify_checkpoint(tmp_path / one, tmp_path / other)
        assert report.ok and "stored as" in str(report)
    report = verify_checkpoint(tmp_path / "bf16", tmp_path / "unrounded")  # the start, rounded to what is stored
    assert report.ok and "bfloat16, the start as float32 (rounded)" in str(report)
    assert len(verify_checkpoint(tmp_path / "unrounded", tmp_path / "bf16").mismatches) == 8


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_a_start_rounded_on_loading_is_told_from_a_trained_one(kind: torch.dtype, tmp_path: Path) -> None:
    start = build("llama")
    start.save_pretrained(tmp_path / "start")
    loaded = start.to(kind).float()
    loaded.save_pretrained(tmp_path / "frozen")
    report = verify_checkpoint(tmp_path / "frozen", tmp_path / "start")
    assert not report.ok
    assert {check.rounding for check in report.checks} == {str(kind).removeprefix("torch.")}
    assert f"all by rounding the start to {report.checks[0].rounding}" in str(report)
    assert "loaded in 16 bits" in str(report)

    weight = loaded.model.layers[0].self_attn.q_proj.weight.data  # one entry that training moved
    weight[0, 0] = weight[0, 0].nextafter(weight.new_tensor(9.0))
    loaded.save_pretrained(tmp_path / "trained")
    trained = verify_checkpoint(tmp_path / "trained", tmp_path / "start")
    assert [check.rounding for check in trained.checks].count("") == 1
    loaded.to(torch.float64).save_pretrained(tmp_path / "wider")
    assert verify_checkpoint(tmp_path / "wider", tmp_path / "trained").ok


def test_integers_are_a_mismatch_not_a_crash(tmp_path: Path) -> None:
    start = build("llama")
    for folder in ("start", "packed"):
        start.save_pretrained(tmp_path / folder)
    file = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.int8)}, file, metadata={"format": "pt"})
    (check,) = verify_checkpoint(tmp_path / "packed", tmp_path / "start").mismatches
    assert check.reason == "stored as int8 against float32, which do not convert without loss"


def test_another_model_is_a_mismatch(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "llama")
    build("gpt2").save_pretrained(tmp_path / "gpt2")
    report = verify_checkpoint(tmp_path / "llama", tmp_path / "gpt2")
    assert not report.ok and all("no such rows" in check.reason for check in report.checks)
    with pytest.raises(ValueError, match="holds none of this checkpoint's 16 routes"):
        verify_checkpoint(tmp_path / "llama", keep(build("lfm2"), tmp_path / "run", layers=[5]))


def test_bad_paths_are_refused(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "llama")
    (tmp_path / "file.txt").write_text("x")
    with pytest.raises(ValueError, match="does not exist"):
        verify_checkpoint(tmp_path / "llama", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="neither a checkpoint folder nor a reference"):
        verify_checkpoint(tmp_path / "llama", tmp_path / "file.txt")
    with pytest.raises(ValueError, match="is not a folder with a checkpoint"):
        verify_checkpoint(tmp_path / "nowhere", tmp_path / "llama")
    run = keep(build("llama"), tmp_path / "run")
    file = run / "routeguard" / "reference.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x07")
    with pytest.raises(ValueError, match="does not match its own digest"):
        verify_checkpoint(tmp_path / "llama", run)
    cut = tmp_path / "llama" / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cut short or damaged"):
        verify_checkpoint(tmp_path / "llama", tmp_path / "llama")


def test_verifying_imports_no_torch(tmp_path: Path) -> None:
    start, model = start_and_tuned("phi3")
    start.save_pretrained(tmp_path / "start")
    model.save_pretrained(tmp_path / "tuned")
    run = keep(start, tmp_path / "run")
    code = (
        "import sys; from routeguard.checkpoint.verify import verify_checkpoint as v\n"
        f"assert v({str(tmp_path / 'start')!r}, {str(run)!r}).ok\n"
        f"assert not v({str(tmp_path / 'tuned')!r}, {str(tmp_path / 'start')!r}).ok\n"
        "loaded = {'torch', 'transformers', 'safetensors'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -- adapters --------------------------------------------------------------------------------------------------------


def adapted(name: str, **options: Any) -> tuple[Any, Any]:
    """(plain base, PEFT model at its start)."""
    peft = pytest.importorskip("peft")
    base = build(name)
    plain = copy.deepcopy(base)
    targets = ["c_attn"] if name == "gpt2" else ["q_proj", "k_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, fan_in_fan_out=name == "gpt2", **options)
    return plain, peft.get_peft_model(base, config)


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gpt2", "gemma3", "lfm2"])
def test_an_adapter_is_verified_by_its_rows_of_b(name: str, tmp_path: Path) -> None:
    plain, model = adapted(name)
    plain.save_pretrained(tmp_path / "base")
    run = keep(model, tmp_path / "run")
    tune(model)
    model.save_pretrained(tmp_path / "tuned")
    restore(model, plain)
    model.save_pretrained(tmp_path / "restored")
    for against in (tmp_path / "base", run):
        good = verify_checkpoint(tmp_path / "restored", against)
        assert good.ok, str(good)
        bad = verify_checkpoint(tmp_path / "tuned", against)
        roles = {(check.layer, check.role) for check in bad.mismatches}
        assert roles == {(route.layer, route.role) for route in find_routes(plain) if route.kind == "weight"}
        assert any("lora_B" in check.tensor for check in bad.mismatches)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert verify_checkpoint(tmp_path / "merged", tmp_path / "base").ok
    with pytest.raises(ValueError, match=r"holds none of this checkpoint's|adapters"):
        verify_checkpoint(tmp_path / "merged", run)


def test_an_adapter_that_did_not_start_at_zero_needs_what_the_guard_kept(tmp_path: Path) -> None:
    plain, model = adapted("llama", init_lora_weights="pissa")
    plain.save_pretrained(tmp_path / "base")
    run = keep(model, tmp_path / "run")
    model.save_pretrained(tmp_path / "start")
    assert verify_checkpoint(tmp_path / "start", run).ok
    report = verify_checkpoint(tmp_path / "start", tmp_path / "base")
    assert all("did not start at zero" in check.reason for check in report.checks) and not report.ok
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers.1.self_attn.k_proj.lora_A" in name:
                parameter[0, 0] += 1
    model.save_pretrained(tmp_path / "moved")
    (check,) = verify_checkpoint(tmp_path / "moved", run).mismatches
    assert "lora_A" in check.tensor and check.num_differing == 1


def test_magnitudes_are_compared_with_what_the_guard_kept(tmp_path: Path) -> None:
    plain, model = adapted("qwen3_next", use_dora=True)
    plain.save_pretrained(tmp_path / "base")
    run = keep(model, tmp_path / "run")
    start = copy.deepcopy(model)
    tune(model)
    restore(model, start)
    model.save_pretrained(tmp_path / "restored")
    assert verify_checkpoint(tmp_path / "restored", run).ok
    assert verify_checkpoint(tmp_path / "restored", tmp_path / "base").ok
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj.lora_magnitude_vector" in name:
                parameter[20] += 1  # an output-gate row
                model.save_pretrained(tmp_path / "gate")
                parameter[3] += 1  # a query row
    model.save_pretrained(tmp_path / "query")
    assert verify_checkpoint(tmp_path / "gate", run).ok
    (check,) = verify_checkpoint(tmp_path / "query", run).mismatches
    assert "magnitude" in check.tensor and check.num_differing == 1


@pytest.mark.parametrize(("dtype", "step"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("case", ["llama", "qwen3_next"])
def test_magnitudes_are_compared_with_the_rows_of_the_base(
    case: str, dtype: torch.dtype, step: float, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    plain = build(case).to(dtype)
    plain.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(plain, peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj"], use_dora=True))
    model.save_pretrained(tmp_path / "frozen")
    report = verify_checkpoint(tmp_path / "frozen", tmp_path / "base")
    assert report.ok and "magnitudes equal the norms of the base's rows up to rounding" in str(report)
    with torch.no_grad():
        name = next(n for n, _ in model.named_parameters() if "q_proj.lora_magnitude_vector" in n)
        dict(model.named_parameters())[name][3] *= 1 + step
    model.save_pretrained(tmp_path / "trained")
    (check,) = verify_checkpoint(tmp_path / "trained", tmp_path / "base").mismatches
    assert "magnitude" in check.tensor and check.num_differing == 1


def test_whole_copies_and_other_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = build("llama")
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, target_modules=["up_proj"], modules_to_save=["k_proj"])
    model = peft.get_peft_model(copy.deepcopy(base), config)
    model.save_pretrained(tmp_path / "start")
    report = verify_checkpoint(tmp_path / "start", tmp_path / "base")
    assert report.ok and "4 of 8 routes carry no adapter" in str(report)
    tune(model)
    model.save_pretrained(tmp_path / "tuned")
    mismatches = verify_checkpoint(tmp_path / "tuned", tmp_path / "base").mismatches
    assert [check.role for check in mismatches] == ["key"] * 4
    other = peft.get_peft_model(copy.deepcopy(base), peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    other.save_pretrained(tmp_path / "ia3")
    mismatches = verify_checkpoint(tmp_path / "ia3", tmp_path / "base").mismatches
    assert all("a IA3 adapter acts on it" in check.reason for check in mismatches) and len(mismatches) == 4
    elsewhere = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=4, target_modules=["up_proj"]))
    tune(elsewhere)
    elsewhere.save_pretrained(tmp_path / "elsewhere")
    assert verify_checkpoint(tmp_path / "elsewhere", tmp_path / "base").ok
    with pytest.raises(ValueError, match="layers \\[9\\] are not covered"):
        verify_checkpoint(tmp_path / "elsewhere", tmp_path / "base", layers=[9])


# -- reading and comparing -------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    data=st.data(),
    dtype=st.sampled_from([*DTYPES, torch.int8, torch.int64]),
    chunk=st.integers(1, 40),
)
@settings(max_examples=60, deadline=None)
def test_rows_read_from_disk_are_those_in_memory(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], data: Any, dtype: torch.dtype, chunk: int
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    edges = sorted(data.draw(st.sets(st.integers(0, shape[dim]), min_size=2)))
    rows = tuple(zip(edges[::2], edges[1::2], strict=False)) if len(edges) % 2 == 0 else None
    tensor = (torch.randn(shape) * 50).to(dtype)
    file = tmp_path_factory.mktemp("rows") / "t.safetensors"
    save_file({"before": torch.zeros(3), "t": tensor, "z": torch.ones(2)}, file)
    stored = stored_tensors([file])["t"]
    expected = take_rows(tensor, rows, dim).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    assert bytes(read_rows(stored, rows, dim)) == expected
    chunks = list(row_chunks(stored, rows, dim, chunk_elements=chunk))
    assert b"".join(chunks) == expected
    assert all(len(piece) == chunk * tensor.element_size() for piece in chunks[:-1])
    assert Slice(stored, rows, dim).num_elements == take_rows(tensor, rows, dim).numel()


@given(one=st.sampled_from(DTYPES), other=st.sampled_from(DTYPES), size=st.integers(1, 50), seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_differing_entries_are_counted_as_torch_counts_them(
    tmp_path_factory: pytest.TempPathFactory, one: torch.dtype, other: torch.dtype, size: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    narrow = torch.randn(size, generator=generator).to(torch.bfloat16).to(torch.float16)
    a, b = narrow.to(one), narrow.to(other).clone()
    changed = torch.rand(size, generator=generator) < 0.3
    b[changed] = b[changed] + 1
    a[::7] = 0.0
    b[::7] = 0.0
    file = tmp_path_factory.mktemp("cmp") / "t.safetensors"
    save_file({"a": a, "b": b}, file)
    stored = stored_tensors([file])
    slices = [Slice(stored[name], None, 0) for name in ("a", "b")]
    assert why_not_comparable(*slices) == ""
    assert num_differing(*slices) == int((a.double() != b.double()).sum())
    assert num_nonzero(slices[0]) == int((a != 0).sum())


def test_minus_zero_is_zero(tmp_path: Path) -> None:
    for dtype in DTYPES:
        save_file({"t": torch.tensor([0.0, -0.0, 1.0, -1.0], dtype=dtype)}, tmp_path / "t.safetensors")
        assert num_nonzero(Slice(stored_tensors([tmp_path / "t.safetensors"])["t"], None, 0)) == 2


def test_rows_outside_a_tensor_are_refused(tmp_path: Path) -> None:
    save_file({"t": torch.zeros(4, 2)}, tmp_path / "t.safetensors")
    stored = stored_tensors([tmp_path / "t.safetensors"])["t"]
    with pytest.raises(ValueError, match="has 4 rows along dimension 0; asked for"):
        read_rows(stored, ((2, 6),), 0)


def test_rows_are_located_among_kept_rows() -> None:
    kept = ((10, 20), (40, 50))
    assert locate_rows(None, ((1, 2),), total=60, what="w") == ((1, 2),)
    assert locate_rows(kept, ((12, 14), (40, 50)), total=60, what="w") == ((2, 4), (10, 20))
    assert locate_rows(((0, 60),), None, total=60, what="w") is None
    with pytest.raises(ValueError, match=r"rows \[18, 22\) of w are wanted"):
        locate_rows(kept, ((18, 22),), total=60, what="w")


def test_comparing_takes_little_memory(tmp_path: Path) -> None:
    tensor = torch.randn(4096, 2048)  # 32 MiB
    save_file({"a": tensor, "b": tensor.clone()}, tmp_path / "t.safetensors")
    stored = stored_tensors([tmp_path / "t.safetensors"])
    tracemalloc.start()
    assert num_differing(*(Slice(stored[name], None, 0) for name in ("a", "b"))) == 0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 * 2**20


def test_a_checkpoint_is_not_compared_with_itself(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="compared with itself"):
        verify_checkpoint(tmp_path / "model", tmp_path / "model" / ".." / "model")
