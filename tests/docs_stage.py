"""Where the documentation's Python blocks run: a folder with a tiny base and a tuned model, and names for both."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Lfm2ForCausalLM
from trl import SFTTrainer

import routeguard
from routeguard import RouteGuard
from routeguard.demo import evaluate
from routeguard.demo import run as demo_run
from routeguard.demo.run import plain_arguments
from routeguard.diagnostics import needle_prompt as needle_prompts
from routeguard.routes import table
from tests.docs_pages import Block
from tests.tiny_chat import save_both, tiny_chat
from tests.tuned import tune

STEPS = 2
_THOUGHTS = "First we count the apples. Wait, there are two baskets. So the sum is seven. Alternatively, count by hand."


def prepare(folder: Path) -> None:
    """Write what the pages call BASE, TUNED and so on into `folder`: LFM2 of two layers, one of full attention."""
    model, tokenizer = tiny_chat(
        Lfm2ForCausalLM, full_attn_idxs=[1], block_auto_adjust_ff_dim=False, max_position_embeddings=32768
    )
    for name in ("BASE", "path/of/the/starting/checkpoint", "path/or/model/or/state dict/or/run folder"):
        save_both(model, tokenizer, folder / name)
    tune(model)
    save_both(model, tokenizer, folder / "TUNED")


def conversations() -> Dataset:
    """Prompts and completions with words of transition in them."""
    return Dataset.from_list([{"prompt": f"{n} apples, {n + 1} pears?", "completion": _THOUGHTS} for n in range(100)])


def names(folder: Path) -> dict[str, Any]:
    """What a reader of the pages is taken to have: models, a tokenizer, data, training arguments."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "BASE")
    data = conversations()
    return {
        "tokenizer": tokenizer,
        "cot": data,
        "dataset": data,
        "data": data,
        "start": str(folder / "BASE"),
        "args": plain_arguments(folder / "trained", steps=STEPS, batch_size=2, learning_rate=1e-3, seed=0),
        "inputs": tokenizer("5 apples, 6 pears?", return_tensors="pt"),
        "evaluate": lambda model: None,
    }


def fresh_models(folder: Path) -> dict[str, Any]:
    """Models that every block gets anew, since it may train or wrap them."""
    load = AutoModelForCausalLM.from_pretrained
    return {"model": load(folder / "TUNED"), "base_model": load(folder / "BASE")}


def guarded_run(folder: Path, scope: dict[str, Any]) -> None:
    """The OUTPUT of a guarded run, and recall before and after it."""
    model = fresh_models(folder)["base_model"]
    args = plain_arguments(folder / "OUTPUT", steps=STEPS, batch_size=2, learning_rate=1e-3, seed=0)
    SFTTrainer(model, args=args, train_dataset=scope["cot"], callbacks=[RouteGuard(protect="track")]).train()
    options: dict[str, Any] = {"tasks": ["niah_single_2"], "lengths": (512,), "num_samples": 2}
    scope["before"] = scope["after"] = routeguard.measure_recall(model, scope["tokenizer"], **options)


def in_small(function: Callable[..., Any], **limits: Any) -> Callable[..., Any]:
    """`function` with the values of `limits` where the caller gives larger ones; takes what the function takes."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(function).bind(*args, **kwargs)
        for name, limit in limits.items():
            if name in bound.arguments:
                value = bound.arguments[name]
                bound.arguments[name] = limit if isinstance(limit, tuple) else min(value, limit)
        return function(*bound.args, **bound.kwargs)

    return called


class FewSteps(trl.SFTConfig):  # type: ignore[misc]
    def __post_init__(self) -> None:
        super().__post_init__()
        self.max_steps = STEPS


def make_small(patch: pytest.MonkeyPatch) -> None:
    """Fewer steps, samples and tokens than the pages ask for, and a table of architectures that is put back."""
    patch.setattr(table, "_BY_TYPE", dict(table._BY_TYPE))
    patch.setattr(routeguard, "measure_recall", in_small(routeguard.measure_recall, lengths=(512, 640), num_samples=2))
    patch.setattr(demo_run, "fine_tune", in_small(demo_run.fine_tune, steps=STEPS))
    patch.setattr(evaluate, "recall", in_small(evaluate.recall, num_tokens=128, num_samples=1))
    patch.setattr(needle_prompts, "needle_prompt", in_small(needle_prompts.needle_prompt, length_tokens=160))
    generate = transformers.GenerationMixin.generate

    def few_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        return generate(self, *args, **{**kwargs, "max_new_tokens": 4})

    patch.setattr(transformers.GenerationMixin, "generate", few_tokens)
    patch.setattr(trl, "SFTConfig", FewSteps)


class _Fill(ast.NodeTransformer):
    """`args=...` stands for the reader's own `args`, and `SFTTrainer(..., callbacks=c)` for what a Trainer needs."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        for keyword in node.keywords:
            if _is_ellipsis(keyword.value) and keyword.arg is not None:
                keyword.value = ast.Name(keyword.arg, ast.Load())
        if any(_is_ellipsis(argument) for argument in node.args):
            node.args = [a for a in node.args if not _is_ellipsis(a)] or [ast.Name("model", ast.Load())]
            given = {keyword.arg for keyword in node.keywords}
            needed = {"args": "args", "train_dataset": "cot", "processing_class": "tokenizer"}
            node.keywords += [ast.keyword(k, ast.Name(v, ast.Load())) for k, v in needed.items() if k not in given]
        return node


def _is_ellipsis(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def run_block(block: Block, scope: dict[str, Any]) -> None:
    """Run a block in `scope`; tracebacks show its page and lines."""
    tree = ast.parse("\n" * (block.line - 1) + block.code)
    exec(compile(ast.fix_missing_locations(_Fill().visit(tree)), block.page, "exec"), scope)


def run_page(page_blocks: list[Block], folder: Path, scope: dict[str, Any]) -> None:
    """Run blocks one after the other in one namespace. Models that the page did not make itself are new in each."""
    prepare(folder)
    scope.update(names(folder))
    if any('"OUTPUT' in block.code for block in page_blocks):
        guarded_run(folder, scope)
    given: dict[str, Any] = {}
    for block in page_blocks:
        own = {name for name, value in given.items() if scope[name] is not value}
        given = {name: value for name, value in fresh_models(folder).items() if name not in own}
        scope.update(given)
        run_block(block, scope)
