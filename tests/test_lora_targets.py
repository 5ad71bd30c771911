"""LoRA on everything but the full-attention queries and keys: exact sets, refusals, reports, a step of training."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from routeguard.protect.lora_modules import is_adapter
from routeguard.protect.lora_targets import check_lora_coverage, lora_config, lora_targets, names_to_regex
from routeguard.routes.names import canonical_name
from tests.zoo.build import build, example_inputs

QK = ("self_attn.q_proj", "self_attn.k_proj")
MLA = ("self_attn.q_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj")
ZAMBA2 = tuple(
    [f"shared_transformer.self_attn.{x}_proj" for x in "qk"]
    + [f"shared_transformer.self_attn.linear_{x}_adapter_list.*" for x in "qk"]
)

# model: (name of the stack of layers, full-attention layers, modules held in them, names left out everywhere)
EXPECTED: dict[str, tuple[str, list[int], tuple[str, ...], tuple[str, ...]]] = {
    "afmoe": ("model.layers", [3], QK, (".gate", ".gate_proj", ".up_proj", ".down_proj")),
    "bamba": ("model.layers", [1, 3], QK, ("mamba.out_proj",)),
    "falcon_h1": ("model.layers", list(range(6)), QK, ("mamba.out_proj",)),
    "gemma3": ("model.language_model.layers", [5], QK, ()),
    "gpt2": ("transformer.h", list(range(4)), ("attn.c_attn",), ()),
    "granitemoehybrid": ("model.layers", [1, 3], QK, ("mamba.out_proj",)),
    "jamba": ("model.layers", [1, 3], QK, ("mamba.dt_proj",)),
    "kimi_linear": ("model.layers", [4], MLA, ()),
    "lfm2": ("model.layers", [2, 5], QK, ()),
    "llama": ("model.layers", list(range(4)), QK, ()),
    "minimax": ("model.layers", [0, 2, 4], QK, ()),
    "nemotron_h": ("model.layers", [1, 5], ("mixer.q_proj", "mixer.k_proj"), ("mixer.out_proj",)),
    "olmo_hybrid": ("model.layers", [3], QK, ()),
    "phi3": ("model.layers", list(range(4)), ("self_attn.qkv_proj",), ()),
    "qwen3_5": ("model.language_model.layers", [3], QK, ()),
    "qwen3_next": ("model.layers", [3], QK, tuple(f"mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down"))),
    "zamba": ("model.layers", [1], tuple(f"shared_transf.{x}" for x in QK), ()),
    "zamba2": ("model.layers", [1, 3, 5], ZAMBA2, ("mamba.out_proj",)),
}
# PEFT turns target_modules of these into last names and adds the experts' tensors for "all-linear".
REDIRECTED = ("afmoe", "minimax", "qwen3_next")
# Zamba2 keeps slots of its built-in adapters that another use of the block reads.
UNUSED_SLOTS = re.compile(r"_adapter_list\.\d")


def adapted_modules(model: nn.Module) -> set[str]:
    return {canonical_name(name) for name, module in model.named_modules() if is_adapter(module)}


def reference(model: nn.Module, name: str) -> set[str]:
    """A plain walk: every linear module in the decoder layers, less those whose weight is listed in `EXPECTED`."""
    stack, layers, held, never = EXPECTED[name]
    modules = dict(model.named_modules())
    patterns = [re.escape(f"{stack}.{i}.{inner}").replace(r"\*", ".*") for i in layers for inner in held]
    weights = {
        id(module.weight)
        for key, module in modules.items()
        if isinstance(module, (nn.Linear, Conv1D)) and any(re.fullmatch(p, key) for p in patterns)
    }
    assert weights
    return {
        key
        for key, module in modules.items()
        if isinstance(module, (nn.Linear, Conv1D))
        and key.startswith(f"{stack}.")
        and id(module.weight) not in weights
        and not key.endswith(never or "nothing")
    }


@pytest.mark.parametrize("name", EXPECTED)
def test_adapts_exactly_the_other_linear_modules(name: str) -> None:
    model = build(name, device="meta")
    expected = reference(model, name)
    targets = lora_targets(model)
    assert {module.name for module in targets.modules} == expected
    names = [key for key, _ in model.named_modules()]
    assert {key for key in names if re.fullmatch(targets.target_modules, key)} == expected
    wrapped = peft.get_peft_model(model, lora_config(model, r=2))
    assert adapted_modules(wrapped) == expected
    assert {canonical_name(module.name) for module in check_lora_coverage(wrapped, quiet=True).adapted} == expected


@pytest.mark.parametrize("name", [name for name in EXPECTED if name not in REDIRECTED])
def test_all_linear_with_exclude_modules_is_the_same_set(name: str) -> None:
    model = build(name, device="meta")
    expected = reference(model, name)
    config = peft.LoraConfig(target_modules="all-linear", exclude_modules=lora_targets(model).exclude_modules)
    assert adapted_modules(peft.get_peft_model(model, config)) == expected


@pytest.mark.parametrize("name", EXPECTED)
def test_every_adapter_is_trained(name: str) -> None:
    model = build(name)
    wrapped = peft.get_peft_model(model, lora_config(model, r=2, init_lora_weights=False))
    wrapped(**example_inputs(name)).logits.square().sum().backward()
    for key, module in wrapped.named_modules():
        if is_adapter(module) and not UNUSED_SLOTS.search(key):
            gradient = module.lora_B["default"].weight.grad
            assert gradient is not None, key
            assert gradient.abs().sum() > 0, key


def test_jamba_dt_proj_adapter_would_be_silent() -> None:
    config = peft.LoraConfig(target_modules=["dt_proj", "in_proj"], init_lora_weights=False)
    model = build("jamba")
    if not dataclasses.is_dataclass(model.config):
        pytest.skip("transformers before 5 calls dt_proj as a module where there are no kernels")
    wrapped = peft.get_peft_model(model, config)
    wrapped(**example_inputs("jamba")).logits.sum().backward()
    moved = {name.split(".")[-4] for name, p in wrapped.named_parameters() if p.grad is not None}
    assert moved == {"in_proj"}


@pytest.mark.parametrize("name", ["falcon_h1", "nemotron_h"])
def test_peft_refuses_what_is_left_out_of_mamba(name: str) -> None:
    model = build(name, device="meta")
    assert any(m.left_out == "bypassed" and m.name.endswith("out_proj") for m in lora_targets(model).left_out)
    with pytest.raises(ValueError, match="incompatible with Mamba"):
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["out_proj"]))


def train_a_step(name: str, config: peft.LoraConfig) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights before training and after a step, merged, by name in the base model."""
    model = build(name)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    wrapped = peft.get_peft_model(model, config)
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    for _ in range(2):  # lora_B starts at zero, so lora_A moves only in the second step
        wrapped(**example_inputs(name)).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return before, wrapped.merge_and_unload().state_dict()


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"use_rslora": True}], ids=["lora", "dora", "rslora"])
@pytest.mark.parametrize("name", ["olmo_hybrid", "qwen3_next", "lfm2"])
def test_training_leaves_queries_and_keys_bit_identical(name: str, options: dict[str, Any]) -> None:
    _, layers, held, _ = EXPECTED[name]
    before, after = train_a_step(name, lora_config(build(name, device="meta"), r=2, **options))
    for layer in layers:
        for inner in held:
            key = f"model.layers.{layer}.{inner}.weight"
            assert torch.equal(before[key], after[key])
        assert not torch.equal(before[key := f"model.layers.{layer}.self_attn.v_proj.weight"], after[key])
    if name == "olmo_hybrid":
        assert not torch.equal(before[key := "model.layers.0.linear_attn.q_proj.weight"], after[key])


