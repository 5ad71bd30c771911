"""Full fine-tuning with TRL; at the end the queries and keys of full attention are put back (QK-Restore).

python sft_full.py                                           # the tiny hybrid, on a CPU
python sft_full.py --model LiquidAI/LFM2-1.2B                # a real one, on a GPU
accelerate launch sft_full.py --model LiquidAI/LFM2-1.2B     # on many
python sft_full.py --unguarded                               # for comparison
"""

from __future__ import annotations

from inputs import arguments, chain_of_thought, recall_questions, trainer_settings
from trl import SFTConfig, SFTTrainer

from routeguard import QKRestore, RecallProbe, RouteGuard, Track, verify_checkpoint

args = arguments(__doc__, steps=100)
probe = RecallProbe(**recall_questions(args.model))
guard = RouteGuard(Track(), restore=None if args.unguarded else QKRestore(), probe=probe)  # RouteGuard(): freeze
data = chain_of_thought(args.model).train_test_split(test_size=0.02, seed=0)

trainer = SFTTrainer(
    args.model,  # TRL loads it in float32, so that small steps are not lost to bf16
    args=SFTConfig(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=16 if args.tiny else 1,
        per_device_eval_batch_size=16 if args.tiny else 1,
        gradient_accumulation_steps=1 if args.tiny else 16,
        learning_rate=2e-3 if args.tiny else 1e-5,
        max_length=8192,
        **trainer_settings(args.model),
    ),
    train_dataset=data["train"],
    eval_dataset=data["test"],
    callbacks=[guard],
)
loss = {"before": trainer.evaluate()["eval_loss"]}
trainer.train()
trainer.save_model()
loss["saved"] = trainer.evaluate()["eval_loss"]  # after the restore

if trainer.is_world_process_zero():
    print(verify_checkpoint(args.output, args.model))
    tuned = probe.results[args.steps]
    measured = {"before": probe.results[0], "tuned": tuned, "saved": probe.restored or tuned}
    print("recall:", ", ".join(f"{name} {result.accuracy():.2f}" for name, result in measured.items()))
    print("eval_loss:", ", ".join(f"{name} {value:.3f}" for name, value in loss.items()))
    print("Look at: recall, and how much of what was learned (eval_loss) the saved model keeps.")
