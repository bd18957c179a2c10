"""Why a key of another tool has no counterpart here, for error messages and for imported configurations."""

from __future__ import annotations

REASONS: dict[str, str] = {
    "each run has a folder of its own below --runs, with its logs": (
        "output_dir overwrite_output_dir logging_dir run_name wandb_name wandb_run_id swanlab_experiment_name log_dir "
        "name trackio_run_name dataset_prepared_path tokenized_path tensorboard_dir save_only_model save_safetensors "
        "plot_loss log_level logging_strategy logging_first_step log_peak_memory_stats include_num_input_tokens_seen "
        "debug filename debug_logging_enabled"
    ),
    "`tunedeck resume` goes on with a run; a new start never takes over another's checkpoint": (
        "resume_from_checkpoint auto_resume_from_checkpoints ignore_data_skip"
    ),
    "nothing is uploaded; push the result with the hub's own command": (
        "push_to_hub hub_model_id hub_strategy hub_private_repo hub_model_revision push_dataset_to_hub hub_token "
        "hf_use_auth_token hf_hub_token push_to_hub_revision"
    ),
    "a tracker's account and options come from its own environment variables": (
        "wandb_entity wandb_watch wandb_log_model wandb_mode swanlab_project swanlab_description swanlab_mode "
        "swanlab_workspace swanlab_log_model use_swanlab trackio_space_id use_otel_metrics otel_metrics_host "
        "swanlab_log_completions swanlab_completion_log_interval swanlab_completion_max_buffer otel_metrics_port "
        "metric_logger use_wandb wandb_group use_tensorboard wandb_run_group"
    ),
    "the class is found from the model's own config": (
        "model_type tokenizer_type processor_type base_model_config tokenizer_config is_llama_derived_model "
        "is_mistral_derived_model is_falcon_derived_model is_qwen_derived_model tokenizer_use_fast tokenizer_legacy "
        "use_fast_tokenizer cls_model_config type_of_model recipe_checkpoint adapter_checkpoint checkpoint_files "
        "merges_file "
        "max_num_tiles use_fast image_size low_cpu_mem_usage low_cpu_ram tokenizer_use_mistral_common "
        "base_model_ignore_patterns"
    ),
    "remote code is allowed by --trust-remote-code on your own command line only": "trust_remote_code",
    "how kernels are chosen is the engine's: the fastest that equals the plain layers is taken": (
        "tf32 liger_rms_norm liger_glu_activation liger_layer_norm liger_rope liger_rms_norm_gated "
        "liger_cross_entropy lora_mlp_kernel lora_qkv_kernel lora_o_kernel use_kernels use_scattermoe use_sonicmoe "
        "experts_implementation fused_attn_kernel gemma4_hybrid_attn_impl flash_attn_cross_entropy "
        "flash_attn_fuse_mlp flash_attn_rms_norm flash_optimum torch_compile_mode torch_compile_backend "
        "flex_attn_compile_kwargs kernel_config use_v1_kernels xformers_attention sdp_attention enable_liger_kernel "
        "use_unsloth_gc fused foreach lora_embedding_kernel unsloth_lora_mlp unsloth_lora_qkv "
        "use_dsv4_kernels use_glm_dsa_kernels dsv4_fp4_grouped_mode apply_rope_fusion bias_activation_fusion "
        "moe_grouped_gemm unsloth_lora_o unsloth_cross_entropy_loss cut_cross_entropy experimental_skip_move_to_device"
    ),
    "plugins are code; the loss without a tensor of tokens x vocabulary is built in (train.loss)": "plugins strict",
    "how recomputation is done is the engine's": (
        "gradient_checkpointing_kwargs use_reentrant_gc recompute_granularity ac_mode ac_option"
    ),
    "processes and their limits are the launcher's; devices and sharding are the profile's and [parallel]'s": (
        "ddp_timeout ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers local_rank device_map "
        "dp_shard_size dp_replicate_size fsdp_version data_parallel_shard_dim data_parallel_replicate_dim device "
        "fsdp_cpu_offload custom_sharded_layers fsdp_transformer_layer_cls_to_wrap use_ray ray_num_workers ddp "
        "ray_run_name ray_storage_path resources_per_worker placement_strategy ray_init_kwargs accelerator_config "
        "memory_efficient_fsdp_wrap special_tokens_fsdp average_tokens_across_devices torchdistx_path "
        "use_distributed_state_dict overlap_param_gather overlap_grad_reduce use_distributed_optimizer"
    ),
    "tensor and expert parallelism do not exist here; sharding and sequence parallelism take their place": (
        "tensor_parallel_size tensor_parallel_dim tensor_parallel_plan expert_parallel_size expert_model_parallel_size "
        "tensor_model_parallel_size pipeline_model_parallel_size sequence_parallel moe_token_dispatcher_type "
        "expert_parallel_num_nvl_bytes expert_parallel_token_capacity"
    ),
    "a sequence is shared by parallel.sequence, as a property of the devices": (
        "context_parallel_size context_parallel_dim sequence_parallel_degree cp_size"
    ),
    "a micro-batch is packed without padding between its samples, or padded to its own longest": (
        "pad_to_sequence_len eval_sample_packing eval_packing group_by_length max_packed_sequence_len padding_free "
        "packing_strategy pad_to_multiple_of sample_packing_eff_est sample_packing_seq_len_multiplier neat_packing "
        "total_num_tokens sample_packing_sequentially sample_packing_group_size collate_fn multipack_real_batches"
    ),
    "columns are chosen by a source's format; data are read as they are needed": (
        "remove_unused_columns skip_prepare_dataset dataset_kwargs overwrite_cache dataset_exact_deduplication "
        "streaming streaming_multipack_buffer_size dataloader_pin_memory dataloader_prefetch_factor "
        "dataloader_drop_last shuffle_merged_datasets "
        "dataset_dir dataset_keep_in_memory pin_memory split_across_devices masked"
    ),
    "the tokens that end a turn are those of the chat template and the tokenizer": (
        "special_tokens eos_token pad_token eot_tokens tokenizer_padding_side padding_side"
    ),
    "the chat template of the model itself is used; model.chat_template takes another": (
        "template prompt_template tool_format"
    ),
    "a reasoning model's template is told by data.template_args": "enable_thinking",
    "the batch size of evaluation is found by the engine": (
        "per_device_eval_batch_size eval_batch_size batch_size_val eval_accumulation_steps"
    ),
    "evaluations and checkpoints are set in steps or minutes: eval.every_steps, checkpoint.every_steps": (
        "saves_per_epoch evals_per_epoch save_strategy eval_strategy evaluation_strategy save_every_n_epochs "
        "run_val_every_n_steps save_first_step"
    ),
    "evaluation happens where there is a validation set; training always": (
        "do_train do_eval do_predict eval_table_size eval_max_new_tokens eval_causal_lm_metrics do_causal_lm_eval "
        "compute_accuracy"
    ),
    "an adapter is always saved as an adapter; --merge or [finish] merge gives whole weights": (
        "save_adapter_weights_only"
    ),
    "the double quantisation of nf4 is always on": "double_quantization bnb_config_kwargs bnb_4bit_quant_type "
    "use_bnb_nested_quant bnb_4bit_use_double_quant quantization_method quantize_base",
    "layers of a model are read in the orientation that they have": "lora_fan_in_fan_out",
    "a run stops by itself where the loss is not finite": "loss_watchdog_threshold loss_watchdog_patience",
    "profiling is not a part of a recipe": "profiler include_tokens_per_second",
    '8-bit base weights do not exist here; the base stays in 16 bits, or model.quantize = "nf4"': "load_in_8bit",
    "how a mixture of experts is stored is the model's own": "llama4_linearized_experts quantize_moe_experts "
    "model_quantization_config model_quantization_config_kwargs nvfp4_merge_aware",
    "memory is kept low by the plan (train.optimizer_offload, train.activation_offload)": "optimizer_in_bwd",
    "train.mlp_tiles takes the number of pieces, and computes them with the block's own weights": (
        "tiled_mlp tiled_mlp_use_original_mlp"
    ),
    "quantised models are read as their own config says": "gptq gptq_groupsize gptq_model_v1 gptq_disable_exllama",
    "adapters on single parameters of experts do not exist here": "lora_target_parameters",
    "adapters start from zero; other initial values do not exist here": (
        "pissa_init pissa_iter pissa_convert init_lora_weights loftq_config peft"
    ),
    "one learning rate for both halves of an adapter": "loraplus_lr_ratio loraplus_lr_embedding loraplus_lr_target",
    "embeddings grow by model.add_tokens alone": "resize_token_embeddings_to_32x resize_vocab",
    "this optimizer does not exist here; adamw takes its place": (
        "use_galore galore_layerwise galore_target galore_rank galore_scale galore_update_interval use_apollo "
        "apollo_layerwise apollo_target apollo_rank apollo_scale apollo_scale_type use_badam badam_mode "
        "badam_switch_mode badam_switch_interval badam_verbose use_adam_mini use_muon optim_args"
    ),
    "the image tower is trained where method.targets or method.freeze say so": (
        "freeze_mm_modules freeze_vision_tower freeze_multi_modal_projector freeze_language_model encoder_trainable "
        "decoder_trainable fusion_trainable"
    ),
    "videos are not read": "video_max_pixels video_fps video_maxlen",
    "single values of a model's config are not changed, except model.rope_scaling": "model_config overrides_of_model",
    "where a job runs is `tunedeck launch`'s": (
        "provider gpu gpu_count node_count volumes branch dockerfile_commands memory timeout memory_preprocess "
        "timeout_preprocess secrets project_name"
    ),
    "this way of pacing the learning rate does not exist here": "lr_quadratic_warmup cosine_constant_lr_ratio",
    "weights in fp32 with arithmetic in bf16: bf16 weights with exact rounding learn the same": "mixed_precision",
    "a prompt is cut with its answer, at data.max_length": "max_prompt_length max_completion_length max_target_length",
    "noise on embeddings does not exist here": "neftune_noise_alpha",
    "sampling of answers belongs to [generate]": "predict_with_generate",
    "a short sample is kept": "min_sample_len",
    "the order of samples is random in every epoch, by train.seed": "curriculum_sampling shuffle_seed",
}
"""A reason to the keys, in lower case with '_', that have it."""

