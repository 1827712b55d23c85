"""Public runs of other systems, by their settings: what `fovea import-config` is to read.

VERL has the settings of examples/grpo_trainer/run_qwen2_5_vl-7b.sh, whose variants stand beside it with other names;
RLINF those of examples/reasoning/config/vqa/qwen3-vl-2b-grpo-fsdp-geo3k.yaml.
"""

from __future__ import annotations

VERL = """\
set -x
ENGINE=${1:-vllm}
DATA=/data/geo3k
GRPO=(
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=False
)
python3 -m verl.trainer.main_ppo "${GRPO[@]}" \\
    data.train_files=$DATA/train.parquet \\
    data.val_files="${DATA}/test.parquet" \\
    data.train_batch_size=512 data.max_prompt_length=1024 data.max_response_length=$((2 * 1024)) \\
    data.filter_overlong_prompts=True data.truncation='error' data.image_key=images \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct \\
    actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.model.enable_gradient_checkpointing=True \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=10 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.01 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.entropy_coeff=0 \\
    actor_rollout_ref.actor.fsdp_config.param_offload=False \\
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=20 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.name=$ENGINE \\
    +actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    actor_rollout_ref.rollout.enable_chunked_prefill=False \\
    actor_rollout_ref.rollout.enforce_eager=False \\
    actor_rollout_ref.rollout.free_cache_engine=True \\
    actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=20 \\
    actor_rollout_ref.ref.fsdp_config.param_offload=True \\
    trainer.critic_warmup=0 trainer.logger='["console","wandb"]' \\
    trainer.project_name='verl_grpo_example_geo3k' trainer.experiment_name='qwen2_5_vl_7b_function_rm' \\
    trainer.n_gpus_per_node=8 trainer.nnodes=1 \\
    trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15 $@
"""

VERL_TABLE = {
    "model.path": "Qwen/Qwen2.5-VL-7B-Instruct",
    "model.dtype": "bfloat16",
    "environment.name": "geo3k",
    "environment.train_files": ["/data/geo3k/train.parquet"],
    "environment.dev_files": ["/data/geo3k/test.parquet"],
    "environment.test_files": ["/data/geo3k/test.parquet"],
    "environment.prompt_key": "prompt",
    "environment.image_keys": ["images"],
    "environment.format_weight": 0.1,
    "environment.think_tags": True,
    "data.max_prompt_tokens": 1024,
    "data.on_bad_row": "skip",
    "data.shuffle": True,
    "rollout.prompts_per_step": 512,
    "rollout.samples_per_prompt": 5,
    "rollout.max_new_tokens": 2048,
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "rollout.top_k": 0,
    "rollout.engine.name": "vllm",
    "rollout.engine.tensor_parallel_size": 2,
    "rollout.engine.gpu_memory_utilization": 0.6,
    "rollout.engine.enable_chunked_prefill": False,
    "rollout.engine.enforce_eager": False,
    "algorithm.name": "grpo",
    "algorithm.advantage.name": "grpo",
    "algorithm.minibatches": 4,
    "algorithm.ppo_epochs": 1,
    "algorithm.kl.name": "loss",
    "algorithm.kl.coef": 0.01,
    "algorithm.kl.estimator": "k3",
    "algorithm.entropy_coef": 0.0,
    "algorithm.aggregation": "token-mean",
    "algorithm.loss.name": "clip",
    "algorithm.loss.clip_low": 0.2,
    "algorithm.loss.clip_high": 0.2,
    "algorithm.loss.dual_clip": 3.0,
    "algorithm.importance_sampling_fix": False,
    "train.learning_rate": 1e-6,
    "train.betas": [0.9, 0.999],
    "train.weight_decay": 0.01,
    "train.max_grad_norm": 1.0,
    "train.lr_schedule": "constant",
    "train.lr_warmup_steps": 0,
    "train.gradient_checkpointing": "full",
    "train.enable_dynamic_batch_size": False,
    "train.groups_per_microbatch": 2,
    "train.backend.cpu_offload": False,
    "max_epochs": 15,
    "max_steps": 1_000_000,
    "run_dir": "checkpoints/verl_grpo_example_geo3k/qwen2_5_vl_7b_function_rm",
    "resume": "auto",
    "checkpoint.every_steps": 20,
    "evaluate.every_steps": 5,
    "evaluate.before_training": True,
    "cluster.gpus_per_node": 8,
    "cluster.num_nodes": 1,
    "log.progress": True,
    "log.tensorboard": False,
    "log.wandb_project": "verl_grpo_example_geo3k",
}
"""What the resolved settings are to be, written by hand; every other setting is at Fovea's own default."""

