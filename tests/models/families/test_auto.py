"""Models without a family: prompts, log-probs, gradients and draws against transformers, training and export."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoImageProcessor, Pix2StructConfig, SuppressTokensLogitsProcessor

from fovea.commands.exporting.export import export
from fovea.config.model import Model
from fovea.errors import ModelError
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.models.families.auto import AutoFamily
from fovea.models.families.registry import FAMILIES
from fovea.models.load import load_network
from fovea.models.plain import PlainVLM
from fovea.models.processor import load_processor
from fovea.models.render import Renderer, images_of
from fovea.rollout.embedded.plain import PlainEngine
from fovea.tools.families.tiny import KINDS, save_tiny_kind
from fovea.train.packing import pack_row
from fovea.train.start_check import Reference, StartCheck
from fovea.types import Message, PromptImage, Sampling
from fovea.wiring.run import build
from tests.plain_runs import run_settings
from tests.reference import gradients, largest_relative_difference
from tests.rollout.drawing import generate
from tests.tiny_models import CORPUS, CPU, from_array, image, random_completions, user

pytestmark = pytest.mark.skipif(
    hasattr(AutoImageProcessor, "_backends"), reason="AutoImageProcessor of this transformers asks for torchvision"
)

CHATS = [
    user("How many circles are there?"),
    user(image(1), "How many circles are there?"),
    user("Compare \n\n", image(2, 70, 40), " with ", image(3, 33, 90), image(4, 48, 48), "\nnow."),
]
TOLERANCE = 2e-5


class Loaded:
    """A tiny model, its prompts, and the inputs that transformers' processor makes for them."""

    def __init__(self, folder: Path) -> None:
        settings = Model(path=str(folder), family="auto")
        self.processor, self.network = load_processor(settings), load_network(settings)
        self.vlm = PlainVLM(self.network, self.processor.banned_ids)
        self.renderer = Renderer(self.processor, from_array)
        self.prompts = [self.renderer.prompt(chat) for chat in CHATS]

    def inputs(self, chat: list[Message]) -> dict[str, Any]:
        pictures = [from_array(ref) for ref in images_of(chat)]
        return dict(self.processor.image_processor.inputs(self.renderer.text(chat), pictures))

    def logprobs(self, chat: list[Message], completion: np.ndarray) -> Tensor:
        """Log-probs [T] by transformers' forward on its processor's outputs."""
        given = {name: torch.as_tensor(x) for name, x in self.inputs(chat).items()}
        ids = torch.cat([given["input_ids"], torch.from_numpy(completion)[None]], dim=1)
        for name in given.keys() & {"token_type_ids", "mm_token_type_ids", "attention_mask"}:
            fill = torch.full((1, len(completion)), int(name == "attention_mask"))
            given[name] = torch.cat([given[name], fill], dim=1)
        logits = self.network(**given | {"input_ids": ids}, use_cache=False).logits[0, -len(completion) - 1 : -1]
        logits = SuppressTokensLogitsProcessor(self.processor.banned_ids)(ids, logits)
        return logits.log_softmax(-1).gather(1, torch.from_numpy(completion)[:, None])[:, 0]


@pytest.fixture(scope="module", params=sorted(KINDS.keys() - FAMILIES.keys()))
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Loaded(save_tiny_kind(request.param, tmp_path_factory.mktemp(request.param), CORPUS))


def test_prompts_equal_transformers_processor(loaded: Loaded) -> None:
    family = loaded.vlm.family
    for chat, prompt in zip(CHATS, loaded.prompts, strict=True):
        expected = loaded.inputs(chat)
        assert prompt.token_ids_L.tolist() == expected["input_ids"][0].tolist()
        inputs = family.forward_inputs(torch.from_numpy(prompt.token_ids_L)[None], prompt.images)
        assert inputs.keys() >= expected.keys() & family.layout.arguments - {"input_ids", "attention_mask"}
        for name, tensor in inputs.items():
            np.testing.assert_array_equal(tensor.numpy(), expected.get(name, tensor.numpy()), err_msg=name)


def test_logprobs_and_gradients_equal_transformers_and_no_row_moves_another(loaded: Loaded) -> None:
    completions = random_completions([(5, 3), (4,), (2, 6)])
    row = pack_row(loaded.vlm.family, loaded.prompts, completions, CPU)
    found = loaded.vlm(row, temperature=1.0, chunk_tokens=100).logprobs_A
    expected = torch.cat(
        [loaded.logprobs(chat, x) for chat, group in zip(CHATS, completions, strict=True) for x in group]
    )
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    both = []
    for logprobs in (found, expected):
        logprobs.sum().backward()
        both.append(gradients(loaded.network))
    total = torch.stack([x.norm() for x in both[0].values()]).norm()
    # the bias of a key moves no softmax: its gradient is rounding
    moving = {name for name, x in both[0].items() if x.norm() > 1e-6 * total}
    assert largest_relative_difference(*({name: each[name] for name in moving} for each in both)) < 1e-5
    completions[1][0] = completions[1][0][::-1].copy()
    changed = pack_row(loaded.vlm.family, loaded.prompts, completions, CPU)
    with torch.no_grad():
        again = loaded.vlm(changed, temperature=1.0, chunk_tokens=100).logprobs_A
    assert torch.equal(again[:8], found[:8])
    assert torch.equal(again[12:], found[12:])
    assert not torch.equal(again[8:12], found[8:12])


