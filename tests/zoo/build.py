"""Build the tiny models of the zoo and the inputs that run them."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from typing import Any

import pytest

from tests.zoo.case import Case
from tests.zoo.config_class import MissingHereError
from tests.zoo.configs import CASES
from tests.zoo.earlier import EARLIER_FIELDS, NOT_EARLIER
from tests.zoo.tiny import NUM_TOKENS, tiny_config
from tests.zoo.towers import register_stub_tower

# Ids outside this range are left for special tokens, such as image placeholders.
PLAIN_TOKENS = range(10, 80)


def find_case(case: Case | str) -> Case:
    """The case itself, or the one of that name; ValueError with the nearest name if there is none."""
    if isinstance(case, Case):
        return case
    if case not in CASES:
        close = difflib.get_close_matches(case, CASES, n=1)
        raise ValueError(f"no zoo case {case!r}; nearest {close or 'none'}")
    return CASES[case]


def config_for(case: Case | str) -> Any:
    """A fresh tiny config of the case; skips the test where the installed transformers does not have it."""
    import transformers

    case = find_case(case)
    config_class = config_class_of(case.model_type)
    try:
        auto_class = getattr(transformers, case.model_class, None)
        if config_class not in getattr(auto_class, "_model_mapping", [config_class] if auto_class else []):
            raise MissingHereError(f"no {case.model_class} of {case.model_type}")
        return tiny_config(config_class, overrides_of(case, config_class))
    except MissingHereError as missing:
        pytest.skip(f"transformers {transformers.__version__}: {missing}")


def config_class_of(model_type: str) -> Any:
    """The config class of a model type; skips the test where the installed transformers has none."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    return CONFIG_MAPPING[model_type]


def overrides_of(case: Case, config_class: type) -> dict[str, Any]:
    """The case's changes as this release of transformers wants them."""
    if dataclasses.is_dataclass(config_class):
        return dict(case.overrides)
    if case.name in NOT_EARLIER:
        raise MissingHereError(f"{case.name}: {NOT_EARLIER[case.name]}")
    return {**case.overrides, **EARLIER_FIELDS.get(case.name, {})}


def build(case: Case | str, *, device: str = "cpu", seed: int = 0) -> Any:
    """A tiny random model in eval mode, float32, eager attention.

    Args:
        case: a case or its name (a model type names its plain case).
        device: "cpu" or "meta".
        seed: seed of the random weights; the global random state is left as it was.
    """
    import torch
    import transformers

    case = find_case(case)
    if case.stub_tower:
        register_stub_tower()
    config = config_for(case)
    model_class = getattr(transformers, case.model_class)
    with torch.random.fork_rng(devices=[]), torch.device(device) if device == "meta" else contextlib.nullcontext():
        torch.manual_seed(seed)
        if case.model_class.startswith("AutoModel"):
            model = model_class.from_config(config, attn_implementation="eager", dtype=torch.float32)
        else:
            model = model_class._from_config(config, attn_implementation="eager", dtype=torch.float32)
    return model.to(device).eval()  # a few classes make parameters that ignore the meta device


def runner(case: Case | str, model: Any) -> Any:
    """The module of `model` that `example_inputs` go to: the model, or the case's `runs` submodule."""
    return model.get_submodule(find_case(case).runs)


def example_inputs(case: Case | str, *, num_tokens: int = NUM_TOKENS, seed: int = 0) -> dict[str, Any]:
    """Text inputs for a forward pass, longer than any sliding window of the zoo: input_ids `[1, num_tokens]`."""
    import torch

    case = find_case(case)
    generator = torch.Generator().manual_seed(seed)

    def tokens(*streams: int) -> torch.Tensor:
        return torch.randint(PLAIN_TOKENS.start, PLAIN_TOKENS.stop, (1, num_tokens, *streams), generator=generator)

    def make(kind: Any) -> Any:
        match kind:
            case "tokens":
                return tokens()
            case ("tokens", int(streams)):
                return tokens(streams)
            case "zeros":
                return torch.zeros(1, num_tokens)
            case tuple():
                return torch.randn(kind, generator=generator)
        return kind

    return {"input_ids": tokens(), **{name: make(kind) for name, kind in case.extra_inputs.items()}}
