"""The embedded engine beyond the suite of all engines (`test_engine_suite`): exact values, memory, its own linears."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from fovea.errors import EngineError
from fovea.models.activation_tape import LinearGroup, Tape
from fovea.models.linear_factors import Factors, add_adapter
from fovea.models.tiny import TinyParts
from fovea.models.trainable import merged_weights
from fovea.models.vision.attention import use_segment_attention
from fovea.models.vlm import VLM
from fovea.rollout.embedded.engine import EmbeddedEngine
from fovea.rollout.embedded.linears import Int8Linears, OneDnnLinears, can_use_onednn
from fovea.rollout.embedded.tuning import Tuning
from fovea.train.packing import pack_row
from fovea.types import Completion, Request, Sampling
from fovea_gym.errors import OutOfMemoryError
from fovea_gym.utils.event_loop import wait_for
from gym_tests.tables import table
from tests.reference import model_inputs, reference_logprobs
from tests.rollout.drawing import LOGPROB_TOLERANCE, generate, make_engine, same, seeded
from tests.rollout.engine_suite import begun
from tests.tiny_models import CPU, FAMILIES, mixed_prompts, tiny, tower_passes


def test_greedy_equals_transformers_generate(parts: TinyParts) -> None:
    prompts = mixed_prompts(parts)
    groups = generate(make_engine(parts), prompts, [Sampling(max_new_tokens=24, temperature=0)] * 3, n=1)
    parts.network.set_attn_implementation("sdpa")
    for prompt, group in zip(prompts, groups, strict=True):
        inputs = model_inputs(parts, prompt, np.empty(0, dtype=np.int64))
        expected = parts.network.generate(
            **inputs, max_new_tokens=24, do_sample=False, suppress_tokens=list(parts.processor.banned_ids)
        )
        assert group[0].token_ids_T.tolist() == expected[0, prompt.num_tokens :].tolist()
    use_segment_attention(parts.network)


def test_logprobs_equal_the_trainers(parts: TinyParts) -> None:
    prompts = mixed_prompts(parts)
    groups = generate(make_engine(parts), prompts, seeded(3, max_new_tokens=12, temperature=0.8), n=5)
    row = pack_row(parts.processor.family, prompts, [[c.token_ids_T for c in group] for group in groups], CPU)
    with torch.no_grad():
        scores = VLM(parts.network, parts.processor.banned_ids)(row, temperature=0.8, chunk_tokens=100)
    sampled = torch.from_numpy(np.concatenate([c.logprobs_T for group in groups for c in group]))
    torch.testing.assert_close(sampled, scores.logprobs_A, atol=LOGPROB_TOLERANCE, rtol=0)


def test_a_request_does_not_feel_what_runs_beside_it(parts: TinyParts) -> None:
    prompts = mixed_prompts(parts)
    samplings = [
        Sampling(max_new_tokens=20, seed=1),
        Sampling(max_new_tokens=5, seed=2, temperature=0.5, top_k=9),
        Sampling(max_new_tokens=11, seed=3, top_p=0.8, min_p=0.01, stop=("e",)),
    ]
    alone = [generate(make_engine(parts), [p], [s], n=5)[0] for p, s in zip(prompts, samplings, strict=True)]
    together = generate(make_engine(parts), prompts * 3, samplings * 3, n=3)
    for index, group in enumerate(together):
        assert same(group, alone[index % 3][:3]), "nor how many completions its group has"


def test_each_image_and_prompt_is_run_once(parts: TinyParts) -> None:
    prompts, patches = mixed_prompts(parts), tower_passes(VLM(parts.network, parts.processor.banned_ids))
    generate(make_engine(parts), prompts, seeded(3, max_new_tokens=6), n=8)
    distinct = {image.key: len(image.tensors["pixel_values"]) for prompt in prompts for image in prompt.images}
    assert patches == [sum(distinct.values())]


def test_weights_are_shared_not_copied_and_follow_the_trainer() -> None:
    parts, greedy = tiny("qwen3_vl"), [Sampling(max_new_tokens=10, temperature=0)]
    engine, prompts = make_engine(parts), mixed_prompts(parts)[:1]
    before = generate(engine, prompts, greedy, n=1)
    with torch.no_grad():
        for parameter in parts.network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    after, expected = (generate(each, prompts, greedy, n=1) for each in (engine, make_engine(parts)))
    assert same(after[0], expected[0])
    assert before[0][0].token_ids_T.tolist() != after[0][0].token_ids_T.tolist()


def test_weights_of_another_process_are_copied_into_the_vision_tower() -> None:
    source, target = tiny("qwen3_vl", seed=1), tiny("qwen3_vl", seed=2)
    engine = make_engine(target)
    engine.load_weights({name: x.clone() for name, x in merged_weights(source.network)}, version=1)
    prompts, greedy = mixed_prompts(source), [Sampling(max_new_tokens=10, temperature=0)] * 3
    expected = generate(make_engine(source), prompts, greedy, n=1)
    assert all(same(a, b) for a, b in zip(generate(engine, prompts, greedy, n=1), expected, strict=True))


def test_an_engine_without_weights_says_so_to_every_caller() -> None:
    parts = tiny("qwen3_vl")
    engine = EmbeddedEngine(VLM(parts.network, parts.processor.banned_ids), parts.processor, max_batch_tokens=10_000)
    with pytest.raises(EngineError, match="load_weights first"):
        generate(engine, mixed_prompts(parts), seeded(3, max_new_tokens=3), n=2)


def test_an_engine_that_draws_takes_no_new_weights_and_can_be_closed() -> None:
    parts = tiny("qwen3_vl")
    request = Request(id="r", prompt=mixed_prompts(parts)[2], sampling=Sampling(max_new_tokens=50), n=2)

    async def in_the_middle() -> None:
        engine = make_engine(parts)
        drawing = await begun(engine, request)
        with pytest.raises(EngineError, match="await them first"):
            engine.load_weights(dict(merged_weights(parts.network)), version=8)
        await drawing
        drawing = await begun(engine, request)
        await engine.close()
        with pytest.raises((EngineError, asyncio.CancelledError)):
            await drawing

    wait_for(in_the_middle())


def test_a_stop_string_that_the_last_allowed_token_completes_counts_as_stop() -> None:
    parts = tiny("qwen3_vl")

    def drawn(*stop: str) -> Sequence[Completion]:
        return generate(make_engine(parts), mixed_prompts(parts)[2:], seeded(1, max_new_tokens=6, stop=stop), n=8)[0]

    free = drawn()
    whole = next(c for c in free if c.finish == "length" and c.text.count(c.text[-1]) == 1 and c.text[-1].isprintable())
    cut = drawn(whole.text[-1])[list(free).index(whole)]
    assert (cut.text, len(cut.token_ids_T), cut.finish) == (whole.text[:-1], 6, "stop")


def test_int8_decoding_is_close_and_its_logprobs_are_those_it_drew_from() -> None:
    parts, differences = tiny("qwen2_5_vl"), []
    engine, prompts = make_engine(parts, int8_decoding=True), mixed_prompts(parts)
    for exact in (False, True):
        groups = generate(engine, prompts, seeded(3, max_new_tokens=12, exact=exact), n=4)
        sampled = [(p, completion) for p, group in zip(prompts, groups, strict=True) for completion in group]
        of_transformers = [reference_logprobs(parts, p, c.token_ids_T).detach().numpy() for p, c in sampled]
        logprobs = np.concatenate([completion.logprobs_T for _, completion in sampled])
        differences.append(np.abs(logprobs - np.concatenate(of_transformers)))
    int8, exact = differences
    assert 1e-3 < int8.mean() < 0.2
    assert exact.max() < LOGPROB_TOLERANCE, "what is not trained on, an evaluation, is sampled exactly"


@table("rows", [1, 2, 33])
def test_int8_linears_are_off_by_no_more_than_their_rounding(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    layers = [Factors(torch.randn(n, 48, generator=generator), torch.randn(n, generator=generator)) for n in (5, 64)]
    x = torch.randn(rows, 48, generator=generator)
    for layer, out in zip(layers, Int8Linears(layers)(x), strict=True):
        weight, bias = layer.weight, layer.bias
        # half a step of either factor, times the other, summed
        step_x, step_w = x.abs().amax(1, keepdim=True) / 254, weight.abs().amax(1, keepdim=True) / 254
        bound = x.abs() @ step_w.expand_as(weight).t() + step_x * weight.abs().sum(1) + 48 * step_x * step_w.t()
        assert ((out - (x @ weight.t() + bias)).abs() <= bound + 1e-5).all()
        assert not torch.equal(out, x @ weight.t() + bias)


WIDE = {"hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 192}


def test_packed_decoding_changes_nothing_that_is_drawn() -> None:
    """The demo's model is too narrow for it: this one is not."""
    for family in FAMILIES:
        parts = tiny(family, **WIDE)
        groups = []
        for packed in (True, False):
            engine = make_engine(parts, onednn_decoding=packed)
            assert Tuning(onednn_decoding=packed).uses_onednn(12, parts.network.get_input_embeddings().weight) == packed
            groups.append(generate(engine, mixed_prompts(parts), seeded(3, max_new_tokens=12), n=4))
        assert all(same(a, b) for a, b in zip(*groups, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@table("rows", [1, 7, 32, 100])
def test_packed_linears_equal_plain_ones(rows: int, dtype: torch.dtype) -> None:
    if not can_use_onednn(torch.empty(0, dtype=dtype)):
        pytest.skip("oneDNN has no bfloat16 products for this CPU")
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    layers = [Factors(random(5, 48), random(5)), Factors(random(64, 48), random(64), random(4, 48), random(64, 4), 0.5)]
    x = random(rows, 48)
    tape = Tape([[69, 1, 1, 1]], 2**20, dtype)
    with tape.recording(rows):
        outs = OneDnnLinears(layers, tape.layer(0)[0])(x)
    for layer, out in zip(layers, outs, strict=True):
        expected = add_adapter(torch.nn.functional.linear(x, layer.weight, layer.bias), x, layer)
        tolerance = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(out, expected, atol=tolerance * float(expected.abs().max()), rtol=0)
    assert torch.equal(tape.read(0, LinearGroup.QKV, slice(None), torch.arange(rows)), torch.cat(outs, dim=1))


@table(
    ("rows", "width", "dtype", "faster"),
    [
        (64, 256, torch.float32, True),
        (65, 256, torch.float32, False),
        (64, 192, torch.float32, False),
        (256, 128, torch.bfloat16, True),
        (257, 128, torch.bfloat16, False),
        (256, 64, torch.bfloat16, False),
        (8, 512, torch.float16, False),
    ],
)
def test_packed_decoding_where_it_is_faster(rows: int, width: int, dtype: torch.dtype, faster: bool) -> None:
    embed = torch.empty(10, width, dtype=dtype)
    assert Tuning().uses_onednn(rows, embed) == (faster and can_use_onednn(embed))


def test_a_rollout_that_runs_out_of_memory_names_its_settings_and_the_engine_goes_on() -> None:
    """The random numbers of such a request are 128 TiB."""
    parts = tiny("qwen3_vl")
    engine, prompts = make_engine(parts, max_batch_tokens=2**60), mixed_prompts(parts)[:1]
    with pytest.raises(
        OutOfMemoryError, match=r"in the rollout; lower rollout\.engine\.max_batch_tokens=\d+, or rollout"
    ):
        generate(engine, prompts, [Sampling(max_new_tokens=2**45)], n=1)
    ((completion,),) = generate(engine, prompts, [Sampling(max_new_tokens=2)], n=1)
    assert len(completion.token_ids_T) <= 2
