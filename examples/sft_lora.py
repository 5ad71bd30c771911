"""LoRA with TRL and PEFT: adapters on every linear layer but the queries and keys of full attention.

python sft_lora.py                                           # the tiny hybrid, on a CPU
python sft_lora.py --model LiquidAI/LFM2-1.2B                # a real one, on a GPU
accelerate launch sft_lora.py --model LiquidAI/LFM2-1.2B     # on many
python sft_lora.py --unguarded                               # "all-linear", for comparison
"""

from __future__ import annotations

from inputs import arguments, chain_of_thought, recall_questions, trainer_settings
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from routeguard import RecallProbe, RouteGuard, lora_config, lora_targets, verify_checkpoint

args = arguments(__doc__, steps=100)
probe = RecallProbe(**recall_questions(args.model))
guard = RouteGuard("track" if args.unguarded else "freeze", probe=probe)  # finds nothing to hold, and proves it

model = AutoModelForCausalLM.from_pretrained(args.model)
if args.unguarded:
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
else:
    print(lora_targets(model))
    adapter = lora_config(model, r=16)

trainer = SFTTrainer(
    model,
    args=SFTConfig(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=16 if args.tiny else 1,
        gradient_accumulation_steps=1 if args.tiny else 16,
        learning_rate=1e-2 if args.tiny else 1e-4,
        max_length=8192,
        **trainer_settings(args.model),
    ),
    train_dataset=chain_of_thought(args.model),
    peft_config=adapter,
    callbacks=[guard],
)
trainer.train()
trainer.save_model()

if trainer.is_world_process_zero():
    print(verify_checkpoint(args.output, args.model))
    print("Look at: which modules were left out, drift_max in the log lines, and recall from first to last step.")