def test_pissa_passes_through_and_leaves_queries_alone() -> None:
    before, after = train_a_step("lfm2", lora_config(build("lfm2"), r=2, init_lora_weights="pissa"))
    assert torch.equal(before[key := "model.layers.2.self_attn.q_proj.weight"], after[key])


def test_naive_list_moves_queries_and_the_check_refuses_it() -> None:
    naive = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    before, after = train_a_step("olmo_hybrid", naive)
    assert not torch.equal(before[key := "model.layers.3.self_attn.q_proj.weight"], after[key])
    with pytest.raises(ValueError, match=r"would be trained: model\.layers\.3\.self_attn\.q_proj; use target_modules"):
        check_lora_coverage(peft.get_peft_model(build("olmo_hybrid"), naive))


def test_typo_in_exclude_modules_is_caught_after_wrapping() -> None:
    typo = peft.LoraConfig(target_modules="all-linear", exclude_modules=["layers.3.self_attn.q_prj", "o_proj"])
    wrapped = peft.get_peft_model(build("olmo_hybrid", device="meta"), typo)
    with pytest.raises(ValueError, match="2 query or key tensors"):
        check_lora_coverage(wrapped)


@pytest.mark.parametrize("name", ["qwen3_next", "olmo_hybrid"])
def test_saved_adapter_reloads_onto_the_same_modules(name: str, tmp_path: Path) -> None:
    model = build(name)
    wrapped = peft.get_peft_model(model, lora_config(model, r=2))
    wrapped.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(build(name), tmp_path)
    assert adapted_modules(loaded) == adapted_modules(wrapped)
    check_lora_coverage(loaded, quiet=True)