def test_the_engine_draws_what_the_trainer_scores(loaded: Loaded) -> None:
    """A prompt without images after others, so that no position of theirs is left."""
    engine = PlainEngine(loaded.vlm, loaded.processor, max_batch_tokens=10_000)
    engine.load_weights(dict(loaded.network.named_parameters()), version=0)
    prompts = loaded.prompts[::-1]
    groups = generate(engine, prompts, [Sampling(max_new_tokens=8, seed=seed) for seed in range(3)], n=2)
    drawn = pack_row(loaded.vlm.family, prompts, [[each.token_ids_T for each in group] for group in groups], CPU)
    with torch.no_grad():
        scored = loaded.vlm(drawn, temperature=1.0, chunk_tokens=100).logprobs_A
    engines = np.concatenate([each.logprobs_T for group in groups for each in group])
    np.testing.assert_allclose(scored.numpy(), engines, atol=TOLERANCE)


def check(loaded: Loaded) -> float:
    arguments = loaded.vlm.family.layout.arguments
    reference = Reference(network=loaded.network, processor=loaded.processor.image_processor, arguments=arguments)
    return StartCheck(loaded.vlm, loaded.processor, loaded.renderer, from_array, reference).run(CHATS)


def test_the_start_check_passes(loaded: Loaded) -> None:
    assert check(loaded) < TOLERANCE


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_kind("glm4v", tmp_path_factory.mktemp("glm"), CORPUS)


def doubled(self: AutoFamily, image: PromptImage) -> str:
    return 2 * TEXT_OF(self, image)


def one_axis(self: AutoFamily, ids: Tensor, images: list[PromptImage]) -> dict[str, Tensor]:
    """M-RoPE positions without height and width."""
    return INPUTS_OF(self, ids, images) | {"position_ids": torch.arange(ids.shape[1]).expand(3, *ids.shape)}


def without_kinds(self: AutoFamily, ids: Tensor, images: list[PromptImage]) -> dict[str, Tensor]:
    return {name: x for name, x in INPUTS_OF(self, ids, images).items() if name != "mm_token_type_ids"}


TEXT_OF, INPUTS_OF = AutoFamily.image_text, AutoFamily.forward_inputs


@pytest.mark.parametrize(
    ("name", "fault", "message"),
    [
        ("image_text", doubled, r"with 1 images has \d+ token ids, and other ones than the processor's \d+"),
        ("forward_inputs", one_axis, r"log-probs differ by .* from transformers' forward"),
        ("forward_inputs", without_kinds, r"no mm_token_type_ids, which the processor gives"),
    ],
)
def test_a_broken_family_is_stopped(
    glm: Path, name: str, fault: Callable[..., Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = Loaded(glm)
    monkeypatch.setattr(AutoFamily, name, fault)
    with pytest.raises(ModelError, match=rf", a glm4v, cannot be trained .*: .*{message}; give another"):
        check(loaded)


def test_a_tower_that_was_not_loaded_is_stopped(glm: Path) -> None:
    loaded = Loaded(glm)
    with torch.no_grad():
        for parameter in loaded.network.model.visual.parameters():
            parameter.zero_()
    with pytest.raises(ModelError, match="another picture does not change the log-probs: the vision tower is not"):
        check(loaded)


def test_the_setting_and_the_model_must_agree(glm: Path) -> None:
    with pytest.raises(ModelError, match=r"model_type is glm4v, and Fovea has families .*; set model\.family=auto"):
        load_processor(Model(path=str(glm)))


def test_a_config_without_a_visual_token_is_refused() -> None:
    with pytest.raises(ModelError, match=r"config of a pix2struct has no image_token_id or image_token_index"):
        _ = AutoFamily.of(Pix2StructConfig()).image_token_id


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("gemma3", {"algorithm.kl": {"coef": 0.01}}),
        ("glm4v", {"model.lora.rank": 4, "train.gradient_checkpointing": "selective"}),
        ("llava", {"algorithm.name": "ppo", "model.freeze_vision_tower": True, "model.dtype": "bfloat16"}),
    ],
    ids=["grpo", "lora", "ppo"],
)
def test_it_trains_passes_the_parity_gate_and_is_exported(
    kind: str, settings: dict[str, object], tmp_path: Path
) -> None:
    model, folder = save_tiny_kind(kind, tmp_path / "model", CORPUS), tmp_path / "run"
    train(build(run_settings(folder, model, **{"model.family": "auto"}, **settings)))
    metrics = read_metrics(folder)
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert all(row["grad_norm"] > 0 for row in metrics)
    assert json.loads((folder / "parity.json").read_text())["passed"]
    limit = 0.3 if "model.dtype" in settings else 1e-4
    assert export(folder, tmp_path / "out").max_logprob_difference < limit
    again = Loaded(tmp_path / "out")
    assert check(again) < TOLERANCE
