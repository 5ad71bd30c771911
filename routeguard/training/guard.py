"""`RouteGuard`: the Trainer callback. It decides when; the work is done by plain functions elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from transformers import TrainerCallback

from routeguard.protect.modes import AtEnd, Freeze, Protection
from routeguard.protect.recipes import RecipeName, choose
from routeguard.routes.collection import ROUTING_ROLES, Role, Routes
from routeguard.routes.find import as_layers, as_roles
from routeguard.training.ending import Ending
from routeguard.training.engines import (
    engine_of,
    refuse_scheduled_optimizer,
    refuse_split_rows,
    refuse_unsupported_engine,
)
from routeguard.training.protector import Protector
from routeguard.training.rewriters import refuse_bema_beside_frozen
from routeguard.training.run_state import RunState, settings, write_state
from routeguard.training.session import Session
from routeguard.training.start import Start, refuse_changed_settings
from routeguard.training.trainer_access import HINT, TOO_EARLY, TOO_LATE, find_trainer, holds, resumed_folder, run_first
from routeguard.training.wrapping import Wrapped

if TYPE_CHECKING:
    from torch import nn

    from routeguard.recall.probe import RecallProbe


class RouteGuard(TrainerCallback):  # type: ignore[misc]
    """Keep where full attention looks while a model is fine-tuned: `SFTTrainer(..., callbacks=[RouteGuard()])`.

    Finds the query and key projections of the full-attention layers, protects them, logs their drift, and can put
    them back at the end. Prints what it holds before the first step. Needs no change to the model.

    Args:
        protect: `Freeze()` (None, the default), `LowLR(scale)`, `Anchor(strength)`, `L2SP(total)`, `Track()`, or
            "freeze", "low_lr", "anchor", "l2_sp", "track". `L2SP` acts on every weight, not only queries and keys.
        restore: `QKRestore()`, `QKPro(ridge)`, `Interpolate(alpha)`, "qk", "qk_pro", "interpolate", or None
            (default). The paper's method is `RouteGuard(protect=Track(), restore=QKRestore())`. `Average(alpha)` or
            "average" moves every weight, not only queries and keys; it keeps the whole start on disk.
        recipe: instead of `protect` and `restore`: "balanced" (`L2SP(0.9)`), "max_recall" (`L2SP(0.9)`,
            `Average(0.1)`) or "max_reasoning" (`Track()` alone); docs/evidence has what each was measured to do.
        reference: the start to protect. None (default): the live weights of a fresh run, and on resume the start that
            the run has kept. "start": the live weights when the run's first `train()` begins, whatever came before
            (a further `train()` keeps it, and a resumed run finds it). Or a model, a state dict, a checkpoint folder
            or file, or a guard's sidecar.
        layers: narrow to these full-attention layers (indices).
        roles: "query" and "key" (default), or one of them.
        norms: also hold the gains of query and key norms. Default no.
        insist: go on where a resumed run's settings or start differ from before, or where a named reference comes
            from a model whose queries and keys mean something else (another rotary base, say).
        probe: a `RecallProbe`, to measure recall during the run, and again after a restore at the end.

    Raises:
        ValueError: at construction for settings that make no sense; in the Trainer's constructor when the model has
            nothing to guard or the mode cannot hold there; in `train()` when a resumed run does not fit.
    """

    def __init__(
        self,
        protect: str | Protection | None = None,
        restore: str | AtEnd | None = None,
        *,
        recipe: RecipeName | None = None,
        reference: Any = None,
        layers: Iterable[int] | None = None,
        roles: Iterable[Role] = ROUTING_ROLES,
        norms: bool = False,
        insist: bool = False,
        probe: RecallProbe | None = None,
    ) -> None:
        self.protect, self.restore = choose(protect, restore, recipe)
        self.reference = reference
        self.layers = as_layers(layers)
        self.roles = as_roles(roles)
        self.norms = norms
        self.insist = insist
        self.probe = probe
        self.summary: str | None = None
        self._protector = Protector(self.protect, layers=self.layers, roles=self.roles, norms=norms)
        self._trainer: Any = None
        self._session: Session | None = None
        self._ending: Ending | None = None  # until every other callback has had its turn at the end
        self._kept: tuple[Any, Start] | None = None  # the model and the start that its last train() protected
        self._states: WeakKeyDictionary[Any, RunState] = WeakKeyDictionary()  # by Trainer: what its last train() kept
        self._has_begun = False  # the Trainer has called train()
        self._own_optimizer = False
        self._wrapped: list[Wrapped] = []

    @property
    def routes(self) -> Routes | None:
        """The routes of the guarded model; None before there is one."""
        return self._protector.routes

    # -- reaching the trainer --------------------------------------------------------------------------------------

    def attach(self, trainer: Any) -> RouteGuard:
        """Guard a Trainer that is already constructed; to be called before `trainer.train()`. Returns self.

        Raises ValueError if the trainer has another guard, or an optimizer with a scheduler that cannot be split; or if
        this guard is in another Trainer that has not trained yet.
        """
        if self._trainer is trainer:
            return self
        if not holds(trainer, self):
            trainer.add_callback(self)
        self._install(trainer, trainer.model)
        return self

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = find_trainer(self)
        self._install(trainer, kwargs["model"] if trainer is None else trainer.model)

    def _install(self, trainer: Any, model: nn.Module) -> None:
        if trainer is not None:
            self._leave_earlier(trainer)
            others = [c for c in trainer.callback_handler.callbacks if isinstance(c, RouteGuard) and c is not self]
            if others:
                raise ValueError("this Trainer already has a RouteGuard; give one guard all the settings")
            engine = engine_of(trainer)
            refuse_unsupported_engine(engine, self.protect, self.restore)
            refuse_split_rows(engine, self.protect, self._protector.find(model))
            self._own_optimizer = trainer.optimizer is not None
            if self._own_optimizer:
                refuse_scheduled_optimizer(trainer, self.protect)
        self._protector.hold(model)
        if trainer is None and not isinstance(self.protect, Freeze):
            raise ValueError(HINT)
        self._trainer, self._has_begun = trainer, False
        if trainer is not None:
            run_first(trainer, self)
            if self.probe is not None:
                self.probe.attach(trainer)
            self._wrapped = [
                Wrapped(trainer, "create_optimizer", partial(self._create_optimizer, trainer)),
                Wrapped(trainer, "save_model", partial(self._save_model, trainer)),
                Wrapped(trainer.callback_handler, "on_train_end", self._last_look),
            ]

    def _leave_earlier(self, trainer: Any) -> None:
        """One Trainer at a time: an earlier one that has trained is left behind, and cannot train again."""
        if self._trainer is None or self._trainer is trainer:
            return
        if not self._has_begun:
            raise ValueError(TOO_EARLY)
        self._close()

    def _refuse_left(self, trainer: Any) -> None:
        if trainer is not None and self._trainer is not None and trainer is not self._trainer:
            raise ValueError(TOO_LATE)

    # -- protecting the model --------------------------------------------------------------------------------------

    def _create_optimizer(self, trainer: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._refuse_left(trainer)
        if trainer.model is not self._protector.model:
            self._protector.hold(trainer.model)
        self._protector.refuse_changes()  # before the optimizer is given what has changed
        self._refuse_changed_resume(trainer)
        optimizer = original(*args, **kwargs)
        self._protector.split(optimizer)
        return optimizer

    def _save_model(
        self, trainer: Any, original: Callable[..., Any], output_dir: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Every saved model says which start it protected, so that a further stage can tell."""
        result = original(output_dir, *args, **kwargs)
        folder = Path(output_dir or trainer.args.output_dir)
        if trainer in self._states and trainer.is_world_process_zero() and folder.is_dir():
            write_state(folder, self._states[trainer])
        return result

    def _last_look(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A callback after the guard may write an average over the model at the end."""
        result = original(*args, **kwargs)
        ending, self._ending = self._ending, None
        if ending is not None:
            ending.look_again()
        return result

    def _refuse_changed_resume(self, trainer: Any) -> None:
        """Before the optimizer's state is loaded: loading it into other groups would fail without saying why."""
        folder = resumed_folder(trainer)
        if folder is not None:
            refuse_changed_settings(
                self.run_state(),
                Path(trainer.args.output_dir),
                folder,
                insist=self.insist,
                required=self.reference is None,
            )

    def run_state(self, digest: str = "", origin: str = "", stage: int = 1) -> RunState:
        """The guard's settings as they are kept on disk, with the start that they protect."""
        assert self.routes is not None
        protect = settings(self.protect)
        assert protect is not None
        return RunState(
            protect, settings(self.restore), self.routes.layers, self.roles, self.norms, digest, origin, stage
        )

    # -- training --------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.routes is None:
            raise ValueError(f"RouteGuard was added to a Trainer that was already constructed. {HINT}")
        self._refuse_left(find_trainer(self))
        self._close()
        self._has_begun = True
        trainer = self._trainer
        if trainer is None and self._protector.model is not kwargs["model"]:
            raise ValueError(f"the model was made again after RouteGuard saw it (model_init). {HINT}")
        self._protector.refuse_changes()
        frozen = self._protector.frozen
        if frozen is not None:
            refuse_bema_beside_frozen(trainer, frozen)
            frozen.hold_rows()
            engine = engine_of(trainer)
            if engine is not None and engine.name == "FSDP1":
                print(f"routeguard: {len(frozen.whole)} routing tensors frozen; drift is not logged here", flush=True)
                return
        assert self._protector.model is not None
        kept = self._kept[1] if self._kept is not None and self._kept[0] is self._protector.model else None
        self._session = Session(
            guard=self,
            model=self._protector.model,
            optimizer=kwargs["optimizer"],
            scheduler=kwargs.get("lr_scheduler"),
            frozen=frozen,
            groups=self._protector.groups,
            output_dir=args.output_dir,
            resumed_from=resumed_folder(trainer) if trainer is not None else None,
            resumed_step=state.global_step,
            num_steps=state.max_steps,
            kept=kept,
            is_main=state.is_world_process_zero,
            trainer=trainer,
        )
        self._kept = (self._protector.model, self._session.start)
        if trainer is not None:
            self._states[trainer] = self._session.state
        self.summary = self._session.summary
        if state.is_world_process_zero:
            print(self.summary, flush=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._session is not None:
            self._session.after_step(state.global_step)
            if control.should_training_stop or state.global_step >= state.max_steps:
                self._session.metrics()  # now, before the best model may be loaded over the last one

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._session is not None and state.is_world_process_zero:
            self._session.write_checkpoint_state(f"{args.output_dir}/checkpoint-{state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._session is None:
            return
        ending = Ending(self._session, kwargs["model"], self.restore)
        ending.finish()
        if self.probe is not None and self.restore is not None:
            self.probe.after_restore(args, state, control, kwargs["model"])
        self._close()
        self._ending = ending

    def _close(self) -> None:
        """Take away every hook of the last `train()`."""
        self._ending = None
        if self._session is not None:
            self._session.close()
            self._session = None

    def detach(self) -> None:
        """Leave the Trainer as if there had been no guard: hooks, wrappers and callback go, frozen parameters thaw.

        The Trainer's optimizer goes too where its groups were split or frozen parameters left out; the next `train()`
        makes a plain one. Raises ValueError if it was the user's own and holds views of rows.
        """
        self._close()
        groups, frozen = self._protector.groups, self._protector.frozen
        if self._own_optimizer and groups is not None and groups.views:
            raise ValueError("the optimizer given to this Trainer holds views of rows now; give the next run a new one")
        if self._trainer is not None and not self._own_optimizer and (groups or (frozen is not None and frozen.whole)):
            self._trainer.optimizer = self._trainer.lr_scheduler = None
        self._protector.release()
        if self.probe is not None:
            self.probe.detach()
        if self._trainer is not None:
            for wrapped in self._wrapped:
                wrapped.remove()
            self._wrapped.clear()
            self._trainer.remove_callback(self)
            self._states.pop(self._trainer, None)
            self._trainer = None
        self._kept = None
