"""`add_state_transition`: give a model's attention layers a linear path, and take it away again."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from routeguard.recall.quiet import undisturbed
from routeguard.routes.in_memory import model_name
from routeguard.routes.wording import as_printed
from routeguard.state_transition.base_model import (
    named_part,
    per_layer_embeddings,
    refuse_mixed_caches,
    set_vocabulary,
    text_config,
)
from routeguard.state_transition.cache import StateTransitionCache, refuse_older_caches
from routeguard.state_transition.config import StateTransitionConfig
from routeguard.state_transition.files import WEIGHTS_FILE, read_base_model, read_config, write_config
from routeguard.state_transition.hooks import DecoderHooks, LayerHooks
from routeguard.state_transition.path import LinearPath
from routeguard.state_transition.projections import find_projections
from routeguard.state_transition.running import Running
from routeguard.state_transition.step_tokens import StepTokens

_NAME = "state_transition"  # of the path in its attention module, and of this in the model
_TOKENS = "step_tokens"


class StateTransition:
    """A conversion that is in place: `add_state_transition` makes it, `remove` undoes it.

    Attributes:
        model: the converted model; all its own weights are frozen.
        config: of the conversion.
        layers: decoder layers with a linear path.
        enabled: whether steps are seen and paths add anything (`disabled`).
    """

    def __init__(self, model: Any, config: StateTransitionConfig, *, dtype: torch.dtype | None = None) -> None:
        if any(isinstance(module, LinearPath) for module in model.modules()):
            raise ValueError("this model has state transition already; remove() it first")
        if any(hasattr(module, "base_layer") and hasattr(module, "merge") for module in model.modules()):
            raise ValueError("this model has PEFT adapters; merge them first (merge_and_unload), then convert it")
        head, embedding = named_part(model, "get_output_embeddings"), named_part(model, "get_input_embeddings")
        decoder = named_part(model, "get_decoder")
        if decoder is model:
            raise ValueError(f"{type(model).__name__} is no causal language model around a decoder")
        projections = find_projections(model, config.layers)
        refuse_mixed_caches(model, [one.layer for one in projections])
        self.base_dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        if dtype is None:
            dtype = self.base_dtype if self.base_dtype.itemsize >= 4 else torch.float32
        self.model, self.config, self.decoder, self.head = model, config, decoder, head
        self.layers = tuple(p.layer for p in projections)
        self.enabled = True
        self.running: Running | None = None
        self.tokens = StepTokens(embedding, head, config.token_ids, dtype=dtype)
        self._were_trained = [p for p in model.parameters() if p.requires_grad]
        model.requires_grad_(False)
        self._attached: list[tuple[nn.Module, str]] = []
        self.paths: dict[int, LinearPath] = {}
        handles = []
        for one in projections:
            path = LinearPath(one, config, dtype=dtype)
            one.attention.add_module(_NAME, path)
            self._attached.append((one.attention, _NAME))
            self.paths[one.layer] = path
            handles += LayerHooks(self, one, path).handles
        head.add_module(_TOKENS, self.tokens)
        self._attached.append((head, _TOKENS))
        handles += [
            embedding.register_forward_pre_hook(self.tokens.before_embedding),
            *[more.register_forward_pre_hook(self.tokens.before_other) for more in per_layer_embeddings(decoder)],
            embedding.register_forward_hook(self.tokens.after_embedding),
            head.register_forward_hook(self.tokens.after_head),
            *DecoderHooks(self, decoder).handles,
        ]
        self._handles = handles
        self._sizes = set_vocabulary(model, self.tokens.size)
        setattr(model, _NAME, self)

    @property
    def covers_all_attention(self) -> bool:
        """Whether every layer of the model is converted."""
        config = text_config(self.model)
        return len(self.layers) == int(config.num_hidden_layers)

    @property
    def uses_cache(self) -> bool:
        """Whether the model makes a cache if nobody says so: outside of training, as its configuration wants."""
        return not self.model.training and bool(getattr(text_config(self.model), "use_cache", False))

    @property
    def openness(self) -> dict[int, float]:
        """By layer, the mean of the gate in the last forward pass; empty without a gate."""
        found = {layer: path.openness for layer, path in self.paths.items()}
        return {layer: float(value) for layer, value in found.items() if value is not None}

    def new_cache(
        self, *, eos_token_ids: Sequence[int] | None = None, pad_token_id: int | None = None
    ) -> StateTransitionCache:
        """An empty cache for `generate(past_key_values=…)`; generation makes its own if none is given.

        Args:
            eos_token_ids, pad_token_id: what ends a row of a batch and fills it up then, so that it is not kept. None
                (default): those of `model.generation_config`; give them where `generate()` gets others.
        """
        settings = getattr(self.model, "generation_config", None)
        if eos_token_ids is None:
            found = getattr(settings, "eos_token_id", None)
            eos_token_ids = [] if found is None else [found] if isinstance(found, int) else found
        if pad_token_id is None:
            pad_token_id = getattr(settings, "pad_token_id", None)
        return StateTransitionCache(
            self.model.config, self.config, self.layers, eos_token_ids=tuple(eos_token_ids), pad_token_id=pad_token_id
        )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What is trained, by names that hold in any model: `layers.3.up.query.weight`, `tokens.inputs`, …"""
        for layer, path in self.paths.items():
            yield from ((f"layers.{layer}.{name}", parameter) for name, parameter in path.named_parameters())
        yield from ((f"tokens.{name}", parameter) for name, parameter in self.tokens.named_parameters())

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The base model inside: full attention, its own vocabulary, no path."""
        before, self.tokens.enabled = self.tokens.enabled, False
        try:
            with self.paused():
                yield
        finally:
            self.tokens.enabled = before

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, each path notes the norm of the states that it reads (`state_norm`)."""
        for path in self.paths.values():
            path.watched = True
        try:
            yield
        finally:
            for path in self.paths.values():
                path.watched = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, passes leave the layers alone, and what is known of the pass before stays; step tokens are known."""
        before = self.enabled, self.running
        self.enabled = False
        try:
            yield
        finally:
            self.enabled, self.running = before

    def remove(self) -> Any:
        """Give the base model back: paths, tokens and hooks are gone, weights train again where they did."""
        if getattr(self.model, _NAME, None) is not self:
            raise ValueError("this state transition was removed already")
        for handle in self._handles:
            handle.remove()
        for module, name in self._attached:
            delattr(module, name)
        for parameter in self._were_trained:
            parameter.requires_grad_(True)
        for owner, size in self._sizes:
            owner.vocab_size = size
        delattr(self.model, _NAME)
        return self.model

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the trained weights and the settings to `folder` (not the base model)."""
        from safetensors.torch import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: parameter.detach().contiguous().cpu() for name, parameter in self.named_parameters()}
        save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        write_config(folder, self.config, model_name(self.model))

    def load(self, folder: str | Path) -> None:
        """Take over the weights that `save_pretrained` wrote to `folder`.

        Raises ValueError where it holds none, other settings, or weights of another model; nothing is changed then.
        """
        from safetensors.torch import load_file

        folder = Path(folder)
        config = read_config(folder)
        if replace(config, chunk_tokens=self.config.chunk_tokens) != self.config:
            raise ValueError(f"{folder} was written with other settings: {config}, here {self.config}")
        stored, own = load_file(folder / WEIGHTS_FILE), dict(self.named_parameters())
        shapes = {name: tuple(weight.shape) for name, weight in stored.items()}
        wanted = {name: tuple(parameter.shape) for name, parameter in own.items()}
        wrong = [name for name in {**wanted, **shapes} if wanted.get(name) != shapes.get(name)]
        if wrong:
            name = read_base_model(folder)
            other = f"another model ({name})" if name else "another model"
            raise ValueError(
                f"{folder} belongs to {other}: {len(wrong)} of {len(own)} weights do not fit, the first is {wrong[0]} "
                f"({shapes.get(wrong[0])} in the folder, {wanted.get(wrong[0])} in this model)"
            )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(stored[name])

    @classmethod
    def from_pretrained(cls, model: Any, folder: str | Path, *, dtype: torch.dtype | None = None) -> StateTransition:
        """Convert `model` as it was when `folder` was written, with the weights of then.

        Errors as in `add_state_transition` and `load`; the model is as it was then. Warns where the folder was written
        with a model of another name.
        """
        folder = Path(folder)
        config, made_with, given = read_config(folder), read_base_model(folder), model_name(model)
        transition = add_state_transition(model, config, dtype=dtype)
        try:
            transition.load(folder)
        except Exception:
            transition.remove()
            raise
        if made_with and given and made_with != given:
            warnings.warn(
                f"{folder} was trained beside {made_with!r} and is put on {given!r}; where these are other weights, "
                "the path reads what it was not trained on",
                stacklevel=2,
            )
        return transition

    def __str__(self) -> str:
        trained = sum(parameter.numel() for _, parameter in self.named_parameters())
        base = sum(parameter.numel() for parameter in self.model.parameters()) - trained
        return (
            f"state transition: linear paths in layers {list(self.layers)}, {len(self.config.token_ids)} step tokens; "
            f"{trained:,} trained parameters beside {base:,} frozen ones ({trained / base:.2%})"
        )

    _repr_pretty_ = as_printed


