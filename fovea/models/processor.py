"""Tokenizer, image processor, chat template and special ids of a model, loaded without its weights."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedTokenizerBase

from fovea.config.model import Model
from fovea.errors import ModelError
from fovea.models.families.base import ModelFamily
from fovea.models.families.registry import family_of, known
from fovea.models.model_files import CONFIG as TOKENIZER_CONFIG
from fovea.models.model_files import check_folder, damaged_model, hub_options
from fovea.models.transformers_versions import load_config, load_tokenizer
from fovea.utils.config_keys import check_config_keys, optional_file, optional_json
from fovea_gym.tools.calls import gemma_calls

SIZES_OF_TOWER = {"merge_size": "spatial_merge_size"}
"""Sizes that have another name in a vision config than in an image processor: processor's name -> config's name."""
SET_BY_RENDERER = frozenset({"messages", "tools", "documents", "tokenize", "chat_template", "add_generation_prompt"})
"""Argument names of a chat template that `model.chat_template_kwargs` may not set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """Tokenizer, image processor and chat template of a model, with the ids that end a completion or are banned."""

    tokenizer: PreTrainedTokenizerBase
    image_processor: Any
    """Image processor of transformers that needs only PIL and numpy, not torchvision."""
    chat_template: str
    family: ModelFamily
    stop_ids: tuple[int, ...]
    """Ids that end a completion: those of the generation config, and the tokenizer's end token."""
    banned_ids: tuple[int, ...]
    """Ids that are never sampled, ascending: special tokens (an image pad in a completion breaks the next forward
    pass) except those that a model uses to call tools, entries of the embedding beyond the tokenizer's vocabulary, and
    `suppress_tokens` of the generation config.

    They have probability 0 in every engine and in the trainer (`models.sampling_distribution`)."""
    max_positions: int
    """Largest number of tokens in a prompt and its completion (`max_position_embeddings`)."""
    name: str
    """Folder or hub id, for messages."""
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    """Arguments of the chat template (`model.chat_template_kwargs`)."""


def load_processor(settings: Model) -> Processor:
    """The processor of `model.path`, without its weights; ModelError when a part is missing or damaged."""
    path = settings.path
    assert path is not None, "a tiny model is loaded from the folder that it was written to"
    check_folder(path, settings.revision)
    options = hub_options(settings)
    with damaged_model(path, TemplateError):
        check_config_keys(path, options["revision"])
        config = load_config(path, **options)
        family = family_of(config, path)
        _check_family(settings, family)
        written = optional_json(path, TOKENIZER_CONFIG, options["revision"])
        tokenizer = load_tokenizer(path, written, **options)
        image_processor = family.load_image_processor(path, options["revision"])
        _check_sizes(config, image_processor, path)
        mark = family.image_mark(image_processor)
        if mark not in tokenizer.get_vocab():
            raise ModelError(
                f"model.path={path}: its tokenizer has no {mark}; "
                "download the whole model again, or give another folder"
            )
        template = _chat_template(path, options["revision"], tokenizer.chat_template)
        # a template that jinja cannot parse must fail here, and not at the first row
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], chat_template=template, tokenize=False)
        if given := optional_json(path, "generation_config.json", options["revision"]):
            generation = GenerationConfig.from_dict(dict(given))
        else:
            generation = GenerationConfig.from_model_config(config)
    _check_template_kwargs(template, settings.chat_template_kwargs, path)
    processor = make_processor(config, generation, tokenizer, image_processor, template, path)
    return replace(processor, template_kwargs=settings.chat_template_kwargs)


def _check_family(settings: Model, family: ModelFamily) -> None:
    """ModelError unless model.family=auto is set for exactly those models without a family in Fovea."""
    is_named = family.model_type in known()
    if not is_named and settings.family != "auto":
        raise ModelError(
            f"model.path={settings.path}: its model_type is {family.model_type}, but Fovea only has families for "
            f"{', '.join(known())}; set model.family=auto to train it with transformers' processor and forward, or "
            "add the family (docs/extending.md)"
        )
    if is_named and settings.family == "auto":
        raise ModelError(
            f"model.family=auto, but Fovea has a family for {settings.path}, a {family.model_type}; remove model.family"
        )


def _check_sizes(config: Any, image_processor: Any, path: str) -> None:
    """ModelError if the image processor cuts pictures into patches of another size than the vision tower expects."""
    vision = getattr(config, "vision_config", None)
    for name in ("patch_size", "temporal_patch_size", "merge_size"):
        cut, taken = getattr(image_processor, name, None), getattr(vision, SIZES_OF_TOWER.get(name, name), None)
        if isinstance(cut, int) and isinstance(taken, int) and cut != taken:
            raise ModelError(
                f"model.path={path}: {name}={cut} in its preprocessor_config.json, but its config.json has {taken}; "
                "download the whole model again, or give another folder"
            )


