"""`StateTransitionCache`: keys and values of the prompt and the current step only, and one state a layer."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from routeguard.state_transition.config import StateTransitionConfig
from routeguard.state_transition.layout import PADDING, PROMPT, STEP, StepLayout, TextEnd, step_layout, visible
from routeguard.state_transition.state import StepState


def refuse_older_caches() -> None:
    """Raise ValueError where masks are asked of caches by positions (transformers 4), not by the number of tokens."""
    if "query_length" not in inspect.signature(DynamicLayer.get_mask_sizes).parameters:
        raise ValueError(
            f"state transition needs the caches of transformers 5, found transformers {transformers.__version__}; "
            "upgrade with: pip install --upgrade 'transformers>=5.0'"
        )


class PromptAndStepLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one converted layer. `seen` counts the whole text, of which `keys` holds a part."""

    is_croppable = False
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
    answer, not with the number of steps. A text may be read at once, in pieces, or token by token; a later turn goes on
    with the cache of the first. Padding is not kept, nor is what `generate()` gives a finished row while others go on:
    the tokens after the one that ended it.

    Args:
        model_config: of the model; its other layers get the caches that they have in a `DynamicCache`.
        config: of the conversion.
        layers: indices of the converted layers.
        eos_token_ids: tokens that end a text. Default: none; no row is taken for finished then.
        pad_token_id: what finished rows are given; the ends themselves count as such, too.
    """

    def __init__(
        self,
        model_config: Any,
        config: StateTransitionConfig,
        layers: tuple[int, ...],
        *,
        eos_token_ids: tuple[int, ...] = (),
        pad_token_id: int | None = None,
    ) -> None:
        super().__init__(config=model_config)
        self._made_with = (model_config, config, layers), {"eos_token_ids": eos_token_ids, "pad_token_id": pad_token_id}
        self.transition = config
        self.converted = layers
        self.eos_token_ids = eos_token_ids
        self.filling = eos_token_ids if pad_token_id is None else (*eos_token_ids, pad_token_id)
        for layer in layers:
            self.layers[layer] = PromptAndStepLayer()
        self.states: dict[int, StepState] = {}
        self.text_end = TextEnd.of_nothing(0, torch.device("cpu"))
        self.last = torch.empty(0, dtype=torch.long)  # [rows], the last real token
        self.prompt = self.valid = torch.empty(0, 0, dtype=torch.bool)  # [rows, places]

    @property
    def started(self) -> bool:
        return bool(self.last.numel())

    @property
    def seen(self) -> int:
        """Tokens of the whole text so far, padding included."""
        return self.layers[self.converted[0]].seen  # type: ignore[no-any-return]

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
            input_ids: [rows, tokens], what follows the text so far.
            attention_mask: [rows, tokens so far and new ones], 0 for padding. None: no padding.

        Returns the layout of those tokens, and which of the places held and of the tokens themselves each may see,
        [rows, tokens, places] booleans; None where a text begins.

        Raises ValueError for another number of rows or a mask of another length.
        """
        rows, tokens = input_ids.shape
        going_on = self.started
        if not going_on:
            self.text_end = TextEnd.of_nothing(rows, input_ids.device)
            self.last = torch.full_like(input_ids[:, 0], -1)
            self.prompt = self.valid = torch.empty(rows, 0, dtype=torch.bool, device=input_ids.device)
        layout = step_layout(
            input_ids,
            start_token_ids=self.transition.start_token_ids,
            end_token_id=self.transition.end_token_id,
            attention_mask=self._real(input_ids, attention_mask),
            before=self.text_end,
        )
        real, prompt, segment = layout.kind != PADDING, layout.kind == PROMPT, layout.segment
        sees = None
        if going_on:
            if tokens == 1:  # several are taken in by their plan, which finishes steps
                self._finish(layout.step[:, 0] - (layout.kind[:, 0] == STEP).long())
            held = self.valid[:, None] & (self.prompt[:, None] | (segment == 0)[:, :, None])
            sees = torch.cat([held, visible(layout)[:, 0]], 2)
        last = layout.end.segment[:, None]
        held = self.valid & (self.prompt | (last == 0))
        self.valid = torch.cat([held, real & (prompt | (segment == last))], 1)
        self.prompt = torch.cat([self.prompt, prompt], 1)
        self.text_end = replace(layout.end, segment=torch.zeros_like(layout.end.segment))
        place = torch.where(real, torch.arange(tokens, device=real.device), -1).amax(1)
        self.last = torch.where(place >= 0, input_ids.gather(1, place.clamp_min(0)[:, None])[:, 0], self.last)
        return layout, sees

    def end(self) -> None:
        """After the model has read them: finish the steps that ended, and let go of keys and values."""
        self._finish(self.text_end.finished)
        self._compact()

    def state(self, layer: int, key: Tensor, value: Tensor) -> StepState:
        """That layer's state, made from what it reads first."""
        if layer not in self.states:
            self.states[layer] = StepState(self.transition, key, value)
        return self.states[layer]

    def reset(self) -> None:
        super().reset()
        arguments, options = self._made_with
        self.__init__(*arguments, **options)  # type: ignore[misc]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(len(self.last)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        indices = indices.to(self.last.device)
        self.text_end = self.text_end.select(indices)
        for name in ("last", "prompt", "valid"):
            setattr(self, name, getattr(self, name).index_select(0, indices))
        for state in self.states.values():
            state.select(indices)

    def _real(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """[rows, tokens], which of the new tokens are no padding."""
        rows, tokens = input_ids.shape
        if rows != len(self.last):
            raise ValueError(f"the cache holds {len(self.last)} rows of text; got tokens for {rows}")
        if attention_mask is None:
            real = torch.ones_like(input_ids, dtype=torch.bool)
        elif attention_mask.shape == (rows, self.seen + tokens):
            real = attention_mask[:, -tokens:].bool()
        else:
            raise ValueError(
                f"attention_mask must be of the whole text: {rows} rows of {self.seen} tokens in the cache and "
                f"{tokens} new ones; got {tuple(attention_mask.shape)}"
            )
        if tokens > 1 or rows == 1 or not self.eos_token_ids:
            return real
        ended = torch.isin(self.last, torch.tensor(self.eos_token_ids, device=real.device))
        return real & ~(ended[:, None] & torch.isin(input_ids, torch.tensor(self.filling, device=real.device)))

    def _finish(self, steps: Tensor) -> None:
        """Finish the open steps of rows in which fewer are finished; [rows]."""
        states = list(self.states.values())
        late = states[0].steps < steps if states else steps < 0  # all layers are equally far
        if bool(late.any()):
            for state in states:
                state.finish(late)

    def _compact(self) -> None:
        """Drop places that no row needs; rows with fewer get unseen places on the left."""
        counts = self.valid.sum(1)
        kept = int(counts.max())
        if kept == self.valid.shape[1]:
            return
        # Stable, so that what is needed keeps its order at the right.
        places = torch.argsort(self.valid.long(), dim=1, stable=True)[:, self.valid.shape[1] - kept :]
        for layer in self.converted:
            self.layers[layer].keep(places)
        self.prompt, self.valid = self.prompt.gather(1, places), self.valid.gather(1, places)
