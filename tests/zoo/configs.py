"""The registry of tiny models: one or more cases for each decoder in transformers' config mapping."""

from __future__ import annotations

from tests.zoo.case import Case
from tests.zoo.decoders import DECODER_CASES
from tests.zoo.hybrids import HYBRID_CASES
from tests.zoo.multimodal import MULTIMODAL_CASES
from tests.zoo.speech import SPEECH_CASES


def _by_name(cases: list[Case]) -> dict[str, Case]:
    named = {case.name: case for case in cases}
    if len(named) != len(cases):
        names = [case.name for case in cases]
        raise ValueError(f"case names appear twice: {sorted({name for name in names if names.count(name) > 1})}")
    return named


CASES: dict[str, Case] = _by_name([*DECODER_CASES, *HYBRID_CASES, *MULTIMODAL_CASES, *SPEECH_CASES])
