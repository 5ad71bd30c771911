"""`RecallProbe`: measure recall while a model is trained, and leave the training exactly as it would have been."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from transformers import TrainerCallback

from routeguard.recall.checks import check_at_least_one, check_lengths, check_probe
from routeguard.recall.haystack_use import chosen_haystack
from routeguard.recall.probe_budget import affordable
from routeguard.recall.probe_failures import Failures, release_memory
from routeguard.recall.probe_record import RECORD_FILE, append_failure, append_record, begin_record, read_recall
from routeguard.recall.probe_samples import ProbeSamples, probe_samples
from routeguard.recall.probe_summary import closing, nothing_recalled, opening
from routeguard.recall.quiet import undisturbed, unwrapped
from routeguard.recall.registry import find_tasks
from routeguard.recall.result import RecallResult
from routeguard.recall.task import Task
from routeguard.training.engines import engine_of, refuse_probing
from routeguard.training.trainer_access import find_trainer, holds

PROBE_TASKS = ("niah_single_3", "niah_multikey_2")


class RecallProbe(TrainerCallback):  # type: ignore[misc]
    """Measure recall during training: `callbacks=[RecallProbe()]`, or `RouteGuard(probe=RecallProbe())`.

    Teacher-forced, on the same samples each time: before the first step, in between, and after the last one. Accuracy
    by length goes to every reporter and to `log_history` as `recall/@4096` (with `recall/niah_single_3@4096` by task),
    and to `OUTPUT/routeguard/recall.jsonl`. Random states, dropout, buffers, training flags: all as without the probe,
    so the run is the same bit for bit.

    A measurement that fails once the training has begun (out of memory, an error in a task) does not end it: all is put
    back, the first failure is warned about, each is in `failures`, `recall.jsonl` and the summary at the end, and
    after three in a row no more are made. The measurement before the first step raises.

    Args:
        lengths: context lengths in tokens. None (default): the training length (the longest row, `max_length` at most)
            and twice that, because recall is lost beyond it first; doubled until the needles fit in, and as far as the
            model's positions go.
        tasks: kinds of question, not those that `replay` trains on. None (default): `PROBE_TASKS`.
        every: steps between measurements. None (default): as often as all of them, the last one included, take at most
            `share` of the time so far. The first and the last measurement always take place.
        share: that share, 0.01 by default.
        num_samples: samples for each task and length. None (default): as many as let the first and the last measurement
            take half of `share`, by an estimate (`probe_budget`), 4 to 16. Where a training is too short for 4, less of
            what is left open is asked: the first task only, then the greatest length only.
        max_drop: how far accuracy at any length may fall below the first measurement, 0 to 1, before the probe acts.
            None (default): it never does. A resumed run counts from its own first measurement, and is refused where
            the probe's settings are others now (a warning with `insist`).
        action: "warn" or "stop": what it does then. "stop" needs `max_drop`.
        tokenizer: None: the Trainer's `processing_class`.
        chat, haystack, seed, batch_tokens, insist: as in `measure_recall`.

    Raises ValueError for settings that make no sense; in `train()` for lengths that the model or the needles do not
    allow, without a tokenizer, and under FSDP or DeepSpeed.
    """

    def __init__(
        self,
        *,
        lengths: Sequence[int] | None = None,
        tasks: str | Task | Iterable[str | Task] | None = None,
        every: int | None = None,
        share: float = 0.01,
        num_samples: int | None = None,
        max_drop: float | None = None,
        action: Literal["warn", "stop"] = "warn",
        tokenizer: Any = None,
        chat: bool = False,
        haystack: Any = None,
        seed: int = 0,
        batch_tokens: int = 16384,
        insist: bool = False,
    ) -> None:
        check_probe(every, share, max_drop, action)
        check_at_least_one("batch_tokens", batch_tokens)
        if num_samples is not None:
            check_at_least_one("num_samples", num_samples)
        self.lengths = None if lengths is None else check_lengths(lengths)
        self.tasks = find_tasks(PROBE_TASKS if tasks is None else tasks)
        self.tasks_given = tasks is not None
        self.every = every
        self.share = share
        self.num_samples = num_samples
        self.max_drop = max_drop
        self.action = action
        self.tokenizer = tokenizer
        self.chat = chat
        self.haystack = chosen_haystack(haystack, self.tasks)
        self.seed = seed
        self.batch_tokens = batch_tokens
        self.insist = insist
        self.results: dict[int, RecallResult] = {}  # by step
        self.restored: RecallResult | None = None  # after a guard's restore at the end
        self.seconds: dict[int, float] = {}
        self.failures = Failures()
        self._spent = self._began = self._ended = self._took = 0.0
        self._trainer: Any = None
        self._asked: ProbeSamples | None = None
        self._first: dict[int, float] = {}
        self._earlier: dict[int, RecallResult] = {}  # of a resumed run
        self._last = _LastMeasurement(self)

    def attach(self, trainer: Any) -> RecallProbe:
        """Probe a Trainer that is already constructed; to be called before `trainer.train()`. Returns self."""
        if not holds(trainer, self):
            trainer.add_callback(self)
        self._trainer = trainer
        return self

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer = find_trainer(self) or self._trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer = find_trainer(self) or self._trainer
        refuse_probing(None if self._trainer is None else engine_of(self._trainer))
        if self.action == "stop" and self.max_drop is not None and getattr(args, "world_size", 1) > 1:
            raise ValueError("RecallProbe(action='stop') is not supported with several processes; use action='warn'")
        if not state.is_world_process_zero:
            return
        self.results, self.seconds, self.restored, self.failures = {}, {}, None, Failures()
        self._began, self._spent, self._asked = time.monotonic(), 0.0, None
        model = unwrapped(kwargs["model"])
        with undisturbed(model):
            self._asked = probe_samples(
                self,
                model,
                args,
                state,
                tokenizer=kwargs.get("processing_class"),
                dataloader=kwargs.get("train_dataloader"),
            )
        self._spent = time.monotonic() - self._began  # making samples is part of the cost
        self._go_first_at_the_end()
        record = Path(args.output_dir) / RECORD_FILE
        self._first = begin_record(
            record,
            self._asked.settings,
            resume_step=state.global_step,
            limited=self.max_drop is not None,
            insist=self.insist,
        )
        self._earlier = read_recall(record)
        print(self._opening(self._asked), flush=True)
        self._measure(self._asked, model, args, state, control)  # a failure here ends the training before it began
        if warning := nothing_recalled(self._first):
            print(warning, flush=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        last = control.should_training_stop or state.global_step >= state.max_steps
        if last or (self._affordable() if self.every is None else state.global_step % self.every == 0):
            self._try(kwargs["model"], args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_training_stop:
            self.measure_last(args, state, control, kwargs["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.measure_last(args, state, control, kwargs["model"])
        if state.is_world_process_zero and self._asked is not None:
            total = time.monotonic() - self._began
            print(closing(self.results, self._spent, total, self.failures, self._earlier), flush=True)

    def measure_last(self, args: Any, state: Any, control: Any, model: Any) -> None:
        """Measure the last step, unless that was done: the decision to stop can fall after the probe's turn."""
        tried = state.global_step in self.results or self.failures.at(state.global_step)
        if state.is_world_process_zero and not tried:
            self._try(model, args, state, control)

    def after_restore(self, args: Any, state: Any, control: Any, model: Any) -> None:
        """Measure once more: what a restore at the end of the training gave back (`recall_restored/...`)."""
        if state.is_world_process_zero:
            self._try(model, args, state, control, restored=True)

    def detach(self) -> None:
        """Leave the Trainer."""
        if self._trainer is not None:
            self._trainer.remove_callback(self)
            self._trainer.remove_callback(self._last)
            self._trainer = None

    def _go_first_at_the_end(self) -> None:
        """Have the last measurement come before a restore, which another callback makes when the training ends."""
        if self._trainer is not None and not holds(self._trainer, self._last):
            handler = self._trainer.callback_handler
            # A new list: the old one is being walked through right now.
            handler.callbacks = [self._last, *handler.callbacks]

    def _affordable(self) -> bool:
        now = time.monotonic()
        return affordable(
            spent=self._spent,
            took=self._took,
            since_last=now - self._ended,
            elapsed=now - self._began,
            share=self.share,
        )

    def _opening(self, asked: ProbeSamples) -> str:
        return opening(
            [task.name for task in asked.tasks],
            asked.lengths,
            asked.budget,
            every=self.every,
            share=self.share,
            trained_tokens=asked.trained_tokens,
            notes=asked.notes,
        )

    def _try(self, model: Any, args: Any, state: Any, control: Any, *, restored: bool = False) -> None:
        """Measure; what goes wrong is noted and does not end the training. Nothing once it was given up."""
        if self._asked is None or self.failures.given_up:
            return
        try:
            by_length = self._measure(self._asked, unwrapped(model), args, state, control, restored=restored)
        except Exception as error:
            release_memory(error)
            failure = self.failures.add(state.global_step, error, restored=restored)
            append_failure(Path(args.output_dir) / RECORD_FILE, failure)
            return
        self.failures.succeeded()
        if not restored:
            self._act(by_length, state.global_step, control)

    def _measure(
        self, asked: ProbeSamples, model: Any, args: Any, state: Any, control: Any, *, restored: bool = False
    ) -> dict[int, float]:
        step = state.global_step
        began = time.monotonic()
        try:
            with undisturbed(model):
                scores = asked.answer(model, self.batch_tokens)
        finally:
            self._ended = time.monotonic()
            took = self._ended - began
            self._spent += took
            self._took = max(took, self._took)  # what fails at once is not tried again at once
        self._took = took
        result = RecallResult(tuple(scores), asked.settings, asked.notes)
        if restored:
            self.restored = result
        else:
            self.results[step], self.seconds[step] = result, took
        by_length = {int(cell.label[0]): cell.accuracy for cell in result.by_length()}
        self._first = self._first or by_length
        append_record(Path(args.output_dir) / RECORD_FILE, step, took, result, restored=restored)
        name = "recall_restored" if restored else "recall"
        metrics = {f"{name}/@{length}": accuracy for length, accuracy in by_length.items()}
        if len(asked.tasks) > 1:
            metrics |= {f"{name}/{cell.label[0]}@{cell.label[1]}": cell.accuracy for cell in result.cells()}
        self._report(metrics, control)
        return by_length

    def _report(self, metrics: dict[str, float], control: Any) -> None:
        """To `log_history` and every reporter, past the trainer's own `log`: TRL's would empty its running averages."""
        if self._trainer is None:
            return
        from transformers import Trainer

        due = control.should_log  # logging takes a log line that is due for written
        try:
            Trainer.log(self._trainer, metrics)
        finally:
            control.should_log = due

    def _act(self, by_length: dict[int, float], step: int, control: Any) -> None:
        if self.max_drop is None:
            return
        fallen = {
            n: (self._first[n], now) for n, now in by_length.items() if self._first[n] - now > self.max_drop - 1e-9
        }
        if not fallen:
            return
        text = ", ".join(f"{before:.2f} to {now:.2f} at {n} tokens" for n, (before, now) in fallen.items())
        end = "; training stops" if self.action == "stop" else ""
        warnings.warn(f"recall fell from {text} by step {step} (allowed: {self.max_drop:g}){end}", stacklevel=2)
        if self.action == "stop":
            control.should_training_stop = True


class _LastMeasurement(TrainerCallback):  # type: ignore[misc]
    """Stands first among the callbacks, so that a probe can measure before any of them ends its work."""

    def __init__(self, probe: RecallProbe) -> None:
        self.probe = probe

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.probe.measure_last(args, state, control, kwargs["model"])
