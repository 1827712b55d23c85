"""Public runs of other systems, by their settings: what `fovea import-config` is to read.

VERL has the settings of examples/grpo_trainer/run_qwen2_5_vl-7b.sh, whose variants stand beside it with other names;
RLINF those of examples/reasoning/config/vqa/qwen3-vl-2b-grpo-fsdp-geo3k.yaml.
"""

from __future__ import annotations

from fovea.config.recipes import read_yaml
from fovea_gym.settings.base import Tree, leaves


def settings_in(text: str) -> Tree:
    return leaves(read_yaml(text, "a table of these tests"))


def variants_in(text: str) -> dict[str, tuple[list[str], Tree]]:
    """Words behind a command, and what they change in its table, by name."""
    found = read_yaml(text, "variants of these tests")
    return {name: (each["words"].split(), leaves(each["settings"])) for name, each in found.items()}


def with_changes(table: Tree, changed: Tree) -> Tree:
    """The table with some settings changed, which take the place of a section, or of settings in one."""

    def meets(key: str) -> bool:
        return any(f"{key}.".startswith(f"{other}.") or other.startswith(f"{key}.") for other in changed)

    return {key: value for key, value in table.items() if not meets(key)} | changed


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

VERL_TABLE = settings_in("""
model: {path: Qwen/Qwen2.5-VL-7B-Instruct, dtype: bfloat16}
environment: {
  name: geo3k, train_files: [/data/geo3k/train.parquet], dev_files: [/data/geo3k/test.parquet],
  test_files: [/data/geo3k/test.parquet], prompt_key: prompt, image_keys: [images], format_weight: 0.1,
  think_tags: true}
data: {max_prompt_tokens: 1024, on_bad_row: skip, shuffle: true}
rollout: {
  prompts_per_step: 512, samples_per_prompt: 5, max_new_tokens: 2048, temperature: 1.0, top_p: 1.0, top_k: 0,
  engine.name: vllm, engine.tensor_parallel_size: 2, engine.gpu_memory_utilization: 0.6,
  engine.enable_chunked_prefill: false, engine.enforce_eager: false}
algorithm: {
  name: grpo, advantage.name: grpo, minibatches: 4, ppo_epochs: 1, kl.name: loss, kl.coef: 0.01, kl.estimator: k3,
  entropy_coef: 0.0, aggregation: token-mean, loss.name: clip, loss.clip_low: 0.2, loss.clip_high: 0.2,
  loss.dual_clip: 3.0, importance_sampling_fix: false}
train: {
  learning_rate: 1e-6, betas: [0.9, 0.999], weight_decay: 0.01, max_grad_norm: 1.0, lr_schedule: constant,
  lr_warmup_steps: 0, gradient_checkpointing: full, enable_dynamic_batch_size: false, groups_per_microbatch: 2,
  backend.cpu_offload: false}
max_epochs: 15
max_steps: 1000000
run_dir: checkpoints/verl_grpo_example_geo3k/qwen2_5_vl_7b_function_rm
resume: auto
checkpoint: {every_steps: 20}
evaluate: {every_steps: 5, before_training: true}
cluster: {gpus_per_node: 8, num_nodes: 1}
log: {progress: true, tensorboard: false, wandb_project: verl_grpo_example_geo3k}
""")
"""What the resolved settings are to be, written by hand; every other setting is at Fovea's own default."""

VERL_VARIANTS = variants_in("""
as published: {words: "", settings: {}}
frozen tower:
  words: actor_rollout_ref.actor.freeze_vision_tower=True
  settings:
    model: {freeze_vision_tower: true}
LoRA:
  words: >-
    actor_rollout_ref.actor.optim.lr=3e-6 actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.lora_alpha=32
    actor_rollout_ref.model.target_modules=all-linear actor_rollout_ref.model.exclude_modules=.*visual.*
  settings:
    train: {learning_rate: 3e-6}
    model: {lora.rank: 64, lora.alpha: 32, lora.targets: [all-linear], lora.exclude: [".*visual.*"]}
balancing:
  words: actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=6144
  settings:
    train: {enable_dynamic_batch_size: true, max_tokens_per_microbatch: 6144, groups_per_microbatch: 1}
PPO:
  words: >-
    algorithm.adv_estimator=gae algorithm.lam=0.95 critic.optim.lr=2e-5 trainer.critic_warmup=3
    critic.model.path=Qwen/Qwen2.5-VL-7B-Instruct
  settings:
    algorithm: {
      name: ppo, advantage.name: gae, advantage.gamma: 1.0, advantage.gae_lambda: 0.95,
      advantage.critic.trunk: separate, advantage.critic.learning_rate: 2e-5, advantage.critic.value_clip: 0.5,
      advantage.critic.warmup_steps: 3}
DAPO:
  words: >-
    actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.clip_ratio_high=0.28
    algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc
    algorithm.filter_groups.max_num_gen_batches=7 reward_model.overlong_buffer.enable=True
    reward_model.overlong_buffer.len=512 reward_model.overlong_buffer.penalty_factor=1.0
    algorithm.rollout_correction.rollout_is=sequence algorithm.rollout_correction.rollout_is_threshold=3
  settings:
    algorithm: {
      kl: null, loss.clip_high: 0.28, dynamic_sampling.max_gen_batches: 7, overlong.buffer_frac: 0.25,
      overlong.penalty_factor: 1.0, importance_sampling_fix: true, importance_sampling_level: sequence,
      importance_sampling_clip: 3.0}
KL in the reward:
  words: >-
    actor_rollout_ref.actor.use_kl_loss=False algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive
    algorithm.kl_ctrl.kl_coef=0.02 algorithm.norm_adv_by_std_in_grpo=False
  settings:
    algorithm: {
      name: dr_grpo, advantage.name: dr_grpo, kl.name: reward, kl.coef: 0.02, kl.estimator: k1,
      kl.controller.target: 0.1, kl.controller.horizon_samples: 10000}
a known number of steps:
  words: >-
    trainer.total_training_steps=60 actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1
    actor_rollout_ref.actor.optim.lr_scheduler_type=cosine actor_rollout_ref.actor.optim.min_lr_ratio=0.2
    custom_reward_function.path=rewards.py
  settings:
    max_steps: 60
    train: {lr_warmup_steps: 6, lr_schedule: cosine, final_lr_frac: 0.2}
    reward: rewards.py:compute_score
    environment: {format_weight: null, think_tags: false}
""")

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