VERL_VARIANTS = {
    "frozen tower": (["actor_rollout_ref.actor.freeze_vision_tower=True"], {"model.freeze_vision_tower": True}),
    "LoRA": (
        [
            "actor_rollout_ref.actor.optim.lr=3e-6",
            "actor_rollout_ref.model.lora_rank=64",
            "actor_rollout_ref.model.lora_alpha=32",
            "actor_rollout_ref.model.target_modules=all-linear",
            "actor_rollout_ref.model.exclude_modules=.*visual.*",
        ],
        {
            "train.learning_rate": 3e-6,
            "model.lora.rank": 64,
            "model.lora.alpha": 32,
            "model.lora.targets": ["all-linear"],
            "model.lora.exclude": [".*visual.*"],
        },
    ),
    "balancing": (
        ["actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=6144"],
        {
            "train.enable_dynamic_batch_size": True,
            "train.max_tokens_per_microbatch": 6144,
            "train.groups_per_microbatch": 1,
        },
    ),
    "PPO": (
        [
            "algorithm.adv_estimator=gae",
            "algorithm.lam=0.95",
            "critic.optim.lr=2e-5",
            "trainer.critic_warmup=3",
            "critic.model.path=Qwen/Qwen2.5-VL-7B-Instruct",
        ],
        {
            "algorithm.name": "ppo",
            "algorithm.advantage.name": "gae",
            "algorithm.advantage.gamma": 1.0,
            "algorithm.advantage.gae_lambda": 0.95,
            "algorithm.advantage.critic.trunk": "separate",
            "algorithm.advantage.critic.learning_rate": 2e-5,
            "algorithm.advantage.critic.value_clip": 0.5,
            "algorithm.advantage.critic.warmup_steps": 3,
        },
    ),
    "DAPO": (
        [
            "actor_rollout_ref.actor.use_kl_loss=False",
            "actor_rollout_ref.actor.clip_ratio_high=0.28",
            "algorithm.filter_groups.enable=True",
            "algorithm.filter_groups.metric=acc",
            "algorithm.filter_groups.max_num_gen_batches=7",
            "reward_model.overlong_buffer.enable=True",
            "reward_model.overlong_buffer.len=512",
            "reward_model.overlong_buffer.penalty_factor=1.0",
            "algorithm.rollout_correction.rollout_is=sequence",
            "algorithm.rollout_correction.rollout_is_threshold=3",
        ],
        {
            "algorithm.kl": None,
            "algorithm.loss.clip_high": 0.28,
            "algorithm.dynamic_sampling.max_gen_batches": 7,
            "algorithm.overlong.buffer_frac": 0.25,
            "algorithm.overlong.penalty_factor": 1.0,
            "algorithm.importance_sampling_fix": True,
            "algorithm.importance_sampling_level": "sequence",
            "algorithm.importance_sampling_clip": 3.0,
        },
    ),
    "KL in the reward": (
        [
            "actor_rollout_ref.actor.use_kl_loss=False",
            "algorithm.use_kl_in_reward=True",
            "algorithm.kl_ctrl.type=adaptive",
            "algorithm.kl_ctrl.kl_coef=0.02",
            "algorithm.norm_adv_by_std_in_grpo=False",
        ],
        {
            "algorithm.name": "dr_grpo",
            "algorithm.advantage.name": "dr_grpo",
            "algorithm.kl.name": "reward",
            "algorithm.kl.coef": 0.02,
            "algorithm.kl.estimator": "k1",
            "algorithm.kl.controller.target": 0.1,
            "algorithm.kl.controller.horizon_samples": 10_000,
        },
    ),
    "a known number of steps": (
        [
            "trainer.total_training_steps=60",
            "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1",
            "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
            "actor_rollout_ref.actor.optim.min_lr_ratio=0.2",
            "custom_reward_function.path=rewards.py",
        ],
        {
            "max_steps": 60,
            "train.lr_warmup_steps": 6,
            "train.lr_schedule": "cosine",
            "train.final_lr_frac": 0.2,
            "reward": "rewards.py:compute_score",
            "environment.format_weight": None,
            "environment.think_tags": False,
        },
    ),
}
"""Words behind the script, and what they change in the table."""

