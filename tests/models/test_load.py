"""Model folders as transformers writes them, and what is wrong with others; tiny models and their tokenizers."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import softplus
from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from fovea.config.model import Model
from fovea.config.run import Config
from fovea.errors import ModelError
from fovea.models.load import empty_network, load_network, pick_device, save_network
from fovea.models.model_files import damaged_model, save_tokenizer
from fovea.models.processor import load_processor
from fovea.models.tiny import MAX_CORPUS_CHARS, MAX_TEXT_CHARS, TinyParts, build_tokenizer, save_tiny
from fovea.models.vlm import VLM
from fovea.models.weights_to_sync import in_layout_of_files, merged_weights_to_sync
from fovea.utils.config_numbers import check_numbers
from fovea_tools.plan.model_sizes import model_sizes
from gym_tests.tables import table
from tests.tiny_models import packed_logprobs, save, tiny


def load_both(settings: Model) -> TinyParts:
    """The processor's door and the network's, one after the other."""
    return TinyParts(processor=load_processor(settings), network=load_network(settings))


def test_a_saved_model_loads_to_the_same_logprobs(parts: TinyParts, tmp_path: Path) -> None:
    loaded = load_both(Model(path=str(save(parts, tmp_path))))
    torch.testing.assert_close(packed_logprobs(loaded), packed_logprobs(parts), atol=1e-6, rtol=0)
    assert loaded.processor.chat_template == parts.processor.chat_template
    assert loaded.processor.stop_ids == parts.processor.stop_ids
    assert loaded.processor.banned_ids == parts.processor.banned_ids


def test_dtype_is_obeyed(tmp_path: Path) -> None:
    folder = save(tiny("qwen3_vl"), tmp_path)
    loaded = load_both(Model(path=str(folder), dtype="bfloat16"))
    assert {parameter.dtype for parameter in loaded.network.parameters()} == {torch.bfloat16}


def test_the_processors_own_chat_template_wins(tmp_path: Path) -> None:
    """Older repositories have chat_template.json beside the tokenizer's template."""
    folder = save(tiny("qwen2_vl"), tmp_path)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ 'of the processor' }}"}))
    assert load_processor(Model(path=str(folder))).chat_template == "{{ 'of the processor' }}"


def test_older_pixel_limits_are_read(tmp_path: Path) -> None:
    """Qwen2-VL's preprocessor_config.json says min_pixels and max_pixels instead of size."""
    folder = save(tiny("qwen2_vl"), tmp_path)
    file = folder / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    settings.pop("size")
    file.write_text(json.dumps(settings | {"min_pixels": 3136, "max_pixels": 12845056}))
    size = load_processor(Model(path=str(folder))).image_processor.size
    assert (size["shortest_edge"], size["longest_edge"]) == (3136, 12845056)


def test_entries_beyond_the_tokenizer_are_banned(tmp_path: Path) -> None:
    """Qwen pads its embedding to a round number of rows."""
    parts = tiny("qwen3_vl")
    size = len(parts.processor.tokenizer)
    parts.network.resize_token_embeddings(size + 5)
    loaded = load_processor(Model(path=str(save(parts, tmp_path))))
    assert set(range(size, size + 5)) <= set(loaded.banned_ids)


def test_what_the_generation_config_suppresses_is_banned_but_for_end_tokens(tmp_path: Path) -> None:
    parts = tiny("qwen3_vl")
    end, beyond = parts.processor.stop_ids[0], len(parts.processor.tokenizer)
    parts.network.generation_config.suppress_tokens = [5, end, beyond]
    loaded = load_processor(Model(path=str(save(parts, tmp_path))))
    assert set(loaded.banned_ids) == {5, *parts.processor.banned_ids}, "the network has no row for the last"


def broken_folders(tmp_path: Path) -> dict[str, Path]:
    folders = {name: tmp_path / name for name in ("missing", "empty", "without_weights", "other_family")}
    folders["empty"].mkdir()
    for name in ("without_weights", "other_family"):
        save(tiny("qwen3_vl"), folders[name])
    (folders["without_weights"] / "model.safetensors").unlink()
    (folders["other_family"] / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folders


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("missing", "no such folder; give a model folder or a hub id such as"),
        ("empty", "has no config.json; give the folder that holds the model's files"),
        ("without_weights", r"no weights \(\*\.safetensors\); download the whole model"),
        ("other_family", "its model_type is llama, but Fovea only trains qwen2_vl, qwen2_5_vl, qwen3_vl"),
    ],
)
def test_a_folder_that_cannot_be_loaded_says_why(which: str, message: str, tmp_path: Path) -> None:
    path = broken_folders(tmp_path)[which]
    with pytest.raises(ModelError, match=message) as error:
        load_both(Model(path=str(path)))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_in_place_of_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("{}")
    with pytest.raises(ModelError, match=f"model.path={file} is a file; give the folder that holds it, {tmp_path}$"):
        load_processor(Model(path=str(file)))


