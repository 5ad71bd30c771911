"""`StateTransitionTrainer`: TRL's SFTTrainer for a converted model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from trl import SFTTrainer

from routeguard.state_transition.convert import StateTransition
from routeguard.state_transition.files import CONFIG_FILE
from routeguard.state_transition.layout import STEP
from routeguard.state_transition.losses import LOSS_TOKENS, StepLosses, decoder_output, step_losses
from routeguard.state_transition.momentum import momentum_weight

_CHECKED_ROWS = 256
_REFUSED = ("peft_config", "compute_loss_func", "compute_metrics")


class StateTransitionTrainer(SFTTrainer):  # type: ignore[misc]
    """Train the linear paths and step tokens of a converted model with `L = L_AR + β·KL(P_base ‖ P)`.

    Everything else is `SFTTrainer`: data, packing, masks on the answer, gradient checkpointing, bf16, DDP. Checkpoints
    and `save_model` write the paths alone (`StateTransition.from_pretrained`), and runs resume from them.

    Logged beside the loss (TRL's entropy and token accuracy are not), for every log line: `step/next_token_loss` and
    `step/distance` (nats a token), `step/gate` (mean openness), `step/state_norm` (mean norm of the states that are
    read), `step/steps` (a sample) and `step/alpha` (momentum weight of the last step).

    Args:
        model: converted by `add_state_transition`.
        beta: β, 0 or more; 0 asks no teacher. Default 0.5 (ours: the paper gives none).
        loss_tokens: positions whose logits are held at a time, default 256.
        kwargs: as `SFTTrainer` takes them; not `peft_config`, `compute_loss_func` or `compute_metrics`, and no args
            with label smoothing, another loss type, Liger kernels or "wrapped" packing. Rows that `max_length` cuts
            inside a step are warned about.

    Raises ValueError for those, for data without any step, for a model without state transition, and under FSDP or
    DeepSpeed.

    Source: arXiv 2602.01198.
    """

    def __init__(self, model: Any, *, beta: float = 0.5, loss_tokens: int = LOSS_TOKENS, **kwargs: Any) -> None:
        transition = getattr(model, "state_transition", None)
        if not isinstance(transition, StateTransition):
            raise ValueError("the model has no state transition; convert it first: add_state_transition(model, config)")
        if beta < 0 or loss_tokens < 1:
            raise ValueError(f"beta must not be negative, loss_tokens at least 1; got {beta} and {loss_tokens}")
        refused = [name for name in _REFUSED if kwargs.get(name) is not None]
        if refused:
            raise ValueError(f"StateTransitionTrainer has adapters and a loss of its own; leave out {refused}")
        _refuse_settings(kwargs.get("args"))
        self.transition = transition
        self.beta = beta
        self.loss_tokens = loss_tokens
        super().__init__(model, **kwargs)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError("StateTransitionTrainer runs on one device or under DDP, not under FSDP or DeepSpeed")
        self._check_rows()

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        transition = self.transition
        labels = inputs["labels"]
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
        with transition.watched(), decoder_output(transition) as found:
            outputs = model(**{**inputs, "use_cache": False, "logits_to_keep": 1})
        running = transition.running
        assert running is not None
        losses = step_losses(
            transition,
            found[0],
            inputs["input_ids"],
            labels,
            running.layout,
            compare=self.beta > 0,
            loss_tokens=self.loss_tokens,
        )
        count = losses.num_tokens if num_items_in_batch is None else num_items_in_batch
        total = losses.next_token + self.beta * losses.distance  # over all labels: the same however a batch is split
        loss = total / torch.as_tensor(count, device=total.device).clamp(min=1)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes
        self._note(losses)
        return (loss, outputs) if return_outputs else loss

    def _check_rows(self) -> None:
        """Refuse data without steps; say how many rows `max_length` cut within one, whose later steps are gone."""
        limit, data, config = self.args.max_length, self.train_dataset, self.transition.config
        if not hasattr(data, "__getitem__") or "input_ids" not in (data.column_names or []):
            return
        rows = [data[i]["input_ids"] for i in range(min(len(data), _CHECKED_ROWS))]
        starts = set(config.start_token_ids)
        if not any(starts.intersection(ids) for ids in rows):
            about = (
                f"none of the first {len(rows)} rows holds a start token {config.start_token_ids}: they train no path. "
                "Mark the steps (mark_steps), and tokenize with the tokenizer that add_step_tokens changed"
            )
            if len(rows) == len(data):
                raise ValueError(about)
            warnings.warn(about, stacklevel=3)
        last = [next((t for t in reversed(ids) if t in config.token_ids), None) for ids in rows if len(ids) == limit]
        cut = sum(token in starts for token in last)
        if cut:
            warnings.warn(
                f"{cut} of the first {len(rows)} rows are cut at max_length={limit} in the middle of a step; raise it "
                "(SFTConfig's default is 1024), or max_length=None",
                stacklevel=3,
            )

    def _note(self, losses: StepLosses) -> None:
        transition = self.transition
        running = transition.running
        assert running is not None
        steps = torch.where(running.layout.kind == STEP, running.layout.step, 0).amax(1)
        metrics = self._metrics["train" if self.model.training else "eval"]
        noted = {
            "next_token_loss": float(losses.next_token.detach()) / max(losses.num_tokens, 1),
            "steps": float(steps.float().mean()),
            "alpha": momentum_weight(int(steps.max()), transition.config),
        }
        if self.beta > 0:
            noted["distance"] = float(losses.distance.detach()) / max(losses.num_compared, 1)
        openness = list(transition.openness.values())
        if openness:
            noted["gate"] = sum(openness) / len(openness)
        norms = [float(path.state_norm) for path in transition.paths.values() if path.state_norm is not None]
        if norms:
            noted["state_norm"] = sum(norms) / len(norms)
        for name, value in noted.items():
            metrics[f"step/{name}"].append(value)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if not self.args.should_save:
            return
        folder = Path(output_dir if output_dir is not None else self.args.output_dir)
        self.transition.save_pretrained(folder)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.transition.load(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        best = str(self.state.best_model_checkpoint)
        if not (Path(best) / CONFIG_FILE).is_file():
            raise ValueError(f"the best checkpoint {best} holds no state transition")
        self.transition.load(best)


def _refuse_settings(args: Any) -> None:
    """Raise ValueError for settings of SFTTrainer that this loss would ignore, or that hide where samples begin."""
    wrong = {
        "label_smoothing_factor": bool(getattr(args, "label_smoothing_factor", 0)),
        "loss_type": getattr(args, "loss_type", "nll") != "nll",
        "use_liger_kernel": bool(getattr(args, "use_liger_kernel", False)),
        "packing_strategy": bool(getattr(args, "packing", False))
        and getattr(args, "packing_strategy", "") == "wrapped",
    }
    found = [f"{name}={getattr(args, name)!r}" for name, refused in wrong.items() if refused]
    if found:
        raise ValueError(f"StateTransitionTrainer does not support {', '.join(found)}; leave it out")
