import base64
import hashlib
import io
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from fovea.config.loading import dump_config, load_config
from fovea.errors import DataError
from fovea.evaluation.answer import SampledAnswer
from fovea.metrics.log import JsonlSink, MetricsLog
from fovea.report.about import write_versions
from fovea.report.html import write_report
from fovea.report.images import png_bytes, write_image
from fovea.report.panels import draw_panels, panels_of, part_colours
from fovea.report.records import RecordedAnswer, RecordedImage, RecordedMessage, RecordedTurn, SampleRecord
from fovea.report.samples import sample_steps, write_samples
from fovea.report.summary import Summary, write_summary
from fovea.types import Evaluation
from tests.chromium import open_browser
from tests.report.pages import ATTACK, ATTACKS, Page

RECIPE = Path(__file__).parents[2] / "recipes" / "geo3k.yaml"
PNG = png_bytes(Image.new("RGB", (48, 48), (200, 30, 30)))
FINAL = Evaluation(accuracies={"count": (1.0,) * 8 + (0.0,) * 2, "colour": (1.0,) * 10})
SUMMARY = Summary(
    before=Evaluation(accuracies={"count": (0.0,) * 10, "colour": (0.0,) * 10}),
    warmup=Evaluation(accuracies={"count": (1.0,) * 4 + (0.0,) * 6, "colour": (1.0,) * 6 + (0.0,) * 4}),
    final=FINAL,
    shuffled_images=Evaluation(accuracies={"count": (1.0, 0.0, 0.0)}),
    blank_images=None,
    duplicates_across_splits=2,
    warmup_seconds=20.5,
    rl_seconds=100.0,
    total_seconds=130.25,
    steps=1200,
    seed=3,
)


def record(text: str, *images: str) -> SampleRecord:
    scores = (
        SampledAnswer(text=text, reward=0.75, accuracy=1.0, parts={text: 0.5, "format": 0.25}),
        SampledAnswer(text="", reward=math.nan, accuracy=0.0, finish="length"),
    )
    return SampleRecord(
        prompt=text,
        truth=text,
        kind=text,
        messages=(RecordedMessage(role="user", parts=(*(RecordedImage(name=name) for name in images), text)),),
        answers=tuple(RecordedAnswer(score=score) for score in scores),
    )


def fill(run_dir: Path, text: str) -> Path:
    """A run folder in which `text` stands wherever a model, a data set or a user can write."""
    with MetricsLog([JsonlSink(run_dir)]) as log:
        for step in range(1, 11):
            times = {"seconds/rollout": 0.25, "seconds/update": 0.5, "seconds/step": 1.0}
            log.write(
                step,
                {"reward": step / 10, f"seconds/{text}": 0.125, "memory/peak_rss_gib": 1.5, "memory/step_gib": 0.75}
                | times,
            )
    for step in (1, 2, 3, 4, 5):
        write_samples(run_dir, step, [record(f"{text} of step {step}", write_image(run_dir, PNG))])
    accuracies = SUMMARY.final.accuracies | {text: (1.0,)}
    write_summary(run_dir / "summary.json", replace(SUMMARY, final=Evaluation(accuracies=accuracies)))
    (run_dir / "config.yaml").write_text(f"note: {text}\n", encoding="utf-8")
    return run_dir


def test_a_run_begins_without_matplotlib() -> None:
    code = "import sys, fovea.api, fovea.loop_async; print({'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_an_empty_folder_gives_a_page(tmp_path: Path) -> None:
    page = Page(write_report(tmp_path))
    assert tmp_path.name in page.text
    assert "No step has been taken yet" in page.text
    assert page.attributes("img") == []


def test_a_young_run_shows_its_reward(tmp_path: Path) -> None:
    with MetricsLog([JsonlSink(tmp_path)]) as log:
        for step in range(1, 21):
            log.write(step, {"reward": step / 100})
    page = Page(write_report(tmp_path))
    assert "Not finished: 20 steps so far" in page.text
    assert "reward at the start 0.015 mean of 2 steps reward now 0.195 mean of 2 steps" in page.text
    assert (tmp_path / "reward_curve.png").exists()