def template_with_defaults(processor: Processor) -> str:
    """The chat template with the processor's arguments as defaults, for programs that call it without them."""
    defaults = "".join(
        f"{{% if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}"
        for name, value in processor.template_kwargs.items()
    )
    # transformers drops the newline after a block: this one, and so not one at the beginning of the template
    return f"{defaults}\n{processor.chat_template}" if defaults else processor.chat_template


def _check_template_kwargs(template: str, given: Mapping[str, object], path: str) -> None:
    """ModelError for an argument that the template does not read, or that Fovea sets itself."""
    names = set(re.findall(r"[A-Za-z_]\w*", template)) - SET_BY_RENDERER
    for name in given.keys() - names:
        near = get_close_matches(name, names, n=1)
        raise ModelError(
            f"model.chat_template_kwargs.{name} is set, but the chat template of {path} does not read it, or Fovea "
            f"sets it; {f'did you mean {near[0]}?' if near else 'leave it out'}"
        )


def make_processor(
    config: Any,
    generation: GenerationConfig,
    tokenizer: PreTrainedTokenizerBase,
    image_processor: Any,
    chat_template: str,
    name: str,
) -> Processor:
    """A processor with stop and banned ids derived from transformers' configs."""
    stop_ids, family = _stop_ids(generation, tokenizer), family_of(config, name)
    marks = gemma_calls.MARKS if gemma_calls.is_written_by(chat_template) else ()
    sampled_ids = (*stop_ids, *(token_id(tokenizer, mark) for mark in marks))
    banned_ids = _banned_ids(tokenizer, config.get_text_config().vocab_size, generation, sampled_ids)
    return Processor(
        tokenizer=tokenizer,
        image_processor=image_processor,
        chat_template=chat_template,
        family=family,
        stop_ids=stop_ids,
        # even if the tokenizer does not mark it as special
        banned_ids=tuple(sorted({*banned_ids, family.image_token_id})),
        max_positions=config.get_text_config().max_position_embeddings,
        name=name,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BannedTokens:
    """The banned ids of a processor by kind, for display."""

    count: int
    special: tuple[str, ...]
    """Texts of the special tokens among the banned ids."""
    num_beyond_tokenizer: int
    """Number of embedding entries that do not belong to a token of the tokenizer."""


def describe_banned(processor: Processor) -> BannedTokens:
    """The banned ids of a processor by kind; ids of neither kind are suppressed by the generation config."""
    known = processor.tokenizer.added_tokens_decoder
    special = [known[index].content for index in processor.banned_ids if index in known and known[index].special]
    return BannedTokens(
        count=len(processor.banned_ids),
        special=tuple(special),
        num_beyond_tokenizer=sum(index >= len(processor.tokenizer) for index in processor.banned_ids),
    )


def token_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    """Id of a token of the vocabulary."""
    index = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(index, int), f"{token} has no id"
    return index


def _stop_ids(generation: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    configured = generation.eos_token_id
    ids = [configured] if isinstance(configured, int) else list(configured or [])
    own = tokenizer.eos_token_id
    return tuple(dict.fromkeys([*ids, *([own] if isinstance(own, int) else [])]))


def _banned_ids(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, generation: GenerationConfig, sampled_ids: tuple[int, ...]
) -> tuple[int, ...]:
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    beyond, suppressed = range(len(tokenizer), vocab_size), generation.suppress_tokens or ()
    banned = special.union(beyond, suppressed).difference(sampled_ids)
    # a tokenizer may have more tokens than the network: ids without a logit need no ban
    return tuple(sorted(index for index in banned if index < vocab_size))


def _chat_template(path: str, revision: str, of_tokenizer: str | None) -> str:
    """Chat template of the model folder if it has one, else that of the tokenizer."""
    for name in ("chat_template.jinja", "chat_template.json"):
        file = optional_file(path, name, revision)
        if file is not None:
            text = file.read_text(encoding="utf-8")
            return str(json.loads(text)["chat_template"]) if name.endswith(".json") else text
    if of_tokenizer is None:
        raise ModelError(f"model.path={path}: it has no chat template (chat_template.jinja); use an Instruct model")
    return of_tokenizer


def special_marks(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The texts of the special tokens of a tokenizer."""
    return [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
