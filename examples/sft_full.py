"""Full fine-tuning with TRL: one line guards recall, and the same line measures it.

python sft_full.py                                           # the tiny hybrid, on a CPU
python sft_full.py --model LiquidAI/LFM2-1.2B                # a real one, on a GPU
accelerate launch sft_full.py --model LiquidAI/LFM2-1.2B     # on many
python sft_full.py --unguarded                               # for comparison
"""

from __future__ import annotations

from inputs import arguments, chain_of_thought, recall_questions, trainer_settings
from trl import SFTConfig, SFTTrainer

from routeguard import RecallProbe, RouteGuard, verify_checkpoint

args = arguments(__doc__, steps=100)
probe = RecallProbe(**recall_questions(args.model))
guard = RouteGuard("track" if args.unguarded else "freeze", probe=probe)

trainer = SFTTrainer(
    args.model,  # TRL loads it in float32, so that small steps are not lost to bf16
    args=SFTConfig(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=16 if args.tiny else 1,
        gradient_accumulation_steps=1 if args.tiny else 16,
        learning_rate=2e-3 if args.tiny else 1e-5,
        max_length=8192,
        **trainer_settings(args.model),
    ),
    train_dataset=chain_of_thought(args.model),
    callbacks=[guard],
)
trainer.train()
trainer.save_model()

if trainer.is_world_process_zero():
    print(verify_checkpoint(args.output, args.model))
    print(
        "Look at: drift_max in the log lines, recall from first to last step, and whether saved rows equal the start."
    )