RLINF_TABLE = settings_in("""
seed: 41
model: {path: /models/Qwen3-VL-2B-Instruct, dtype: bfloat16}
environment: {
  name: geo3k, train_files: [/data/train.parquet], dev_files: [/data/validation.parquet],
  test_files: [/data/validation.parquet], prompt_key: problem, answer_key: answer, image_keys: [images],
  system_prompt: 'The last line of your response should be of the form Answer: \\boxed{$Answer}.', reward_max_val: 1.0,
  reward_min_val: 0.0}
data: {max_prompt_tokens: 4096, on_bad_row: error, shuffle: true}
rollout: {
  prompts_per_step: 64, samples_per_prompt: 8, max_new_tokens: 4096, temperature: 1.0, top_p: 1.0, top_k: 0,
  engine.name: sglang, engine.gpu_memory_utilization: 0.6, engine.tensor_parallel_size: 1,
  engine.enforce_eager: false, engine.max_num_seqs: 64}
algorithm: {
  name: grpo, advantage.name: grpo, importance_sampling_fix: true, importance_sampling_clip: 2.0,
  importance_sampling_level: token, minibatches: 1, ppo_epochs: 1, kl: null, entropy_coef: 0.0,
  aggregation: seq-mean-token-mean, loss.name: clip, loss.clip_low: 0.2, loss.clip_high: 0.28, loss.dual_clip: null}
train: {
  learning_rate: 1e-6, betas: [0.9, 0.98], adam_eps: 1e-8, weight_decay: 0.1, max_grad_norm: 1.0,
  lr_schedule: constant, lr_warmup_steps: 8, gradient_checkpointing: full, enable_dynamic_batch_size: true,
  max_tokens_per_microbatch: 8192, backend.cpu_offload: false, backend.liger_kernels: false}
max_epochs: 25
max_steps: 750
run_dir: ../results/grpo-qwen3-vl-2b-geo3k
resume: auto
checkpoint: {every_steps: 100}
evaluate: {every_steps: 1}
cluster: {num_nodes: 1, placement: collocated}
log: {tensorboard: true}
""")
"""What the resolved settings are to be with runner.max_steps=750, written by hand; all others are at their defaults."""

RLINF_VARIANTS = variants_in("""
as published: {words: "", settings: {}}
PPO:
  words: >-
    algorithm.adv_type=gae algorithm.gae_lambda=0.95 algorithm.value_clip=0.4 algorithm.critic_warmup_steps=2
    critic.use_critic_model=True critic.optim.lr=1e-5
  settings:
    algorithm: {
      name: ppo, advantage.name: gae, advantage.gamma: 1.0, advantage.gae_lambda: 0.95,
      advantage.critic.trunk: separate, advantage.critic.value_clip: 0.4, advantage.critic.warmup_steps: 2,
      advantage.critic.learning_rate: 1e-5, max_policy_kl: null}
a KL term, one bound, other rewards:
  words: >-
    algorithm.kl_beta=0.02 algorithm.kl_penalty_type=mse algorithm.clip_ratio_low=null algorithm.clip_ratio_high=null
    algorithm.ratio_clip_eps=0.3 reward.reward_scale=5 reward.reward_min_val=-1
  settings:
    algorithm: {kl.name: loss, kl.coef: 0.02, kl.estimator: k2, loss.clip_low: 0.3, loss.clip_high: 0.3}
    environment: {reward_max_val: 5.0, reward_min_val: -5.0}
the length of a completion left to what the prompt leaves of a sequence:
  words: algorithm.sampling_params.max_new_tokens=null data.max_prompt_length=1000
  settings: {data.max_prompt_tokens: 1000, rollout.max_new_tokens: 7192}
other GPUs, fixed micro-batches:
  words: >-
    cluster.component_placement.actor=0-5 cluster.component_placement.rollout=6-7
    runner.enable_dynamic_batch_size=False algorithm.training_batch_size_per_gpu=16 runner.save_interval=-1
    runner.resume_dir=null
  settings:
    cluster: {placement: disaggregated, rollout_gpus: 2}
    train: {enable_dynamic_batch_size: false, groups_per_microbatch: 2, max_tokens_per_microbatch: 16384}
    checkpoint: {every_steps: 0}
    resume: never
""")

CASES = {
    f"{system}: {name}": ([*command, *words], with_changes(table, changed))
    for system, command, table, variants in (
        ("verl", ["run.sh"], VERL_TABLE, VERL_VARIANTS),
        ("RLinf", ["geo3k.yaml", "runner.max_steps=750"], RLINF_TABLE, RLINF_VARIANTS),
    )
    for name, (words, changed) in variants.items()
}
"""Words of the command, and the table of its recipe."""