def test_report_counts_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    model = build("nemotron_h", device="meta")
    text = str(lora_targets(model))
    assert "full attention: mixer.v_proj, mixer.o_proj: 2 of 2 layers" in text
    assert "state space: mixer.in_proj: 2 of 2 layers" in text
    assert "left out: mixer.out_proj (2 layers): the layer's code reads the weight itself" in text
    assert "3-D expert tensors are no modules: mixer.experts.up_proj, mixer.experts.down_proj (1 layer)" in text
    coverage = check_lora_coverage(peft.get_peft_model(model, lora_config(model)))
    assert capsys.readouterr().out == f"{coverage}\n"
    assert "LoRA coverage: 10 of 17 linear modules in 6 of 6 layers" in str(coverage)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("lfm2", {"full", "conv", "mlp"}),
        ("gemma3", {"full", "sliding", "mlp"}),
        ("falcon_h1", {"full", "ssm", "mlp"}),
        ("kimi_linear", {"full", "linear", "mlp"}),
        ("zamba2", {"full", "ssm", "mlp", "other"}),
    ],
)
def test_kinds_of_layers(name: str, kinds: set[str]) -> None:
    assert {module.kind for module in lora_targets(build(name, device="meta")).modules} == kinds


def test_targets_narrow_to_kinds() -> None:
    model = build("lfm2", device="meta")
    targets = lora_targets(model, targets=("conv", "full"))
    assert {m.inner for m in targets.modules} == {
        "conv.in_proj",
        "conv.out_proj",
        "self_attn.v_proj",
        "self_attn.out_proj",
    }
    assert {m.inner for m in lora_targets(model, targets="conv").modules} == {"conv.in_proj", "conv.out_proj"}


def test_layers_narrow_what_is_held() -> None:
    model = build("lfm2", device="meta")
    names = {m.name for m in lora_targets(model, layers=[2]).modules}
    assert "model.layers.5.self_attn.q_proj" in names
    assert "model.layers.2.self_attn.q_proj" not in names
    wrapped = peft.get_peft_model(model, lora_config(model, layers=iter([2])))
    check_lora_coverage(wrapped, layers=[2], quiet=True)
    with pytest.raises(ValueError, match=r"layers\.5\.self_attn\.q_proj"):
        check_lora_coverage(wrapped)


def test_fused_tensor_is_left_out_or_adapted_whole() -> None:
    model = build("qwen3_next", device="meta")
    left = {m.inner: m for m in lora_targets(model).left_out}["self_attn.q_proj"]
    assert (left.left_out, left.num_routing_rows, left.num_rows) == ("fused", 64, 128)
    targets = lora_targets(model, fused="include")
    assert "model.layers.3.self_attn.q_proj" in {m.name for m in targets.modules}
    assert "model.layers.3.self_attn.k_proj" not in {m.name for m in targets.modules}
    assert "RouteGuard(protect=Freeze())" in str(targets)
    wrapped = peft.get_peft_model(model, lora_config(model, fused="include"))
    check_lora_coverage(wrapped, fused="include", quiet=True)
    with pytest.raises(ValueError, match=r"partly queries or keys: self_attn\.q_proj.*fused='include'"):
        check_lora_coverage(wrapped)
    with pytest.raises(ValueError, match="'pissa' starts with a non-zero adapter"):
        lora_config(build("qwen3_next", device="meta"), fused="include", init_lora_weights="pissa")


