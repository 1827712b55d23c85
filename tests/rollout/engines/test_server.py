"""`fovea serve` with the real server of the engine: its answers, and that nothing of it is left behind."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import psutil
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from fovea.commands.serve import served_folder
from fovea.config.model import Model
from fovea.models.processor import load_processor
from fovea.rollout.server_guard import MAX_BODY_BYTES, UNREADABLE
from fovea_gym.benchmarks.mathvision import extracted
from gym_tests.images import encoded, noise
from gym_tests.rows.web import served
from tests.evaluation.benchmarks.made import ROWS, write
from tests.rollout.engines.under_test import under_test
from tests.rollout.serve_command import KEY, KEY_ENV, Serving, serving
from tests.rollout.short_runs import LIMIT_SECONDS
from tests.runs import SMALL, fovea_here


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few supervised steps."""
    folder = tmp_path_factory.mktemp("served") / "run"
    settings = ["max_steps=1", "warmup.max_steps=40", "warmup.check_every_steps=40", "parity.prompts=0"]
    fovea_here("train", "recipes/shapes.yaml", f"run_dir={folder}", *SMALL, *settings)
    return folder


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[Serving]:
    """The server of the run, with a key, once it is ready; it reads images from addresses, of this machine too."""
    words = ["--api-key-env", KEY_ENV, "--name", "shapes", "--allow-urls", "--allow-private-addresses"]
    with serving(run, *words, engine=under_test().name) as started:
        said = started.wait_until_ready()
        assert f"${KEY_ENV}" in said
        assert KEY not in said
        yield started


def asked(server: Serving, image: Image.Image, question: str) -> str | None:
    return asked_by(server, f"data:image/png;base64,{base64.b64encode(encoded(image)).decode()}", question)


def asked_by(server: Serving, url: str, question: str) -> str | None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY)
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    messages = [{"role": "user", "content": parts}]
    reply = client.chat.completions.create(model="shapes", messages=messages, max_tokens=12, temperature=0)
    return reply.choices[0].message.content


def test_a_run_is_trained_and_exported_once(run: Path) -> None:
    said: list[str] = []
    folder = served_folder(str(run), said.append)
    assert folder == run / "exports" / "step-1"
    assert served_folder(str(run / "checkpoints" / "step-1"), said.append) == folder
    assert said == [f"exporting {run} step 1 to {folder}"]
    assert served_folder(str(folder), said.append) == folder


def test_a_greedy_answer_is_that_of_transformers_on_the_export(server: Serving, run: Path) -> None:
    (export,) = (run / "exports").iterdir()
    processor = AutoProcessor.from_pretrained(export)
    model = AutoModelForImageTextToText.from_pretrained(export, dtype=torch.float32).eval()
    for seed, question in enumerate(["How many circles are there?", "What colour is the square?", "x"]):
        content = [{"type": "image", "image": noise(seed)}, {"type": "text", "text": question}]
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
        inputs = processor.apply_chat_template([{"role": "user", "content": content}], **options)
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=12)[0, inputs["input_ids"].shape[1] :]
        assert asked(server, noise(seed), question) == processor.decode(ids, skip_special_tokens=True)


def test_nothing_banned_is_drawn_and_a_key_is_needed(server: Serving, run: Path) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY)
    asked = {"model": "shapes", "messages": [{"role": "user", "content": "x"}], "max_tokens": 60, "temperature": 2.0}
    more = {"n": 16, "seed": 1, "logprobs": True, "extra_body": {"ignore_eos": True}}
    sampled = client.chat.completions.create(**asked, **more)  # type: ignore[call-overload]
    (export,) = (run / "exports").iterdir()
    processor = load_processor(Model(path=str(export)))
    # special tokens, whose text no others have
    banned = set(map(processor.tokenizer.decode, processor.banned_ids))
    assert "<|image_pad|>" in banned
    tokens = [each.token for choice in sampled.choices if choice.logprobs for each in choice.logprobs.content or ()]
    assert len(tokens) == 960
    # so many different ones that a banned one would have come up; of half as many tokens the bound was missed once
    assert len(set(tokens)) > 150
    assert not banned.intersection(tokens)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="another").models.list()
    # vLLM's own check leaves the second open
    statuses = [httpx2.get(server.url + path).status_code for path in ("/health", "/metrics", "/v1/models")]
    assert statuses == [200, 401, 401]


def test_an_image_at_an_address_is_the_same_image(server: Serving) -> None:
    with served({"/a.png": encoded(noise(0)), "/b.png": encoded(noise(1))}) as site:
        for seed, name in enumerate("ab"):
            question = "How many circles are there?"
            assert asked_by(server, f"{site.url}/{name}.png", question) == asked(server, noise(seed), question)
        assert site.asked == ["/a.png", "/b.png"]


