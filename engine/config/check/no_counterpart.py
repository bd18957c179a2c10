"""Keys of other tools that have no counterpart here, with the reason: for error messages and for imports.

Only a key of WITHOUT_EFFECT may be left out of an imported recipe. Every other key becomes a value of the recipe, a
blank that the user fills in, or an error.
"""

from __future__ import annotations

from typing import Any

WITHOUT_EFFECT: dict[str, str] = {
    "each run has its own folder in --runs, with its logs": (
        "output_dir overwrite_output_dir logging_dir run_name wandb_name wandb_run_id swanlab_experiment_name log_dir "
        "name trackio_run_name dataset_prepared_path tokenized_path tensorboard_dir save_only_model save_safetensors "
        "plot_loss log_level logging_strategy logging_first_step log_peak_memory_stats include_num_input_tokens_seen "
        "debug filename debug_logging_enabled add_version ignore_args_error load_args create_checkpoint_symlink "
        "save_optim no_save_optim no_save_rng checkpoint_dir logging_steps_strategy disable_tqdm seed_of_logging "
        "export_hf_on_finish save_ckpt_as_hf include_effective_tokens_per_second include_tokens_per_second "
        "log_completions test_value"
    ),
    "`tunedeck resume` continues a run; a new start never takes over another run's checkpoint": (
        "resume_from_checkpoint auto_resume_from_checkpoints ignore_data_skip resume_only_model"
    ),
    "nothing is uploaded; `tunedeck push` sends a result to the hub": (
        "push_to_hub hub_model_id hub_strategy hub_private_repo hub_model_revision push_dataset_to_hub hub_token "
        "hf_use_auth_token hf_hub_token push_to_hub_revision use_hf model_author"
    ),
    "a tracker's account and options come from its environment variables": (
        "wandb_entity wandb_watch wandb_log_model wandb_mode swanlab_project swanlab_description swanlab_mode "
        "swanlab_workspace swanlab_log_model trackio_space_id use_otel_metrics otel_metrics_host "
        "swanlab_log_completions swanlab_completion_log_interval swanlab_completion_max_buffer otel_metrics_port "
        "metric_logger wandb_group wandb_run_group swanlab_run_name swanlab_logdir"
    ),
    "the classes of model, tokenizer and processor are read from the model's own files": (
        "model_type tokenizer_type processor_type is_llama_derived_model "
        "is_mistral_derived_model is_falcon_derived_model is_qwen_derived_model tokenizer_use_fast "
        "use_fast_tokenizer type_of_model recipe_checkpoint checkpoint_files merges_file model_class init_config "
        "max_num_tiles use_fast low_cpu_mem_usage low_cpu_ram base_model_ignore_patterns task_type lora_task_type "
        "experimental_skip_move_to_device task"
    ),
    "remote code is allowed only by --trust-remote-code on your command line": "trust_remote_code",
    "the engine chooses equivalent kernels: the fastest that passes its check at startup": (
        "tf32 liger_rms_norm liger_glu_activation liger_layer_norm liger_rope liger_rms_norm_gated "
        "liger_cross_entropy lora_mlp_kernel lora_qkv_kernel lora_o_kernel use_kernels use_scattermoe use_sonicmoe "
        "experts_implementation fused_attn_kernel gemma4_hybrid_attn_impl flash_attn_cross_entropy "
        "flash_attn_fuse_mlp flash_attn_rms_norm flash_optimum torch_compile_mode torch_compile_backend "
        "flex_attn_compile_kwargs kernel_config use_v1_kernels xformers_attention sdp_attention enable_liger_kernel "
        "use_unsloth_gc fused foreach lora_embedding_kernel unsloth_lora_mlp unsloth_lora_qkv "
        "use_dsv4_kernels use_glm_dsa_kernels apply_rope_fusion bias_activation_fusion "
        "moe_grouped_gemm unsloth_lora_o unsloth_cross_entropy_loss cut_cross_entropy pretrain_multipack_attn "
        "moe_permute_fusion moe_shared_expert_overlap cross_entropy_loss_fusion attention_backend strict "
        "masked_softmax_fusion bias_swiglu_fusion gradient_accumulation_fusion"
    ),
    "the engine decides how activations are recomputed": (
        "gradient_checkpointing_kwargs use_reentrant_gc recompute_granularity recompute_method recompute_num_layers "
        "ac_mode ac_option vit_gradient_checkpointing"
    ),
    "the launcher starts the processes; devices and sharding are set in the profile and in [parallel]": (
        "ddp_timeout ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers local_rank device_map "
        "dp_shard_size dp_replicate_size fsdp_version data_parallel_shard_dim data_parallel_replicate_dim device "
        "fsdp_cpu_offload custom_sharded_layers fsdp_transformer_layer_cls_to_wrap use_ray ray_num_workers ddp "
        "ray_run_name ray_storage_path resources_per_worker placement_strategy ray_init_kwargs accelerator_config "
        "memory_efficient_fsdp_wrap special_tokens_fsdp torchdistx_path dist_timeout dist_env "
        "use_distributed_state_dict overlap_param_gather overlap_grad_reduce use_distributed_optimizer "
        "torch_empty_cache_steps use_cpu data_shared_file_system ep_size ep_dispatcher ddp_backend"
    ),
    "sharding and sequence parallelism replace tensor, pipeline and expert parallelism": (
        "tensor_parallel_size tensor_parallel_dim tensor_parallel_plan expert_parallel_size expert_model_parallel_size "
        "tensor_model_parallel_size pipeline_model_parallel_size sequence_parallel moe_token_dispatcher_type "
        "expert_parallel_num_nvl_bytes expert_parallel_token_capacity virtual_pipeline_model_parallel_size"
    ),
    "parallel.sequence says how many devices share one sequence": (
        "context_parallel_size context_parallel_dim sequence_parallel_degree cp_size cp_mode sequence_parallel_size"
    ),
    "a micro-batch is packed without padding, or padded to its longest sample; neither changes the result": (
        "pad_to_sequence_len eval_sample_packing eval_packing padding_free batching_strategy "
        "pad_to_multiple_of sample_packing_eff_est sample_packing_seq_len_multiplier neat_packing "
        "total_num_tokens sample_packing_group_size collate_fn multipack_real_batches use_packed_sequences "
        "batching_workers max_packed_sequence_len"
    ),
    "columns are chosen by the format of a source, and rows are read when they are needed": (
        "remove_unused_columns skip_prepare_dataset overwrite_cache load_from_cache_file preprocessing_batch_size "
        "streaming streaming_multipack_buffer_size dataloader_pin_memory dataloader_prefetch_factor buffer_size "
        "dataset_dir dataset_keep_in_memory pin_memory split_across_devices dataloader_persistent_workers lazy_tokenize"
    ),
    "the order of samples is random in every epoch, set by train.seed": "shuffle_seed shuffle_merged_datasets",
    "the template ends each turn with its end token, and that token is trained": "eot_tokens",
    "padding is never trained": "pad_token tokenizer_padding_side padding_side ignore_pad_token_for_loss",
    "the engine finds the batch size of evaluation": (
        "per_device_eval_batch_size eval_batch_size batch_size_val eval_accumulation_steps"
    ),
    "evaluation runs if there is a validation set; training always runs": (
        "do_train do_eval do_predict eval_table_size eval_max_new_tokens eval_causal_lm_metrics do_causal_lm_eval "
        "compute_accuracy greater_is_better save_first_step eval_num_beams prediction_loss_only eval_table_max"
    ),
    "an adapter is saved as an adapter; `tunedeck merge` or [finish] merge writes full weights": (
        "save_adapter_weights_only merge_lora lora_merge_method"
    ),
    "the layout of a layer's weight is read from the model": "lora_fan_in_fan_out",
    "a run stops when its loss is not finite": "loss_watchdog_threshold loss_watchdog_patience",
    "profiling is not part of a recipe": "profiler use_pytorch_profiler",
    "the storage layout of experts does not change them": "llama4_linearized_experts",
    "the plan keeps memory low (train.optimizer_offload, train.activation_offload)": "optimizer_in_bwd",
    "train.mlp_tiles takes the number of pieces; the result is the same without them": (
        "tiled_mlp tiled_mlp_use_original_mlp"
    ),
    "the base's config sets its quantisation": "gptq gptq_groupsize gptq_model_v1 gptq_disable_exllama",
    "rows that are added for alignment get no token": "resize_token_embeddings_to_32x",
    "videos are not read": "video_max_pixels video_fps video_maxlen fps_max_frames",
    "`tunedeck launch` sets where a job runs": (
        "provider gpu gpu_count node_count volumes branch dockerfile_commands memory timeout memory_preprocess "
        "timeout_preprocess secrets project_name env"
    ),
    "fp32 weights with bf16 arithmetic train like bf16 weights with exact rounding": "mixed_precision",
    "[generate] and [evaluate] set how answers are generated": (
        "predict_with_generate sample_backend max_new_tokens do_sample temperature top_p top_k num_beams "
        "repetition_penalty stream"
    ),
    "weights on disk use 4-bit types of bitsandbytes": "bnb_4bit_quant_storage",
}
"""A reason to the keys, in lower case with '_', that change nothing about what is trained."""

