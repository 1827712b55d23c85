"""A reward model that reads the image: a vision-language model whose last token's state is scored by a linear head.

The folder holds the model in the format of transformers, and the head as `score.weight` (a sequence classifier of
transformers with one output) or `v_head.summary.weight` and `.bias` (TRL's value head).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from PIL.Image import Image
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModel

from fovea.config.model import Model
from fovea.errors import ModelError
from fovea.models.model_files import check_folder, damaged_model, hub_options, no_progress_bar
from fovea.models.plain import PlainRow, plain_states
from fovea.models.processor import load_processor, special_marks
from fovea.models.render import Renderer
from fovea.utils.config_keys import check_unquantized
from fovea_gym.rows.images import ImageOpener
from fovea_gym.settings.rewards import RewardModel
from fovea_gym.types import ImageRef, Message
from fovea_gym.utils.shown_text import without_marks

KEY = "reward_model.path"
"""The setting that names the folder."""
HEADS = ("score", "v_head.summary")
"""Names of the linear layers that are a head."""
_ANY_SIZE = 1e9
"""Megapixels and MiB: images were opened, and so checked, before they come here."""


class VisionRewardScorer:
    """A scorer of an answer to a question about images; one at a time, in the number format of its file."""

    def __init__(self, settings: RewardModel) -> None:
        """Weights come from safetensors, code from transformers; ModelError names what the folder lacks."""
        path = settings.path
        model = Model(path=path)
        with named_as_reward_model():
            check_folder(path, None)
            self._processor = load_processor(model)
            network = _network(model)
        self._marks = special_marks(self._processor.tokenizer)
        self._renderer = Renderer(self._processor, ImageOpener(max_image_mib=_ANY_SIZE, max_image_megapixels=_ANY_SIZE))
        self._network = network.eval().to(settings.device)
        self._weight, self._bias = (x.to(settings.device) for x in _head(Path(path)))
        self._lock = Lock()

    def score(self, question: str, answer: str, images: Sequence[Image]) -> float:
        """The logistic function of the head's output on the answer's end token: 0..1."""
        refs = tuple(ImageRef(source=image) for image in images)
        prompt = self._renderer.prompt([Message(role="user", parts=(*refs, question))])
        answer_ids = torch.tensor(self._renderer.target(without_marks(answer, self._marks)))
        device = self._weight.device
        ids_L = torch.cat([torch.from_numpy(prompt.token_ids_L).long(), answer_ids]).to(device)
        row = PlainRow(token_ids_L=ids_L, images=prompt.images, hidden_index_A=[])
        with self._lock, torch.inference_mode():
            last_E = plain_states(self._network, self._processor.family, [row], self._network.dtype)[0, -1].float()
            return float(torch.sigmoid(self._weight @ last_E + self._bias))


@contextmanager
def named_as_reward_model() -> Iterator[None]:
    """Errors about the files of a model name the setting of the reward model, and not the policy's."""
    try:
        yield
    except ModelError as error:
        raise ModelError(str(error).replace("model.path=", f"{KEY}=")) from error


def _network(model: Model) -> Any:
    """The network of a model folder without a head; ModelError where weights are missing or damaged."""
    assert model.path is not None, "reward models are not made here"
    with damaged_model(model.path), no_progress_bar():
        check_unquantized(model.path, "main")
        loaded: Any = AutoModel.from_pretrained(
            model.path, dtype="auto", use_safetensors=True, output_loading_info=True, **hub_options(model)
        )
    network, info = loaded
    if info["missing_keys"]:
        raise ModelError(f"model.path={model.path} lacks weights, first {sorted(info['missing_keys'])[0]}")
    return network


def _head(folder: Path) -> tuple[Tensor, Tensor]:
    """Weight [E] and bias [] of the head; ModelError where there is none with one output."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names = {f"{head}.{part}" for head in HEADS for part in ("weight", "bias")} & set(opened.keys())
            tensors |= {name: opened.get_tensor(name).float() for name in names}
    name = next((head for head in HEADS if f"{head}.weight" in tensors), None)
    if name is None:
        raise ModelError(
            f"{KEY}: {folder} has no head that scores ({' or '.join(f'{head}.weight' for head in HEADS)} "
            "in its safetensors); name the folder of a reward model"
        )
    weight, bias = tensors[f"{name}.weight"], tensors.get(f"{name}.bias", torch.zeros(1))
    if weight.shape[0] != 1:
        raise ModelError(
            f"{KEY}: {folder} has {weight.shape[0]} outputs, and a reward is one number; name a model with one"
        )
    return weight[0], bias[0]
