"""Checks that tests on a CPU notice faults that earlier versions had on GPUs: puts each back into a copy of the tree.

    python -m benchmarks.gpu_faults
    python -m benchmarks.gpu_faults --only "vLLM"

Prints a Markdown table of the tests that fail. Tests of the kernel run in SGLang's environment (`.venv-sglang`), which
has Triton, tests of vLLM in `.venv-vllm`, and tests of Megatron in `.venv-megatron`. Exits with 1 if a fault is not
noticed or a test fails without a fault.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.mutations import EXIT_CODE, ROOT, Tests, copy_tree

LOG = "pytest.log"
KERNEL = "fovea/rollout/embedded/paged_triton.py"
TRIAL = "fovea/rollout/embedded/paged_attention.py"
CACHE = "fovea/rollout/embedded/paged_cache.py"
STATES, PREFILL = "fovea/rollout/embedded/states.py", "fovea/rollout/embedded/prefill.py"
OPTIMIZER, OPTIMIZER_TESTS = "fovea/train/torch/optimizer.py", "tests/train/test_optimizer.py"
TWIN = "tests/rollout/test_gpu_decoding.py::test_the_kernel_equals_its_plain_twin"
PAGED = "tests/rollout/test_gpu_decoding.py"
PREEMPTION = "tests/rollout/test_batching.py::test_preempted_completions_are_those_of_an_engine_with_room"
SEGMENTS = "tests/cli/test_options.py::test_segments_of_gpu_memory_grow_where_no_engine_opens_them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A change of one place in the code that brings a fault back."""

    name: str
    file: str
    before: str
    after: str
    tests: str
    """A test file, or one test."""
    environment: str = ".venv"


