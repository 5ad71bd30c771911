"""L2-SP on adapters: what a LoRA adds goes back to its start, through one factor if the other makes it zero."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import TrainerCallback

from routeguard import L2SP, RouteGuard, l2_sp, lora_config
from routeguard.protect.adapter_start import left_free
from routeguard.protect.l2_sp import trained_weights
from tests.loops import assert_same, tiny, train
from tests.test_guard_peft import adapted, on_quantised, trained
from tests.trainers import run

pytestmark = pytest.mark.filterwarnings("ignore")
RATE, STRENGTH = 1e-2, 20.0
TOTAL = 0.5  # the same in a run of four steps at a linearly falling rate


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trained_weights(model).items()}


def added(model: nn.Module) -> dict[str, Tensor]:
    """What each LoRA layer adds to its base weight."""
    return {
        name: module.get_delta_weight("default").detach().clone()
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight") and hasattr(module, "base_layer")
    }


def total_norm(tensors: dict[str, Tensor]) -> float:
    return sum(float(t.norm()) ** 2 for t in tensors.values()) ** 0.5


class PullB(TrainerCallback):
    """Plain reference: after each step every B goes `lr · strength` of the way to zero, and nothing else does."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        factors = {p for name, p in kwargs["model"].named_parameters() if ".lora_B." in name}
        with torch.no_grad():
            for group in kwargs["optimizer"].param_groups:
                for parameter in factors.intersection(group["params"]):
                    parameter.lerp_(torch.zeros_like(parameter), group["lr"] * STRENGTH)


