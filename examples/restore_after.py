"""A fine-tuning that nobody guarded, repaired on disk: drift, restore, verify, average, and recall of each.

    python restore_after.py                                           # the tiny hybrid, on a CPU
    python restore_after.py --model LiquidAI/LFM2-1.2B                # a real one, on a GPU
    accelerate launch restore_after.py --model LiquidAI/LFM2-1.2B     # on many (the repair is done by one process)

A checkpoint that you have already needs the second half only, and no GPU but for measuring recall.
"""

from __future__ import annotations

import shutil

from inputs import arguments, chain_of_thought, recall_questions, trainer_settings
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from routeguard import average_checkpoint, checkpoint_drift, measure_recall, restore_checkpoint, verify_checkpoint

args = arguments(__doc__, steps=100, guarded=False)
tuned, restored, averaged = (args.output / name for name in ("tuned", "restored", "averaged"))

trainer = SFTTrainer(
    args.model,
    args=SFTConfig(
        output_dir=tuned,
        max_steps=args.steps,
        per_device_train_batch_size=16 if args.tiny else 1,
        gradient_accumulation_steps=1 if args.tiny else 16,
        learning_rate=2e-3 if args.tiny else 1e-5,
        max_length=8192,
        **trainer_settings(args.model),
    ),
    train_dataset=chain_of_thought(args.model),
)
trainer.train()
trainer.save_model()

if trainer.is_world_process_zero():
    for folder in (restored, averaged):
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier run of this script: nothing is ever overwritten
    print(checkpoint_drift(args.model, tuned))
    print(restore_checkpoint(args.model, tuned, out=restored))
    print(verify_checkpoint(restored, args.model))
    print(average_checkpoint(args.model, tuned, out=averaged, alpha=0.1))

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    recall = {}
    for name, folder in {"before": args.model, "tuned": tuned, "restored": restored, "averaged": averaged}.items():
        model = AutoModelForCausalLM.from_pretrained(folder, device_map="auto")
        recall[name] = measure_recall(model, tokenizer, **recall_questions(args.model))
        print(f"{name}\n{recall[name]}")
    print(
        "Look at: how far recall fell from before to tuned, and how much of it each repair gave back. Then run your "
        "reasoning benchmark on the repaired folders too: a repair can cost some of what was learned."
    )
