"""Every metric that a run writes: its name, unit, meaning, and what a healthy value looks like.

`python -m fovea.metrics.docs > docs/metrics.md` makes the page of it; a test holds that page up to date, and another
holds every key of real runs to these names. A name may hold one word in angle brackets, which stands for any text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One name, or one family of names (`accuracy/dev/<kind>`)."""

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
    """Metrics that are read together."""

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
            "Mean over the episodes of the step, as the environment scores them: before `reward/overlong` and "
            "`reward_kl`.",
            "Rises; noisy from step to step, so look at tens of steps. Rising while `accuracy/dev` falls: the reward "
            "is being gamed, or the training rows are learned by heart.",
        ),
        (
            "reward/image_<position>/<part>/<kind>",
            "reward",
            "The next one for one type of question, where there are several.",
            "Tells in which questions an image is not looked at.",
        ),
        (
            "reward/image_<position>/<part>",
            "reward",
            "Mean of one named part of what the first, second, ... image of a prompt earned, over the episodes that "
            "have it; only where the reward tells images apart (docs/own.md).",
            "Every position rises; one that stays behind is an image that the policy does not look at.",
        ),
        (
            "reward/<part>",
            "reward",
            "Mean of one named part of the reward, as the environment scores it (`answer`, `format`, ...).",
            "A part for the format is near its top early; the part for the answer goes on rising after it.",
        ),
        (
            "reward/overlong",
            "reward",
            "Mean penalty for completions that run into the last tokens they may have (DAPO, arXiv 2503.14476), on "
            "top of `reward`.",
            "At most 0, and near it. Growing more negative: completions grow to their limit; raise it, or read them.",
        ),
        (
            "reward_kl",
            "reward",
            "Mean that the KL term takes off the reward, where it stands in the reward and not in the loss.",
            "Small beside the spread of `reward`; as large as it: the policy mostly trains to stay where it is.",
        ),
        (
            "accuracy",
            "fraction",
            "Mean accuracy of the sampled answers, whatever else the reward holds.",
            "Rises with the reward. Below `accuracy/dev`, since dev answers are greedy.",
        ),
        (
            "accuracy/train/<kind>",
            "fraction",
            "The same for one type of question, where there are several.",
            "Every type rises; one that stays at guessing has found no right answer to reinforce.",
        ),
        (
            "accuracy/dev",
            "fraction",
            "Greedy accuracy on dev rows, every `evaluate.every_steps`.",
            "The figure to steer by. Rises, flattens, and falls only when training goes on for too long.",
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
            "Dev rows that count as wrong because your own code gave no score (`reward_on_failure: drop`).",
            "Absent; `unscored.jsonl` in the run folder says why there are any.",
        ),
        (
            "response_tokens_mean",
            "tokens",
            "Mean length of the completions.",
            "Steady, or growing slowly with accuracy. Growing alone: see `truncated_frac`. Falling to a few: the "
            "policy has found an answer that needs no thought.",
        ),
        ("response_tokens_max", "tokens", "Longest completion.", "Below `rollout.max_new_tokens` most of the time."),
        (
            "truncated_frac",
            "fraction",
            "Completions that ended at `rollout.max_new_tokens`; most of them can earn nothing.",
            "Under 0.1; above, raise the limit or penalise length.",
        ),
    ),
    _chapter(
        "Groups and advantages",
        (
            "groups/with_signal",
            "groups",
            "Groups whose rewards differ, so that there is something to learn from them.",
            "More than half of the step. Few: the questions are too hard, or too easy by now.",
        ),
        (
            "groups/without_signal",
            "groups",
            "Groups of equal rewards, of those that the step trains on.",
            "Grows as questions are mastered.",
        ),
        (
            "groups/without_signal_frac",
            "fraction",
            "Share of groups of equal rewards in all that was drawn, dynamic sampling's rejects included.",
            "Under 0.5. Near 1: the step costs a whole rollout and teaches next to nothing.",
        ),
        (
            "groups/unscored",
            "groups",
            "Groups that a judge, or code of your own, gave no score, and that were left out by "
            "`environment.judge.on_failure` or `reward_on_failure`.",
            "0; `unscored.jsonl` in the run folder says why there are any.",
        ),
        (
            "groups/skipped",
            "groups",
            "Groups without signal that were left out of the update; the loss is divided by all tokens all the same.",
            "`groups/without_signal` less those kept for an entropy bonus; 0 with a KL term or a value head.",
        ),
        (
            "advantage/mean",
            "advantage",
            "Mean over the actions trained on.",
            "Near 0: groups are centred, and whitened advantages too. Away from it, long completions are mostly the "
            "better or the worse ones.",
        ),
        (
            "advantage/std",
            "advantage",
            "Standard deviation over the actions trained on.",
            "About 1, less if not divided.",
        ),
        (
            "advantage/max_abs",
            "advantage",
            "The largest, by its size.",
            "At most (n - 1) / sqrt(n) in a group of n that is divided by its deviation: 2.5 for 8. Far above it after "
            "whitening: one sample rules the step.",
        ),
        (
            "dynamic_sampling/batches",
            "rollouts",
            "Rollouts that it took to fill the batch (DAPO's dynamic sampling).",
            "1 to 3. At its bound: see `dynamic_sampling/groups_missing`.",
        ),
        (
            "dynamic_sampling/groups_dropped",
            "groups",
            "Groups of one accuracy, drawn and left out.",
            "The price of the method. Growing to several batches a step: time for harder questions.",
        ),
        (
            "dynamic_sampling/groups_left_over",
            "groups",
            "Groups that differ, but for which the step had no more room.",
            "Below the groups of one rollout.",
        ),
        (
            "dynamic_sampling/groups_missing",
            "groups",
            "Groups that the batch lacks, because the bound on rollouts came first.",
            "0; above it the step trained on what there was.",
        ),
        (
            "curriculum/stage",
            "stage",
            "The stage that scored the step; 1 is the first.",
            "Rises by its schedule. The reward falls where it rises: the next stage asks for more.",
        ),
        (
            "curriculum/<fact>",
            "of the fact",
            "What the stage asks for: weights of the parts, tolerance, weights of levels.",
            "As declared; the tolerance falls from stage to stage.",
        ),
        (
            "data/rows_skipped",
            "rows",
            "Rows of all splits that could not become a prompt, so far (`data.on_bad_row=skip`); see bad_rows.jsonl.",
            "0, or a number that you know.",
        ),
        (
            "data/rows_skipped/<reason>",
            "rows",
            "Those of one reason; docs/data.md lists them.",
            "As `data/rows_skipped`.",
        ),
    ),
    _chapter(
        "The update",
        (
            "loss",
            "",
            "What was minimised, mean of the optimizer steps: the policy loss with its bonus and penalty terms, and "
            "with a value function `value_coef` times the value loss.",
            "Near 0 and no measure of progress: centred advantages make it so.",
        ),
        ("policy_loss", "", "Its policy term alone.", "As `loss`."),
        (
            "entropy",
            "nats",
            "Mean entropy of the policy over the tokens trained on.",
            "Falls slowly. To almost 0 within tens of steps: the policy has stopped exploring; raise clip_high or "
            "the bonus. Rising without end: the bonus is too strong, or the engine is off (see `rollout_train_kl`).",
        ),
        ("ratio_mean", "ratio", "Mean probability of an action now over that before the update.", "Within 1 +- 0.02."),
        (
            "clip_frac/low",
            "fraction",
            "Actions whose ratio was clipped below, so that they gave no gradient (loss=cispo: a bounded one).",
            "Both together under 0.2; exactly 0 with one optimizer step per batch, where the ratio is 1.",
        ),
        ("clip_frac/high", "fraction", "The same above.", "See `clip_frac/low`."),
        (
            "grad_norm",
            "",
            "Norm of the gradient before clipping, mean of the optimizer steps.",
            "Of one order of magnitude throughout. Tens of times larger for several steps: lower the learning rate.",
        ),
        ("grad_norm/value", "", "The same of the critic's own parameters.", "High at first, then as `grad_norm`."),
        ("learning_rate", "", "Of this step.", "As the schedule says."),
        ("learning_rate/value", "", "Of the value head or critic.", "As its schedule says."),
        (
            "actions_trained",
            "tokens",
            "Completion tokens that the update saw, each epoch counted.",
            "The tokens of the step less those of skipped groups, times the epochs.",
        ),
        (
            "epochs_run",
            "epochs",
            "Optimizer steps taken, in passes over the batch; fewer than set where `kl/policy` reached its limit.",
            "The number set. Always below it: the learning rate is too high for so many.",
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
            "Actions whose linear layers were looked up in their rollout's (CPU, `rollout.reuse_gib`).",
            "0 or 1: 0 every `train.plain_update_every_steps`, on CUDA, and where it does not pay.",
        ),
        ("reused_images", "images", "Images whose rollout pass also served the update.", "All of the batch, or 0."),
    ),
    _chapter(
        "PPO",
        (
            "value_loss",
            "",
            "The critic's clipped squared error.",
            "Falls in the first tens of steps, then follows the spread of the returns.",
        ),
        ("value/mean", "reward", "Mean value over the actions trained on.", "Comes near `return/mean`."),
        ("return/mean", "reward", "Mean return over the actions trained on.", "Follows `reward`."),
        ("value_clip_frac", "fraction", "Values whose change was clipped.", "Under 0.2."),
        (
            "explained_variance",
            "fraction",
            "1 - var(return - value) / var(return): what the critic knows of the returns.",
            "From 0 to above 0.3. Negative: the critic is worse than a constant; train it longer before the policy.",
        ),
    ),
    _chapter(
        "Distance to the reference",
        (
            "kl/reference",
            "nats",
            "Mean k3 estimate of the KL to the model that RL began with (Schulman, joschu.net/blog/kl-approx.html).",
            "Grows slowly to some tenths. Jumping: the policy has left what the reference can say.",
        ),
        (
            "kl/reward",
            "nats",
            "Mean estimate of the KL to the reference that the reward is charged for (`algorithm.kl_in=reward`).",
            "As `kl/reference`; with a controller it comes near `algorithm.kl_target`. Below 0 for long: the policy "
            "has moved to tokens that generation bans, and is paid for it; go back to an earlier checkpoint.",
        ),
        (
            "kl/coef",
            "",
            "Weight of the KL in the reward (`algorithm.kl_in=reward`); moves with `algorithm.kl_target`.",
            "Settles.",
        ),
        (
            "kl/policy",
            "nats",
            "Mean k3 estimate of the KL from the policy before the update to that of its last pass, which may end it; "
            "0 where there is one pass.",
            "Under 0.02.",
        ),
    ),
    _chapter(
        "Rollout against training",
        (
            "rollout_train_k1",
            "nats",
            "Mean of the engine's log-prob less the trainer's, over all action tokens of the step: in every step whose "
            "log-probs are all at hand, else every `train.plain_update_every_steps`.",
            "Near 0 on both sides of it; of one sign throughout: the engine is surer, or less sure, than it should be.",
        ),
        (
            "rollout_train_kl",
            "nats",
            "Mean k3 estimate of KL(engine || trainer) over the same.",
            "Under 0.001 in float32 here, under 0.01 between engines in bfloat16. Growing over the run: the run is on "
            "its way to collapse; set `algorithm.importance_sampling_fix=true` and look for the cause.",
        ),
        (
            "rollout_train_<figure>/trained",
            "nats",
            "k1, kl, abs and max of the groups trained on alone, in every step that reused nothing of its rollout.",
            "As those of the whole step; where groups are left out, the figures to plot.",
        ),
        (
            "rollout_train_abs",
            "nats",
            "Mean absolute difference of the log-probs; what public documents plot.",
            "About 0.03 between two engines in bfloat16, 1e-6 for the embedded one in float32. 0.7: wrong positions.",
        ),
        (
            "rollout_train_max",
            "nats",
            "The largest absolute difference of the step.",
            "Single tokens may reach 1 in bfloat16; one of 10 is an engine that drew what it says it could not.",
        ),
        (
            "importance/weight",
            "ratio",
            "Mean weight that corrects for the engine (`algorithm.importance_sampling_fix`).",
            "Within 1 +- 0.01.",
        ),
        (
            "importance/clipped_frac",
            "fraction",
            "Weights at their bound, or samples left out for it.",
            "Under 0.01; much of the step there means that the engine draws from another policy.",
        ),
    ),
    _chapter(
        "Time and speed",
        (
            "seconds/step",
            "seconds",
            "The whole step, without readings and checkpoints.",
            "Steady; grows with the length of completions.",
        ),
        (
            "seconds/<phase>",
            "seconds",
            "One phase: data, rollout, samples, logprobs, update or sync.",
            "Rollout and update take nearly all. Much in data: images are processed again and again, see "
            "`data.prompt_cache_gib`.",
        ),
        ("tokens_per_second", "tokens/s", "Completion tokens of the step over `seconds/step`.", "Steady."),
        ("samples_per_second", "completions/s", "Completions of the step over `seconds/step`.", "Steady."),
        (
            "update_tflop",
            "TFLOP",
            "Arithmetic that the update's passes need by the model's sizes (`fovea/models/flops.py`), epochs counted: "
            "every prompt of a group once, its completions, its images where the vision tower is trained, forward and "
            "backward. What a kernel or a recomputation adds does not count, and what was taken over from the rollout "
            "(`reused_frac`) does; features of a frozen tower are taken to be there.",
            "Grows with the length of completions.",
        ),
        (
            "tflops_per_second",
            "TFLOP/s",
            "`update_tflop` over `seconds/update`.",
            "Steady.",
        ),
        (
            "mfu",
            "fraction",
            "`tflops_per_second` over the device's dense bfloat16 rate, or over `log.peak_tflops`: model FLOPs "
            "utilisation (PaLM, arXiv 2204.02311, appendix B) of the update, vision counted and shared prompts "
            "counted once. Not there on a CPU or an unknown GPU without that setting.",
            "0.2 to 0.5 on one large GPU. Under 0.1: rows are too short (`train.max_tokens_per_microbatch`), or the "
            "model too small.",
        ),
    ),
    _chapter(
        "Memory",
        ("memory/peak_rss_gib", "GiB", "Most main memory that the process ever held.", "Flat after some steps."),
        (
            "memory/activations_gib",
            "GiB",
            "What the largest row so far kept for its backward pass.",
            "Bounded by `train.max_tokens_per_microbatch`.",
        ),
        (
            "memory/<phase>_gib",
            "GiB",
            "Most that CUDA held within the phase; without CUDA, main memory at its end.",
            "Flat; growing without end is a leak.",
        ),
    ),
)

METRICS = tuple(metric for chapter in CHAPTERS for metric in chapter.metrics)


def definition_of(key: str) -> Metric | None:
    """What a key of metrics.jsonl is; a name written out goes before a family that it also fits."""
    exact = (metric for metric in METRICS if metric.name == key)
    family = (metric for metric in METRICS if metric.pattern.fullmatch(key))
    return next(exact, None) or next(family, None)


def undefined(keys: Iterable[str]) -> list[str]:
    """The keys that are defined nowhere; `step` is the line's own."""
    return sorted({key for key in keys if key != "step" and definition_of(key) is None})