WITH_EFFECT: dict[str, str] = {
    "a tokenizer from another library can split text differently": "tokenizer_use_mistral_common tokenizer_legacy",
    "the config of another model would replace this model's": "base_model_config cls_model_config",
    "image sizes are set by data.image_max_pixels and data.image_min_pixels": "image_size image_resize_algorithm",
    "plugins are code that can change training": "plugins",
    "the loss of a step is the mean over its target tokens on all devices": "average_tokens_across_devices",
    "the order of samples is random; samples are not grouped by length or drawn in the order of the file": (
        "group_by_length sample_packing_sequentially train_sampling_strategy disable_shuffling"
    ),
    "how rows are packed differs": "packing_strategy packing_mode",
    "duplicate rows are kept; `tunedeck data --duplicates` lists them": "dataset_exact_deduplication",
    "the last, smaller step of an epoch is kept": "dataloader_drop_last",
    "options of another tool's data preparation": "dataset_kwargs masked",
    'model.special_tokens names them: { eos = "<|im_end|>" }; model.add_tokens adds tokens to the vocabulary': (
        "special_tokens bos_token unk_token new_special_tokens special_tokens_map added_tokens_overrides"
    ),
    "the model's chat template is used; to change it, set model.chat_template": "template prompt_template tool_format",
    "data.template_args passes variables to the chat template, such as enable_thinking = false": (
        "preserve_thinking add_non_thinking_prefix response_prefix"
    ),
    "the loss weighs all target tokens equally": "loss_scale token_weights",
    "double quantisation is always on with nf4": (
        "double_quantization bnb_config_kwargs use_bnb_nested_quant bnb_4bit_use_double_quant"
    ),
    "4-bit weights are stored as nf4": "bnb_4bit_quant_type quantization_method quant_method",
    '8-bit base weights are not supported: choose model.quantize = "none" (16 bits) or "nf4" (4 bits)': (
        "load_in_8bit quantize_base"
    ),
    "experts are quantised like the other layers": "quantize_moe_experts nvfp4_merge_aware dsv4_fp4_grouped_mode",
    "the base is dequantised when it is loaded": ("model_quantization_config model_quantization_config_kwargs"),
    "adapters start from zero; other initial values are not supported": (
        "pissa_init pissa_iter pissa_convert init_lora_weights init_weights peft_init_lora_weights loftq_config peft "
        "lora_bias lorap_lr_ratio"
    ),
    "adapters have one rank and alpha on every layer; method.layers names the layers that get them": (
        "peft_layers_pattern layers_pattern lora_rank_pattern lora_alpha_pattern rank_pattern alpha_pattern"
    ),
    'train.groups gives lora_B its own learning rate: [{ match = "**lora_B**", learning_rate = 3.2e-3 }]': (
        "loraplus_lr_ratio loraplus_lr_embedding loraplus_lr_target"
    ),
    "train.groups gives embeddings their own learning rate": "embedding_lr embedding_lr_scale",
    "the vocabulary only grows by model.add_tokens": "resize_vocab",
    "this optimizer is not supported; train.optimizer has the list": (
        "use_galore galore_layerwise galore_target galore_rank galore_scale galore_update_interval galore_proj_type "
        "use_apollo apollo_layerwise apollo_target apollo_rank apollo_scale apollo_scale_type apollo_proj "
        "apollo_proj_type apollo_update_interval apollo_scale_front use_badam badam_mode badam_start_block "
        "badam_switch_mode badam_switch_interval badam_update_ratio badam_mask_mode badam_verbose use_adam_mini "
        "use_muon optim_args optim_target_modules optim_config"
    ),
    "values of a model's config cannot be changed, except with model.rope_scaling": (
        "model_config overrides_of_model overrides_of_model_config model_init_kwargs model_kwargs"
    ),
    "this learning rate schedule is not supported": (
        "lr_quadratic_warmup cosine_constant_lr_ratio lr_groups lr_scheduler_kwargs lr_scheduler_config "
        "lr_decay_style lr_wsd_decay_style"
    ),
    "prompt and answer are truncated together, at data.max_length": (
        "max_prompt_length max_completion_length max_target_length truncation_mode"
    ),
    "noise on embeddings is not supported": "neftune_noise_alpha noisy_embedding_alpha",
    "short samples are kept": "min_sample_len",
    "the reference of a preference loss is the model at the start": (
        "ref_model ref_model_adapters sync_ref_model ref_adapter_name ref_model_mixup_alpha ref_model_sync_steps "
        "reference_free precompute_ref_log_probs_file"
    ),
    "this variant of the preference loss is not supported": (
        "ld_alpha f_divergence_type f_alpha_divergence_coef use_weighting discopop_tau loss_weights pref_bco_weight "
        "rl_adapter_ref_model dpo_use_weighting dpo_norm_loss"
    ),
    'sources are mixed by data.sources.NAME.weight, as shares with data.mixing = "probability"': (
        "mix_strategy interleave_probs stopping_strategy"
    ),
    "one validation loss over all validation sources": "eval_on_each_dataset",
    "evaluation truncates at data.max_length": "eval_sequence_len",
    "a reward per conversation is not read": "kto_sample",
}
"""A reason to the keys that can change what is trained: an import asks the user about each, unless its value is one
that has no effect here (NEUTRAL)."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "average_tokens_across_devices": (True,),
    "train_sampling_strategy": ("random",),
    "packing_strategy": ("bfd",),
    "tool_format": ("default",),
    "loss_scale": ("default",),
    "double_quantization": (True,),
    "use_bnb_nested_quant": (True,),
    "bnb_4bit_use_double_quant": (True,),
    "bnb_4bit_quant_type": ("nf4",),
    "quantization_method": ("bnb", "bitsandbytes"),
    "quant_method": ("bnb", "bitsandbytes"),
    "quantize_base": (True,),
    "bnb_config_kwargs": ({"bnb_4bit_use_double_quant": True},),
    "dataset_kwargs": ({"skip_prepare_dataset": True},),
    "model_quantization_config_kwargs": ({"dequantize": True},),
    "init_lora_weights": (True, "true", "default"),
    "init_weights": (True, "true", "default"),
    "truncation_mode": ("keep_start",),
    "min_sample_len": (0, 1, 2),
    "f_divergence_type": ("reverse_kl",),
    "loss_weights": ([1.0],),
    "mix_strategy": ("concat",),
    "pref_bco_weight": (0.0,),
    "resize_vocab": (False,),
}
"""Values of keys of WITH_EFFECT, beside false and nothing, that mean what happens here anyway."""

OTHER_TRAINING: dict[str, str] = {
    "training on rewards is not supported": (
        "reward_model process_reward_model trl num_generations reward_funcs reward_functions ppo_epochs grpo_samples "
        "reward_weights center_rewards_coefficient reward_and_value_model vllm_mode use_vllm"
    ),
    "distillation from a teacher is not supported": "teacher_model teacher_model_name_or_path kd_loss kd_trainer "
    "kd_ratio teacher_checkpointer",
    "quantisation-aware training and training in 8 or 4 bits are not supported": "qat quantizer fp8 llmcompressor",
    "this training loss is not supported": (
        "ebft diffusion use_eaft use_eaft_loss use_dft_loss use_asft_loss chunked_cross_entropy_loss "
        "enable_dft_loss enable_channel_loss"
    ),
    "training a few layers at a time, or growing a model, is not supported": (
        "lisa_n_layers relora use_llama_pro mixture_of_depths jagged_restart_steps lisa_activated_layers"
    ),
    "classifiers are not supported": "num_labels",
    "training with experts on the CPU is not supported": "use_kt kt_config",
    'model.init = "random" starts from new weights; imported recipes do not set it': "reinit_weights",
    "binary weights are not supported": "use_onebitllms",
}
"""A reason to the keys that, when they are on, make a training that cannot be imported as anything else."""


def _by_key(reasons: dict[str, str]) -> dict[str, str]:
    return {key: reason for reason, keys in reasons.items() for key in keys.split()}


LEFT_OUT = _by_key(WITHOUT_EFFECT)
ASKED_ABOUT = _by_key(WITH_EFFECT)
CANNOT_IMPORT = _by_key(OTHER_TRAINING)
NO_COUNTERPART = LEFT_OUT | ASKED_ABOUT