def test_shared_latents_are_named_and_can_be_left_out() -> None:
    model = build("gemma4_text/k_eq_v", device="meta")
    assert re.search(r"note: self_attn\.k_proj \(1 layer\): feed keys and values alike", str(lora_targets(model)))
    shared = lora_targets(model, shared=True)
    assert not re.search("feed keys and values alike", str(shared))
    gone = {m.name for m in lora_targets(model).modules} - {m.name for m in shared.modules}
    assert gone == {"model.layers.5.self_attn.k_proj"}


def test_tied_blocks_are_noted_because_merging_them_is_wrong() -> None:
    model = build("zamba2")
    assert "keep the adapters unmerged" in str(lora_targets(model))
    wrapped = peft.get_peft_model(model, lora_config(model, r=2, init_lora_weights=False))
    with torch.no_grad():
        apart = wrapped(**example_inputs("zamba2")).logits
        merged = wrapped.merge_and_unload()(**example_inputs("zamba2")).logits
    assert (apart - merged).abs().max() > 0.01
    assert "unmerged" not in str(lora_targets(build("lfm2", device="meta")))


def test_expert_tensors_through_target_parameters() -> None:
    model = build("qwen3_next", device="meta")
    if isinstance(model.model.layers[0].mlp.experts, nn.ModuleList):
        pytest.skip("the experts of this transformers are modules")
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    wrapped = peft.get_peft_model(model, lora_config(model, target_parameters=experts))
    coverage = check_lora_coverage(wrapped, quiet=True)
    assert len(coverage.expert_tensors) == 12
    assert "3-D expert tensors are no modules" not in str(coverage)


def quantise(model: nn.Module, bits: int) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name != "lm_head":
            bias = module.bias is not None
            weight = module.weight.detach()
            if bits == 4:
                quantised = bnb.nn.Linear4bit(module.in_features, module.out_features, bias=bias)
                quantised.weight = bnb.nn.Params4bit(weight, requires_grad=False)
            else:
                quantised = bnb.nn.Linear8bitLt(
                    module.in_features, module.out_features, bias=bias, has_fp16_weights=False
                )
                quantised.weight = bnb.nn.Int8Params(weight, requires_grad=False)
            quantised.bias = module.bias
            model.set_submodule(name, quantised.to("cpu"))
    setattr(model, f"is_loaded_in_{bits}bit", True)
    return model


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_base(bits: int) -> None:
    expected = reference(build("lfm2", device="meta"), "lfm2")
    model = quantise(build("lfm2"), bits)
    wrapped = peft.get_peft_model(model, lora_config(model))
    assert adapted_modules(wrapped) == expected
    check_lora_coverage(wrapped, quiet=True)


def test_compiled_model_keeps_its_own_names() -> None:
    model: Any = torch.compile(build("lfm2"))
    config = lora_config(model)
    assert adapted_modules(peft.get_peft_model(model, config)) == reference(build("lfm2", device="meta"), "lfm2")