RLINF = """\
cluster: {num_nodes: 1, component_placement: {"actor,rollout,reward": all}}
runner:
  task_type: reasoning
  logger: {project_name: rlinf, logger_backends: ["tensorboard"], experiment_name: "${runner.experiment_name}"}
  max_epochs: 25
  max_steps: -1
  val_check_interval: 1
  save_interval: 100
  seq_length: 8192
  enable_dynamic_batch_size: True
  max_tokens_per_mbs: 8192
  resume_dir: auto
  experiment_name: grpo-qwen3-vl-2b-geo3k
  output_dir: ../results
algorithm:
  importance_sampling_fix: True
  importance_sampling_clip: 2
  group_size: 8
  n_minibatches: 1
  training_batch_size_per_gpu: ${algorithm.logprob_forward_micro_batch_size}
  logprob_forward_micro_batch_size: 1
  recompute_logprobs: True
  shuffle_rollout: False
  loss_type: actor
  loss_agg_func: seq-mean-token-mean
  kl_beta: 0.0
  kl_penalty_type: low_var_kl
  ratio_clip_eps: 0.2
  entropy_bonus: 0.0
  calculate_entropy: True
  clip_ratio_c: null
  clip_ratio_low: 0.2
  clip_ratio_high: 0.28
  adv_type: grpo
  normalize_advantages: False
  early_stop_imp_ratio: 5.0
  use_valid_token_scale: False
  sampling_params:
    do_sample: True
    temperature: 1
    top_k: 1000000
    top_p: 1.0
    repetition_penalty: 1.0
    max_new_tokens: ${subtract:${runner.seq_length}, ${data.max_prompt_length}}
    min_new_tokens: 1
rollout:
  gpu_memory_utilization: 0.6
  model: {model_path: /models/Qwen3-VL-2B-Instruct, model_type: qwen3_vl, precision: bf16}
  enforce_eager: False
  rollout_backend: sglang
  return_logprobs: True
  tensor_parallel_size: 1
  max_running_requests: 64
  sglang: {attention_backend: triton}
data:
  type: vlm
  dataset_name: base
  max_prompt_length: 4096
  filter_prompt_by_length: False
  rollout_batch_size: 64
  prompt_key: problem
  image_keys: ["images"]
  answer_key: answer
  use_chat_template: True
  lazy_loading: True
  shuffle: True
  seed: 41
  train_data_paths: ["/data/train.parquet"]
  val_data_paths: ["/data/validation.parquet"]
  system_prompt: 'The last line of your response should be of the form Answer: \\boxed{$Answer}.'
actor:
  training_backend: fsdp
  enable_offload: True
  global_batch_size: ${int_div:${multiply:${algorithm.group_size}, 64}, ${algorithm.n_minibatches}}
  seed: 42
  model: {model_path: "${rollout.model.model_path}", precision: fp32, is_lora: False, variable_seq_lengths: True}
  optim: {optimizer: adam, lr: 1e-06, adam_beta1: 0.9, adam_beta2: 0.98, weight_decay: 0.1, clip_grad: 1}
  lr_sched: {lr_warmup_fraction: 0.01, lr_warmup_iters: 0, max_lr: 1e-06, min_lr: 0.0, lr_decay_style: constant}
  fsdp_config:
    strategy: fsdp2
    cpu_offload: False
    use_liger_kernel: False
    gradient_checkpointing: True
    gradient_checkpointing_use_reentrant: False
    mixed_precision: {param_dtype: bf16, reduce_dtype: fp32}
reward: {reward_type: math, reward_scale: 1.0, reward_min_val: 0, reward_max_val: 1, use_reward_model: false}
critic: {use_critic_model: false}
"""