def test_no_file_is_opened_and_nobody_who_asks_administers(server: Serving) -> None:
    """`/update_weights_from_disk` is SGLang's, which takes the key for answers there; the image tag is a GET."""
    with httpx2.Client(base_url=server.url, headers={"authorization": f"Bearer {KEY}"}) as client:
        for url in ("file:///etc/hostname", "/etc/hostname.png", "file:///nowhere"):
            parts = [{"type": "image_url", "image_url": {"url": url}}]
            body = {"model": "shapes", "messages": [{"role": "user", "content": parts}]}
            answer = client.post("/v1/chat/completions", json=body)
            assert (answer.status_code, answer.content) == (400, b'{"error": "%s"}' % UNREADABLE), url
        model = {"model_path": "/nowhere"}
        assert client.post("/update_weights_from_disk", json=model).status_code == 403
        assert client.get("/release_memory_occupation").status_code == 403
        assert client.post("/v1/completions", content=b"x" * (MAX_BODY_BYTES + 1)).status_code == 413
        upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
        page = client.get("/v1/realtime", headers=upgrade | {"sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA=="})
        assert page.status_code == 403


def test_eval_of_the_server_is_that_of_the_folder(
    server: Serving, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (export,) = (run / "exports").iterdir()
    file = tmp_path / "eval.json"
    arguments = ["--api-key-env", KEY_ENV, "--json", str(file), "evaluate.samples_per_prompt=2"]
    monkeypatch.setenv(KEY_ENV, KEY)
    fovea_here("eval", server.url, str(export), *arguments)
    found = json.loads(file.read_text())
    of_server, of_folder = found["targets"]
    assert all(of_server[name] == of_folder[name] for name in ("accuracy", "reward"))
    for row in found["rows"]:
        there, here = row["answers"].values()
        assert len(there.pop("samples")) == len(here.pop("samples")) == 2
        # greedy, with shuffled images and with blank ones: text, reward, parts, and why it ended
        assert there == here
    assert len({row["answers"][server.url]["greedy"]["turns"][-1]["text"] for row in found["rows"]}) > 2


def test_lmms_eval_scores_the_server_as_fovea_eval_does(
    server: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its interpreter is named by FOVEA_LMMS_EVAL_PYTHON (tests/evaluation/benchmarks/README.md)."""
    python = os.environ.get("FOVEA_LMMS_EVAL_PYTHON")
    if python is None:
        pytest.skip("FOVEA_LMMS_EVAL_PYTHON names no interpreter with lmms-eval")
    monkeypatch.setenv(KEY_ENV, KEY)
    rows = [
        row | {"id": str(place), "image": f"images/{place}.png"} for place, row in enumerate(4 * ROWS["mathvision"]())
    ]

    def evaluated() -> tuple[list[str], list[float], float]:
        words = [f"bench.mathvision={write(tmp_path / 'rows', 'mathvision', rows)}", "rollout.max_new_tokens=12"]
        options = ["--api-key-env", KEY_ENV, "--json", str(tmp_path / "eval.json")]
        fovea_here("eval", server.url, "bench=mathvision", *words, "evaluate.image_controls=false", *options)
        found = json.loads((tmp_path / "eval.json").read_text())["benchmarks"]["mathvision"]
        answers = [row["answers"][server.url]["greedy"] for row in found["rows"]]
        share = found["scores"][server.url]["accuracy"]["mean"]
        return [each["turns"][-1]["text"] for each in answers], [each["accuracy"] for each in answers], share

    for row, said in list(zip(rows, evaluated()[0], strict=True))[::2]:
        row.update(options=[], answer=extracted(said))  # an answer that the model may give
    texts, accuracies, share = evaluated()
    client = [python, str(Path(__file__).parent / "lmms_client.py"), server.url, KEY, "shapes", str(tmp_path / "rows")]
    done = subprocess.run(client, check=True, capture_output=True, text=True)
    theirs = json.loads(done.stdout.splitlines()[-1])
    assert (theirs["texts"], theirs["right"]) == (texts, list(map(bool, accuracies)))
    assert theirs["percent"] == pytest.approx(100 * share, abs=0.005)
    assert 0 < share < 1


def test_ctrl_c_leaves_no_process(server: Serving) -> None:
    """The last test of the server."""
    started = [psutil.Process(pid) for pid in server.processes()]
    assert len(started) >= 2, "the server and its engine"
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(LIMIT_SECONDS) == 130
    assert not psutil.wait_procs(started, timeout=LIMIT_SECONDS)[1]
