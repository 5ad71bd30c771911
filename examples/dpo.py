"""DPO with TRL's DPOTrainer: preferences are learned, queries and keys keep their bits.

python dpo.py                                           # the tiny hybrid, on a CPU
python dpo.py --model LiquidAI/LFM2-1.2B                # a real one, on a GPU
accelerate launch dpo.py --model LiquidAI/LFM2-1.2B     # on many
python dpo.py --unguarded                               # for comparison
"""

from __future__ import annotations

from inputs import arguments, preferences, recall_questions, trainer_settings
from trl import DPOConfig, DPOTrainer

from routeguard import RecallProbe, RouteGuard, verify_checkpoint

args = arguments(__doc__, steps=60)
probe = RecallProbe(**recall_questions(args.model))
guard = RouteGuard("track" if args.unguarded else "freeze", probe=probe)

trainer = DPOTrainer(
    args.model,
    args=DPOConfig(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=16 if args.tiny else 1,
        gradient_accumulation_steps=1 if args.tiny else 16,
        learning_rate=1e-3 if args.tiny else 1e-6,
        max_length=4096,
        **trainer_settings(args.model),
    ),
    train_dataset=preferences(args.model),
    callbacks=[guard],
)
trainer.train()
trainer.save_model()

if trainer.is_world_process_zero():
    print(verify_checkpoint(args.output, args.model))
    print("Look at: rewards/accuracies (is anything learned?), drift_max, and recall from first to last step.")
