"""QLoRA: adapters over a base in 4 bits, none of them on the queries and keys of full attention.

python sft_qlora.py                                          # the tiny hybrid, on a CPU (pip install bitsandbytes)
python sft_qlora.py --model LiquidAI/LFM2-1.2B               # a real one, on a GPU
accelerate launch sft_qlora.py --model LiquidAI/LFM2-1.2B    # on many
python sft_qlora.py --unguarded                              # "all-linear", for comparison
"""

from __future__ import annotations

import torch
from accelerate import PartialState
from inputs import arguments, chain_of_thought, recall_questions, trainer_settings
from peft import LoraConfig, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

from routeguard import RouteGuard, check_lora_coverage, lora_config, measure_recall, verify_checkpoint

args = arguments(__doc__, steps=100)
tokenizer = AutoTokenizer.from_pretrained(args.model)
four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


def base():
    return AutoModelForCausalLM.from_pretrained(
        args.model, quantization_config=four_bit, device_map={"": PartialState().device}
    )


# On a copy, not by a RecallProbe: some CPUs' bitsandbytes repacks what was evaluated, and it does not train afterwards.
before = measure_recall(base(), tokenizer, **recall_questions(args.model))
model = prepare_model_for_kbit_training(base(), use_gradient_checkpointing=not args.tiny)
everywhere = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")

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
    peft_config=everywhere if args.unguarded else lora_config(model, r=16),
    callbacks=[RouteGuard("track" if args.unguarded else "freeze")],  # finds nothing to hold, and proves it
)
if not args.unguarded:
    check_lora_coverage(trainer.model)  # raises if an adapter would move queries or keys
trainer.train()
trainer.save_model()
after = measure_recall(trainer.model, tokenizer, **recall_questions(args.model))

if trainer.is_world_process_zero():
    print(f"before\n{before}\nafter\n{after}")
    print(verify_checkpoint(args.output, args.model))
    print("Look at: what the adapters cover, drift_max in the log lines, and the two recall tables.")