def test_defaults() -> None:
    config = lora_config(build("lfm2", device="meta"), r=4, lora_dropout=0.1)
    assert (config.r, config.lora_alpha, config.lora_dropout, config.task_type) == (4, 8, 0.1, "CAUSAL_LM")
    assert lora_config(build("gpt2", device="meta")).fan_in_fan_out is True
    assert lora_config(build("llama", device="meta"), lora_alpha=3, task_type=None).lora_alpha == 3


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lfm2", {"targets": "all-linaer but routing"}, "nearest: 'all-linear but routing'"),
        ("lfm2", {"targets": ["slidng"]}, "'slidng' is not a kind of layer; nearest: 'sliding'"),
        ("lfm2", {"targets": []}, "targets is empty"),
        ("lfm2", {"targets": ["ssm"]}, r"targets \['ssm'\]: the model has no linear module of that kind; it has"),
        ("lfm2", {"fused": "exlude"}, "nearest: 'exclude'"),
        ("lfm2", {"layers": [99]}, r"\[99\]"),
        ("lfm2", {"layers": [0]}, r"\[2, 5\]"),
        ("lfm2", {"r": 0}, "at least 1"),
        ("lfm2", {"lora_dropuot": 0.1}, "'lora_dropuot' is not a LoraConfig field; nearest: 'lora_dropout'"),
        ("lfm2", {"layers_to_transform": [0]}, "layers_to_transform is decided here"),
        ("lfm2", {"modules_to_save": ["self_attn"]}, r"would train model\.layers\.2\.self_attn\.q_proj\.weight"),
        ("lfm2", {"target_parameters": ["q_proj.weight"]}, r"would train model\.layers\.2\.self_attn\.q_proj\.weight"),
        ("gpt2", {"bias": "all"}, "bias='all' trains the query and key biases"),
        ("recurrent_gemma", {}, "no full-attention layer"),
        ("mistral/window", {}, "no full-attention layer"),
    ],
)
def test_mistakes_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lora_config(build(name, device="meta"), **options)


def test_empty_target_set_says_what_is_left_out() -> None:
    model = build("phi3", device="meta")
    for layer in model.model.layers:
        layer.mlp = layer.self_attn.o_proj = nn.Identity()
    with pytest.raises(ValueError, match=r"nothing to adapt .*all 5 linear modules are left out: self_attn\.qkv_proj"):
        lora_targets(model)
    assert len(lora_targets(model, fused="include").modules) == 4


def wrap_lora(model: nn.Module) -> Any:
    return peft.get_peft_model(model, lora_config(model))


def wrap_prompt(model: nn.Module) -> Any:
    return peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))


@pytest.mark.parametrize("wrap", [wrap_lora, wrap_prompt])
def test_wrapped_model_is_refused_with_the_way_out(wrap: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(ValueError, match=r"already carries adapters .*model\.unload\(\).*check_lora_coverage"):
        lora_targets(wrap(build("lfm2")))


@pytest.mark.parametrize("wrap", [lambda model: model, wrap_prompt])
def test_check_needs_an_adapter(wrap: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(ValueError, match="no adapter found"):
        check_lora_coverage(wrap(build("lfm2")))


def test_check_refuses_full_copies_and_trainable_queries() -> None:
    config = peft.LoraConfig(target_modules=["v_proj"], modules_to_save=["q_proj"])
    with pytest.raises(ValueError, match=r"would be trained: model\.layers\.2\.self_attn\.q_proj\.weight"):
        check_lora_coverage(peft.get_peft_model(build("lfm2"), config))
    config = peft.LoraConfig(target_modules=["v_proj"], target_parameters=["k_proj.weight"])
    with pytest.raises(ValueError, match=r"would be trained: model\.layers\.2\.self_attn\.k_proj"):
        check_lora_coverage(peft.get_peft_model(build("lfm2"), config))


def test_few_layers_draw_a_warning() -> None:
    wrapped = peft.get_peft_model(
        build("olmo_hybrid", device="meta"), peft.LoraConfig(target_modules=r".*self_attn\.v_proj")
    )
    with pytest.warns(UserWarning, match=r"reach 1 of 6 layers of 'olmo_hybrid' \(self_attn\.v_proj\)"):
        check_lora_coverage(wrapped, quiet=True)


@pytest.mark.filterwarnings("error:the adapters reach")
def test_full_coverage_draws_no_warning() -> None:
    check_lora_coverage(wrap_lora(build("olmo_hybrid", device="meta")), quiet=True)


SEGMENT = st.sampled_from(["a", "b", "layers", "0", "1", "10", "q.p", "+"])
NAME = st.lists(SEGMENT, min_size=1, max_size=4).map(".".join)


@given(st.sets(NAME, max_size=12), st.sets(NAME, max_size=12))
def test_regex_matches_the_names_and_no_other(names: set[str], others: set[str]) -> None:
    pattern = names_to_regex(names)
    assert {name for name in names | others if re.fullmatch(pattern, name)} == names