def test_a_mistyped_folder_is_answered_without_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "Qwen3-VL-2B-Instruct").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    close = ("models/Qwen3-VL-2B-Instuct", "./models/Qwen3-VL-2B-Instrut", f"{tmp_path}/models/Qwen-VL-2B-Instruct")
    for path in close:
        with pytest.raises(ModelError, match=r"no such folder; did you mean .*models/Qwen3-VL-2B-Instruct"):
            load_processor(Model(path=path))
    for path in ("models/other", "Qwen3-VL", "~/nowhere/at/all"):
        with pytest.raises(ModelError, match="no such folder; give a model folder or a hub id"):
            load_processor(Model(path=path))


def test_a_hub_id_without_the_hub_is_one_line() -> None:
    with pytest.raises(ModelError, match=r"^model\.path=nobody/no-such-model: ") as error:
        load_both(Model(path="nobody/no-such-model"))
    assert "\n" not in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
def test_cuda_that_is_not_there_is_refused() -> None:
    with pytest.raises(ModelError, match=r"no CUDA device; set model\.device=auto or cpu"):
        pick_device("cuda")
    assert pick_device("auto") == torch.device("cpu")


def cut_tensor(folder: Path, rows: int) -> None:
    """Cut a tensor of the weights to so many rows, or leave it out."""
    file, name = folder / "model.safetensors", "model.language_model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)
    cut = tensors.pop(name)[:rows].contiguous()
    save_file(tensors | ({name: cut} if rows else {}), file, {"format": "pt"})


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 5\n"
SPOILED: dict[str, Callable[[Path], object]] = {
    "truncated": lambda folder: os.truncate(folder / "model.safetensors", 5000),
    "a pointer instead of weights": lambda folder: (folder / "model.safetensors").write_text(POINTER),
    "a tensor is missing": lambda folder: cut_tensor(folder, 0),
    "a tensor of another size": lambda folder: cut_tensor(folder, -8),
    "a broken config": lambda folder: (folder / "config.json").write_text("{broken"),
    "a broken template": lambda folder: (folder / "chat_template.jinja").write_text("{% for x in %}"),
    "no image processor": lambda folder: (folder / "preprocessor_config.json").unlink(),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_a_spoiled_folder_is_refused_in_one_line(spoil: Callable[[Path], object], tmp_path: Path) -> None:
    """Above all a missing tensor, which transformers replaces by random numbers and a warning."""
    folder = save(tiny("qwen3_vl"), tmp_path)
    spoil(folder)
    refused = r"^model\.path=.*download the whole model again, or give another folder$"
    with pytest.raises(ModelError, match=refused) as error:
        load_both(Model(path=str(folder)))
    assert "\n" not in str(error.value)


def test_what_is_no_folder_is_taken_for_an_id_and_told_so() -> None:
    refused = r"there is no folder nobody/nothing in /.*, so it is read as the id of a model on the hub; correct it, or"
    with pytest.raises(ModelError, match=refused), damaged_model("nobody/nothing"):
        raise OSError("We couldn't connect.\nCheck your connection.")


def as_on_the_hub(folder: Path) -> dict[str, list[int]]:
    """Rewrite the weights in the layout of Qwen/Qwen3-VL-30B-A3B-Instruct: experts as [experts, inputs, outputs]."""
    weights = folder / "model.safetensors"
    tensors = {
        name: x.transpose(1, 2).contiguous() if ".mlp.experts." in name else x for name, x in load_file(weights).items()
    }
    save_file(tensors, weights, {"format": "pt"})
    return {name: list(x.shape) for name, x in tensors.items()}


def test_experts_in_the_layout_of_the_hub(tmp_path: Path) -> None:
    """Names and shapes are those of the hub's files, and transformers turns the experts around when it loads them."""
    parts = tiny("qwen3_vl_moe")
    shapes = as_on_the_hub(save(parts, tmp_path / "hub"))
    layer = "model.language_model.layers.0.mlp."
    assert {name.removeprefix(layer): shape for name, shape in shapes.items() if name.startswith(layer)} == {
        "experts.down_proj": [4, 128, 64],
        "experts.gate_up_proj": [4, 64, 256],
        "gate.weight": [4, 64],
    }
    loaded = load_both(Model(path=str(tmp_path / "hub")))
    torch.testing.assert_close(packed_logprobs(loaded), packed_logprobs(parts), atol=1e-6, rtol=0)
    # what we save is laid out as what we read, and as what a run saves of a tiny model
    save_network(VLM(loaded.network, loaded.processor.banned_ids), tmp_path / "saved")
    save_tiny(parts, tmp_path / "tiny")
    theirs, *ours = (load_file(tmp_path / name / "model.safetensors") for name in ("hub", "saved", "tiny"))
    for saved in ours:
        assert saved.keys() == theirs.keys()
        assert all(torch.equal(saved[name], x) for name, x in theirs.items())
    again = dict(load_network(Model(path=str(tmp_path / "saved"))).named_parameters())
    assert all(torch.equal(again[name], x) for name, x in parts.network.named_parameters())


def test_experts_of_qwen3_5_in_the_layout_of_the_hub(tmp_path: Path) -> None:
    """As vLLM and SGLang read Qwen/Qwen3.5-35B-A3B: experts in one tensor, as [experts, outputs, inputs]."""
    parts = tiny("qwen3_5_moe")
    layer = "model.language_model.layers.0.mlp."
    save_tiny(parts, tmp_path / "hub")
    hub = load_file(tmp_path / "hub" / "model.safetensors")
    assert {name.removeprefix(layer): list(x.shape) for name, x in hub.items() if name.startswith(layer)} == {
        "experts.down_proj": [4, 64, 128],
        "experts.gate_up_proj": [4, 256, 64],
        "gate.weight": [4, 64],
        "shared_expert.down_proj.weight": [64, 48],
        "shared_expert.gate_proj.weight": [48, 64],
        "shared_expert.up_proj.weight": [48, 64],
        "shared_expert_gate.weight": [1, 64],
    }
    loaded = load_both(Model(path=str(tmp_path / "hub")))
    given = dict(parts.network.named_parameters())
    assert all(torch.equal(x, given[name]) for name, x in loaded.network.named_parameters())
    # products of experts are rounded by where their tensors begin in memory
    torch.testing.assert_close(packed_logprobs(loaded), packed_logprobs(parts), atol=1e-6, rtol=0)
    save_network(VLM(loaded.network, loaded.processor.banned_ids), tmp_path / "saved")
    ours = load_file(tmp_path / "saved" / "model.safetensors")
    assert ours.keys() == hub.keys()
    assert all(torch.equal(ours[name], x) for name, x in hub.items())


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_a_weight_sync_to_an_engine_has_the_layout_of_the_files(family: str, tmp_path: Path) -> None:
    parts = tiny(family)
    save_tiny(parts, tmp_path / "model")
    held = load_file(tmp_path / "model" / "model.safetensors")
    synced = {each.name: each.tensor() for each in in_layout_of_files(merged_weights_to_sync(parts.network))}
    assert held.keys() <= synced.keys()
    assert all(torch.equal(synced[name], x) for name, x in held.items())


@contextmanager
def key_set(file: Path, keys: str, value: object) -> Iterator[None]:
    """A key of a JSON file, by its dotted name, has this value in the block."""
    before, (*above, last) = file.read_text(), keys.split(".")
    content = json.loads(before)
    reduce(lambda inner, key: inner.setdefault(key, {}), above, content)[last] = value
    file.write_text(json.dumps(content))
    try:
        yield
    finally:
        file.write_text(before)


FETCHES_OR_IMPORTS = [
    *(
        ("config.json", f"{part}{key}", "somebody/kernel")
        for part in ("", "text_config.", "vision_config.")
        for key in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
    ),
    ("config.json", "attn_implementation", {"": "sdpa", "vision_config": "kernels-community/flash-attn3:flash"}),
    ("config.json", "attn_implementation", "paged|somebody/kernel@main"),
    ("config.json", "text_config.experts_implementation", "somebody/kernel"),
    ("config.json", "tokenizer_class", "BertJapaneseTokenizer"),
    ("tokenizer_config.json", "tokenizer_class", "BertJapaneseTokenizer"),
    ("tokenizer_config.json", "tokenizer_class", "MistralCommonBackend"),
    ("tokenizer_config.json", "tokenizer_class", ["Qwen2Tokenizer"]),
]


def test_no_key_of_a_config_fetches_a_kernel_or_imports_a_package(tmp_path: Path) -> None:
    folder = save(tiny("qwen3_vl"), tmp_path)
    config, model = folder / "config.json", Model(path=str(folder))
    for name, key, value in FETCHES_OR_IMPORTS:
        with key_set(folder / name, key, value):
            for read in (load_processor, load_network) if name == "config.json" else (load_processor,):
                with pytest.raises(ModelError, match=rf"{key}=.* in its {name} "):
                    read(model)
    for key in ("quantization_config", "text_config.quantization_config", "fusion_config"):
        refused = pytest.raises(ModelError, match=rf"{key} in its config.json makes transformers import a package")
        with key_set(config, key, {"quant_method": "fp8"}), refused:
            load_network(model)
    for known in ("eager", "sdpa", {"": "sdpa", "text_config": "eager"}):
        with key_set(config, "attn_implementation", known):
            load_both(model)


def test_a_fifo_in_a_model_folder_is_not_waited_for(tmp_path: Path) -> None:
    folder = save(tiny("qwen3_vl"), tmp_path)
    (folder / "generation_config.json").unlink()
    os.mkfifo(folder / "generation_config.json")
    with pytest.raises(ModelError, match=r"generation_config.json is neither a file nor a folder"):
        load_both(Model(path=str(folder)))


def test_an_adapter_beside_the_weights_is_refused(tmp_path: Path) -> None:
    folder = save(tiny("qwen3_vl"), tmp_path)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "megatron_core": "evil", "megatron_config": {}}')
    with pytest.raises(ModelError, match=r"an adapter_config.json, which transformers would apply to the model"):
        load_network(Model(path=str(folder)))


