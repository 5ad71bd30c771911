"""The zoo covers transformers' config mapping, and each of its tiny models builds and runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from tests.zoo.build import build, config_class_of, config_for, example_inputs, runner
from tests.zoo.case import Case
from tests.zoo.configs import CASES
from tests.zoo.parts import PARTS
from tests.zoo.skips import DORMANT_DECODER, ENCODER_DECODER, NO_SOFTMAX, SINGLE, SKIPS

ZOO_TYPES = {case.model_type for case in CASES.values()}
TEXT_GENERATORS = {
    model_type
    for task in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
    for model_type in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {})
}
MAX_PARAMETERS = 1_500_000
WRITTEN_FOR = "5.24"
of_the_list = pytest.mark.skipif(
    Version(transformers.__version__) < Version(WRITTEN_FOR),
    reason=f"the zoo lists the model types of transformers {WRITTEN_FOR}",
)


def skipped_for(reason: str) -> list[str]:
    return [model_type for model_type, given in SKIPS.items() if given == reason]


def sub_config_types(config: Any) -> Iterator[str]:
    for name in config.sub_configs:
        if (sub_config := getattr(config, name, None)) is not None:
            yield sub_config.model_type
            yield from sub_config_types(sub_config)


class SoftmaxCounter(TorchDispatchMode):
    """Counts the softmax operations that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(word in func.name() for word in ("softmax", "scaled_dot_product"))
        return func(*args, **(kwargs or {}))


@of_the_list
def test_every_model_type_is_in_the_zoo_or_skipped_with_a_reason() -> None:
    assert ZOO_TYPES | set(SKIPS) == set(CONFIG_MAPPING_NAMES)
    assert not ZOO_TYPES & set(SKIPS)


def test_each_model_type_of_the_zoo_has_a_case_of_its_own_name() -> None:
    assert set(CASES) >= ZOO_TYPES
    assert all(name.partition("/")[0] == case.model_type for name, case in CASES.items())


@of_the_list
def test_only_named_kinds_of_text_generators_are_skipped() -> None:
    reasons = {model_type: SKIPS[model_type] for model_type in TEXT_GENERATORS & set(SKIPS)}
    allowed = {ENCODER_DECODER, DORMANT_DECODER, NO_SOFTMAX, *SINGLE.values()}
    assert {model_type: reason for model_type, reason in reasons.items() if reason not in allowed} == {}


@of_the_list
@pytest.mark.parametrize("name", PARTS)
def test_skipped_parts_are_inside_their_case(name: str) -> None:
    assert set(PARTS[name].split()) <= set(sub_config_types(config_for(name)))


@of_the_list
@pytest.mark.parametrize("model_type", skipped_for(ENCODER_DECODER))
def test_skipped_encoder_decoders_are_encoder_decoders(model_type: str) -> None:
    assert config_class_of(model_type)().is_encoder_decoder


@pytest.mark.parametrize("model_type", skipped_for(DORMANT_DECODER))
def test_skipped_dormant_decoders_are_encoders_by_default(model_type: str) -> None:
    assert not config_class_of(model_type)().is_decoder


@of_the_list
@pytest.mark.parametrize("model_type", skipped_for(NO_SOFTMAX))
def test_skipped_recurrent_models_run_without_softmax(model_type: str) -> None:
    sizes = {"mamba2": {"num_heads": 6}, "xlstm": {"qk_dim_factor": 1.0}}
    case = Case(model_type, model_type, sizes.get(model_type, {}))
    with SoftmaxCounter() as counter, torch.no_grad():
        build(case)(**example_inputs(case))
    assert counter.count == 0


def test_softmax_counter_sees_attention() -> None:
    with SoftmaxCounter() as counter, torch.no_grad():
        build("llama")(**example_inputs("llama"))
    assert counter.count == config_for("llama").num_hidden_layers


IGNORED_OPTIONS = {"nemotron_h/window"}


@pytest.mark.parametrize("name", [name for name in CASES if "/" in name])
def test_variants_differ_from_the_plain_case(name: str) -> None:
    plain, variant = build(name.partition("/")[0]), build(name)
    shapes = [{key: value.shape for key, value in model.state_dict().items()} for model in (plain, variant)]
    if shapes[0] == shapes[1]:
        variant.load_state_dict(plain.state_dict())
        with torch.no_grad():
            logits = [model(**example_inputs(name)).logits for model in (plain, variant)]
        assert torch.equal(*logits) == (name in IGNORED_OPTIONS)


@pytest.mark.parametrize("model_type", ["gemma4_assistant", "gemma4_unified_assistant"])
def test_skipped_drafting_heads_have_queries_but_no_keys(model_type: str) -> None:
    draft = Case(
        model_type, model_type, {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}}
    )
    names = [name for name, _ in build(draft, device="meta").named_parameters()]
    assert any("q_proj" in name for name in names)
    assert not any("k_proj" in name for name in names)


@of_the_list
def test_skipped_bidirectional_and_local_models_are_so_by_default() -> None:
    assert not config_class_of("xlm")().causal
    assert not config_class_of("flaubert")().causal
    assert config_class_of("xlnet")().attn_type == "bi"
    assert set(config_class_of("reformer")().attn_layers) == {"local", "lsh"}
    assert CONFIG_MAPPING_NAMES["EvollaModel"] == CONFIG_MAPPING_NAMES["evolla"]


@pytest.mark.parametrize("name", CASES)
def test_case_builds_on_meta(name: str) -> None:
    model = build(name, device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert 0 < sum(parameter.numel() for parameter in model.parameters()) < MAX_PARAMETERS
    assert model.config._attn_implementation == "eager"
    assert not model.training


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.forward])
def test_case_runs_text_on_cpu(name: str) -> None:
    model = build(name)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    with SoftmaxCounter() as counter, torch.no_grad():
        outputs = runner(name, model)(**example_inputs(name))
    scores = outputs["logits"] if "logits" in outputs else outputs[0]
    assert torch.isfinite(scores).all()
    assert counter.count > 0


def test_build_repeats_with_the_seed_and_leaves_the_random_state_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, second, other = build("llama"), build("llama"), build("llama", seed=1)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_unknown_case_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"qwen3_nxt.*nearest.*qwen3_next"):
        build("qwen3_nxt")


def test_case_asks_for_a_reason_exactly_when_it_cannot_run() -> None:
    with pytest.raises(ValueError, match="reason"):
        Case("llama", "llama", forward=False)
