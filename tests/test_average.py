"""Averaging all weights with their start: in memory, on disk, for adapters; and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from routeguard import average, average_checkpoint, averaged
from routeguard.cli.main import app
from routeguard.restoration.rounding import round_at_random
from routeguard.storage.floats import to_bytes_at_random, to_floats
from tests.folders import snapshot, write_pair
from tests.tuned import assert_same, start_and_tuned, tune, values
from tests.zoo.build import build

pytestmark = pytest.mark.filterwarnings("ignore:all .* layers of:UserWarning")
ALPHA = 0.3


def mean(tuned: torch.nn.Module, start: torch.nn.Module, alpha: float = ALPHA) -> dict[str, torch.Tensor]:
    """Plain reference: the weighted mean of every parameter, in float32."""
    before = values(start)
    return {name: (1 - alpha) * value.float() + alpha * before[name].float() for name, value in values(tuned).items()}


def assert_rounded(value: torch.Tensor, exact: torch.Tensor, key: str) -> None:
    """The value is the exact one to float32's last bit, or in 16 bits one of its two neighbours there."""
    if value.dtype == torch.float32:
        assert torch.allclose(value, exact, rtol=1e-6, atol=1e-8), key
        return
    spacing = (value.float().abs() * torch.finfo(value.dtype).eps).clamp_min(
        torch.finfo(value.dtype).smallest_normal / 64
    )
    assert ((value.float() - exact).abs() <= spacing * 1.01).all(), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "gemma3", "bamba"])
def test_averages_every_parameter_and_gives_the_tuned_ones_back(name: str, dtype: torch.dtype) -> None:
    start, tuned = start_and_tuned(name, dtype=dtype)
    expected, before = mean(tuned, start), values(tuned)
    with averaged(tuned, start, ALPHA) as report:
        for key, value in values(tuned).items():
            assert_rounded(value, expected[key], key)
    assert_same(tuned, before)
    assert report.num_tensors == len(before) and report.num_entries == sum(v.numel() for v in before.values())
    pairs = [(before[n].double(), v.double()) for n, v in values(start).items()]
    moved, size = sum(float((a - b).square().sum()) for a, b in pairs), sum(float(b.square().sum()) for _, b in pairs)
    assert report.drift_before == pytest.approx((moved / size) ** 0.5, rel=1e-5)


def test_one_is_the_start_and_exceptions_bring_the_tuned_weights_back() -> None:
    start, tuned = start_and_tuned("lfm2")
    before = values(tuned)
    with pytest.raises(RuntimeError, match="boom"), averaged(tuned, start, 1.0):
        assert_same(tuned, values(start))
        raise RuntimeError("boom")
    assert_same(tuned, before)
    average(tuned, start.state_dict(), 1)
    assert_same(tuned, values(start))