CONFIG, PROCESSOR, NAN = "config.json", "preprocessor_config.json", float("nan")
IMPOSSIBLE: dict[tuple[str, str], tuple[object, ...]] = {
    (CONFIG, "vision_config.patch_size"): (0, "8", 8.5),
    (CONFIG, "vision_config.spatial_merge_size"): (0,),
    (CONFIG, "vision_config.temporal_patch_size"): (-2,),
    (CONFIG, "vision_config.depth"): (10**9,),
    (CONFIG, "vision_config.num_heads"): (0,),
    (CONFIG, "vision_config.hidden_size"): (10**12,),
    (CONFIG, "text_config.num_attention_heads"): (0, True),
    (CONFIG, "text_config.num_key_value_heads"): (3,),
    (CONFIG, "text_config.num_hidden_layers"): (10**9, 1e9),
    (CONFIG, "text_config.hidden_size"): (-64,),
    (CONFIG, "text_config.head_dim"): (0,),
    (CONFIG, "text_config.vocab_size"): (10**12,),
    (CONFIG, "text_config.max_position_embeddings"): (0,),
    (CONFIG, "text_config.rms_norm_eps"): (NAN, -1e-6),
    (CONFIG, "text_config.rope_parameters.rope_theta"): (0, float("inf")),
    (CONFIG, "text_config.attention_dropout"): (2,),
    (CONFIG, "text_config.eos_token_id"): (-7,),
    (CONFIG, "image_token_id"): (-5,),
    (CONFIG, "vision_start_token_id"): (-1,),
    **{(PROCESSOR, name): (0,) for name in ("patch_size", "merge_size", "temporal_patch_size", "size.shortest_edge")},
    (PROCESSOR, "image_std"): ([0.5, 0, 0.5],),
    (PROCESSOR, "image_mean"): ([0.5, NAN, 0.5],),
    (PROCESSOR, "rescale_factor"): (0.0,),
    (PROCESSOR, "size.longest_edge"): (100,),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny("qwen3_vl"), tmp_path_factory.mktemp("model"))