OTHER_TRAINING: dict[str, str] = {
    "training on rewards does not exist here": (
        "reward_model process_reward_model trl num_generations reward_funcs reward_functions ppo_epochs grpo_samples "
        "reward_weights center_rewards_coefficient reward_and_value_model"
    ),
    "distillation from a teacher does not exist here": "teacher_model teacher_model_name_or_path kd_loss kd_trainer "
    "kd_ratio teacher_checkpointer",
    "quantisation-aware training and training in 8 or 4 bits do not exist here": "qat quantizer fp8 llmcompressor",
    "this training loss does not exist here": (
        "ebft diffusion use_eaft use_eaft_loss use_dft_loss use_asft_loss chunked_cross_entropy_loss"
    ),
    "training only some layers at a time, or growing a model, does not exist here": (
        "lisa_n_layers relora use_llama_pro mixture_of_depths freeze_trainable_layers jagged_restart_steps"
    ),
    "classifiers are not trained here": "num_labels",
    "training across processors with CPU experts does not exist here": "use_kt kt_config",
    'a model that starts from new weights is model.init = "random"; a config never asks for it': "reinit_weights",
}
"""A reason to the keys that, when they are on, make a training that cannot be imported as anything else."""


def _by_key(reasons: dict[str, str]) -> dict[str, str]:
    return {key: reason for reason, keys in reasons.items() for key in keys.split()}


NO_COUNTERPART = _by_key(REASONS)
CANNOT_IMPORT = _by_key(OTHER_TRAINING)
