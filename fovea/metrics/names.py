"""Definitions of all logged metrics: name, unit, meaning, and the range of a healthy run.

docs/metrics.md is generated from them (`python -m fovea.metrics.docs > docs/metrics.md`). Tests check that the page is
up to date, and that every key of real runs is defined here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric, or a family of them: a word in angle brackets stands for any text (`accuracy/dev/<kind>`)."""

    name: str
    unit: str
    meaning: str
    healthy: str

    @property
    def pattern(self) -> re.Pattern[str]:
        pieces = re.split(r"<[a-z_]+>", self.name)
        return re.compile(".+".join(map(re.escape, pieces)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """A titled table of metrics on the same subject."""

    title: str
    metrics: tuple[Metric, ...]


def _chapter(title: str, *rows: tuple[str, str, str, str]) -> Chapter:
    metrics = (Metric(name=name, unit=unit, meaning=meaning, healthy=healthy) for name, unit, meaning, healthy in rows)
    return Chapter(title=title, metrics=tuple(metrics))


CHAPTERS = (
    _chapter(
        "Rewards and answers",
        (
            "reward",
            "reward",
            "Mean reward of the step's episodes as scored by the environment, before `reward/overlong` and "
            "`reward_kl`.",
            "Rises; noisy from step to step, so look at tens of steps. Rising while `accuracy/dev` falls: the reward "
            "is being gamed, or the training rows are memorised.",
        ),
        (
            "reward/image_<position>/<part>/<kind>",
            "reward",
            "`reward/image_<position>/<part>` for one question type, where there are several.",
            "Shows for which questions an image is ignored.",
        ),
        (
            "reward/image_<position>/<part>",
            "reward",
            "Mean of one named part of the reward for the first, second, ... image of a prompt, over the episodes that "
            "have it; only where the environment scores images separately (docs/own.md).",
            "Every position rises; one that stays behind is an image that the policy ignores.",
        ),
        (
            "reward/<part>",
            "reward",
            "Mean of one named part of the reward, as the environment scores it (`answer`, `format`, ...).",
            "A format part nears its maximum early; the answer part keeps rising after that.",
        ),
        (
            "reward/overlong",
            "reward",
            "Mean penalty for completions that come close to `rollout.max_new_tokens` (soft overlong punishment, DAPO, "
            "arXiv 2503.14476), added to `reward`.",
            "At most 0, and near it. Growing more negative: completions grow towards their limit; raise it, or read "
            "some of them.",
        ),
        (
            "reward_kl",
            "reward",
            "Mean KL penalty per completion that is subtracted from the reward (`algorithm.kl_in=reward`).",
            "Small beside the spread of `reward`; as large as that: the policy mostly trains to stay at the reference.",
        ),
        (
            "accuracy",
            "fraction",
            "Mean accuracy of the sampled answers, without the other parts of the reward.",
            "Rises with the reward. Below `accuracy/dev`, which uses greedy decoding.",
        ),
        (
            "accuracy/train/<kind>",
            "fraction",
            "The same for one type of question, where there are several.",
            "Every type rises; one that stays at chance level has found no correct answer to reinforce.",
        ),
        (
            "accuracy/dev",
            "fraction",
            "Greedy accuracy on dev rows, every `evaluate.every_steps`.",
            "The metric to steer by. Rises, flattens, and falls only when training goes on for too long (overfitting).",
        ),
        (
            "accuracy/dev/<kind>",
            "fraction",
            "The same for one type of question, where there are several.",
            "As `accuracy/train/<kind>`.",
        ),
        (
            "accuracy/dev_unscored",
            "rows",
            "Dev rows counted as wrong because your own reward gave no score (`reward_on_failure: drop`).",
            "Absent; `unscored.jsonl` in the run folder has the reasons.",
        ),
        (
            "response_tokens_mean",
            "tokens",
            "Mean length of the completions.",
            "Steady, or growing slowly with accuracy. Growing alone: see `truncated_frac`. Falling to a few: the "
            "policy has found answers without reasoning.",
        ),
        ("response_tokens_max", "tokens", "Longest completion.", "Mostly below `rollout.max_new_tokens`."),
        (
            "truncated_frac",
            "fraction",
            "Completions truncated at `rollout.max_new_tokens`; most of them earn no reward.",
            "Under 0.1; above, raise the limit or penalise length.",
        ),
    ),
    _chapter(
        "Groups and advantages",
        (
            "groups/with_signal",
            "groups",
            "Groups whose rewards differ, so that their group-relative advantages are not all 0.",
            "More than half of the step. Few: the questions are too hard, or too easy by now.",
        ),
        (
            "groups/without_signal",
            "groups",
            "Groups of equal rewards, among those of the step.",
            "Grows as questions are mastered.",
        ),
        (
            "groups/without_signal_frac",
            "fraction",
            "Fraction of groups of equal rewards among all sampled groups, rejects of dynamic sampling included.",
            "Under 0.5. Near 1: the step costs a whole rollout and has almost no gradient.",
        ),
        (
            "groups/unscored",
            "groups",
            "Groups left out because a judge or your own reward gave no score (`environment.judge.on_failure`, "
            "`reward_on_failure`).",
            "0; `unscored.jsonl` in the run folder has the reasons.",
        ),
        (
            "groups/skipped",
            "groups",
            "Groups without signal that were left out of the update; the loss is still normalised over all groups.",
            "`groups/without_signal` less those kept for an entropy bonus; 0 with a KL term or a value head.",
        ),
        (
            "advantage/mean",
            "advantage",
            "Mean advantage over the trained tokens.",
            "Near 0: groups are centred, and whitened advantages too. Away from it, long completions are mostly the "
            "better or the worse ones.",
        ),
        (
            "advantage/std",
            "advantage",
            "Standard deviation of the advantage over the trained tokens.",
            "About 1; less for estimators that do not divide by the deviation.",
        ),
        (
            "advantage/max_abs",
            "advantage",
            "Largest absolute advantage.",
            "At most (n - 1) / sqrt(n) in a group of n that is divided by its deviation: 2.5 for 8. Far above it after "
            "whitening: one sample dominates the step.",
        ),
        (
            "dynamic_sampling/batches",
            "rollouts",
            "Rollouts needed to fill the batch (DAPO's dynamic sampling).",
            "1 to 3. At `algorithm.max_gen_batches`: see `dynamic_sampling/groups_missing`.",
        ),
        (
            "dynamic_sampling/groups_dropped",
            "groups",
            "Groups rejected because all their answers have the same accuracy.",
            "The price of the method. Growing to several batches per step: time for harder questions.",
        ),
        (
            "dynamic_sampling/groups_left_over",
            "groups",
            "Groups with differing accuracies that the batch had no room for.",
            "Below the groups of one rollout.",
        ),
        (
            "dynamic_sampling/groups_missing",
            "groups",
            "Groups missing from the batch when `algorithm.max_gen_batches` was reached.",
            "0; above it the step trained on a smaller batch.",
        ),
        (
            "curriculum/stage",
            "stage",
            "Curriculum stage that scored the step; 1 is the first.",
            "Rises by its schedule. The reward drops where it rises: the next stage is harder.",
        ),
        (
            "curriculum/<fact>",
            "of the fact",
            "Parameters of the stage: reward weights, tolerance, sampling weights of levels.",
            "As declared; the tolerance falls from stage to stage.",
        ),
        (
            "data/rows_skipped",
            "rows",
            "Rows of all splits that could not become a prompt, so far (`data.on_bad_row=skip`); see bad_rows.jsonl.",
            "0, or a known number.",
        ),
        (
            "data/rows_skipped/<reason>",
            "rows",
            "`data/rows_skipped` for one reason; docs/data.md lists the reasons.",
            "As `data/rows_skipped`.",
        ),
    ),
    _chapter(
        "The update",
        (
            "loss",
            "",
            "Total loss, mean over the optimizer steps: policy loss, entropy bonus, KL term and, with a critic, "
            "`value_coef` times the value loss.",
            "Near 0, because advantages are centred; no measure of progress.",
        ),
        ("policy_loss", "", "Policy-gradient term of `loss`.", "As `loss`."),
        (
            "entropy",
            "nats",
            "Mean entropy of the policy over the trained tokens.",
            "Falls slowly. To almost 0 within tens of steps: the policy has stopped exploring; raise clip_high or "
            "the bonus. Rising without end: the bonus is too strong, or the engine is off (see `rollout_train_kl`).",
        ),
        (
            "ratio_mean",
            "ratio",
            "Mean importance ratio of the current policy to that before the update.",
            "Within 1 +- 0.02.",
        ),
        (
            "clip_frac/low",
            "fraction",
            "Trained tokens whose ratio was clipped from below, so that they have no gradient (loss=cispo: a bounded "
            "one).",
            "Both together under 0.2; exactly 0 with one optimizer step per batch, where the ratio is 1.",
        ),
        ("clip_frac/high", "fraction", "The same from above.", "See `clip_frac/low`."),
        (
            "grad_norm",
            "",
            "Gradient norm before clipping, mean over the optimizer steps.",
            "Within one order of magnitude. Tens of times larger for several steps: lower the learning rate.",
        ),
        ("grad_norm/value", "", "The same for the critic's own parameters.", "High at first, then as `grad_norm`."),
        ("learning_rate", "", "Learning rate of the policy at this step.", "As the schedule says."),
        ("learning_rate/value", "", "Learning rate of the value head or critic.", "As its schedule says."),
        (
            "actions_trained",
            "tokens",
            "Completion tokens in the loss, summed over epochs.",
            "The tokens of the step minus those of skipped groups, times the epochs.",
        ),
        (
            "epochs_run",
            "epochs",
            "Optimizer steps taken, in epochs (passes over the batch); fewer than `algorithm.ppo_epochs` where "
            "`kl/policy` reached its limit (early stopping).",
            "The number set. Always below it: the learning rate is too high for so many epochs.",
        ),
        (
            "updates_skipped",
            "updates",
            "1 where the update ended early because a loss, a gradient or a log-prob was not finite.",
            "0; above a limit the run stops and names the samples.",
        ),
        (
            "reused_frac",
            "fraction",
            "Trained tokens whose linear-layer outputs were reused from the rollout (CPU, `rollout.reuse_gib`).",
            "0 or 1: 0 every `train.plain_update_every_steps`, on CUDA, and where reuse does not pay.",
        ),
        (
            "reused_images",
            "images",
            "Images whose vision features were reused from the rollout.",
            "All of the batch, or 0.",
        ),
    ),
    _chapter(
        "PPO",
        (
            "value_loss",
            "",
            "Clipped squared error of the critic.",
            "Falls in the first tens of steps, then follows the spread of the returns.",
        ),
        ("value/mean", "reward", "Mean predicted value over the trained tokens.", "Approaches `return/mean`."),
        ("return/mean", "reward", "Mean return over the trained tokens.", "Follows `reward`."),
        ("value_clip_frac", "fraction", "Trained tokens whose value was clipped.", "Under 0.2."),
        (
            "explained_variance",
            "fraction",
            "1 - var(return - value) / var(return): the share of the returns' variance that the critic predicts.",
            "From 0 to above 0.3. Negative: the critic is worse than a constant; train it longer before the policy.",
        ),
    ),
    _chapter(
        "Distance to the reference",
        (
            "kl/reference",
            "nats",
            "Mean k3 estimate of the KL to the reference model (Schulman, joschu.net/blog/kl-approx.html).",
            "Grows slowly to some tenths. Jumping: the policy produces text that the reference would not.",
        ),
        (
            "kl/reward",
            "nats",
            "Mean estimate of the KL to the reference, as used in the reward's KL penalty (`algorithm.kl_in=reward`).",
            "As `kl/reference`; with a controller it approaches `algorithm.kl_target`. Below 0 for long: the policy "
            "moves probability mass to tokens that generation bans, and is rewarded for it; go back to an earlier "
            "checkpoint.",
        ),
        (
            "kl/coef",
            "",
            "Coefficient of the KL penalty in the reward (`algorithm.kl_in=reward`); adaptive with "
            "`algorithm.kl_target`.",
            "Converges.",
        ),
        (
            "kl/policy",
            "nats",
            "Mean k3 estimate of the KL between the policy before the update and in its last epoch, which may stop the "
            "update early; 0 where there is one epoch.",
            "Under 0.02.",
        ),
    ),
    _chapter(
        "Rollout against training",
        (
            "rollout_train_k1",
            "nats",
            "Mean log-prob of the engine minus that of the trainer, over all completion tokens: in every step "
            "that computes all of them anyway, else every `train.plain_update_every_steps`.",
            "Fluctuates around 0; of one sign throughout: the engine is over- or underconfident.",
        ),
        (
            "rollout_train_kl",
            "nats",
            "Mean k3 estimate of KL(engine || trainer) over the same tokens.",
            "Under 0.001 in float32 here, under 0.01 between engines in bfloat16. Growing over the run: the run is "
            "about to collapse; set `algorithm.importance_sampling_fix=true` and look for the cause.",
        ),
        (
            "rollout_train_<figure>/trained",
            "nats",
            "k1, kl, abs and max over the trained groups only, in every step that reused no rollout activations.",
            "As those of the whole step; where groups are left out, the ones to plot.",
        ),
        (
            "rollout_train_abs",
            "nats",
            "Mean absolute difference of the log-probs; the figure that publications plot.",
            "About 0.03 between two engines in bfloat16, 1e-6 for the embedded one in float32. 0.7: wrong positions.",
        ),
        (
            "rollout_train_max",
            "nats",
            "The largest absolute difference of the step.",
            "Single tokens may reach 1 in bfloat16. 10: the trainer gives a sampled token almost no probability.",
        ),
        (
            "importance/weight",
            "ratio",
            "Mean truncated importance weight of trainer over engine (`algorithm.importance_sampling_fix`).",
            "Within 1 +- 0.01.",
        ),
        (
            "importance/clipped_frac",
            "fraction",
            "Fraction of tokens whose weight was truncated or masked.",
            "Under 0.01; a large share of the step means that the engine samples from another policy.",
        ),
    ),
    _chapter(
        "Time and speed",
        (
            "seconds/step",
            "seconds",
            "Wall time of the step, without evaluations and checkpoints.",
            "Steady; grows with the length of completions.",
        ),
        (
            "seconds/<phase>",
            "seconds",
            "Wall time of one phase: data, rollout, samples, logprobs, update or sync.",
            "Rollout and update take nearly all. Much in data: images are processed repeatedly, see "
            "`data.prompt_cache_gib`.",
        ),
        ("tokens_per_second", "tokens/s", "Completion tokens of the step divided by `seconds/step`.", "Steady."),
        ("samples_per_second", "completions/s", "Completions of the step divided by `seconds/step`.", "Steady."),
        (
            "update_tflop",
            "TFLOP",
            "Model FLOPs of the update's forward and backward passes (`fovea/models/flops.py`), summed over epochs: "
            "each prompt once per group, completions, and images where the vision tower is trained. Recomputation does "
            "not count, activations reused from the rollout (`reused_frac`) do; features of a frozen tower are free.",
            "Grows with the length of completions.",
        ),
        (
            "tflops_per_second",
            "TFLOP/s",
            "`update_tflop` divided by `seconds/update`.",
            "Steady.",
        ),
        (
            "mfu",
            "fraction",
            "Model FLOPs utilisation of the update (PaLM, arXiv 2204.02311, appendix B): `tflops_per_second` over "
            "the device's dense bfloat16 peak or by `log.peak_tflops`, with vision counted and shared prompts "
            "counted once. Absent on a CPU or an unknown GPU without that setting.",
            "0.2 to 0.5 on one large GPU. Under 0.1: rows are too short (`train.max_tokens_per_microbatch`), or the "
            "model too small.",
        ),
    ),
    _chapter(
        "Memory",
        ("memory/peak_rss_gib", "GiB", "Peak resident memory of the process.", "Flat after some steps."),
        (
            "memory/activations_gib",
            "GiB",
            "Activation memory of the largest packed row so far, kept for its backward pass.",
            "Bounded by `train.max_tokens_per_microbatch`.",
        ),
        (
            "memory/<phase>_gib",
            "GiB",
            "Peak CUDA memory within the phase; without CUDA, resident memory at its end.",
            "Flat; growing without end is a leak.",
        ),
    ),
)

METRICS = tuple(metric for chapter in CHAPTERS for metric in chapter.metrics)


def definition_of(key: str) -> Metric | None:
    """The definition of a key of metrics.jsonl; an exact name takes precedence over a family that matches too."""
    exact = (metric for metric in METRICS if metric.name == key)
    family = (metric for metric in METRICS if metric.pattern.fullmatch(key))
    return next(exact, None) or next(family, None)


def undefined(keys: Iterable[str]) -> list[str]:
    """The keys without a definition, sorted; `step` needs none."""
    return sorted({key for key in keys if key != "step" and definition_of(key) is None})