@table(("place", "value"), [(place, value) for place, values in IMPOSSIBLE.items() for value in values])
def test_a_number_that_no_model_can_have_is_named(folder: Path, place: tuple[str, str], value: object) -> None:
    """By whatever reads the folder first: the processor, the network, the network without weights."""
    file, name = place
    with key_set(folder / file, name, value):
        for read in (load_processor, load_network, empty_network):
            with pytest.raises(ModelError, match=r"must be .*; correct it, or download the model again") as error:
                read(Model(path=str(folder)))
            assert name.rpartition(".")[2] in str(error.value)
            assert file in str(error.value)


@table(("name", "value"), [("text_config.num_hidden_layers", 10**9), ("vision_config.patch_size", 0)])
def test_a_plan_names_such_a_number(folder: Path, name: str, value: object) -> None:
    config = Config.model_validate({"model": {"path": str(folder)}, "environment": {"name": "shapes"}})
    refused = pytest.raises(ModelError, match=rf"{name}={value} in its config.json must be a whole number from 1")
    with key_set(folder / CONFIG, name, value), refused:
        model_sizes(config)


@table("kind", {*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES})
def test_the_numbers_of_models_that_transformers_knows_are_accepted(kind: str) -> None:
    try:
        config = AutoConfig.for_model(kind)
    except (ImportError, OSError, ValueError, TypeError):
        return  # needs a package or a part that is not there
    check_numbers(kind, CONFIG, json.loads(json.dumps(config.to_dict(), default=str)))