@pytest.mark.parametrize("shards", ["5GB", "60KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "nemotron_h"])
def test_a_checkpoint_on_disk_becomes_what_the_model_in_memory_becomes(
    name: str, dtype: torch.dtype, shards: str, tmp_path: Path
) -> None:
    start, tuned = write_pair(name, tmp_path, dtype=dtype, tuned_shards=shards)
    before = snapshot(tmp_path / "tuned")
    report = average_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out", alpha=ALPHA)
    assert snapshot(tmp_path / "tuned") == before
    found = type(tuned).from_pretrained(tmp_path / "out", dtype=dtype)
    expected = mean(tuned, start)
    in_memory = average(tuned, start, ALPHA)
    for (key, one), other in zip(found.named_parameters(), expected.values(), strict=True):
        assert_rounded(one.to(dtype), other, key)
    assert report.num_tensors >= in_memory.num_tensors - 1  # transformers may store other tensors than it trains
    assert report.drift_before == pytest.approx(in_memory.drift_before, rel=1e-3)
    facts = json.loads((tmp_path / "out/routeguard/provenance.json").read_text())["restores"][-1]
    assert facts["method"] == "average (alpha 0.3)" and len(facts["tensors"]) == report.num_tensors


def test_weights_that_never_moved_keep_their_bits(tmp_path: Path) -> None:
    start = build("lfm2")
    tuned = copy.deepcopy(start)
    with torch.no_grad():
        tuned.model.layers[0].operator_norm.weight.add_(1.0)
    start.save_pretrained(tmp_path / "base")
    tuned.save_pretrained(tmp_path / "tuned")
    average_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out", alpha=ALPHA)
    average(tuned, start, ALPHA)
    on_disk = values(type(tuned).from_pretrained(tmp_path / "out"))
    for name, value in values(start).items():
        moved = name == "model.layers.0.operator_norm.weight"
        assert torch.equal(values(tuned)[name], value) != moved and torch.equal(on_disk[name], value) != moved, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_below_half_a_unit_are_kept_on_average(dtype: torch.dtype, tmp_path: Path) -> None:
    start = build("lfm2").to(dtype)
    tuned = copy.deepcopy(start)
    name = "model.layers.0.feed_forward.w1.weight"
    with torch.no_grad():
        for parameter in tuned.parameters():  # one unit in the last place, outward: a tenth of it rounds to nothing
            parameter.copy_((parameter.view(torch.int16) + 1).view(dtype))
    moved = tuned.get_parameter(name) != start.get_parameter(name)
    assert moved.all()
    start.save_pretrained(tmp_path / "base")
    tuned.save_pretrained(tmp_path / "tuned")
    average_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out", alpha=0.1)
    report = average(tuned, start, 0.1)
    assert report.num_16_bit == report.num_entries and "rounded at random" in str(report)
    again = copy.deepcopy(start)
    for found in (values(tuned)[name], values(type(tuned).from_pretrained(tmp_path / "out", dtype=dtype))[name]):
        went_back = (found == values(again)[name]).float().mean()
        assert went_back == pytest.approx(0.1, abs=4 * (0.09 / found.numel()) ** 0.5)


def test_random_rounding_is_exact_where_it_can_be_and_right_on_average() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.tensor([0.0, -1.5, 65504.0, 2.0**-24])
    assert torch.equal(round_at_random(exact, torch.float16, generator), exact.half())
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        for value in (1.001, -3.14159, 1e-6, -7e-8):
            many = torch.full((40_000,), value)
            rounded = round_at_random(many, dtype, generator).double()
            on_disk = to_floats(to_bytes_at_random(many.numpy(), name, np.random.default_rng(0)), name)
            for found in (rounded.numpy(), on_disk.astype(np.float64)):
                assert len(np.unique(found)) == 2
                spread = found.std() / len(found) ** 0.5
                assert abs(found.mean() - float(many[0])) < 5 * spread, (dtype, value)


def adapter_pair(folder: Path, **options: Any) -> tuple[Any, Any]:
    """`folder/base` and a trained LoRA in `folder/tuned`; returns the base and the model with its adapter."""
    base = build("lfm2")
    base.save_pretrained(folder / "base")
    model = get_peft_model(copy.deepcopy(base), LoraConfig(target_modules=["q_proj", "w1"], r=4, **options))
    tune(model, size=0.2)
    model.save_pretrained(folder / "tuned")
    return base, model


def test_an_adapter_is_averaged_by_scaling_its_b(tmp_path: Path) -> None:
    _, model = adapter_pair(tmp_path)
    report = average_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out", alpha=ALPHA)
    before = load_file(tmp_path / "tuned/adapter_model.safetensors")
    after = load_file(tmp_path / "out/adapter_model.safetensors")
    scaled = [name for name in before if not torch.equal(before[name], after[name])]
    assert scaled == [name for name in before if "lora_B" in name] and report.num_tensors == len(scaled)

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "out").merge_and_unload()
    expected = mean(model.merge_and_unload(), base)
    for name, value in loaded.named_parameters():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_what_an_adapter_stores_whole_is_averaged_with_the_base(tmp_path: Path) -> None:
    base, _ = adapter_pair(tmp_path, modules_to_save=["embedding_norm"])
    average_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out", alpha=ALPHA)
    (name,) = [n for n in load_file(tmp_path / "out/adapter_model.safetensors") if "embedding_norm" in n]
    before, after = (load_file(tmp_path / folder / "adapter_model.safetensors")[name] for folder in ("tuned", "out"))
    start = dict(base.named_parameters())["model.embedding_norm.weight"]
    torch.testing.assert_close(after, (1 - ALPHA) * before + ALPHA * start)


@pytest.mark.parametrize(
    ("options", "message"), [({"use_dora": True}, "DoRA"), ({"init_lora_weights": "pissa"}, "did not start at zero")]
)
def test_adapters_that_are_not_scaled_by_their_b_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    adapter_pair(tmp_path, **options)
    with pytest.raises(ValueError, match=message):
        average_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("alpha", [0, -0.1, 1.5, float("nan"), True, "0.1"])
def test_an_alpha_that_is_no_fraction_is_refused(alpha: Any) -> None:
    start, tuned = start_and_tuned("lfm2")
    before = values(tuned)
    with pytest.raises(ValueError, match="above 0 and up to 1"):
        average(tuned, start, alpha)
    assert_same(tuned, before)


def test_a_start_that_lacks_weights_is_refused_unless_insisted(tmp_path: Path) -> None:
    start, tuned = start_and_tuned("lfm2")
    before = values(tuned)
    part = {name: value for name, value in start.state_dict().items() if "layers.0." not in name}
    with pytest.raises(ValueError, match=r"tensors are not in a state dict.*insist"):
        average(tuned, part)
    assert_same(tuned, before)
    report = average(tuned, part, insist=True)
    assert "left as tuned" in str(report)
    assert torch.equal(
        values(tuned)["model.layers.0.operator_norm.weight"], before["model.layers.0.operator_norm.weight"]
    )
    assert not torch.equal(
        values(tuned)["model.layers.1.operator_norm.weight"], before["model.layers.1.operator_norm.weight"]
    )
    with pytest.raises(ValueError, match="checkpoint that the tuning started from"):
        average(tuned, {"unrelated": torch.zeros(2)}, insist=True)


def test_weights_that_are_not_finite_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    start, tuned = write_pair("lfm2", tmp_path)
    file = tmp_path / "tuned/model.safetensors"
    state = load_file(file)
    state["model.layers.1.operator_norm.weight"][0] = float("nan")
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"NaN.*layers\.1\.operator_norm"):
        average_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with torch.no_grad():
        dict(tuned.named_parameters())["model.layers.1.operator_norm.weight"][0] = float("inf")
    before = values(tuned)
    with pytest.raises(ValueError, match="in the model"):
        average(tuned, start)
    assert_same(tuned, before)


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["embedding_norm"]}, {"bias": "lora_only"}])
def test_in_memory_an_adapter_is_averaged_as_the_merged_model_is(options: dict[str, Any], tmp_path: Path) -> None:
    base, model = adapter_pair(tmp_path, **options)
    expected = mean(copy.deepcopy(model).merge_and_unload(), base)
    factors = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_A" in name}
    report = average(model, base, ALPHA)
    assert report.num_tensors > len(factors)
    assert all(torch.equal(factors[name], p) for name, p in model.named_parameters() if name in factors)
    for name, value in model.merge_and_unload().named_parameters():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_an_adapter_that_is_not_active_stays() -> None:
    base = build("lfm2")
    model = get_peft_model(copy.deepcopy(base), LoraConfig(target_modules=["q_proj"], r=4))
    model.add_adapter("other", LoraConfig(target_modules=["q_proj"], r=4, use_dora=True))
    tune(model, size=0.2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B.other." in name:
                parameter.fill_(0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    average(model, base, ALPHA)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved and all(".lora_B.default." in name for name in moved)


def test_averaged_gives_the_adapter_back(tmp_path: Path) -> None:
    base, model = adapter_pair(tmp_path)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with averaged(model, base, ALPHA):
        assert any(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize(
    ("options", "message"), [({"use_dora": True}, "DoRA"), ({"init_lora_weights": "pissa"}, "did not start at zero")]
)
def test_in_memory_other_adapters_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    base, model = adapter_pair(tmp_path, **options)
    with pytest.raises(ValueError, match=message):
        average(model, base)
    ia3 = get_peft_model(build("lfm2"), IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    with pytest.raises(ValueError, match="IA3 adapter"):
        average(ia3, base)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    write_pair("lfm2", tmp_path)
    build("gemma3").save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"not in|differ"):
        average_checkpoint(tmp_path / "other", tmp_path / "tuned", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command(tmp_path: Path) -> None:
    write_pair("lfm2", tmp_path)
    arguments = ["average", str(tmp_path / "base"), str(tmp_path / "tuned"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*arguments, "--alpha", "0.2"])
    assert done.exit_code == 0 and "0.2 of the way back" in done.output and "wrote" in done.output
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 2 and "exists already" in again.output
    as_json = CliRunner().invoke(app, [*arguments[:-1], str(tmp_path / "second"), "--json"])
    assert json.loads(as_json.output)["alpha"] == 0.1


def test_a_start_that_carries_an_adapter_is_refused() -> None:
    start = get_peft_model(build("lfm2"), LoraConfig(target_modules=["q_proj"], r=4))
    for reference in (start, start.state_dict()):
        tuned = build("lfm2", seed=1)
        before = values(tuned)
        with pytest.raises(ValueError, match="carries an adapter"):
            average(tuned, reference)
        assert_same(tuned, before)
    model = get_peft_model(build("lfm2"), LoraConfig(target_modules=["q_proj"], r=4))
    average(model, start)  # its adapter is at zero, where the model's began
    tune(start, size=0.2)
    with pytest.raises(ValueError, match="adapter that is not at zero"):
        average(model, start)


def test_a_start_that_is_the_model_itself_is_refused() -> None:
    model = build("lfm2")
    for reference in (model, model.state_dict()):
        with pytest.raises(ValueError, match="shares its memory"):
            average(model, reference)
