"""Records that pass between the stages of a step (docs/step.md); nothing here imports torch.

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
"""Hugging Face parameter names and full tensors, produced one by one."""

EpisodeEnd: TypeAlias = Literal["done", "max_turns", "max_tokens"]
"""The end of an episode: by the environment, or at the limit of turns or of tokens while it would have gone on."""
PositionRule: TypeAlias = Literal["grid", "time", "sequence"]
"""Positions of visual tokens: by their place in the grid, by its first axis only, or one after the other."""
Metrics: TypeAlias = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptImage:
    """One image as the model sees it."""

    key: str
    """Hash of the processed pixels: equal key, equal features (see `models.vision.feature_cache`)."""
    tensors: Mapping[str, NDArray[np.generic]]
    """Outputs of the image processor, by the family's names. Qwen's are pixel_values, float32 [N, C], and
    image_grid_thw, the numbers of patches in time, height and width. Empty in a process that was not sent them."""
    num_tokens: int
    """Visual tokens in the prompt."""
    grid: tuple[int, int, int]
    """Numbers of patches in time (or tiles), height and width, by which the work of the vision tower is known."""
    positions: PositionRule = "grid"
    """Other rules than `grid` are faults that the parity gate imitates; models whose positions are made by transformers
    or Megatron do not follow them."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """Token ids and pixels, made once and used by rollout and training alike.

    With one 4x6-patch image and a merge size of 2 the ids hold 6 image pads:
    `token_ids_L = [im_start, ..., vision_start, pad x 6, vision_end, "How", " many", ...]`. Positions are not kept:
    the model family computes them where a row is packed or prefilled (`models.families`).
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
    """Sampling parameters of a request. Log-probs are at this temperature, before top-p, top-k and min-p."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy (log-probs are then at temperature 1)."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    answer_end: AnswerEnd | None = None
    """A completion ends with the token that closes the answer, whose text stays in it whole; None: it goes on."""
    seed: int = 0
    exact: bool = True
    """False: the engine may decode with approximate weights (`rollout.engine.decode_weights`), corrected in training by
    importance weights."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """A call to an engine: n completions of one prompt."""

    id: str
    """Unique among the requests of a run; its completions are named `id/0`, `id/1`, ..."""
    prompt: Prompt
    sampling: Sampling
    n: int = 1
    for_update: bool = False
    """The next update trains on the completions: an engine in the trainer's process may record activations for it."""
    keep: bool = False
    """Another turn may follow: an engine without a prefix cache keeps the KV cache of the completions."""
    continues: str | None = None
    """Id of the previous turn's completion; this prompt begins with its prompt and its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One generation."""

    token_ids_T: NDArray[np.int64]
    """Sampled tokens, the stop token or the token that closes the answer included."""
    logprobs_T: NDArray[np.float32]
    """The engine's log-probs of these tokens at the sampling temperature."""
    id: str = ""
    """The request's id and the completion's number, as in `id/0`."""
    text: str
    """Decoded text without special tokens, cut before the first stop string."""
    finish: FinishReason
    version: int
    """Version of the policy that sampled it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTokens:
    """The tokens of one turn: observation and completion."""

    observation: Prompt
    """Token ids and images that the environment added; in the first turn, the prompt."""
    completion: Completion
    is_noisy: bool = False
    """True if the engine drew the completion on the observation's pictures with noise (`rollout.augmentation`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn(Turn):
    """A turn that an engine has generated."""

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
        """Tokens of each turn, without turns that no engine generated."""
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
        """True if the last completion reached `max_new_tokens`, or the episode its limit of turns or tokens."""
        return self.last.finish == "length" or self.end != "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The episodes of one task; they share the first prompt."""

    prompt: Prompt
    episodes: tuple[Episode, ...]
    masked: Prompt | None = None
    """The prompt with masked pictures, for a term of the loss (`algorithm.augmentation`)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One episode to train on: the `T` tokens after the prompt that it shares with its group.

    Example with two turns, completions c and d of 2 tokens each and an observation o of 3 tokens between them:
    `token_ids_T = [c1, c2, o1, o2, o3, d1, d2]`, `mask_T = [1, 1, 0, 0, 0, 1, 1]`. Per-token values are 0 where the
    mask is False.
    """

    token_ids_T: NDArray[np.int64]
    mask_T: NDArray[np.bool_]
    """True at action tokens, which the policy generated; the last token is one."""
    rollout_logprobs_T: NDArray[np.float32]
    reward: float
    """Reward of the environment, minus penalties that need no model, such as those of length: where it is given by
    turn, the sum of `turn_rewards`, discounted by `algorithm.turn_discount`."""
    turn_rewards: tuple[float, ...] = ()
    """Rewards of its turns, undiscounted, penalties on the last; empty: the reward is that of the whole episode."""
    weight: float
    """Loss weight of each of its action tokens in the step's loss (`algorithms.aggregation`)."""
    old_logprobs_T: NDArray[np.float32] | None = None
    """The trainer's log-probs before the update; None if the update's first, on-policy epoch computes them."""
    reference_logprobs_T: NDArray[np.float32] | None = None
    """The reference model's log-probs; None without a KL term."""
    masked_logprobs_T: NDArray[np.float32] | None = None
    """The trainer's log-probs on the masked picture before the update; None without `algorithm.augmentation`."""
    values_T: NDArray[np.float32] | None = None
    """Values before each token, by the value function before the update; None without a value function."""
    advantages_T: NDArray[np.float32] | None = None
    """Advantages; None until `advantages.with_advantages`."""
    returns_T: NDArray[np.float32] | None = None
    """Returns, the targets of the value function; None without a value function."""
    images: tuple[PromptImage, ...] = ()
    """Images of the observations after the prompt, in order."""
    completion_ids: tuple[str, ...] = ()
    """Ids of the completions of its turns."""
    versions: tuple[int, ...] = ()
    """Version of the policy that sampled each turn."""
    is_noisy: bool = False
    """True if it was drawn on noisy pictures: `rollout_logprobs_T` are of these, and no measure of the engine."""

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
        """Place of the last action token of each turn among the `T` tokens."""
        return np.flatnonzero(self.mask_T & ~np.append(self.mask_T[1:], False))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleGroup:
    """The samples of one group, with the prompt that they share."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    task_id: str = ""
    """Id of their task, for error messages."""
    masked: Prompt | None = None
    """The prompt with masked pictures, of the same token ids, for log-probs before the update (`samples.on_masked`)."""

    @property
    def images(self) -> tuple[PromptImage, ...]:
        """Images of the prompt, then those of later turns, sample by sample."""
        return (*self.prompt.images, *(image for sample in self.samples for image in sample.images))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples of one update; their loss weights are normalised over the whole step, groups left out included."""

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
    """Accuracies in 0..1 by question type, one per row."""
    by_image_type: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """The accuracies by image type; empty without `evaluate.image_type_key`."""
    rewards: tuple[float, ...] = ()
    """Rewards, one per row."""
    parts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Values of each named part of the reward, over the rows that have it."""
    num_unscored: int = 0
    """Rows left out because their grader gave no score."""

    @property
    def num_rows(self) -> int:
        return sum(len(values) for values in self.accuracies.values())

    @property
    def accuracy(self) -> float:
        return sum(sum(values) for values in self.accuracies.values()) / max(self.num_rows, 1)