COLOURS = ["How many circles are there?", "What colour is the square?", "red", "blue"] * 20
TRAIN = """
import random
from fovea.models.tiny import build_tokenizer
word = "".join(random.Random(0).choices("abcdefghij", k=1_000_000))
print(len(build_tokenizer(["How many circles are there?", word], 2000)))
"""


def test_a_row_of_a_megabyte_without_spaces_is_no_hang() -> None:
    """In a separate process, since nothing else could end a trainer that hangs."""
    done = subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, text=True, check=False, timeout=100)
    assert int(done.stdout) > 300, done.stderr


def test_only_the_starts_of_texts_are_trained_on() -> None:
    tail = "".join(random.Random(1).choices("vwxyz", k=100))
    long = [*COLOURS, "a" * MAX_TEXT_CHARS + tail * 30]
    cut = [*COLOURS, "a" * MAX_TEXT_CHARS]
    assert build_tokenizer(long, 400).get_vocab() == build_tokenizer(cut, 400).get_vocab()
    filled = ["b " * (MAX_TEXT_CHARS // 2)] * (MAX_CORPUS_CHARS // MAX_TEXT_CHARS)
    assert build_tokenizer([*filled, *COLOURS], 400).get_vocab() == build_tokenizer(filled, 400).get_vocab()
    assert build_tokenizer(COLOURS, 400).decode(build_tokenizer(COLOURS, 400).encode(tail)) == tail


def test_most_heads_of_a_new_delta_net_remember_a_prompt() -> None:
    """A tenth of a state is left after the 25 tokens of a prompt of the demo."""
    named = dict(tiny("qwen3_5", num_layers=12).network.named_parameters())
    biases = {name: bias for name, bias in named.items() if name.endswith("dt_bias")}
    left = [
        (-25 * named[name.replace("dt_bias", "A_log")].exp() * softplus(bias)).exp() for name, bias in biases.items()
    ]
    assert (torch.cat(left) > 0.1).float().mean() > 0.5


TEXT = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>How many, Zoë?<|im_end|>\n"


def test_a_tokenizer_is_written_in_names_that_both_versions_read(tmp_path: Path) -> None:
    tokenizer = tiny("qwen3_vl").processor.tokenizer
    save_tokenizer(tokenizer, tmp_path)
    written = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast", "version 4 has no class for any tokenizer.json"
    # version 4 asks extra_special_tokens for its keys
    assert not isinstance(written.get("extra_special_tokens"), list)
    read = AutoTokenizer.from_pretrained(tmp_path)
    assert read(TEXT).input_ids == tokenizer(TEXT).input_ids
    assert set(read.all_special_tokens) == set(tokenizer.all_special_tokens)
    assert (read.eos_token_id, read.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert len(read) == len(tokenizer)


def test_a_tokenizer_with_a_class_of_its_own_keeps_it(tmp_path: Path) -> None:
    save_tokenizer(tiny("qwen3_vl").processor.tokenizer, tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tokenizer_class": "Qwen2Tokenizer"}))
    save_tokenizer(AutoTokenizer.from_pretrained(tmp_path), tmp_path / "again")
    written = json.loads((tmp_path / "again" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert written["tokenizer_class"] in ("Qwen2Tokenizer", "Qwen2TokenizerFast")
    assert not isinstance(written.get("extra_special_tokens"), list)
