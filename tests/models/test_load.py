"""Loading a model folder as the hub lays it out, written here by transformers itself; and what is wrong with others."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fovea.config.model import Model
from fovea.errors import ModelError
from fovea.models.load import load_network, pick_device, save_network
from fovea.models.model_files import damaged_model
from fovea.models.processor import load_processor
from fovea.models.tiny import TinyParts, save_tiny
from fovea.models.vlm import VLM
from fovea.models.weights_to_sync import in_layout_of_files, merged_weights_to_sync
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
    empty = tmp_path / "empty"
    empty.mkdir()
    without_weights = save(tiny("qwen3_vl"), tmp_path / "without_weights")
    for file in without_weights.glob("*.safetensors"):
        file.unlink()
    other_family = tmp_path / "other"
    save(tiny("qwen3_vl"), other_family)
    (other_family / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return {
        "missing": tmp_path / "nowhere",
        "empty": empty,
        "without_weights": without_weights,
        "other_family": other_family,
    }


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("missing", "no such folder; give a model folder or a hub id such as"),
        ("empty", "has no config.json; give the folder that holds the model's files"),
        ("without_weights", r"no weights \(\*\.safetensors\); download the whole model"),
        ("other_family", "its model_type is llama, and Fovea trains qwen2_vl, qwen2_5_vl, qwen3_vl"),
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
    for path in (
        "models/Qwen3-VL-2B-Instuct",
        "./models/Qwen3-VL-2B-Instrut",
        f"{tmp_path}/models/Qwen-VL-2B-Instruct",
    ):
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


def spoil(folder: Path, how: str) -> None:
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    name = next(name for name in tensors if "layers.1.mlp.up_proj" in name)
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif how == "a pointer instead of weights":
        weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 5\n")
    elif how == "a tensor is missing":
        save_file({key: value for key, value in tensors.items() if key != name}, weights, {"format": "pt"})
    elif how == "a tensor of another size":
        save_file(tensors | {name: tensors[name][:-8].contiguous()}, weights, {"format": "pt"})
    elif how == "a broken config":
        (folder / "config.json").write_text("{broken")
    elif how == "a broken template":
        (folder / "chat_template.jinja").write_text("{% for x in %}")
    elif how == "no image processor":
        (folder / "preprocessor_config.json").unlink()


@pytest.mark.parametrize(
    "how",
    [
        "truncated",
        "a pointer instead of weights",
        "a tensor is missing",
        "a tensor of another size",
        "a broken config",
        "a broken template",
        "no image processor",
    ],
)
def test_a_spoiled_folder_is_refused_in_one_line(how: str, tmp_path: Path) -> None:
    """Above all a missing tensor, which transformers replaces by random numbers and a warning."""
    folder = save(tiny("qwen3_vl"), tmp_path)
    spoil(folder, how)
    with pytest.raises(
        ModelError, match=r"^model\.path=.*download the whole model again, or give another folder$"
    ) as error:
        load_both(Model(path=str(folder)))
    assert "\n" not in str(error.value)


def test_what_is_no_folder_is_taken_for_an_id_and_told_so() -> None:
    refused = (
        r"there is no folder nobody/nothing in /.*, so it is taken for the id of a model on the hub; correct it, or"
    )
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
    # what we save is laid out as what we read
    save_network(VLM(loaded.network, loaded.processor.banned_ids), tmp_path / "saved")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("saved", "hub"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], x) for name, x in theirs.items())
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


def set_in(file: Path, keys: str, value: object) -> None:
    """Set a key of a JSON file by its dotted name."""
    content = json.loads(file.read_text())
    *above, last = keys.split(".")
    inner = content
    for key in above:
        inner = inner[key]
    inner[last] = value
    file.write_text(json.dumps(content))


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
    kept = {name: (folder / name).read_text() for name in ("config.json", "tokenizer_config.json")}
    for name, key, value in FETCHES_OR_IMPORTS:
        set_in(folder / name, key, value)
        with pytest.raises(ModelError, match=rf"{key}=.* in its {name} "):
            load_processor(Model(path=str(folder)))
        if name == "config.json":
            with pytest.raises(ModelError, match=rf"{key}=.* in its config.json "):
                load_network(Model(path=str(folder)))
        (folder / name).write_text(kept[name])
    for key in ("quantization_config", "text_config.quantization_config", "fusion_config"):
        set_in(folder / "config.json", key, {"quant_method": "fp8"})
        with pytest.raises(ModelError, match=rf"{key} in its config.json has transformers import another package"):
            load_network(Model(path=str(folder)))
        (folder / "config.json").write_text(kept["config.json"])
    for known in ("eager", "sdpa", {"": "sdpa", "text_config": "eager"}):
        set_in(folder / "config.json", "attn_implementation", known)
        load_both(Model(path=str(folder)))


def test_a_fifo_in_a_model_folder_is_not_waited_for(tmp_path: Path) -> None:
    folder = save(tiny("qwen3_vl"), tmp_path)
    (folder / "generation_config.json").unlink()
    os.mkfifo(folder / "generation_config.json")
    with pytest.raises(ModelError, match=r"generation_config.json is neither a file nor a folder"):
        load_both(Model(path=str(folder)))


def test_an_adapter_beside_the_weights_is_refused(tmp_path: Path) -> None:
    folder = save(tiny("qwen3_vl"), tmp_path)
    (folder / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "megatron_core": "evil", "megatron_config": {"a": 1}}'
    )
    with pytest.raises(ModelError, match=r"an adapter_config.json, which transformers would apply to the model"):
        load_network(Model(path=str(folder)))