def test_headline_and_types_with_intervals(tmp_path: Path) -> None:
    write_summary(tmp_path / "summary.json", SUMMARY)
    text = Page(write_report(tmp_path)).text
    assert "1,200 RL steps, seed 3; warm-up 20 s, RL 100 s, 130 s in total" in text
    assert "before warm-up 0.0 % 95 % interval [0, 16]" in text
    assert "after warm-up 50.0 % 95 % interval [30, 70] after RL 90.0 % 95 % interval [70, 97]" in text
    assert "count 40.0 80.0 [49, 94] 10 colour 60.0 100.0 [72, 100] 10 all 50.0 90.0 [70, 97] 20" in text
    assert "gets 33.3 % right with another question's image: that accuracy" in text
    assert "Test images found in the training split: 2 ." in text


def test_partial_credits_have_the_interval_of_a_mean(tmp_path: Path) -> None:
    """That of `estimate`, which test_statistics has by hand: 0.5 +- 0.299."""
    final = Evaluation(accuracies={"all": (0.2, 0.4, 0.6, 0.8)})
    write_summary(tmp_path / "summary.json", replace(SUMMARY, warmup=None, final=final))
    text = Page(write_report(tmp_path)).text
    assert "after RL 50.0 % 95 % interval [20, 80]" in text
    assert "all 50.0 [20, 80] 4" in text


def test_a_summary_of_an_earlier_version_has_shares_of_its_rows(tmp_path: Path) -> None:
    earlier = {key: value for key, value in SUMMARY.to_json().items() if key != "test"}
    (tmp_path / "summary.json").write_text(json.dumps(earlier), encoding="utf-8")
    text = Page(write_report(tmp_path)).text
    assert "after warm-up 50.0 % 95 % interval [30, 70] after RL 90.0 % 95 % interval [70, 97]" in text
    assert "count 40.0 80.0 [49, 94] 10 colour 60.0 100.0 [72, 100] 10 all 50.0 90.0 [70, 97] 20" in text


def test_a_run_without_warmup_has_no_such_column(tmp_path: Path) -> None:
    final = Evaluation(accuracies={"all": (1.0, 0.0)})
    rl_only = replace(SUMMARY, warmup=None, final=final, shuffled_images=None, duplicates_across_splits=None)
    write_summary(tmp_path / "summary.json", rl_only)
    text = Page(write_report(tmp_path)).text
    assert "before RL 0.0 %" in text
    assert "after warm-up" not in text
    assert text.count("50.0 [9, 91]") == 1
    assert "text alone" not in text
    assert "training split" not in text


def test_phases_and_memory(tmp_path: Path) -> None:
    text = Page(write_report(fill(tmp_path, "score"))).text
    assert "peak memory 1.50 GiB" in text
    assert "memory of a step, on the GPU where there is one 0.75 GiB" in text
    phases = text[text.index("phase total s") :]
    assert phases.startswith(
        "phase total s ms per step share update 5.0 500.0 50.0 % rollout 2.5 250.0 25.0 % "
        "score 1.2 125.0 12.5 % other 1.2 125.0 12.5 %"
    )


def test_samples_of_all_steps_are_folded(tmp_path: Path) -> None:
    page = Page(write_report(fill(tmp_path, "How many?")))
    steps = [int(step) for step in re.findall(r"Step (\d+) ", page.text)]
    assert steps == sample_steps(tmp_path)
    folded = [attributes for attributes in page.attributes("details") if attributes.get("class") == "step"]
    assert ["open" in attributes for attributes in folded] == [True, *[False] * (len(steps) - 2), True]
    assert "Truth: How many? of step 3" in page.text
    assert "reward 0.75 , accuracy 1, How many? of step 3 0.5, format 0.25" in page.text
    assert "(nothing) reward not finite , accuracy 0, truncated" in page.text
    pictures = [image["src"] for image in page.attributes("img") if image.get("class") == "small"]
    assert [base64.b64decode(source.partition(",")[2]) for source in pictures] == [PNG] * 5


def test_a_missing_image_is_a_note_on_the_page(tmp_path: Path) -> None:
    run_dir = fill(tmp_path, "How many?")
    (image,) = (run_dir / "samples" / "images").iterdir()
    image.unlink()
    page = Page(write_report(run_dir))
    assert page.text.count("Image 1 is missing: its file in samples/images is gone.") == 5
    assert [image for image in page.attributes("img") if not (image.get("class") or "").startswith("curve")] == []


