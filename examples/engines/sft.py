"""Supervised fine-tuning with TRL and RouteGuard, on one device or many.

    python sft.py MODEL DATA                                                    # one device
    torchrun --nproc_per_node 8 sft.py MODEL DATA                               # DDP
    accelerate launch --config_file fsdp2.yaml sft.py MODEL DATA                # FSDP2
    torchrun --nproc_per_node 8 sft.py MODEL DATA --deepspeed zero3.json        # DeepSpeed ZeRO

MODEL is a folder that transformers can load; DATA is a JSON-lines file whose lines have "text", or "prompt" and
"completion" (the loss is then on the completion only). The guard is the same line on every engine; README.md beside
this file has the rest.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

from routeguard import Anchor, LowLR, QKRestore, RouteGuard, Track

GUARDS = {
    "freeze": lambda: RouteGuard(),
    "track": lambda: RouteGuard(protect=Track(), restore=QKRestore()),  # the paper's method
    "low_lr": lambda: RouteGuard(protect=LowLR(0.1)),
    "anchor": lambda: RouteGuard(protect=Anchor(100.0)),
    "l2_sp": lambda: RouteGuard(recipe="balanced"),  # every weight is pulled to its start: one device, DDP
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder of the model to start from")
    parser.add_argument("data", type=Path, help='JSON lines with "text", or "prompt" and "completion"')
    parser.add_argument("--protect", choices=GUARDS, default="freeze", help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("guarded"), help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=-1, help="optimizer steps; default: one pass over the data")
    parser.add_argument("--batch-size", type=int, default=1, help="on each device; default: %(default)s")
    parser.add_argument("--accumulate", type=int, default=1, help="batches a step; default: %(default)s")
    parser.add_argument("--learning-rate", type=float, default=1e-5, help="default: %(default)s")
    parser.add_argument("--max-length", type=int, default=4096, help="tokens a sample; default: %(default)s")
    parser.add_argument("--save-steps", type=int, default=0, help="steps between checkpoints; default: none")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --output")
    parser.add_argument("--fp32", action="store_true", help="no bfloat16, no gradient checkpointing (CPUs, tests)")
    parser.add_argument("--deepspeed", type=Path, help="a DeepSpeed config: zero2.json, zero3.json")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def training_arguments(args: argparse.Namespace) -> SFTConfig:
    return SFTConfig(
        output_dir=str(args.output),
        max_steps=args.steps,
        num_train_epochs=1,
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=args.learning_rate,
        max_length=args.max_length,
        logging_steps=1 if 0 < args.steps < 50 else 10,
        save_strategy="steps" if args.save_steps else "no",
        save_steps=args.save_steps or 500,
        bf16=not args.fp32,
        gradient_checkpointing=not args.fp32,
        deepspeed=None if args.deepspeed is None else str(args.deepspeed),
        # float32 weights: the masters that a small step in bfloat16 would be lost without
        model_init_kwargs={"dtype": torch.float32},
        report_to="none",
        seed=args.seed,
    )


def main() -> None:
    args = parse_arguments()
    set_seed(args.seed)
    settings = training_arguments(args)  # before the model: under ZeRO-3 it is split while it is made
    data = load_dataset("json", data_files=str(args.data), split="train")
    trainer = SFTTrainer(
        str(args.model),
        args=settings,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(args.model),
        callbacks=[GUARDS[args.protect]()],
    )
    trainer.train(resume_from_checkpoint=args.resume or None)
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()  # a process that leaves while another still writes can take it down
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
