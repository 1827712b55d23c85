"""Records that pass between the stages of a step (docs/step.md); this module does not import torch.

Records that hold arrays compare by identity.

Axes: `L` tokens of a prompt, `U` with one token per image, `T` tokens of a completion, `N` patches of an image, `C`
values of a patch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fovea_gym.types import AnswerEnd, FinishReason, Score, Task, Turn

if TYPE_CHECKING:
    from torch import Tensor

Shape: TypeAlias = tuple[int, ...]
Weights: TypeAlias = "Iterable[tuple[str, Tensor]]"
"""Hugging Face parameter names and full tensors, produced one at a time."""

EpisodeEnd: TypeAlias = Literal["done", "max_turns", "max_tokens"]
"""The end of an episode: the environment ended it, or it reached the limit of turns or tokens first."""
PositionRule: TypeAlias = Literal["grid", "time", "sequence"]
"""Positions of visual tokens: by their place in the grid, only by its first axis, or consecutive."""
Metrics: TypeAlias = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptImage:
    """One image as the model sees it."""

    key: str
    """Hash of the processed pixels: images with equal keys have equal features (see `models.vision.feature_cache`)."""
    tensors: Mapping[str, NDArray[np.generic]]
    """Outputs of the image processor under the family's names. For Qwen these are pixel_values, float32 [N, C], and
    image_grid_thw, the numbers of patches in time, height and width. Empty in a process that did not receive them."""
    num_tokens: int
    """Number of visual tokens in the prompt."""
    grid: tuple[int, int, int]
    """Numbers of patches in time (or of tiles), height and width, which determine the work of the vision tower."""
    positions: PositionRule = "grid"
    """Rules other than `grid` are faults that the parity gate imitates; models whose positions come from transformers
    or Megatron ignore them."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """Token ids and pixels, made once and used by both rollout and training.

    With one image of 4x6 patches and a merge size of 2, the ids contain 6 image pads:
    `token_ids_L = [im_start, ..., vision_start, pad x 6, vision_end, "How", " many", ...]`. Positions are not stored:
    the model family computes them when a row is packed or prefilled (`models.families`).
    """

    token_ids_L: NDArray[np.int64]
    """Input of the network: one image pad per visual token."""
    unexpanded_ids_U: NDArray[np.int64]
    """Input of an inference server, which expands images itself: one pad per image."""
    images: tuple[PromptImage, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_L)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters of a request. Log-probs are taken at this temperature, before top-p, top-k and min-p."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 means greedy decoding (log-probs are then taken at temperature 1)."""
    top_p: float = 1.0
    top_k: int = 0
    """0 disables top-k."""
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    answer_end: AnswerEnd | None = None
    """End a completion at the token that closes the answer, and keep the text of that token; None: do not end there."""
    seed: int = 0
    exact: bool = True
    """If false, the engine may decode with approximate weights (`rollout.engine.decode_weights`), for which importance
    weights correct in training."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """A call to an engine: n completions of one prompt."""

    id: str
    """Unique among the requests of a run; its completions are named `id/0`, `id/1`, ..."""
    prompt: Prompt
    sampling: Sampling
    n: int = 1
    for_update: bool = False
    """True if the next update trains on the completions: an engine in the same process may record their activations."""
    keep: bool = False
    """True if another turn may follow, so that an engine without a prefix cache keeps the completions' KV cache."""
    continues: str | None = None
    """Id of the previous turn's completion; this prompt begins with that turn's prompt and completion."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One generated sequence of a request."""

    token_ids_T: NDArray[np.int64]
    """Sampled tokens, including the stop token or the token that closes the answer."""
    logprobs_T: NDArray[np.float32]
    """The engine's log-probs of these tokens at the sampling temperature."""
    id: str = ""
    """The request's id and the number of the completion, as in `id/0`."""
    text: str
    """Decoded text without special tokens, cut before the first stop string."""
    finish: FinishReason
    version: int
    """Version of the policy that sampled this completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTokens:
    """The tokens of one turn: observation and completion."""

    observation: Prompt
    """Token ids and images that the environment added; in the first turn, the prompt itself."""
    completion: Completion
    is_noisy: bool = False
    """True if the engine sampled the completion with noise on the observation's pictures (`rollout.augmentation`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn(Turn):
    """A turn that an engine generated."""

    tokens: TurnTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A finished interaction with one task: its turns and their score."""

    task: Task
    turns: tuple[Turn, ...]
    score: Score
    end: EpisodeEnd = "done"

    @property
    def tokens(self) -> tuple[TurnTokens, ...]:
        """Tokens of each turn that an engine generated."""
        return tuple(turn.tokens for turn in self.turns if isinstance(turn, SampledTurn))

    @property
    def num_action_tokens(self) -> int:
        """Number of tokens that the policy generated, over all turns."""
        return sum(len(turn.completion.token_ids_T) for turn in self.tokens)

    @property
    def last(self) -> Turn:
        """The turn that ended the episode."""
        return self.turns[-1]

    @property
    def was_truncated(self) -> bool:
        """True if the last completion reached `max_new_tokens`, or the episode reached its limit of turns or tokens."""
        return self.last.finish == "length" or self.end != "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The episodes of one task, which share the first prompt."""

    prompt: Prompt
    episodes: tuple[Episode, ...]
    masked: Prompt | None = None
    """The prompt with masked pictures, for a term of the loss (`algorithm.augmentation`)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One episode to train on: the `T` tokens after the prompt that it shares with its group.

    Example of two turns, with completions c and d of 2 tokens each and an observation o of 3 tokens between them:
    `token_ids_T = [c1, c2, o1, o2, o3, d1, d2]`, `mask_T = [1, 1, 0, 0, 0, 1, 1]`. Per-token values are 0 where the
    mask is False.
    """

    token_ids_T: NDArray[np.int64]
    mask_T: NDArray[np.bool_]
    """True at action tokens, which the policy generated; the last token is one."""
    rollout_logprobs_T: NDArray[np.float32]
    reward: float
    """Reward of the environment, minus penalties that do not need a model, such as for length. If rewards are per turn,
    the sum of `turn_rewards`, discounted by `algorithm.turn_discount`."""
    turn_rewards: tuple[float, ...] = ()
    """Undiscounted rewards of the turns, with penalties on the last turn; empty if the whole episode has one reward."""
    weight: float
    """Weight of each action token in the step's loss (`algorithms.aggregation`)."""
    old_logprobs_T: NDArray[np.float32] | None = None
    """The trainer's log-probs before the update; None if the first, on-policy epoch of the update computes them."""
    reference_logprobs_T: NDArray[np.float32] | None = None
    """The reference model's log-probs; None without a KL term."""
    masked_logprobs_T: NDArray[np.float32] | None = None
    """The trainer's log-probs with masked pictures, before the update; None without `algorithm.augmentation`."""
    values_T: NDArray[np.float32] | None = None
    """Values of the states before each token, computed before the update; None without a value function."""
    advantages_T: NDArray[np.float32] | None = None
    """Advantages; None before `advantages.with_advantages`."""
    returns_T: NDArray[np.float32] | None = None
    """Returns, the targets of the value function; None without a value function."""
    images: tuple[PromptImage, ...] = ()
    """Images of the observations after the prompt, in order."""
    completion_ids: tuple[str, ...] = ()
    """Ids of the turns' completions."""
    versions: tuple[int, ...] = ()
    """Version of the policy that sampled each turn."""
    is_noisy: bool = False
    """True if sampled with noisy pictures: `rollout_logprobs_T` belong to these, and say nothing about the engine."""

    def __post_init__(self) -> None:
        arrays = (
            self.mask_T,
            self.rollout_logprobs_T,
            self.old_logprobs_T,
            self.reference_logprobs_T,
            self.masked_logprobs_T,
            self.values_T,
            self.advantages_T,
            self.returns_T,
        )
        lengths = {len(array) for array in arrays if array is not None} | {len(self.token_ids_T)}
        assert len(lengths) == 1, f"per-token fields of a sample differ in length: {sorted(lengths)}"
        if self.turn_rewards:
            num_turns = len(self.turn_ends)
            assert len(self.turn_rewards) == num_turns, f"{len(self.turn_rewards)} rewards for {num_turns} turns"

    @property
    def num_actions(self) -> int:
        return int(self.mask_T.sum())

    @property
    def turn_ends(self) -> NDArray[np.intp]:
        """Index of each turn's last action token among the `T` tokens."""
        return np.flatnonzero(self.mask_T & ~np.append(self.mask_T[1:], False))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleGroup:
    """The samples of one group, with their shared prompt."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    task_id: str = ""
    """Id of the group's task, for error messages."""
    masked: Prompt | None = None
    """The prompt with masked pictures and the same token ids, for log-probs before the update (`samples.on_masked`)."""

    @property
    def images(self) -> tuple[PromptImage, ...]:
        """Images of the prompt, then those of later turns, sample by sample."""
        return (*self.prompt.images, *(image for sample in self.samples for image in sample.images))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples of one update; their loss weights are normalised over the whole step, including groups left out."""

    groups: tuple[SampleGroup, ...]
    left_out: tuple[SampleGroup, ...] = ()
    """Groups of the step that contribute no gradient."""

    @property
    def samples(self) -> tuple[Sample, ...]:
        return tuple(sample for group in self.groups for sample in group.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCount:
    """Parameter counts of one part of the model."""

    part: str
    trainable: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Scores of the greedy answers to held-out rows."""

    accuracies: Mapping[str, tuple[float, ...]]
    """Accuracy of each row in 0..1, by question type."""
    by_image_type: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Accuracy of each row, by image type; empty without `evaluate.image_type_key`."""
    rewards: tuple[float, ...] = ()
    """Reward of each row."""
    parts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Values of each named part of the reward, for the rows that have this part."""
    num_unscored: int = 0
    """Number of rows left out because their grader gave no score."""

    @property
    def num_rows(self) -> int:
        return sum(len(values) for values in self.accuracies.values())

    @property
    def accuracy(self) -> float:
        return sum(sum(values) for values in self.accuracies.values()) / max(self.num_rows, 1)