FAULTS = (
    Fault(
        name="paged decoding is refused: dense cache, no graphs",
        file=TRIAL,
        before="return why_refused(lambda: difference(paged_attention, shape, page_tokens))",
        after='return "torch wants both or neither"',
        tests=f"{PAGED}::test_a_run_on_a_gpu_prints_how_it_decodes",
    ),
    Fault(
        name="paged decoding is refused: whole rollouts",
        file="fovea/rollout/embedded/tuning.py",
        before="return paged_refusal(heads_of(shape, device, dtype), page_tokens)",
        after='return "torch wants both or neither"',
        tests="tests/rollout/test_gpu_decoding.py",
    ),
    Fault(
        name="the trial has one row, which hides errors in further rows",
        file=TRIAL,
        before="TRIALS = ((2, 40), (3, 130), (40, 300), (300, 600))",
        after="TRIALS = ((1, 40),)",
        tests=f"{PAGED}::test_a_wrong_kernel_is_refused_with_where_it_is_wrong",
    ),
    Fault(
        name="the trial compares no values",
        file=TRIAL,
        before="if not relative <= TOLERANCE[shape.dtype]:",
        after="if relative < 0:",
        tests=f"{PAGED}::test_a_wrong_kernel_is_refused_with_where_it_is_wrong",
    ),
    Fault(
        name="the output goes into a copy, and uninitialised memory is returned",
        file=KERNEL,
        before="merge_splits[(rows * heads,)](parts, logs, out,",
        after="merge_splits[(rows * heads,)](parts, logs, out.clone(),",
        tests=TWIN,
        environment=".venv-sglang",
    ),
    Fault(
        name="split keys: some rows are not written",
        file=KERNEL,
        before="merge_splits[(rows * heads,)]",
        after="merge_splits[(rows * heads // 2,)]",
        tests=TWIN,
        environment=".venv-sglang",
    ),
    Fault(
        name="split keys: only the first part counts",
        file=KERNEL,
        before="weight = tl.exp(log - tl.max(log, 0))",
        after="weight = tl.where(split == 0, 1.0, 0.0)",
        tests=TWIN,
        environment=".venv-sglang",
    ),
    Fault(
        name="a completion reserves pages for max_new_tokens",
        file=CACHE,
        before="self._new_pages(each, each.sampled_tokens + GROWTH_TOKENS) for each",
        after="self._new_pages(each, each.limit_tokens) for each",
        tests=PREEMPTION,
    ),
    Fault(
        name="running rows are given no room to grow",
        file=CACHE,
        before="growth = sum(self._missing(row, row.tokens + GROWTH_TOKENS) for row in self._rows)",
        after="growth = 0",
        tests="tests/rollout/test_caches.py::test_pages_are_admitted_by_use_and_room_to_grow",
    ),
    Fault(
        name="a preempted completion is prefilled without its last token but one",
        file="fovea/rollout/embedded/requests.py",
        before="origin, fed_T = preempted.row.request, preempted.token_ids_T[:-1]",
        after="origin, fed_T = preempted.row.request, preempted.token_ids_T[:-2]",
        tests=PREEMPTION,
    ),
    Fault(
        name="the oldest completion is preempted",
        file="fovea/rollout/embedded/scheduler.py",
        before="youngest = max(range(len(batch))",
        after="youngest = min(range(len(batch))",
        tests="tests/rollout/test_batching.py::test_the_youngest_is_preempted",
    ),
    Fault(
        name="a preempted completion goes on with the random numbers of another token",
        file="fovea/rollout/embedded/batch.py",
        before="new.length_B[index], new.token_B[index] = length,",
        after="new.length_B[index], new.token_B[index] = length + 1,",
        tests=PREEMPTION,
    ),
    Fault(
        name="Qwen3.5: a prefill copies an index from pageable memory",
        file=STATES,
        before="to_device(torch.tensor([span.prompt - first for span in spans]), self._device)",
        after="torch.tensor([span.prompt - first for span in spans], device=self._device)",
        tests="tests/rollout/test_gpu_decoding.py",
    ),
    Fault(
        name="Qwen3.5: finished rows copy the states of all others",
        file=STATES,
        before="                states[targets] = states[sources]",
        after="                states = states.clone()\n                states[targets] = states[sources]",
        tests="tests/rollout/test_delta_states.py::test_states_of_one_layer_at_a_time_are_in_memory_twice",
    ),
    Fault(
        name="Megatron: rotary positions read the end of each row, twice per layer",
        file="fovea/train/megatron/model.py",
        before="        rotate_without_waits()",
        after="        pass",
        tests="tests/train/megatron/test_model.py::test_rotary_positions_of_packed_rows_read_nothing",
        environment=".venv-megatron",
    ),
    Fault(
        name="later turns: attention of each conversation by itself",
        file=PREFILL,
        before='if fastest_kernel(heads_of(shape, device, like.dtype)) == "varlen":',
        after="if False:",
        tests="tests/rollout/test_gpu_decoding.py::test_later_turns_launch_as_much_for_many_conversations_as_for_one",
    ),
    Fault(
        name="later turns: new tokens see the tokens after them",
        file=PREFILL,
        before="causal=True, scale=scale",
        after="causal=False, scale=scale",
        tests="tests/rollout/test_turns.py::test_later_turns_of_all_conversations_attend_in_one_call_per_layer",
    ),
    Fault(
        name="vLLM under torchrun: every rank on GPU 0",
        file="fovea/rollout/vllm/arguments.py",
        before='"device_ids": gpus,',
        after='"device_ids": None,',
        tests="tests/rollout/vllm/test_engine.py::test_each_process_gives_vllm_its_own_gpus",
        environment=".venv-vllm",
    ),
    Fault(
        name="vLLM under torchrun: the GPUs begin at 0",
        file="fovea/rollout/checks.py",
        before="return list(range(own, own + number))",
        after="return list(range(number))",
        tests="tests/rollout/test_checks.py",
    ),
    Fault(
        name="an engine's start leaves the trainer on another GPU",
        file="fovea/rollout/checks.py",
        before="            cuda.set_device(own)",
        after="            pass",
        tests="tests/rollout/test_checks.py",
    ),
    Fault(
        name="a weight sync reads every checksum separately",
        file="fovea/utils/checksum.py",
        before="awaited(torch.stack([hashes[place] for place in places])).tolist()",
        after="[int(awaited(hashes[place])) for place in places]",
        tests="tests/weights/test_sync.py::test_a_weight_sync_reads_the_device_once_for_all_tensors",
    ),
    Fault(
        name="a wait reads lengths that are not needed",
        file="fovea/rollout/embedded/batch.py",
        before="        if self._rows_with_stop:\n            lengths",
        after="        if True:\n            lengths",
        tests="tests/rollout/test_gpu_decoding.py::test_a_rollout_waits_once_a_sync_and_twice_for_what_ended",
    ),
    Fault(
        name="gradients of the head are rounded to 16 bits after each chunk",
        file="fovea/models/head_gradients.py",
        before="torch.addmm(sum_WE, of_logits_WA, hidden_AE, out_dtype=torch.float32, out=sum_WE)",
        after="sum_WE.add_(of_logits_WA @ hidden_AE)",
        tests="tests/models/test_token_logprobs.py::test_on_a_gpu_products_of_chunks_are_added_by_the_product_itself",
    ),
    Fault(
        name="host masters: all gradients are in host memory at once",
        file=OPTIMIZER,
        before="most = BUCKET_BYTES // torch.float32.itemsize",
        after="most = 2**60",
        tests=f"{OPTIMIZER_TESTS}::test_the_host_holds_two_buckets_of_gradients_and_waits_once_for_each",
    ),
    Fault(
        name="host masters: a bucket arrives where the host computes with the one before",
        file=OPTIMIZER,
        before="buffers[number % 2]",
        after="buffers[0]",
        tests=f"{OPTIMIZER_TESTS}::test_a_step_by_buckets_is_the_whole_step_bit_for_bit",
    ),
    Fault(
        name="host masters: each part of a parameter counts as a step",
        file=OPTIMIZER,
        before='state["step"] if rows.are_last else state["step"].clone()',
        after='state["step"]',
        tests=f"{OPTIMIZER_TESTS}::test_a_step_by_buckets_is_the_whole_step_bit_for_bit",
    ),
    Fault(
        name="host masters: weights are uploaded from pageable memory",
        file=OPTIMIZER,
        before="                copy_pinned(master, rows.of(rows.parameter))",
        after="                rows.of(rows.parameter).copy_(master)",
        tests=f"{OPTIMIZER_TESTS}::test_the_host_holds_two_buckets_of_gradients_and_waits_once_for_each",
    ),
    Fault(
        name="segments of a GPU's memory do not grow",
        file="fovea/cli/main.py",
        before="        use_expandable_segments()",
        after="        pass",
        tests=SEGMENTS,
    ),
    Fault(
        name="segments grow where CUDA IPC forbids it",
        file="fovea/cli/main.py",
        before="    if config.expands_segments:",
        after="    if True:",
        tests=SEGMENTS,
    ),
    Fault(
        name="every process reads the model",
        file="fovea/wiring/model.py",
        before="(load_network if ranks.is_first else empty_network)(settings)",
        after="load_network(settings)",
        tests="tests/wiring/test_model.py",
    ),
    Fault(
        name="a pydantic error loses its reason",
        file="gym/fovea_gym/errors.py",
        before="lines = faults or str(error)",
        after="lines = str(error)",
        tests="tests/test_errors.py",
    ),
    Fault(
        name="max_model_len is not capped at the model's positions",
        file="fovea/rollout/checks.py",
        before="return chosen or min(default, positions)",
        after="return chosen or default",
        tests="tests/rollout/test_checks.py",
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only faults with this text in their name")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "gpu_faults", help="folder for the copy")
    options = parser.parse_args(arguments)
    faults = [fault for fault in FAULTS if options.only in fault.name]
    copy = options.folder / ROOT.name
    copy_tree(ROOT, copy)
    # import no code of Fovea in advance, since the faults change it
    modules = ("numpy", "torch", "transformers")
    names = sorted({fault.environment for fault in faults})
    processes = {name: Tests(copy, modules, str(copy / name / "bin" / "python")) for name in names}
    for name, tests in sorted({(fault.environment, fault.tests) for fault in faults}):
        if failed := first_failure(processes[name], tests):
            print(f"{failed} fails even without a fault")
            return 1
    print("| fault put back | in | noticed by |\n|---|---|---|", flush=True)
    unnoticed = 0
    for fault in faults:
        with put_back(copy, fault):
            by = first_failure(processes[fault.environment], fault.tests)
        unnoticed += not by
        print(f"| {fault.name} | `{fault.file}` | {f'`{by}`' if by else '**nothing**'} |", flush=True)
    return int(unnoticed > 0)


@contextmanager
def put_back(copy: Path, fault: Fault) -> Iterator[None]:
    """Put the fault into the copy during the context; ValueError unless its place occurs exactly once."""
    file = copy / fault.file
    source = file.read_text(encoding="utf-8")
    if source.count(fault.before) != 1:
        raise ValueError(
            f"{fault.file} contains this {source.count(fault.before)} times instead of once: {fault.before}"
        )
    file.write_text(source.replace(fault.before, fault.after), encoding="utf-8")
    try:
        yield
    finally:
        file.write_text(source, encoding="utf-8")


def first_failure(process: Tests, tests: str) -> str:
    """Run tests and return the first failed one, empty if all pass; RuntimeError if pytest itself fails."""
    words = ["-n0", "-o", "faulthandler_timeout=1200", "-m", "not gpu", tests]  # long enough for a busy machine
    found = process.first_failure(words, LOG, limit_seconds=math.inf)
    if found.startswith(EXIT_CODE):
        raise RuntimeError(
            f"pytest ended with {found} and without a failed test; its output is in {LOG} next to the copy"
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