def add_state_transition(
    model: Any, config: StateTransitionConfig, *, dtype: torch.dtype | None = None
) -> StateTransition:
    """Give the full-attention layers of `model` a linear path over finished reasoning steps; the base is frozen.

    In place, by hooks: softmax attention then sees the prompt and its own step only, and finished steps through the
    path. Until it is trained the path adds nothing, so a text with one step or none gives the base model's logits bit
    for bit.

    Args:
        model: a causal language model of transformers; attention "sdpa", "eager" or "flex_attention".
        config: what marks a step, and the sizes.
        dtype: of what is trained. None (default): the base's, but fp32 for a 16-bit one.

    Returns: `StateTransition`, also at `model.state_transition`.

    Raises ValueError for a model that has it already, no decoder, or layers without projections of their own.

    Source: arXiv 2602.01198; what it leaves open is marked "ours" in `StateTransitionConfig` and `LinearPath`.
    """
    refuse_older_caches()
    transition = StateTransition(model, config, dtype=dtype)
    try:
        _try_out(transition)
    except Exception as error:
        transition.remove()
        raise ValueError(
            f"{type(model).__name__} could not read a text with steps after the conversion, which was undone: {error}"
        ) from error
    return transition


@torch.no_grad()
def _try_out(transition: StateTransition) -> None:
    """Read two steps at once, and the same up to the end of a step and one token more, as generation does."""
    model, config = transition.model, transition.config
    device = transition.tokens.outputs.device
    if device.type == "meta":
        return
    start, end = config.start_token_ids[0], config.end_token_id
    text = torch.tensor([[3, 4, start, 5, 6, end, start, 7, end]], device=device)
    with undisturbed(model):
        model(input_ids=text, use_cache=False)
        cache = transition.new_cache()
        model(input_ids=text[:, :6], past_key_values=cache, use_cache=True)
        model(input_ids=text[:, 6:7], past_key_values=cache, use_cache=True)
    transition.running = None
