"""`StateTransitionCache`: keys and values of the prompt and the current step only, and one state a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from routeguard.state_transition.config import StateTransitionConfig
from routeguard.state_transition.layout import ANSWER, PADDING, PROMPT, STEP, StepLayout, step_layout
from routeguard.state_transition.state import StepState


class PromptAndStepLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one converted layer. `seen` counts the whole text, of which `keys` holds a part."""

    keys: Tensor
    values: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.seen = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.seen += key_states.shape[-2]
        return super().update(key_states, value_states)  # type: ignore[no-any-return]

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(
                "a StateTransitionCache cannot be rolled back: finished steps are sums (assisted decoding)"
            )

    def keep(self, places: Tensor) -> None:
        """Keep those places of each row, in that order: [rows, kept]."""
        index = places[:, None, :, None]
        self.keys = self.keys.gather(2, index.expand(-1, self.keys.shape[1], -1, self.keys.shape[-1]))
        self.values = self.values.gather(2, index.expand(-1, self.values.shape[1], -1, self.values.shape[-1]))


class StateTransitionCache(DynamicCache):  # type: ignore[misc]
    """What a converted model keeps while it writes; `generate()` gets one by itself.

    The steps of a batch's rows may end at different places. Memory grows with the prompt and the longest open step or
    answer, not with the number of steps. A text is read at once, then goes on token by token.

    Args:
        model_config: of the model; its other layers get the caches that they have in a `DynamicCache`.
        config: of the conversion.
        layers: indices of the converted layers.
    """

    def __init__(self, model_config: Any, config: StateTransitionConfig, layers: tuple[int, ...]) -> None:
        super().__init__(config=model_config)
        self._model_config = model_config
        self.transition = config
        self.converted = layers
        for layer in layers:
            self.layers[layer] = PromptAndStepLayer()
        self.states: dict[int, StepState] = {}
        self.kind = self.step = torch.empty(0, dtype=torch.long)  # [rows], of the last token
        self.ended = torch.empty(0, dtype=torch.bool)  # [rows], the last token closed its step
        self.prompt = self.valid = torch.empty(0, 0, dtype=torch.bool)  # [rows, places]
        self._stale = False  # some place is needed no more

    @property
    def started(self) -> bool:
        return bool(self.kind.numel())

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values in the converted layers."""
        held = [self.layers[layer] for layer in self.converted]
        return sum(
            tensor.numel() * tensor.element_size()
            for layer in held
            if layer.is_initialized
            for tensor in (layer.keys, layer.values)
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of the states."""
        return sum(state.num_bytes for state in self.states.values())

    def begin(self, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[StepLayout, Tensor | None]:
        """Place new tokens, before the model reads them.

        Args:
            input_ids: [rows, tokens], a whole text at first, then one token of each row.
            attention_mask: [rows, tokens], for the text.

        Returns the layout of those tokens, and for one token a row which of the places held and itself it may see,
        [rows, places] booleans; None for a whole text.

        Raises ValueError for several tokens after the first call.
        """
        if not self.started:
            return self._begin_text(input_ids, attention_mask), None
        if bool((self.kind == PADDING).any()):
            raise ValueError("going on with a text needs padding on the left; some rows end with padding")
        if input_ids.shape[1] != 1:
            raise ValueError(
                f"a StateTransitionCache reads a text at once and then one token at a time; got {input_ids.shape[1]} "
                "tokens after the first ones"
            )
        token = input_ids[:, 0]
        opens = torch.isin(token, torch.tensor(self.transition.start_token_ids, device=token.device))
        within = (self.kind == STEP) & ~self.ended
        broken = opens & within  # a start inside a step: the open one ends here
        if bool(broken.any()):
            for state in self.states.values():
                state.finish(broken)
        outside = (self.kind != PROMPT) & ~within & ~opens
        self.kind = torch.where(opens | within, STEP, torch.where(outside, ANSWER, PROMPT))
        self.step = self.step + opens
        if bool(opens.any()):
            self._forget(opens)
        self.ended = (token == self.transition.end_token_id) & (self.kind == STEP)
        new = torch.ones_like(opens)[:, None]
        self.prompt = torch.cat([self.prompt, (self.kind == PROMPT)[:, None]], 1)
        self.valid = torch.cat([self.valid, new], 1)
        column = self.kind[:, None]
        layout = StepLayout(column, torch.zeros_like(column), self.step[:, None], torch.zeros_like(column))
        return layout, self.valid

    def end(self) -> None:
        """After the model has read them: finish the steps that ended, and let go of their keys and values."""
        if bool(self.ended.any()):
            self._forget(self.ended)
            for state in self.states.values():
                state.finish(self.ended & (state.steps < self.step))
        if self._stale:
            self._compact()

    def state(self, layer: int, key: Tensor, value: Tensor) -> StepState:
        """That layer's state, made from what it reads first."""
        if layer not in self.states:
            self.states[layer] = StepState(self.transition, key, value)
        return self.states[layer]

    def reset(self) -> None:
        super().reset()
        self.__init__(self._model_config, self.transition, self.converted)  # type: ignore[misc]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(len(self.kind)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        indices = indices.to(self.kind.device)
        for name in ("kind", "step", "ended", "prompt", "valid"):
            setattr(self, name, getattr(self, name).index_select(0, indices))
        for state in self.states.values():
            state.select(indices)

    def _begin_text(self, input_ids: Tensor, attention_mask: Tensor | None) -> StepLayout:
        layout = step_layout(
            input_ids,
            start_token_ids=self.transition.start_token_ids,
            end_token_id=self.transition.end_token_id,
            attention_mask=attention_mask,
        )
        last = layout.segment[:, -1:]
        self.kind, self.step = layout.kind[:, -1], layout.step[:, -1]
        self.ended = (input_ids[:, -1] == self.transition.end_token_id) & (self.kind == STEP)
        self.prompt = layout.kind == PROMPT
        self.valid = self.prompt | (layout.segment == last)
        self._stale = not bool(self.valid.all())
        return layout

    def _forget(self, rows: Tensor) -> None:
        """Nothing but the prompt is to be seen any more in those rows."""
        self.valid = torch.where(rows[:, None], self.valid & self.prompt, self.valid)
        self._stale = True

    def _compact(self) -> None:
        """Drop places that no row needs; rows with fewer get unseen places on the left."""
        counts = self.valid.sum(1)
        kept = int(counts.max())
        # Stable, so that what is needed keeps its order at the right.
        places = torch.argsort(self.valid.long(), dim=1, stable=True)[:, self.valid.shape[1] - kept :]
        for layer in self.converted:
            self.layers[layer].keep(places)
        self.prompt, self.valid = self.prompt.gather(1, places), self.valid.gather(1, places)
        self._stale = False
