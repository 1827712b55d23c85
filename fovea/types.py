"""The records that go from stage to stage of a step (see docs/step.md); nothing here imports torch.

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

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

Weights: TypeAlias = "Iterable[tuple[str, Tensor]]"
"""Hugging Face parameter names and full tensors, produced one by one."""

FinishReason: TypeAlias = Literal["stop", "length"]
Metrics: TypeAlias = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageRef:
    """Where one image is, not yet opened. Opened by `fovea.data.images.open_image` only."""

    source: bytes | str | NDArray[np.uint8] | Image
    """Encoded file content, a local path, a URL, RGB values [height, width, 3], or a picture of Pillow's."""
    where: str = "image"
    """What an error message calls it: `train.parquet row 12, image 1`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One row of a data set, as an environment understands it."""

    id: str
    """Unique in its split and equal in every run; keys the prompt cache and the resumable order."""
    question: str
    """The user's text; `<image>` marks where an image goes (none: images come first)."""
    answer: str
    images: tuple[ImageRef, ...] = ()
    kind: str = "all"
    """The question type by which accuracies are reported."""
    row: Mapping[str, object] = field(default_factory=dict)
    """The untouched row, for a user's own reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message; text and images in the order in which the model reads them."""

    role: Literal["system", "user", "assistant"]
    parts: tuple[str | ImageRef, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptImage:
    """One image as the model sees it."""

    key: str
    """Hash of the processed pixels: equal key, equal features (see `models.vision.feature_cache`)."""
    tensors: Mapping[str, NDArray[np.generic]]
    """As the image processor made them; the names are the family's. Qwen's are pixel_values, float32 [N, C], and
    image_grid_thw, the patches in time, height and width."""
    num_tokens: int
    """Visual tokens in the prompt."""

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
    """As the network reads them: as many image pads as there are visual tokens."""
    unexpanded_ids_U: NDArray[np.int64]
    """As a server reads them, which expands images itself: one pad per image."""
    images: tuple[PromptImage, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_L)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How an engine draws a completion. Log-probs are at this temperature, before top-p/top-k/min-p."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy (log-probs are then at temperature 1)."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    seed: int = 0
    exact: bool = True
    """False: the engine may decode with approximate weights (`rollout.engine.decode_weights`), which importance weights
    correct in training."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """A call to an engine: n completions of one prompt."""

    id: str
    """Unique among the requests of a run; its completions are named `id/0`, `id/1`, ..."""
    prompt: Prompt
    sampling: Sampling
    n: int = 1
    for_update: bool = False
    """The completions go into an update of the weights that draw them: an engine in the trainer's process may keep
    activations for it."""
    keep: bool = False
    """Another turn may follow: an engine without a prefix cache keeps the keys and values of the completions."""
    continues: str | None = None
    """The completion of the turn before, whose prompt and tokens this prompt begins with."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One generation. `token_ids_T` ends with the stop token when `finish` is "stop" by token."""

    token_ids_T: NDArray[np.int64]
    logprobs_T: NDArray[np.float32]
    """Natural log, at the sampling temperature, of the engine that drew them."""
    id: str = ""
    """The request's id and the number among its completions."""
    text: str
    """Decoded without special tokens, cut before a stop string."""
    finish: FinishReason
    version: int
    """Of the policy whose weights drew it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTokens:
    """One turn as the model reads and writes it."""

    observation: Prompt
    """Ids and images that the environment added; the first turn's is the prompt."""
    completion: Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One exchange: the messages that the environment added, and the model's answer."""

    messages: tuple[Message, ...]
    text: str
    finish: FinishReason = "stop"
    tokens: TurnTokens | None = None
    """None for an answer that no engine drew, such as one that is graded from a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What an environment says of an episode."""

    reward: float
    accuracy: float
    """0..1; what accuracies are reported by, whatever else the reward holds."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The named parts of the reward, for logs and reports."""
    image_parts: tuple[Mapping[str, float], ...] = ()
    """The same for every image of the task, in order; empty where the reward does not tell images apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """All turns about one task, and their score."""

    task: Task
    turns: tuple[Turn, ...]
    score: Score

    @property
    def tokens(self) -> tuple[TurnTokens, ...]:
        """The turns as the model read and wrote them."""
        return tuple(turn.tokens for turn in self.turns if turn.tokens is not None)

    @property
    def num_action_tokens(self) -> int:
        """Tokens that the policy said, over all turns."""
        return sum(len(turn.completion.token_ids_T) for turn in self.tokens)

    @property
    def last(self) -> Turn:
        """The turn that ended the episode."""
        return self.turns[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The episodes of one task; they share the first prompt."""

    prompt: Prompt
    episodes: tuple[Episode, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One episode to train on: `T` tokens after the prompt that it shares with its group.

    Of two turns with completions c and d and an observation o between them, where the policy says 2 tokens each:
    `token_ids_T = [c1, c2, o1, o2, o3, d1, d2]`, `mask_T = [1, 1, 0, 0, 0, 1, 1]`. Per-token values are 0 where the
    mask is False.
    """

    token_ids_T: NDArray[np.int64]
    mask_T: NDArray[np.bool_]
    """True at actions, the tokens that the policy said; the last one is."""
    rollout_logprobs_T: NDArray[np.float32]
    reward: float
    """What the algorithm is to raise: the environment's, less penalties that are known without a model."""
    weight: float
    """Of the loss of each of its tokens in that of the step (`algorithms.aggregation`)."""
    old_logprobs_T: NDArray[np.float32] | None = None
    """The trainer's before the update; None when the first epoch of the update, which is on-policy, makes them."""
    reference_logprobs_T: NDArray[np.float32] | None = None
    """None when the KL coefficient is 0."""
    values_T: NDArray[np.float32] | None = None
    """What the value function expected before each token, before the update; None without one."""
    advantages_T: NDArray[np.float32] | None = None
    """None until `advantages.with_advantages` has made them."""
    returns_T: NDArray[np.float32] | None = None
    """What the value function is to learn; None without one."""
    images: tuple[PromptImage, ...] = ()
    """Images of the observations after the prompt, in order."""
    completion_ids: tuple[str, ...] = ()
    """The completions of its turns."""
    versions: tuple[int, ...] = ()
    """The policy's version in each turn."""

    def __post_init__(self) -> None:
        arrays = (
            self.mask_T,
            self.rollout_logprobs_T,
            self.old_logprobs_T,
            self.reference_logprobs_T,
            self.values_T,
            self.advantages_T,
            self.returns_T,
        )
        lengths = {len(array) for array in arrays if array is not None} | {len(self.token_ids_T)}
        assert len(lengths) == 1, f"per-token fields of a sample differ in length: {sorted(lengths)}"

    @property
    def num_actions(self) -> int:
        return int(self.mask_T.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleGroup:
    """Samples that share one prompt: the unit of packing."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    task_id: str = ""
    """Of the row that they answer, for messages."""

    @property
    def images(self) -> tuple[PromptImage, ...]:
        """Those of the prompt, then those that came later in each sample."""
        return (*self.prompt.images, *(image for sample in self.samples for image in sample.images))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one update trains on. The weights of its samples count the whole step, groups left out included."""

    groups: tuple[SampleGroup, ...]
    left_out: tuple[SampleGroup, ...] = ()
    """Groups drawn for the step that have no gradient to give."""

    @property
    def samples(self) -> tuple[Sample, ...]:
        return tuple(sample for group in self.groups for sample in group.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCount:
    """One row of the table of trainable parameters."""

    part: str
    trainable: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Greedy accuracies on held-out rows, by question type."""

    accuracies: Mapping[str, tuple[float, ...]]
    """For each kind, one value in 0..1 per row."""
    num_unscored: int = 0
    """Rows that count as wrong because the user's own code gave no score."""

    @property
    def num_rows(self) -> int:
        return sum(len(values) for values in self.accuracies.values())

    @property
    def accuracy(self) -> float:
        return sum(sum(values) for values in self.accuracies.values()) / max(self.num_rows, 1)
