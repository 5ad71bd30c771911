"""Keys of training configs that say nothing about what a guard depends on, so that the others can be listed."""

from __future__ import annotations

from dataclasses import fields

# Fields of TrainingArguments that may change what a guard can do, and that the doctor does not model.
_NOT_MODELLED = frozenset({"parallelism_config", "optim_target_modules"})

# The common keys of the tools that are not installed here, beside those of TrainingArguments.
_LLAMA_FACTORY = """
    dataset eval_dataset max_samples overwrite_cache preprocessing_num_workers plot_loss val_size packing flash_attn
    lora_alpha lora_dropout use_rslora loraplus_lr_ratio trust_remote_code model_revision cache_dir rope_scaling
    train_on_prompt mask_history quantization_method pref_beta pref_loss pref_ftx
    overwrite_output_dir warmup_ratio image_max_pixels video_max_pixels
"""
_AXOLOTL = """
    datasets test_datasets dataset_prepared_path dataset_processes val_set_size output_dir sequence_len sample_packing
    eval_sample_packing pad_to_sequence_len wandb_project wandb_entity wandb_watch wandb_name wandb_log_model
    gradient_accumulation_steps micro_batch_size eval_batch_size num_epochs max_steps lr_scheduler lr_scheduler_kwargs
    cosine_min_lr_ratio weight_decay max_grad_norm adam_beta1 adam_beta2 adam_epsilon warmup_steps warmup_ratio tf32
    gradient_checkpointing gradient_checkpointing_kwargs logging_steps flash_attention sdp_attention
    xformers_attention evals_per_epoch eval_steps saves_per_epoch save_steps save_total_limit save_strategy
    special_tokens tokens chat_template train_on_inputs group_by_length lora_alpha lora_dropout loraplus_lr_ratio
    peft_use_rslora seed tokenizer_type tokenizer_config tokenizer_use_fast model_type trust_remote_code
    revision_of_model hub_model_id resume_from_checkpoint auto_resume_from_checkpoints early_stopping_patience debug
    strict shuffle_merged_datasets ddp_timeout ddp_find_unused_parameters
"""


def known_to_axolotl() -> frozenset[str]:
    return frozenset(_AXOLOTL.split())


def known_to_llama_factory() -> frozenset[str]:
    from transformers import Seq2SeqTrainingArguments

    return _fields(Seq2SeqTrainingArguments).union(_LLAMA_FACTORY.split())


def known_to_trl() -> frozenset[str]:
    """The fields of TRL's own configs, of whichever trainer, as installed."""
    import trl

    names = ["ScriptArguments", "ModelConfig", "DatasetMixtureConfig"]
    names += [f"{kind}Config" for kind in ("SFT", "DPO", "GRPO", "KTO", "RLOO", "Reward")]
    classes = [getattr(trl, name) for name in names if hasattr(trl, name)]
    return frozenset({"env"}).union(*map(_fields, classes))


def _fields(kind: type) -> frozenset[str]:
    return frozenset(field.name for field in fields(kind)) - _NOT_MODELLED