def test_a_bounded_number_of_steps_is_shown(tmp_path: Path) -> None:
    for step in range(1, 101):
        write_samples(tmp_path, step, [record("x")])
    page = Page(write_report(tmp_path))
    steps = [int(step) for step in re.findall(r"Step (\d+) ", page.text)]
    assert (len(steps), steps[0], steps[-1]) == (40, 1, 100)
    assert "40 of 100 recorded steps are shown." in page.text


def test_the_head_says_what_was_trained_and_with_what(tmp_path: Path) -> None:
    settings = load_config([RECIPE], ["environment.dev_files=null"])
    (tmp_path / "config.yaml").write_text(dump_config(settings))
    write_versions(tmp_path, {"torch": "2.9.0", "fovea": ATTACK})
    page = Page(write_report(tmp_path))
    for text in (
        "model Qwen/Qwen3-VL-2B-Instruct",
        "algorithm grpo (advantage grpo, loss clip)",
        "dev rows 5 % of the training rows, held out by image",
        "test rows data/geo3k/test.parquet",
        "versions torch 2.9.0, fovea " + ATTACKS[0],
    ):
        assert text in page.text, text
    assert ATTACKS[0] not in page.source


def test_rows_given_by_python_code_are_named_as_files_of_the_run(tmp_path: Path) -> None:
    files = ["environment.train_files=['{run_dir}/rows/rows-1.parquet']", "environment.test_files=null"]
    settings = load_config([RECIPE], [*files, "environment.test_share=0.1"])
    (tmp_path / "config.yaml").write_text(dump_config(settings))
    text = Page(write_report(tmp_path)).text
    assert "train rows rows/rows-1.parquet in the run folder" in text
    assert "test rows 10 % of the training rows, held out by image" in text


def test_curves_of_signal_parts_length_entropy_and_kl(tmp_path: Path) -> None:
    assert draw_panels([{"step": 1.0, "loss": 0.5}]) is None


def test_names_of_parts_are_no_formulas() -> None:
    assert draw_panels([{"step": 1.0, "reward/cost_$^$": 0.5, "reward/$\\frac$": 0.1}]) is not None
    rows = [
        {"step": float(n), "groups/without_signal_frac": 0.5, "entropy": 1.0, "kl/reference": 0.1, "reward/format": 1.0}
        | {"reward/distance_km": 3.0, "dev/reward": 0.5}
        for n in range(1, 60)
    ]
    drawn = draw_panels(rows)
    assert drawn is not None
    assert Image.open(io.BytesIO(drawn)).width > 800


def test_a_part_has_one_colour_while_training_and_on_dev() -> None:
    rows = [{"step": 1.0, "reward/answer": 0.5, "reward/format": 0.5, "dev/reward": 0.5, "dev/reward/format": 1.0}]
    assert part_colours(panels_of(rows)) == {"answer": "C0", "format": "C1"}


def test_the_kl_of_engine_and_trainer_is_no_kl_to_the_reference() -> None:
    """Rounding, which every run has, is not drawn."""
    rounding, real = ([{"step": 1.0, "rollout_train_kl": value}] for value in (3e-14, 1e-4))
    reference = [{"step": 1.0, "kl/reference": 0.0, "kl/reward": 0.1}]
    assert panels_of(rounding) == {}
    assert panels_of([*rounding, *real]) == {"KL of engine and trainer, nats": ["rollout_train_kl"]}
    assert panels_of([{"step": 1.0, "rollout_train_kl": math.nan}]) != {}
    assert panels_of(reference) == {"KL to the reference, nats": ["kl/reference", "kl/reward"]}


def test_rewards_parts_and_image_types_have_intervals(tmp_path: Path) -> None:
    final = replace(FINAL, rewards=(0.5,) * 10 + (1.0,) * 10, parts={ATTACK: (0.0, 1.0)}, by_image_type={"map": (1.0,)})
    write_summary(tmp_path / "summary.json", replace(SUMMARY, final=final))
    page = Page(write_report(tmp_path))
    assert "reward 0.75 [0.638, 0.862] 20" in page.text
    assert "accuracy on map 1 [0.207, 1] 1" in page.text
    assert "mean of after RL, with 95" in page.text, "no column for what was not evaluated"
    write_summary(tmp_path / "summary.json", replace(SUMMARY, warmup=None, before=final, final=final))
    assert "mean of before RL after RL, with 95" in Page(write_report(tmp_path)).text
    assert ATTACKS[0] not in page.source


