"""GRPO with TRL's GRPOTrainer and a reward that can be verified: the number is right. Queries and keys keep their bits.

python grpo.py                                           # the tiny hybrid, on a CPU
python grpo.py --model LiquidAI/LFM2-1.2B                # a real one, on a GPU
accelerate launch grpo.py --model LiquidAI/LFM2-1.2B     # on many
python grpo.py --unguarded                               # for comparison
"""

from __future__ import annotations

import re

from inputs import arguments, questions, recall_questions, trainer_settings
from trl import GRPOConfig, GRPOTrainer

from routeguard import RecallProbe, RouteGuard, verify_checkpoint

args = arguments(__doc__, steps=40)
probe = RecallProbe(**recall_questions(args.model))
guard = RouteGuard("track" if args.unguarded else "freeze", probe=probe)


def number_is_right(completions: list, answer: list[str], **_: object) -> list[float]:
    """1 where the last number of the completion is the answer, else 0."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    numbers = [re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", "")) for text in texts]
    return [float(found[-1:] == [right]) for found, right in zip(numbers, answer, strict=True)]


trainer = GRPOTrainer(
    args.model,
    reward_funcs=number_is_right,
    args=GRPOConfig(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=64 if args.tiny else 8,
        gradient_accumulation_steps=1 if args.tiny else 16,
        learning_rate=1e-3 if args.tiny else 1e-6,
        num_generations=8,
        max_completion_length=1 if args.tiny else 2048,
        temperature=3.0 if args.tiny else 1.0,  # the tiny model is too sure of its sums to try others
        **trainer_settings(args.model),
    ),
    train_dataset=questions(args.model),
    callbacks=[guard],
)
trainer.train()
trainer.save_model()

if trainer.is_world_process_zero():
    print(verify_checkpoint(args.output, args.model))
    print("Look at: reward (the share of right sums), drift_max, and recall from first to last step.")
