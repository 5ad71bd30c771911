"""How cases are built in releases of transformers whose config classes are plain (4.57), where that differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Model types that cannot choose head_dim there: it is hidden_size over heads, as for `tiny.SQUARE`.
SQUARE_EARLIER = frozenset({"granitemoe", "granitemoeshared", "phimoe", "qwen2_moe"})

MROPE_TEXT = {"text_config": {"rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]}}}

# case: fields to add to its overrides, or to put in their place
EARLIER_FIELDS: dict[str, Mapping[str, Any]] = {
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"use_mamba_kernels": False},
    "mllama": {"text_config": {"rope_scaling": {"rope_type": "default"}}},
    "qwen3_vl": MROPE_TEXT,
    "qwen3_vl_moe": MROPE_TEXT,
}

# case: why it is left out there
NOT_EARLIER: dict[str, str] = {
    "apertus": "its activation keeps bfloat16 parameters and cannot be built on the meta device",
    "dbrx": "its sub-configs refuse what they write themselves",
    "doge/experts": "its experts cannot run: dropout is given a tuple",
    "evolla": "its tiny aligner cannot run: shapes differ by one token",
    "ovis2": "its image tower is built for another width",
    "phi4_multimodal": "the audio tower cannot be built without the image tower's config",
    "recurrent_gemma": "it reads whole sequences without its window",
    "stablelm/qk_norm": "its norms without bias cannot be initialised",
    "zamba2": "its shared blocks cannot be saved",
    "zamba2/no_adapter": "its shared blocks cannot be saved",
}