def moved_then_pulled(
    model: nn.Module, away: Callable[[nn.Module], None]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Every trained tensor before and after one pull of a half, after they were moved away from their start."""
    pull = l2_sp(
        torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=1.0), model, total=0.5, rates=1.0
    )
    away(model)
    before = values(model)
    pull.pull()
    return before, values(model)


@torch.no_grad()
def shake(model: nn.Module) -> None:
    torch.manual_seed(1)
    for parameter in trained_weights(model).values():
        parameter.add_(torch.randn_like(parameter))


@pytest.mark.parametrize("case", ["lfm2", "qwen3_5_text", "phi3", "gpt2"])
def test_what_a_fresh_adapter_adds_is_scaled(case: str) -> None:
    model = adapted(case)
    seen: dict[str, Tensor] = {}

    def away(model: nn.Module) -> None:
        shake(model)
        seen.update(added(model))

    before, after = moved_then_pulled(model, away)
    assert seen and all(delta.any() for delta in seen.values())
    torch.testing.assert_close(added(model), {name: delta / 2 for name, delta in seen.items()})
    for name in before:
        if ".lora_A." in name:
            assert torch.equal(before[name], after[name])


def test_other_tensors_of_adapters_go_back_whole() -> None:
    options = {"use_dora": True, "modules_to_save": ["lm_head"], "target_modules": ["q_proj", "v_proj"]}
    model = adapted("llama", **options)
    start = values(model)
    before, after = moved_then_pulled(model, shake)
    for part in ("lora_B", "lora_magnitude_vector", "lm_head"):
        names = [name for name in before if part in name]
        assert names
        for name in names:
            torch.testing.assert_close(after[name] - start[name], (before[name] - start[name]) / 2)


def test_an_embedding_adapter_goes_back_through_its_a() -> None:
    """PEFT starts an embedding's A at zero instead of its B."""
    model = adapted("llama", target_modules=["embed_tokens"])
    (layer,) = [m for m in model.modules() if hasattr(m, "lora_embedding_A") and len(m.lora_embedding_A)]
    seen: list[Tensor] = []

    def away(model: nn.Module) -> None:
        shake(model)
        seen.append(layer.get_delta_weight("default").detach().clone())

    before, after = moved_then_pulled(model, away)
    torch.testing.assert_close(layer.get_delta_weight("default"), seen[0] / 2)
    (free,) = [name for name in before if torch.equal(before[name], after[name])]
    assert "lora_embedding_B" in free


def test_both_factors_go_back_where_neither_starts_at_zero() -> None:
    model = trained("lfm2")
    start = values(model)
    before, after = moved_then_pulled(model, shake)
    assert {"lora_A", "lora_B"} == {name.split(".")[-3] for name in before}
    for name in before:
        torch.testing.assert_close(after[name] - start[name], (before[name] - start[name]) / 2)


def test_other_methods_are_pulled_as_they_are() -> None:
    model = get_peft_model(tiny("llama"), IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    _, after = moved_then_pulled(model, lambda model: [p.data.fill_(3.0) for p in trained_weights(model).values()])
    assert after and all(torch.equal(value, torch.full_like(value, 2.0)) for value in after.values())


def test_left_free() -> None:
    zero, one = torch.zeros(2), torch.ones(2)
    starts = {
        "a.lora_A.default.weight": one, "a.lora_B.default.weight": zero,
        "b.lora_A.default.weight": one, "b.lora_B.default.weight": one,
        "c.lora_A.default.weight": zero, "c.lora_B.default.weight": zero,
        "d.lora_A.one.weight": one, "d.lora_B.two.weight": zero,
        "e.lora_embedding_A.default": zero, "e.lora_embedding_B.default": one,
        "f.weight": one,
    }  # fmt: skip
    assert left_free(starts) == {"a.lora_A.default.weight", "e.lora_embedding_B.default"}


# -- guarded runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sft", [False, True])
def test_a_guarded_run_equals_a_plain_callback(tmp_path: Path, sft: bool) -> None:
    guarded = run(adapted("lfm2"), tmp_path / "guarded", RouteGuard(L2SP(TOTAL)), sft=sft)
    plain = run(adapted("lfm2"), tmp_path / "plain", PullB(), sft=sft, weight_decay=0.0)
    assert_same(values(plain.model), values(guarded.model))
    free = run(adapted("lfm2"), tmp_path / "free", sft=sft, weight_decay=0.0)
    assert 0 < total_norm(added(guarded.model)) < 0.9 * total_norm(added(free.model))
    kept = load_file(tmp_path / "guarded/routeguard/start.safetensors")
    assert_same(kept, values(adapted("lfm2")))  # what is trained, not the base


def test_a_plain_loop_equals_a_guarded_run_in_what_it_pulls() -> None:
    pulled, plain = adapted("lfm2"), adapted("lfm2")
    optimizer = torch.optim.AdamW(trained_weights(pulled).values(), lr=RATE, weight_decay=0.1)
    assert "(not 6 factors of adapters whose other factor, at zero, is pulled)" in str(
        l2_sp(optimizer, pulled, total=STRENGTH, rates=1.0)
    )
    train(pulled, optimizer)

    @torch.no_grad()
    def pull(_: int) -> None:
        for name, parameter in trained_weights(plain).items():
            if ".lora_B." in name:
                parameter.lerp_(torch.zeros_like(parameter), RATE * STRENGTH)

    train(plain, torch.optim.AdamW(trained_weights(plain).values(), lr=RATE, weight_decay=0.0), after_step=pull)
    assert_same(values(plain), values(pulled))


def test_a_resumed_run_is_pulled_to_the_first_start(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}

    def guard() -> RouteGuard:
        return RouteGuard(L2SP(TOTAL))

    straight = run(adapted("lfm2"), tmp_path / "a", guard(), **options)
    run(adapted("lfm2"), tmp_path / "b", guard(), **options)
    checkpoint = str(tmp_path / "b" / "checkpoint-2")
    again = run(adapted("lfm2"), tmp_path / "b", guard(), resume=checkpoint, **options)
    assert_same(values(straight.model), values(again.model))


def test_an_adapter_that_was_trained_before(tmp_path: Path) -> None:
    start = values(trained("lfm2"))
    pulled = run(trained("lfm2"), tmp_path / "a", RouteGuard(L2SP(1.25), reference="start"))
    free = run(trained("lfm2"), tmp_path / "b", weight_decay=0.0)
    near, far = (
        total_norm({name: value - start[name] for name, value in values(trainer.model).items()})
        for trainer in (pulled, free)
    )
    assert 0 < near < 0.8 * far


def test_the_recipe_on_adapters_that_leave_routing_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny("lfm2")
    torch.manual_seed(0)
    model = get_peft_model(model, lora_config(model, r=4)).train()
    run(model, tmp_path, RouteGuard(recipe="balanced"))
    said = capsys.readouterr().out
    assert "l2_sp: every trained weight is pulled to its start, by 0.9 in all" in said
    assert "factors of adapters whose other factor, at zero, is pulled" in said
    assert "no routing parameter is trainable" in said


def test_adapters_on_a_quantised_base(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "base")
    model = on_quantised(tmp_path / "base", 4, target_modules=["q_proj", "v_proj"])
    free = on_quantised(tmp_path / "base", 4, target_modules=["q_proj", "v_proj"])
    run(model, tmp_path / "a", RouteGuard(L2SP(TOTAL)))
    run(free, tmp_path / "b", weight_decay=0.0)
    assert 0 < total_norm(added(model)) < 0.9 * total_norm(added(free))


def test_a_base_is_no_start_of_adapters(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lacks 12 of the 12 trained weights.*leave `reference` out"):
        run(adapted("lfm2"), tmp_path, RouteGuard("l2_sp", reference=tiny("lfm2")))
