"""The parts of `benchmarks.gpu`: agreement with the CPU, decoding, training, and a whole step compared with TRL."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from statistics import median
from time import perf_counter

import numpy as np
import torch

from benchmarks.cases import CASES, Case, make_parts
from benchmarks.gpu_model import make_shaped
from benchmarks.ours import Ours, Shared, share
from benchmarks.timing import Deadline, StepTimes
from fovea.errors import is_out_of_memory
from fovea.models.families.registry import family_of
from fovea.models.flops import Passes, training_passes
from fovea.models.recompute import Recompute, recompute_activations
from fovea.models.shared_prefix.attention import Kernel
from fovea.models.tiny import TinyParts
from fovea.rollout.embedded.paged_cache import TILE_ROWS
from fovea.types import Prompt, Request, Sampling
from fovea_gym.utils.event_loop import wait_for
from fovea_tools.probe.rates import Rates, seconds_of

WARM_STEPS = 1
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.03}
"""Largest accepted mean |log-prob difference| and relative difference of gradient norms. Kernels sum in another order,
and bfloat16 has 8 significant bits (a difference of 0.006 in log-probs on a CPU)."""
PARITY_CASE = replace(CASES["tiny"], prompts=4, samples=4)
Figures = dict[str, float | str]
"""One row of a table of results, by column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The settings that all parts share."""

    device: str
    dtype: torch.dtype
    shape: dict[str, dict[str, object]]
    case: Case
    """The largest case."""
    rates: Rates
    peak: float
    """Peak operations per second, which are the denominator of MFU."""


def parity(device: str, variants: Sequence[tuple[torch.dtype, Kernel]], deadline: Deadline) -> Iterator[Figures]:
    """Measure the agreement with the CPU; yields one row per dtype and attention kernel."""
    guess = 0.0
    for dtype, attention in variants:
        if not deadline.allows(f"parity of {dtype}, {attention}", guess):
            continue
        started = perf_counter()
        yield _parity_of(device, dtype, attention)
        guess = perf_counter() - started


def _parity_of(device: str, dtype: torch.dtype, attention: Kernel) -> Figures:
    """Compare log-probs and gradient norm of a tiny model with float32 and plain attention on the CPU.

    Both use the same weights, rounded to `dtype`, and the same completions, sampled by the device's engine.
    """
    exact_parts, parts = make_parts(PARITY_CASE), make_parts(PARITY_CASE)
    for parameter in (*exact_parts.network.parameters(), *parts.network.parameters()):
        parameter.data = parameter.data.to(dtype)
    for parameter in exact_parts.network.parameters():
        parameter.data = parameter.data.float()
    ours = Ours(PARITY_CASE, 1, share(PARITY_CASE, parts, device, attention))
    exact = share(PARITY_CASE, exact_parts, attention="eager").policy
    batch = ours.draw()
    of_engine = [sample.rollout_logprobs_T for group in batch.groups for sample in group.samples]
    of_trainer = ours.shared.policy.logprobs(batch)
    reference = np.concatenate(exact.logprobs(batch))
    engine, trainer = (float(np.abs(np.concatenate(values) - reference).mean()) for values in (of_engine, of_trainer))
    norms = [policy.update(batch)["grad_norm"] for policy in (ours.shared.policy, exact)]
    gradient = abs(norms[0] / norms[1] - 1)
    limit = TOLERANCES[dtype]
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "attention": attention,
        "engine": engine,
        "trainer": trainer,
        "grad norm": gradient,
        "tolerance": limit,
        "verdict": "ok" if max(engine, trainer, gradient) <= limit else "DIFFERENT",
    }


def decoding(setting: Setting, shared: Shared, sequences: Sequence[int], deadline: Deadline) -> Iterator[Figures]:
    """Measure decoding in tokens per second without prefill, and compare it with reading weights and KV cache."""
    guess = 0.0
    n, tokens = setting.case.samples, setting.case.completion_tokens
    for count in sequences:
        if not deadline.allows(f"decoding {count} sequences", guess):
            continue
        prompts = Ours(replace(setting.case, prompts=count // n), 1, shared).prompts(count // n)
        draw_all(shared, prompts, n, 2)  # warm-up
        first = seconds_of(partial(draw_all, shared, prompts, n, 1), setting.device)
        whole = seconds_of(partial(draw_all, shared, prompts, n, tokens), setting.device)
        # the kernel reads a shared prompt once for TILE_ROWS of its completions
        reads = -(-n // TILE_ROWS)
        as_read = (tokens - 1) * bytes_of_step(shared, prompts, n, tokens, reads=reads) / setting.rates.read
        yield {
            "sequences": count,
            "prefill s": first,
            "tokens/s": count * (tokens - 1) / (whole - first),
            "floor tokens/s": count * (tokens - 1) / as_read,
            "of floor as read": as_read / (whole - first),
        }
        guess = 2.5 * (first + whole)


def draw_all(shared: Shared, prompts: Sequence[Prompt], n: int, tokens: int) -> None:
    """Generate n completions of every prompt, concurrently."""

    async def all_of_them() -> None:
        requests = [
            Request(id=str(index), prompt=prompt, sampling=Sampling(max_new_tokens=tokens, seed=index), n=n)
            for index, prompt in enumerate(prompts)
        ]
        await asyncio.gather(*map(shared.engine.generate, requests))

    wait_for(all_of_them())


def bytes_of_step(shared: Shared, prompts: Sequence[Prompt], n: int, tokens: int, *, reads: int) -> float:
    """Bytes read by an average decode step: weights, each prompt's KV cache `reads` times, half of the completions'."""
    text = shared.vlm.text_config
    width = next(shared.vlm.parameters()).element_size()
    weights = sum(p.numel() for name, p in shared.vlm.named_parameters() if ".visual." not in name) * width
    per_token = 2 * width * text.num_hidden_layers * text.num_key_value_heads * text.head_dim
    cached = sum(reads * prompt.num_tokens + n * tokens / 2 for prompt in prompts)
    return float(weights + per_token * cached)


def steps(setting: Setting, shared: Shared, cases: Sequence[Case], timed: int, deadline: Deadline) -> Iterator[Figures]:
    """Measure the times of Fovea's whole step, and the MFU of its update including the vision tower."""
    guess, recompute = 0.0, setting.case.gradient_checkpointing
    for case in cases:
        if not deadline.allows(f"our step of {name_of(case)}", guess):
            continue
        ours = Ours(case, 2 * WARM_STEPS + timed, shared)
        operations = update_operations(case, ours)
        recompute = warm_up(ours, case, recompute)
        taken = [ours.step() for _ in range(timed)]
        step, update = (median(values) for values in zip(*((t.step, t.phases["update"]) for t in taken), strict=True))
        yield {
            "case": name_of(case),
            "step s": step,
            "rollout s": median(times.rollout for times in taken),
            "update s": update,
            "update TFLOP": operations / 1e12,
            "recomputed": recompute,
            "MFU": operations / update / setting.peak,
        }
        guess = (WARM_STEPS + timed) * _growth(cases, case) * step


