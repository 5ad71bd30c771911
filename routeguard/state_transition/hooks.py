"""The hooks that lead a forward pass through the linear paths."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache

from routeguard.recall.prefill_trial import takes_prompts_in_pieces
from routeguard.recall.quiet import undisturbed
from routeguard.state_transition.cache import StateTransitionCache
from routeguard.state_transition.layout import step_layout
from routeguard.state_transition.path import LinearPath
from routeguard.state_transition.projections import Projections
from routeguard.state_transition.running import ATTENTION_FUNCTIONS, Running

if TYPE_CHECKING:
    from routeguard.state_transition.convert import StateTransition

_CACHE_NAMES = ("cache", "past_key_values")
_TRIED_TOKENS = 32
_PASS = "state_transition_pass"  # travels with the layers' arguments, so that recomputation meets its own pass


class DecoderHooks:
    """Before and after the decoder: find the steps, provide the cache, tidy it up."""

    def __init__(self, transition: StateTransition, decoder: nn.Module) -> None:
        self.transition = transition
        parameters = inspect.signature(decoder.forward).parameters
        self.names = list(parameters)
        self.hands_on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        self.trained = False  # the pass before was one of training
        self.reads_pieces: bool | None = True if transition.covers_all_attention else None  # None: to be tried
        self.handles = [
            decoder.register_forward_pre_hook(self.before, with_kwargs=True),
            decoder.register_forward_hook(self.after),
        ]

    def before(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        transition = self.transition
        transition.running = None
        kwargs = {**dict(zip(self.names, args, strict=False)), **kwargs}
        given = next((kwargs[name] for name in _CACHE_NAMES if kwargs.get(name) is not None), None)
        if not transition.enabled:
            if isinstance(given, StateTransitionCache):
                raise ValueError("the base model cannot use a StateTransitionCache, which lacks its finished steps")
            return None
        self._check_head()
        input_ids = kwargs.get("input_ids")
        if input_ids is None:
            raise ValueError("a model with state transition reads input_ids: steps are found by their tokens")
        mask = kwargs.get("attention_mask")
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
            raise ValueError("a model with state transition takes an attention_mask of [rows, tokens], or none")
        uses = kwargs.get("use_cache")
        if given is None and not (transition.uses_cache if uses is None else bool(uses)):
            transition.running = self._whole(input_ids, mask, kwargs.get("position_ids"))
            return (), self._with_pass(kwargs)
        if given is None:
            cache = transition.new_cache()
            kwargs[next(n for n in _CACHE_NAMES if n in self.names)] = cache
        else:
            cache = self._ours(given)
        if cache.started and input_ids.shape[1] > 1:
            self._check_pieces()
        if "position_ids" in self.names and kwargs.get("position_ids") is None:  # Bamba would begin at 0 each time
            places = torch.arange(cache.seen, cache.seen + input_ids.shape[1], device=input_ids.device)
            kwargs["position_ids"] = places[None]
        transition.running = self._cached(input_ids, mask, cache)
        if transition.running.goes_on and transition.covers_all_attention:
            kwargs["attention_mask"] = None  # every layer gets ours
        return (), self._with_pass(kwargs)

    def after(self, decoder: nn.Module, args: Any, output: Any) -> None:
        running = self.transition.running
        if running is not None and running.cache is not None:
            running.cache.end()
            running.cache = None

    def _ours(self, given: Any) -> StateTransitionCache:
        """A cache that was handed to the decoder: ours, or an empty one that becomes so in place."""
        transition = self.transition
        if isinstance(given, StateTransitionCache):
            if (given.transition, given.converted) != (transition.config, transition.layers):
                raise ValueError(
                    "the StateTransitionCache given belongs to another conversion; make one by new_cache()"
                )
            return given
        if type(given) is not DynamicCache:
            raise ValueError(
                f"a model with state transition cannot use a {type(given).__name__}; give no cache, or an empty one of "
                "model.state_transition.new_cache()"
            )
        if given.get_seq_length() > 0:
            raise ValueError(
                "the DynamicCache given holds tokens already; a model with state transition begins with an empty "
                "cache, or goes on with its own StateTransitionCache"
            )
        given.__class__ = StateTransitionCache  # the caller holds on to it
        given.__dict__ = vars(transition.new_cache())
        return given  # type: ignore[no-any-return]

    def _with_pass(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**kwargs, _PASS: self.transition.running} if self.hands_on else kwargs

    def _check_pieces(self) -> None:
        """Refuse several tokens after others where layers of another kind begin anew with each piece of a text."""
        transition = self.transition
        if self.reads_pieces is None:
            size = transition.tokens.base_size
            ids = torch.arange(_TRIED_TOKENS, device=transition.tokens.outputs.device)[None] % size
            with undisturbed(transition.model), transition.disabled():
                self.reads_pieces = takes_prompts_in_pieces(transition.model, ids, 8, _TRIED_TOKENS // 2)
        if not self.reads_pieces:
            raise ValueError(
                "the cache holds text already, and the layers of this model that are not converted do not carry theirs "
                "over to several tokens more: read the text at once, then token by token"
            )

    def _check_head(self) -> None:
        """Refuse what would go wrong without a word: another output layer, or a loss that never asks it."""
        transition = self.transition
        if transition.model.get_output_embeddings() is not transition.head:
            raise ValueError(
                "the model's output layer was replaced after the conversion (resize_token_embeddings?): resize before "
                "add_state_transition"
            )
        missed = self.trained and not transition.tokens.asked
        self.trained = transition.model.training and torch.is_grad_enabled()
        transition.tokens.asked = False
        if missed:
            self.trained = False
            raise ValueError(
                "the last training pass computed its loss past the output layer, so step tokens were not trained "
                "(SFTTrainer's fused head does that); use StateTransitionTrainer"
            )

    def _whole(self, input_ids: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> Running:
        config = self.transition.config
        layout = step_layout(
            input_ids,
            start_token_ids=config.start_token_ids,
            end_token_id=config.end_token_id,
            attention_mask=mask,
            position_ids=position_ids if position_ids is None or position_ids.dim() == 2 else position_ids[0],
        )
        return Running(config, layout)

    def _cached(self, input_ids: Tensor, mask: Tensor | None, cache: StateTransitionCache) -> Running:
        finished = cache.text_end.finished if cache.started else None
        layout, sees = cache.begin(input_ids, mask)
        return Running(self.transition.config, layout, cache, sees, finished)


class LayerHooks:
    """Around one attention layer: hand it our mask, note what its projections give, add the linear path's output."""

    def __init__(self, transition: StateTransition, projections: Projections, path: LinearPath) -> None:
        self.transition, self.path = transition, path
        self.sources = projections.sources
        self.running: Running | None = None
        self.hidden: Tensor | None = None
        self.frozen: dict[str, Tensor] = {}
        self.handles: list[RemovableHandle] = [
            projections.attention.register_forward_pre_hook(self.mask, with_kwargs=True),
            projections.output.register_forward_pre_hook(self.add),
        ]
        for module in {id(module): module for module, _ in self.sources.values()}.values():
            self.handles.append(module.register_forward_hook(self.note))

    def mask(self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handed = kwargs.pop(_PASS, None)
        self.running = running = handed or self.transition.running
        self.hidden, self.frozen = None, {}
        if running is None or not running.limited:
            return args, kwargs
        config = getattr(attention, "config", self.transition.model.config)
        implementation = str(getattr(config, "_attn_implementation", "") or "eager")
        if implementation not in ATTENTION_FUNCTIONS:
            raise ValueError(
                f"attn_implementation={implementation!r} cannot be shown steps; there are "
                f"{', '.join(ATTENTION_FUNCTIONS)}"
            )
        if "attention_mask" not in kwargs:
            raise ValueError(f"{type(attention).__name__} is not handed an attention_mask by name: not supported")
        return args, {**kwargs, "attention_mask": running.mask(self.transition.base_dtype, implementation)}

    def note(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if self.running is None:
            return
        for role, (source, rows) in self.sources.items():
            if source is module:
                self.frozen[role] = Projections.channels(output, rows)
                self.hidden = args[0]

    def add(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        running, hidden, frozen = self.running, self.hidden, self.frozen
        self.running, self.hidden, self.frozen = None, None, {}
        if running is None:
            return None
        if hidden is None or hidden.shape[:2] != running.layout.kind.shape:
            raise ValueError(
                "the attention layer did not compute its projections over the tokens of this pass: not supported"
            )
        added = self.path(hidden, frozen, running).to(args[0].dtype)
        return (args[0] + added.reshape(args[0].shape), *args[1:])
