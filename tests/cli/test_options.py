"""What every command has in common: help that fits a terminal, -h, --debug, and completion by the shell."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from fovea.cli import main as cli
from fovea.cli.doctor import Found, findings
from fovea.cli.texts import with_options
from fovea.config.algorithm import DEFAULTS_OF
from fovea.utils import malloc
from fovea.utils.installing import pip_install_elsewhere
from fovea.wiring import run as run_module
from gym_tests.tables import table
from tests.saved import make_checkpoint

ROOT = Path(__file__).parents[2]
COMMANDS = ["train", "eval", "saliency", "export", "grade", "serve", "view", "report", "config", "doctor", "recipes"]
DATA_SETS = ["geo3k", "vqa", "caption", "geospot", "easy-vqa"]
WORKFLOWS = [["workflow", "vlm-rl-training"], ["workflow", "vlm-rl-eval"]]
SMALL = ["environment.train_size=50", "environment.dev_size=10", "environment.test_size=12"]
FOUR = ["cluster.gpus_per_node=4"]
SERVERS = ("rollout.engine.weights_dir=w", "rollout.engine.servers=[http://a:1]")


def fovea(*words: str) -> Result:
    return CliRunner().invoke(cli.app, words)


@pytest.mark.parametrize("words", [[], ["data"], ["workflow"]])
def test_the_summary_of_a_command_is_not_cut_off(words: list[str]) -> None:
    _, _, summaries = CliRunner().invoke(cli.app, [*words, "-h"], env={"COLUMNS": "80"}).stdout.partition("Commands:")
    assert summaries
    assert "..." not in summaries


@table("words", [*([name] for name in COMMANDS), *(["data", name] for name in DATA_SETS), *WORKFLOWS])
def test_every_command_has_a_short_help_and_debug(words: list[str]) -> None:
    result = fovea(*words, "-h")
    assert result.exit_code == 0, result.output
    assert all(option in result.stdout for option in ("-h, --help", "--debug"))


@table(
    ("typed", "offered"),
    [
        ("train rollout.top", ["rollout.top_p=", "rollout.top_k="]),
        ("train shapes", ["shapes", "shapes_ppo", "shapes_small", "shapes_zoom"]),
        ("view ru", ["runs/first"]),
        ("eval runs/first --recipe geo3k_", ["geo3k_qwen2_5_vl_7b", "geo3k_qwen3_5", "geo3k_sglang", "geo3k_vllm"]),
        # neither bash nor zsh puts a space behind `=` where several words are left
        ("train shapes rollout.max_new_t", ["rollout.max_new_tokens=", "rollout.max_new_tokens=512"]),
        ("train model.pa", ["model.path=", "model.path=null"]),
        # bash asks for a value behind `key`, `=`
        ("train algorithm.name = grp", ["grpo"]),
        ("train algorithm.name =", list(DEFAULTS_OF)),
        ("train algorithm.name=gr", ["algorithm.name=grpo"]),
        ("config log.progress=", ["log.progress=true", "log.progress=false"]),
        ("train shapes rollout.max_new_tokens =", []),
    ],
)
def test_a_shell_completes_settings_recipes_and_runs(typed: str, offered: list[str], in_tmp_path: None) -> None:
    """What bash offers for the last word of a command line; a shell runs the command so in the test below."""
    for run in ("first", "second"):
        Path("runs", run).mkdir(parents=True, exist_ok=True)
    Path("runs/first/config.yaml").touch()
    words = f"fovea {typed}"
    asked = {"_FOVEA_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    assert CliRunner().invoke(cli.app, [], prog_name="fovea", env=asked).stdout.split() == offered


def test_bash_completes_a_setting_up_to_its_equals_sign(tmp_path: Path) -> None:
    """By readline, in a shell with the script of `--show-completion`."""
    (tmp_path / "fovea").write_text(f"#!{sys.executable}\nfrom fovea.cli.main import main; main()\n")
    (tmp_path / "fovea").chmod(0o755)
    env = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", "PYTHONPATH": str(ROOT)}
    command = [tmp_path / "fovea", "--show-completion", "bash"]
    script = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    shown = "fovea() { printf '<%s>' \"$@\"; }"
    (tmp_path / "rc").write_text(f"PATH={tmp_path}:$PATH\nPS1='ready '\n{script}\n{shown}\n")
    typed = b"fovea train rollout.max_new_t\t8 algorithm.name=gr\t; exit\n"
    assert "<train><rollout.max_new_tokens=8><algorithm.name=grpo>" in typed_into_bash(tmp_path / "rc", typed)


def typed_into_bash(startup: Path, typed: bytes) -> str:
    """What an interactive bash shows, on a separate terminal, of keys that are typed at its first prompt."""
    ours, its = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"}
    command = ["bash", "--noprofile", "--rcfile", str(startup), "-i"]
    shell = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment, start_new_session=True)
    os.close(its)
    shown = b""
    try:
        while not shown.endswith(b"ready "):
            shown += os.read(ours, 4096)
        os.write(ours, typed)
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:  # the terminal is gone with the shell
        shell.wait()
    os.close(ours)
    return shown.decode()


def test_help_lists_commands_in_the_order_of_use_and_the_doctor_begins_with_what_matters() -> None:
    told = fovea("-h").stdout.partition("Commands:")[2].partition("Start with")[0].splitlines()
    listed = [line.split()[0] for line in told if re.match(r"  \S", line)]
    assert listed[:7] == ["recipes", "train", "view", "report", "eval", "saliency", "export"]
    assert listed[-2:] == ["cluster", "workflow"]
    assert next(iter(findings(Found({}, [])).items())) == ("ready", "yes, on cpu: torch sees no CUDA device")
    assert findings(Found({"torch": "ImportError: x"}, []))["ready"] == "no: torch is broken"


def dry_run(*words: str, recipe: str = str(ROOT / "recipes" / "shapes.yaml")) -> Result:
    return fovea("train", recipe, *(SMALL if recipe != "own.yaml" else []), *words, "--dry-run")


def test_a_dry_run_says_what_would_run_and_leaves_nothing(in_tmp_path: None) -> None:
    Path("mine.py").write_text("def score(task, text, images):\n    return float(task.answer in text)\n")
    result = dry_run("reward=mine.py:score")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "model: tiny qwen3_vl, to be made with random weights",
        "train: 50 rows",
        "dev: 10 rows",
        "test: 12 rows",
        "reward: mine.py:score, tried on a training row",
        "grpo: 1,200 steps of 40 prompts with 8 completions each, of at most 8 tokens",
        "run folder: runs/shapes-<time>",
    ]
    assert [path.name for path in Path().iterdir() if path.name != "__pycache__"] == ["mine.py"]


@table(
    ("words", "message"),
    [
        (["model.tiny=null", "model.path=models/absent/it"], "models/absent/it: no such folder"),
        (["reward=mine.py:score"], "raised NameError: name 'undefined' is not defined at mine.py:2"),
        (["run_dir=taken"], "run_dir=taken already holds a run"),
        (["run_dir=runs/{name}"], "run_dir=runs/shapes already holds a run; set resume=auto"),
        (["data.kind_weights={countin: 2}"], "data.kind_weights names 'countin', but no row has that kind"),
        (["curriculum.level_weights=[{hard: 2}]"], "curriculum.level_weights is set, but the rows have no levels"),
        ([*FOUR, "train.backend.replicas=3"], "replicas=3 does not divide the number of training processes, 4"),
        (
            [*FOUR, "train.backend={name: megatron, tensor_parallel_size: 3}", "model.dtype=bfloat16"],
            "tensor_parallel_size=3 times pipeline_parallel_size=1 does not divide the number of training processes, 4",
        ),
        ([*FOUR, "rollout.engine=vllm_servers", *SERVERS], "rollout.engine=vllm_servers with 4 workers that generate"),
        (["rollout.engine=vllm", "rollout.engine.python=no/python"], "rollout.engine.python=no/python: no such interp"),
    ],
)
def test_a_dry_run_fails_where_the_run_would(words: list[str], message: str, in_tmp_path: None) -> None:
    Path("mine.py").write_text("def score(task, text, images):\n    return undefined\n")
    for run in ("taken", "runs/shapes"):
        shutil.rmtree(run, ignore_errors=True)
        make_checkpoint(Path(run), 3)
    result = dry_run(*words)
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr


GOOD = {"question": "q", "answer": "a", "image": "good.png"}


def write_rows(rows: list[dict[str, object]]) -> None:
    """Rows to train on, a reward, and test rows that can be used."""
    Path("mine.py").write_text("def score(task, text, images):\n    return 0.0\n")
    Image.new("RGB", (32, 32)).save("good.png")
    Path("broken.png").write_bytes(b"no picture")
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("test.jsonl").write_text(json.dumps(GOOD) + "\n")
    Path("own.yaml").write_text(
        "model: {tiny: {}}\nreward: mine.py:score\nenvironment: {name: rows, train_files: [rows.jsonl], "
        "test_files: [test.jsonl], dev_share: 0}\nrollout: {prompts_per_step: 8}\n"
    )


def test_a_dry_run_passes_where_the_run_would(in_tmp_path: None) -> None:
    """A split without rows that nothing reads, and first rows that are bad and skipped."""
    write_rows([{"question": ""}, *({"question": f"q{index}"} for index in range(20))])
    Path("empty.jsonl").write_text((json.dumps({"question": ""}) + "\n") * 2)
    words = ["environment.test_files=[empty.jsonl]", "environment.image_keys=[]"]
    result = dry_run(*words, "data.on_bad_row=skip", recipe="own.yaml")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[1:4] == [
        "train: 21 rows; 1 of the 21 opened cannot be used, and data.on_bad_row=skip leaves them out",
        "dev: 0 rows",
        "test: 2 rows; 2 of the 2 opened cannot be used, and data.on_bad_row=skip leaves them out",
    ]
    assert "rows.jsonl line 1: the prompt is empty" in dry_run(*words, recipe="own.yaml").stderr


WARMED = ["warmup={}", "environment.dev_files=[test.jsonl]"]


def good_but(**cells: object) -> list[dict[str, object]]:
    return [GOOD] * 5 + [GOOD | cells]


@table(
    ("rows", "words", "message"),
    [
        ([GOOD | {"image": f"no-{n}.png"} for n in range(60)], [], "train: 32 of the 32 rows opened cannot be used"),
        ([GOOD | {"image": "no.png"}] * 60, ["data.on_bad_row=skip"], "train: 32 of the 32 rows opened cannot be used"),
        (good_but(image="broken.png"), [], "train: 1 of the 6 rows opened cannot be used"),
        (good_but(answer=None), WARMED, "train: 1 of the 6 rows opened cannot be used"),
        (good_but(question="long " * 3000), [], "data.max_prompt_tokens=2048"),
        (
            good_but(answer="long " * 5000),
            WARMED,
            "and the model has positions for 4096; shorten the answer, or set war",
        ),
        (good_but(answer="a<|im_end|>b"), WARMED, "a demonstration of train/5: it contains <|im_end|>, which is never"),
        ([GOOD] * 5, ["model.lora={targets: [nothing]}"], "model.lora.targets: nothing with exclude=[]"),
    ],
)
def test_a_dry_run_opens_rows_and_model(
    rows: list[dict[str, object]], words: list[str], message: str, in_tmp_path: None
) -> None:
    write_rows(rows)
    result = dry_run(*words, recipe="own.yaml")
    assert (result.exit_code, message in result.stderr) == (2, True), result.output


def test_a_dry_run_says_what_long_answers_few_rows_and_few_pictures_lead_to(in_tmp_path: None) -> None:
    write_rows(good_but(answer="one two three four five"))
    words = ["rollout.max_new_tokens=4", "environment.dev_files=[test.jsonl]"]
    result = dry_run(*words, "warmup={}", recipe="own.yaml")
    assert result.exit_code == 0, result.output
    said = (
        r"train: 6 rows; the longest answer that the warm-up imitates has \d+ tokens, which rollout\.max_new_tokens=4 "
    )
    assert re.search(said + "cuts when RL samples it", result.stdout)
    assert "imitates" not in dry_run(*words, recipe="own.yaml").stdout
    # few rows and pictures
    write_rows([GOOD | {"image": f"{n % 3}.png"} for n in range(60)])
    for number in range(3):
        Image.new("RGB", (32, 32)).save(f"{number}.png")
    shares = ["environment.test_files=null", "environment.test_share=0.2", "environment.dev_share=0.05"]
    lines = dry_run(*shares, "rollout.prompts_per_step=1000", recipe="own.yaml").stdout
    for share in ("test_share=0.2", "dev_share=0.05"):
        assert f"environment.{share} of 60 rows holds out 20 and leaves 20 to train on, since rows that share" in lines
    assert "rollout.prompts_per_step=1000 is more than the 20 training rows" in lines


def test_a_dry_run_opens_all_rows_where_that_is_asked_for(in_tmp_path: None) -> None:
    write_rows([GOOD] * 99 + [GOOD | {"image": "broken.png"}])
    sample = dry_run(recipe="own.yaml")
    assert sample.exit_code == 0, sample.output
    assert fovea("train", "--dry-run", "own.yaml").stdout == sample.stdout, "a value comes only after ="
    whole = fovea("train", "own.yaml", "--dry-run=full")
    assert "train: 1 of the 100 rows opened cannot be used, the first: " in whole.stderr
    assert "is not one of 'sample', 'full'" in fovea("train", "own.yaml", "--dry-run=all").stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.skipif(find_spec("megatron") is not None, reason="Megatron is installed")
def test_a_dry_run_reports_all_problems_at_once(in_tmp_path: None) -> None:
    write_rows([GOOD | {"image": "absent.png"}] * 9)
    make_checkpoint(Path("taken"), 3)
    words = ["model.device=cuda", "train.backend.name=megatron", "run_dir=taken", "model.lora={targets: [nothing]}"]
    result = dry_run(*words, "rollout.engine.name=vllm", recipe="own.yaml")
    assert result.exit_code == 2
    told = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    for problem in (
        "run_dir=taken already holds a run",
        "train.backend=megatron, but megatron is not installed",
        "model.device=cuda, but torch sees no CUDA device",
        "model.lora.targets: nothing",
        "train: 9 of the 9 rows opened cannot be used",
    ):
        assert sum(problem in line for line in told) == 1, result.stderr


def test_a_dry_run_names_ray_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "fovea.cluster.ray", raising=False)
    assert "cluster.gpus_per_node is set, but ray is not installed" in dry_run("cluster.gpus_per_node=1").stderr


@pytest.mark.skipif(find_spec("sglang") is not None, reason="SGLang is installed")
def test_a_dry_run_names_an_engine_that_is_not_installed() -> None:
    result = dry_run("rollout.engine=sglang")
    assert result.exit_code == 2
    assert f"SGLang, which is not installed: {pip_install_elsewhere('sglang')}" in result.stderr
    elsewhere = dry_run("rollout.engine=vllm", f"rollout.engine.python={sys.executable}")
    assert elsewhere.exit_code == 0, elsewhere.output
    on_ray = dry_run("rollout.engine=sglang", "cluster.gpus_per_node=1")
    assert on_ray.exit_code == 0, on_ray.output  # its machines may have what this one lacks
    assert "cluster: 1 x 1 GPUs, of which 1 train and 1 generate (cluster.placement=collocated)" in on_ray.stdout


def test_a_dry_run_outside_torchrun_leaves_the_number_of_processes_open(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = ["cluster.placement=disaggregated", "cluster.rollout_gpus=1"]
    result = dry_run(*apart)
    assert result.exit_code == 0, result.output
    assert "not checked: the number of processes; with one, cluster.rollout_gpus=1 only generate" in result.stdout
    assert "not checked" not in dry_run().stdout
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "not checked" not in dry_run(*apart).stdout
    refused = dry_run(*apart, "cluster.rollout_gpus=2")
    assert "cluster.rollout_gpus=2 only generate, but there are 2 processes" in refused.stderr
    monkeypatch.setenv("RANK", "1")
    worker = dry_run()
    assert (worker.exit_code, worker.output) == (0, ""), "it would wait for a driver that makes no calls"


def test_a_choice_says_what_it_drops_of_the_recipe() -> None:
    words = ["environment.name=shapes", "model.path=null", "model.tiny={}", "environment.train_size=9"]
    result = fovea("config", str(ROOT / "recipes" / "geo3k.yaml"), *words)
    assert result.exit_code == 0, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("settings of the recipe that were dropped by another choice: environment.train_files=")
    assert "train_size" not in line
    assert fovea("config", str(ROOT / "recipes" / "shapes.yaml"), "warmup=null").stderr == ""
    gspo = fovea("config", "shapes", "algorithm.name=gspo").stderr
    assert gspo.endswith("dropped by another choice: algorithm.loss.clip_high=0.28 (now 0.0004)\n")


@table(
    ("settings", "expands"),
    [
        ([], True),
        (["model.device=cpu"], False),
        (["rollout.engine=sglang"], False),
        (["rollout.engine=vllm"], False),
        (["rollout.engine=vllm_servers", *SERVERS], True),
        (["rollout.engine=vllm_servers", *SERVERS, "rollout.engine.python=env/bin/python"], False),
    ],
)
def test_segments_of_gpu_memory_grow_where_no_engine_opens_them(
    settings: list[str], expands: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines in processes of their own open tensors by CUDA IPC, and vLLM has a pool in this process."""
    called: list[str] = []
    monkeypatch.setattr(malloc, "use_expandable_segments", lambda: called.append("expands"))
    monkeypatch.setattr(run_module, "build", lambda _: called.append("built") or sys.exit("enough"))
    fovea("train", "shapes", *settings)
    assert called == [*(["expands"] if expands else []), "built"]


def test_quiet_prints_results_only(in_tmp_path: None) -> None:
    result = fovea("data", "vqa", "--rows", "10", "--out", "scenes", "--quiet")
    assert (result.stdout.split(), result.stderr) == (["scenes/train.parquet", "scenes/test.parquet"], "")


@table(
    ("words", "told"),
    [
        (["majority"], "give a recipe that does (--recipe FILE, or a name such as geo3k)"),
        (["geo3k"], "geo3k: a recipe, not a target; give --recipe geo3k together with a target"),
        (["http://127.0.0.1:9?key=x"], "a key comes from --api-key-env VARIABLE"),
        (["http://127.0.0.1:9", "--recipe", "shapes", "--api-key-env", "NO_KEY"], "--api-key-env NO_KEY, but there is"),
    ],
)
def test_errors_of_functions_name_the_options_of_commands(words: list[str], told: str) -> None:
    result = fovea("eval", *words)
    assert (result.exit_code, told in result.stderr) == (2, True)
    kept = "rollout.engine.api_key_env=KEY, trust=true and model.recipe=x"
    assert with_options(kept) == kept, "settings and texts that look like arguments"