def test_nothing_written_by_others_becomes_a_tag(tmp_path: Path) -> None:
    plain = Page(write_report(fill(tmp_path / "plain", "x")))
    attacked = Page(write_report(fill(tmp_path / "attacked", ATTACK)))
    assert [tag for tag, _ in attacked.tags] == [tag for tag, _ in plain.tags]
    assert [sorted(found) for _, found in attacked.tags] == [sorted(found) for _, found in plain.tags]
    assert not any(attack in attacked.source for attack in ATTACKS)
    # prompt, truth, kind, answer and part name of five records; question type, phase, config
    assert attacked.text.count(ATTACK) == 5 * 5 + 3


def test_a_folder_name_is_text(tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>"
    page = Page(write_report(fill(tmp_path / name, "x")))
    assert page.text.startswith(f"{name} · Fovea report")
    assert all("onerror" not in attributes for _, attributes in page.tags)


def test_the_page_is_self_contained(tmp_path: Path) -> None:
    page = Page(write_report(fill(tmp_path, "x")))
    assert "://" not in page.source
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "iframe", "object", "base", "form"})
    for _, attributes in page.tags:
        assert all((attributes.get(key) or "data:").startswith("data:") for key in ("src", "href", "srcset"))
        assert not any(name.startswith("on") or name == "style" for name in attributes)


def test_the_policy_allows_its_own_style_and_images_only(tmp_path: Path) -> None:
    page = Page(write_report(fill(tmp_path, ATTACK)))
    (style,) = re.findall(r"<style>(.*?)</style>", page.source, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    (policy,) = (
        meta["content"] for meta in page.attributes("meta") if meta.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy == (
        f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )


def test_text_that_no_encoding_can_write(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, [record("half \ud800 pair")])
    assert "half ? pair" in Page(write_report(tmp_path)).text


def test_a_broken_metrics_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("oops\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl line 1"):
        write_report(tmp_path)


def look(page: Path, profile: Path) -> tuple[str, str]:
    """Title and text of a page in a real browser."""
    with open_browser(profile) as browser:
        browser.open(page.resolve().as_uri())
        browser.wait_for("document.readyState === 'complete'")
        return browser.evaluate("document.title"), browser.evaluate("document.body.textContent")


@pytest.mark.browser
def test_injected_scripts_do_not_run_in_a_browser(tmp_path: Path) -> None:
    control = tmp_path / "control.html"
    control.write_text(f"<!doctype html><title>clean</title><body>{ATTACKS[0]}")
    assert look(control, tmp_path / "profile")[0] == "owned", "the browser runs no scripts at all"
    title, text = look(write_report(fill(tmp_path / "run", ATTACK)), tmp_path / "profile")
    assert title == "run · Fovea report"
    assert ATTACKS[0] in text


@pytest.mark.browser
def test_the_policy_alone_stops_a_script(tmp_path: Path) -> None:
    report = write_report(fill(tmp_path / "run", "x"))
    report.write_text(report.read_text().replace("<body>", f"<body>{ATTACKS[0]}{ATTACKS[1]}"))
    assert look(report, tmp_path / "profile")[0] == "run · Fovea report"


def test_all_turns_of_an_answer_are_in_the_page(tmp_path: Path) -> None:
    """Of six images that the environment adds, the first four are embedded; that of the prompt stands there once."""
    prompt, *added = (write_image(tmp_path, png_bytes(Image.new("RGB", (48, 48), (shade, 0, 0)))) for shade in range(7))
    images = tuple(RecordedImage(name=name) for name in (prompt, *added))
    reply = RecordedMessage(role="user", parts=(*images, f"And now? {ATTACK}"))
    turns = (RecordedTurn(text="look"), RecordedTurn(messages=(reply,), text=""))
    score = SampledAnswer(text="", reward=1.0, accuracy=1.0)
    first = replace(record("Dark or light?", prompt), answers=(RecordedAnswer(score=score, turns=turns),))
    write_samples(tmp_path, 1, [first])
    page = Page(write_report(tmp_path))
    assert f"look user [image 1 of the prompt] {'[another image, which `fovea view` shows] ' * 2}And now?" in page.text
    assert "(nothing) reward 1 , accuracy 1" in page.text
    assert len(page.attributes("img")) == 1 + 4
    assert "<script>" not in page.source.split("</style>")[1]