def warm_up(ours: Ours, case: Case, recompute: Recompute) -> Recompute:
    """Take untimed steps; returns `recompute`, or `selective` if memory ran out without recomputation."""
    try:
        ran_out = sum(ours.step().ran_out_of_memory for _ in range(WARM_STEPS)) > 0
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        ran_out = True
    if not ran_out or recompute != "none":
        return recompute
    print(f"memory ran out in {name_of(case)} with gradient_checkpointing=none: using selective from here on")
    give_back_memory()
    recompute_activations(ours.shared.parts.network, "selective")
    ours.shared.policy._limit.max_tokens = case.microbatch_tokens
    return warm_up(ours, case, "selective")


def _growth(cases: Sequence[Case], case: Case) -> float:
    """The factor by which the next case is larger than this one."""
    after = cases[cases.index(case) + 1 :]
    return after[0].prompts / case.prompts if after else 1.0


def update_operations(case: Case, ours: Ours) -> float:
    """Operations of forward and backward passes over images, prompts and completions; each prompt counts once."""
    work = family_of(ours.shared.parts.network.config, "").work
    passes: Passes = training_passes(lora=False, trains_vision=True, features_cached=False)
    return sum(
        work.prompt(prompt.num_tokens, prompt.images, passes)
        + case.samples * work.completion(case.completion_tokens, prompt.num_tokens, passes)
        for prompt in ours.prompts(case.prompts)
    )


def against_trl(
    setting: Setting, shared: Shared, cases: Sequence[Case], timed: int, deadline: Deadline
) -> Iterator[Figures]:
    """Compare Fovea with TRL in alternating steps, as in `benchmarks.vs_trl`; TRL generates with transformers."""
    if find_spec("trl") is None:
        print("skipped: TRL is not importable here; pip install 'trl==1.16.0', or ./gym '.[bench]' ./tools")
        return
    from benchmarks.trl_side import train  # noqa: PLC0415  TRL is optional

    guess = 0.0
    for case in cases:
        if not deadline.allows(f"{name_of(case)} against TRL", guess):
            continue
        ours, theirs, mine = Ours(case, WARM_STEPS + timed, shared), list[StepTimes](), list[StepTimes]()
        train(case, WARM_STEPS + timed, _taking_turns(ours, theirs, mine), fresh_parts(setting))
        give_back_memory()
        trl_s, ours_s = (median(times.step for times in taken[WARM_STEPS:]) for taken in (theirs, mine))
        yield {"case": name_of(case), "TRL s": trl_s, "ours s": ours_s, "times": trl_s / ours_s}
        guess = (WARM_STEPS + timed) * _growth(cases, case) * (trl_s + ours_s)


def _taking_turns(ours: Ours, theirs: list[StepTimes], mine: list[StepTimes]) -> Callable[[StepTimes], None]:
    def after(times: StepTimes) -> None:
        theirs.append(times)
        give_back_memory()
        mine.append(ours.step())
        give_back_memory()
        assert times.tokens == mine[-1].tokens, f"TRL sampled {times.tokens} tokens, Fovea {mine[-1].tokens}"

    return after


def give_back_memory() -> None:
    """Empty torch's CUDA allocator, after collecting reference cycles such as a finished trainer."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def fresh_parts(setting: Setting) -> TinyParts:
    """Make a new model, equal to every other model of this setting."""
    return make_shaped(setting.shape, setting.device, setting.dtype)


def name_of(case: Case) -> str:
    return f"{case.prompts}x{case.samples}, {case.completion_tokens} tokens"