RLINF_TABLE = {
    "seed": 41,
    "model.path": "/models/Qwen3-VL-2B-Instruct",
    "model.dtype": "bfloat16",
    "environment.name": "geo3k",
    "environment.train_files": ["/data/train.parquet"],
    "environment.dev_files": ["/data/validation.parquet"],
    "environment.test_files": ["/data/validation.parquet"],
    "environment.prompt_key": "problem",
    "environment.answer_key": "answer",
    "environment.image_keys": ["images"],
    "environment.system_prompt": "The last line of your response should be of the form Answer: \\boxed{$Answer}.",
    "environment.reward_max_val": 1.0,
    "environment.reward_min_val": 0.0,
    "data.max_prompt_tokens": 4096,
    "data.on_bad_row": "error",
    "data.shuffle": True,
    "rollout.prompts_per_step": 64,
    "rollout.samples_per_prompt": 8,
    "rollout.max_new_tokens": 4096,
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "rollout.top_k": 0,
    "rollout.engine.name": "sglang",
    "rollout.engine.gpu_memory_utilization": 0.6,
    "rollout.engine.tensor_parallel_size": 1,
    "rollout.engine.enforce_eager": False,
    "rollout.engine.max_num_seqs": 64,
    "algorithm.name": "grpo",
    "algorithm.advantage.name": "grpo",
    "algorithm.importance_sampling_fix": True,
    "algorithm.importance_sampling_clip": 2.0,
    "algorithm.importance_sampling_level": "token",
    "algorithm.minibatches": 1,
    "algorithm.ppo_epochs": 1,
    "algorithm.kl": None,
    "algorithm.entropy_coef": 0.0,
    "algorithm.aggregation": "seq-mean-token-mean",
    "algorithm.loss.name": "clip",
    "algorithm.loss.clip_low": 0.2,
    "algorithm.loss.clip_high": 0.28,
    "algorithm.loss.dual_clip": None,
    "train.learning_rate": 1e-6,
    "train.betas": [0.9, 0.98],
    "train.adam_eps": 1e-8,
    "train.weight_decay": 0.1,
    "train.max_grad_norm": 1.0,
    "train.lr_schedule": "constant",
    "train.lr_warmup_steps": 8,
    "train.gradient_checkpointing": "full",
    "train.enable_dynamic_batch_size": True,
    "train.max_tokens_per_microbatch": 8192,
    "train.backend.cpu_offload": False,
    "train.backend.liger_kernels": False,
    "max_epochs": 25,
    "max_steps": 750,
    "run_dir": "../results/grpo-qwen3-vl-2b-geo3k",
    "resume": "auto",
    "checkpoint.every_steps": 100,
    "evaluate.every_steps": 1,
    "cluster.num_nodes": 1,
    "cluster.placement": "collocated",
    "log.tensorboard": True,
}
"""What the resolved settings are to be with runner.max_steps=750, written by hand; all others are at their defaults."""

WITHOUT_ITS_OWN_LIMIT = RLINF.replace(
    "    max_new_tokens: ${subtract:${runner.seq_length}, ${data.max_prompt_length}}\n", ""
)
"""RLINF with the length of a completion left to what the prompt leaves of a sequence."""

RLINF_VARIANTS = {
    "PPO": (
        [
            "algorithm.adv_type=gae",
            "algorithm.gae_lambda=0.95",
            "algorithm.value_clip=0.4",
            "algorithm.critic_warmup_steps=2",
            "critic.use_critic_model=True",
            "critic.optim.lr=1e-5",
        ],
        {
            "algorithm.name": "ppo",
            "algorithm.advantage.name": "gae",
            "algorithm.advantage.gamma": 1.0,
            "algorithm.advantage.gae_lambda": 0.95,
            "algorithm.advantage.critic.trunk": "separate",
            "algorithm.advantage.critic.value_clip": 0.4,
            "algorithm.advantage.critic.warmup_steps": 2,
            "algorithm.advantage.critic.learning_rate": 1e-5,
            "algorithm.max_policy_kl": None,
        },
    ),
    "a KL term, one bound, other rewards": (
        [
            "algorithm.kl_beta=0.02",
            "algorithm.kl_penalty_type=mse",
            "algorithm.clip_ratio_low=null",
            "algorithm.clip_ratio_high=null",
            "algorithm.ratio_clip_eps=0.3",
            "reward.reward_scale=5",
            "reward.reward_min_val=-1",
        ],
        {
            "algorithm.kl.name": "loss",
            "algorithm.kl.coef": 0.02,
            "algorithm.kl.estimator": "k2",
            "algorithm.loss.clip_low": 0.3,
            "algorithm.loss.clip_high": 0.3,
            "environment.reward_max_val": 5.0,
            "environment.reward_min_val": -5.0,
        },
    ),
    "other GPUs, fixed micro-batches": (
        [
            "cluster.component_placement.actor=0-5",
            "cluster.component_placement.rollout=6-7",
            "runner.enable_dynamic_batch_size=False",
            "algorithm.training_batch_size_per_gpu=16",
            "runner.save_interval=-1",
            "runner.resume_dir=null",
        ],
        {
            "cluster.placement": "disaggregated",
            "cluster.rollout_gpus": 2,
            "train.enable_dynamic_batch_size": False,
            "train.groups_per_microbatch": 2,
            "train.max_tokens_per_microbatch": 16_384,
            "checkpoint.every_steps": 0,
            "resume": "never",
        },
    ),
}
"""Words behind the YAML, and what they change in the table."""
