"""A training loop of your own with accelerate: freeze, track and measure as plain functions.

python accelerate_loop.py                                           # the tiny hybrid, on a CPU
python accelerate_loop.py --model LiquidAI/LFM2-1.2B                # a real one, on a GPU
accelerate launch accelerate_loop.py --model LiquidAI/LFM2-1.2B     # on many
python accelerate_loop.py --unguarded                               # for comparison
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from inputs import arguments, chain_of_thought, recall_questions
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

from routeguard import find_routes, freeze, measure_recall, track, verify_checkpoint

args = arguments(__doc__, steps=100)
set_seed(0)
accelerator = Accelerator(
    mixed_precision="no" if args.tiny else "bf16", gradient_accumulation_steps=1 if args.tiny else 16
)
tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(accelerator.device)


def tokenise(row: dict) -> dict:
    ids = tokenizer.apply_chat_template(row["messages"], truncation=True, max_length=8192, return_dict=True)[
        "input_ids"
    ]
    return {"input_ids": ids, "labels": ids}


data = chain_of_thought(args.model)
if "messages" in data.column_names:
    data = data.map(tokenise, remove_columns="messages")
loader = DataLoader(data, batch_size=16 if args.tiny else 1, shuffle=True, collate_fn=DataCollatorForSeq2Seq(tokenizer))

routes = find_routes(model)
accelerator.print(routes)
meter = track(model, routes)  # before the freeze: what is frozen already could not move, and there is nothing to track
if not args.unguarded:
    frozen = freeze(model, routes)  # before the optimizer is made
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-3 if args.tiny else 1e-5)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, args.steps)  # as the Trainer has it
if not args.unguarded:
    frozen.attach(optimizer)  # for tensors that are held by row, such as gated queries

before = measure_recall(model, tokenizer, **recall_questions(args.model))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
model.train()
step = 0
while step < args.steps:
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            schedule.step()
            meter.measure(step)
            if step % 10 == 0 or step == args.steps:
                drift = meter.read()[-1]
                accelerator.print(f"step {step}: loss {loss.item():.3f}, drift {max(drift.factors.values()):.4f}")
        if step == args.steps:
            break

tuned = accelerator.unwrap_model(model)
after = measure_recall(tuned, tokenizer, **recall_questions(args.model))
tuned.save_pretrained(args.output, is_main_process=accelerator.is_main_process, save_function=accelerator.save)
accelerator.print(f"before\n{before}\nafter\n{after}")
if accelerator.is_main_process:
    tokenizer.save_pretrained(args.output)
    print(verify_checkpoint(args.output, args.model))
accelerator.print(
    "Look at: drift in the step lines, the two recall tables, and whether the saved rows equal the start."
)
accelerator.end_training()
