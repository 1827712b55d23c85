"""From settings to a run: the one place that names concrete backends."""

from __future__ import annotations

import copy
import importlib
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Literal

import torch
from rich.table import Table
from rich.text import Text

from fovea.bad_rows import BadRows
from fovea.checkpoint import Checkpoints
from fovea.config import (
    CaptionEnvironment,
    Config,
    Data,
    Geo3kEnvironment,
    GeoSpotEnvironment,
    Model,
    OwnEnvironment,
    VqaEnvironment,
)
from fovea.data.fetch import FetchedFiles, UrlLimits
from fovea.data.images import open_image
from fovea.data.order import Order, kinds_of, levels_of
from fovea.data.readers.remote import remote_image
from fovea.data.rows import RowAccess
from fovea.draw import note_unscored_answer
from fovea.environments.base import Environment, Split
from fovea.environments.curriculum import Curriculum
from fovea.environments.geo3k import Geo3k
from fovea.environments.own import CallLimits, GuardedEnvironment, OwnReward, for_readings
from fovea.environments.own_code import load_environment, load_reward
from fovea.environments.shapes import Shapes
from fovea.environments.vqa import Vqa
from fovea.errors import ConfigError, DataError
from fovea.evaluation.controls import OpenImage
from fovea.evaluation.evaluator import Evaluator
from fovea.metrics import JsonlSink, MetricsLog, Phases, Sink, TensorBoardSink
from fovea.models.features import FeatureCache
from fovea.models.fused import TORCH_KERNELS, Kernels
from fovea.models.load import DTYPES, load_pretrained, pick_device
from fovea.models.parts import ModelParts, config_of
from fovea.models.render import Renderer
from fovea.models.spill import SpillFolder
from fovea.models.tape import Tape
from fovea.models.tiny import make_tiny
from fovea.models.trainable import (
    choose_trainable,
    count_parameters,
    lora_layers,
    recompute_activations,
    trainable_parameters,
    untrained_head,
    value_parameters,
)
from fovea.models.value_head import ValueHead
from fovea.models.value_model import ValueModel
from fovea.models.vlm import VLM
from fovea.profile import StepProfile
from fovea.prompts import PromptSource
from fovea.report.progress import Progress
from fovea.rollout.embedded.engine import EmbeddedEngine
from fovea.rollout.embedded.setup import Tuning
from fovea.run import Run, Sources
from fovea.run_folder import open_run_folder
from fovea.throughput import known_peak_tflops
from fovea.train.critic import Critic
from fovea.train.optimizer import Optimizer
from fovea.train.supervised import SupervisedTrainer
from fovea.train.torch_policy import TorchPolicy
from fovea.warmup import Warmup

MIN_RECORDED_WIDTH = 128
"""Of narrower models a linear layer's output is computed faster than it is read from memory."""
CORPUS_ROWS = 2000
"""Enough rows to know the words of a task by."""


def build(config: Config, environment: Environment | None = None) -> Run:
    """Everything made, nothing trained; each error says which setting to change.

    `environment` takes the place of the one that the settings name: for rows that Python holds (docs/own.md).
    """
    started = perf_counter()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    folder = open_run_folder(Path(config.run_dir), config)
    checkpoints = Checkpoints(folder, config.checkpoint.keep)
    resumed = checkpoints.latest() if config.resume == "auto" else None
    start_step = resumed.step if resumed else 0
    progress = Progress(config.max_steps, start_step, config.log.progress)
    progress.stage("making the model")
    limits = url_limits(config.data)
    environment = make_environment(config, environment)
    parts, vlm = make_model(config, environment)
    progress.print(_model_table(parts, vlm))
    opener = make_opener(config.data, folder, limits)
    renderer = Renderer(parts, opener, min_pixels=config.model.min_pixels, max_pixels=config.model.max_pixels)
    bad_rows = BadRows(folder, resume_at=resumed.state.get("bad_rows", 0) if resumed else 0)
    sources = make_sources(config, environment, renderer, bad_rows)
    engine = make_engine(config, parts, vlm)
    sinks, profile = make_sinks(config, folder, start_step), make_profile(config, folder, start_step, progress)
    return Run(
        config=config,
        folder=folder,
        environment=environment,
        sources=sources,
        order=Order(
            kinds_of(sources.train.tasks),
            weights=config.data.kind_weights,
            seed=config.seed,
            levels=levels_of(sources.train.tasks),
        ),
        curriculum=Curriculum(environment, config.curriculum),
        engine=engine,
        policy=make_policy(config, vlm),
        warmup=make_warmup(config, vlm, environment, sources.train, renderer),
        open_image=opener,
        evaluator=Evaluator(
            engine,
            for_readings(environment, partial(note_unscored_answer, folder)),
            max_new_tokens=config.rollout.max_new_tokens,
            stop=config.rollout.stop,
            batch_size=config.evaluate.batch_size,
        ),
        checkpoints=checkpoints,
        resumed=resumed,
        metrics=MetricsLog([*sinks, profile] if profile else sinks),
        phases=Phases(),
        progress=progress,
        started=started,
        peak_tflops=peak_tflops(config, next(vlm.parameters()).device, progress),
        token_text=renderer.token_text,
        profile=profile or nullcontext,
    )


def url_limits(settings: Data) -> UrlLimits:
    """What may be read from the network, and how much of it."""
    return UrlLimits(
        max_mib=settings.max_image_mib,
        timeout_seconds=settings.url_timeout_seconds,
        max_redirects=settings.max_url_redirects,
        retries=settings.url_retries,
        allow_private_addresses=settings.allow_private_addresses,
    )


def make_opener(settings: Data, folder: Path, limits: UrlLimits) -> OpenImage:
    """The opener of images, with a memory of what URLs have sent in the run's folder."""
    fetch = FetchedFiles(folder / "images", settings.url_cache_gib, partial(remote_image, limits=limits))
    return partial(
        open_image,
        max_mib=settings.max_image_mib,
        max_megapixels=settings.max_image_megapixels,
        convert=settings.convert_images,
        fetch=fetch,
    )


def make_access(settings: Data) -> RowAccess:
    """How data files may be reached."""
    return RowAccess(
        cache_dir=Path(settings.cache_dir), image_root=settings.image_root, url_limits=url_limits(settings)
    )


def make_environment(config: Config, environment: Environment | None = None) -> Environment:
    """The environment given, or the one that the settings name; scored by the function of `reward`, if there is one."""
    made = environment or named_environment(config)
    if config.reward is None:
        return made
    opener = make_opener(config.data, Path(config.run_dir), url_limits(config.data))
    function = load_reward(config.reward)
    return OwnReward(made, function, opener, limits=call_limits(config), name=config.reward)


def named_environment(config: Config) -> Environment:
    """The task family that `environment.name` names."""
    if isinstance(config.environment, Geo3kEnvironment):
        return Geo3k(config.environment, make_access(config.data))
    if isinstance(config.environment, VqaEnvironment):
        return Vqa(config.environment, make_access(config.data))
    if isinstance(config.environment, CaptionEnvironment):
        return make_caption(config, config.environment)
    if isinstance(config.environment, GeoSpotEnvironment):
        from fovea.environments.geospot.environment import GeoSpot  # an extra: it says itself what is absent

        return GeoSpot(config.environment, make_access(config.data))
    if isinstance(config.environment, OwnEnvironment):
        own = load_environment(config.environment)
        return GuardedEnvironment(own, limits=call_limits(config), name=config.environment.file)
    return Shapes(config.environment, config.seed)


def call_limits(config: Config) -> CallLimits:
    """How the user's own code is called."""
    return CallLimits(
        timeout_seconds=config.reward_timeout_seconds,
        on_failure=config.reward_on_failure,
        calls_at_once=config.reward_calls_at_once,
    )


def make_caption(config: Config, settings: CaptionEnvironment) -> Environment:
    """Captions, with the models that score them."""
    from fovea.environments.caption import Caption, JudgedCaption

    reward_model = None
    if settings.reward_model is not None:
        from fovea.environments.reward_model import RewardScorer

        reward_model = RewardScorer(settings.reward_model)
    caption = Caption(settings, reward_model, make_access(config.data))
    if settings.judge is None:
        return caption
    from fovea.environments.judge import JudgeClient

    opener = make_opener(config.data, Path(config.run_dir), url_limits(config.data))
    judge = JudgeClient(settings.judge)
    return JudgedCaption(caption, judge, opener, scores_at_once=settings.judge.max_concurrency)


def make_model(config: Config, environment: Environment) -> tuple[ModelParts, VLM]:
    """The model on its device, with what is trained chosen."""
    parts = make_parts(config, environment)
    return parts, make_vlm(config, parts)


def make_parts(config: Config, environment: Environment) -> ModelParts:
    """The model as it is made or loaded."""
    settings = config.model
    if settings.tiny is None:
        return load_pretrained(settings)
    parts = make_tiny(settings.tiny, _corpus(environment, config.data.on_bad_row), config.seed)
    for parameter in parts.network.parameters():  # not the frequencies of rotary positions: those stay float32
        parameter.data = parameter.data.to(DTYPES[settings.dtype])
    return parts


def make_vlm(config: Config, parts: ModelParts) -> VLM:
    """The model on its device, with what is trained chosen."""
    settings = config.model
    device = pick_device(settings.device)
    kernels = _liger_kernels(device) if config.train.liger_kernels else TORCH_KERNELS
    choose_trainable(parts.network, settings, config.seed)
    if config.train.gradient_checkpointing:
        recompute_activations(parts.network)
    _check_attention(settings, device)
    cache = None if settings.trains_vision else make_feature_cache(config)
    vlm = VLM(
        parts,
        attention=settings.attention,
        feature_cache=cache,
        kernels=kernels,
        value_head=make_value_head(config, parts),
    )
    return vlm.to(device)


def make_value_head(config: Config, parts: ModelParts) -> ValueHead | None:
    """On the policy's trunk, where PPO's value function shares that."""
    if not config.algorithm.needs_values or config.critic.trunk != "shared":
        return None
    return ValueHead(config_of(parts.network).text_config.hidden_size, detach_trunk=config.critic.detach_trunk)


def _check_attention(settings: Model, device: torch.device) -> None:
    """Two kernels run on one kind of device each."""
    if settings.attention == "merged" and device.type != "cpu":
        raise ConfigError(f"model.attention=merged is for CPUs, but the model is on {device.type}; set it to auto")
    if settings.attention == "varlen" and device.type == "cuda" and settings.dtype != "bfloat16":
        raise ConfigError(
            f"model.attention=varlen takes 16-bit numbers on CUDA, but model.dtype={settings.dtype}; set "
            "model.dtype=bfloat16, or model.attention=auto"
        )


def _liger_kernels(device: torch.device) -> Kernels:
    """Its kernels run on CUDA, from an extra."""
    if device.type != "cuda":
        raise ConfigError(
            f"train.liger_kernels=true, but the model is on {device.type} and Liger's kernels run on CUDA only; set "
            "train.liger_kernels=false, or model.device=cuda where there is one"
        )
    # an extra: absent packages are named by its own error
    kernels: Kernels = importlib.import_module("fovea.models.liger").LIGER_KERNELS
    return kernels


def make_feature_cache(config: Config) -> FeatureCache:
    """Features of a frozen vision tower in memory and, where asked for, in files beside the run's own."""
    settings = config.model
    files = None
    if settings.feature_spill_gib:
        files = SpillFolder(Path(config.run_dir) / "features", settings.feature_spill_gib * 2**30)
    return FeatureCache(settings.feature_cache_gib * 2**30, files)


def _corpus(environment: Environment, on_bad_row: Literal["error", "skip"]) -> list[str]:
    """Questions and answers of the first training rows: the words of the task."""
    tasks = environment.tasks("train")
    texts: list[str] = []
    for index in range(min(len(tasks), CORPUS_ROWS)):
        try:
            task = tasks[index]
        except DataError:
            if on_bad_row == "error":
                raise
            continue  # counted when the run comes to it
        texts += [task.question, environment.target(task)]
    return texts


def make_engine(config: Config, parts: ModelParts, vlm: VLM) -> EmbeddedEngine:
    """The embedded engine."""
    int8 = config.rollout.decode_weights == "int8"
    device = next(vlm.parameters()).device
    if int8 and device.type != "cpu":
        raise ConfigError(
            f"rollout.decode_weights=int8, but the model is on {device.type} and 8-bit decoding is made for CPUs; set "
            "rollout.decode_weights=exact"
        )
    return EmbeddedEngine(
        vlm,
        parts,
        max_batch_tokens=config.rollout.max_batch_tokens,
        tape=make_tape(vlm, config),
        tuning=Tuning(int8_decoding=int8),
    )


def make_tape(vlm: VLM, config: Config) -> Tape | None:
    """Memory for what the update can take over from the rollout; None where it is not wanted."""
    device = next(vlm.parameters()).device
    if config.rollout.reuse_gib == 0 or config.train.gradient_checkpointing or device.type != "cpu":
        return None
    narrow = vlm.text_config.hidden_size < MIN_RECORDED_WIDTH
    inexact = config.rollout.decode_weights != "exact"
    padded = not config.train.variable_seq_lengths
    # in 16 bits the later steps of an update would be compared with another computation of the first
    algorithm = config.algorithm
    again = algorithm.ppo_epochs * algorithm.minibatches > 1 or algorithm.needs_old_logprobs
    mixed = vlm.dtype != torch.float32 and again
    return Tape(
        [] if narrow or inexact or padded or mixed else vlm.linear_widths, config.rollout.reuse_gib * 2**30, vlm.dtype
    )


def make_policy(config: Config, vlm: VLM) -> TorchPolicy:
    """The trainer; a frozen copy of the model only where a KL term needs it, a value function where PPO does.

    With LoRA, switching the adapters off gives the reference, unless a warm-up has trained them by the time that RL
    begins.
    """
    adapters_off_is_the_start = bool(lora_layers(vlm)) and config.warmup is None
    needs_copy = config.algorithm.kl_coef > 0 and not adapters_off_is_the_start
    return TorchPolicy(
        vlm,
        train=config.train,
        algorithm=config.algorithm,
        temperature=config.rollout.temperature,
        max_steps=config.max_steps,
        reference=copy.deepcopy(vlm).requires_grad_(False) if needs_copy else None,
        critic=make_critic(config, vlm) if config.algorithm.needs_values else None,
    )


def make_critic(config: Config, vlm: VLM) -> Critic:
    """The value function: the head that `make_model` has put on the policy, or a model of its own."""
    settings = config.critic
    model = None
    if settings.trunk == "separate":
        model = ValueModel(copy.deepcopy(vlm)).to(next(vlm.parameters()).device)
        untrained_head(model.trunk.network)
    parameters = value_parameters(vlm) if model is None else trainable_parameters(model)
    return Critic(
        optimizer=Optimizer(
            parameters, config.train, peak_learning_rate=settings.learning_rate, max_steps=config.max_steps
        ),
        model=model,
        warmup_steps=settings.warmup_steps,
    )


def make_sources(config: Config, environment: Environment, renderer: Renderer, bad_rows: BadRows) -> Sources:
    """Prompts of every split."""

    def source(split: Split, cache_gib: float = 0.0) -> PromptSource:
        return PromptSource(
            environment.tasks(split),
            environment,
            renderer,
            max_prompt_tokens=config.data.max_prompt_tokens,
            on_bad_row=config.data.on_bad_row,
            cache_gib=cache_gib,
            bad_rows=bad_rows,
        )

    return Sources(
        train=source("train", config.data.prompt_cache_gib),
        dev=source("dev", config.data.prompt_cache_gib),
        test=source("test"),
        bad_rows=bad_rows,
    )


def make_warmup(
    config: Config, vlm: VLM, environment: Environment, train: PromptSource, renderer: Renderer
) -> Warmup | None:
    """The supervised stage, if there is one."""
    settings = config.warmup
    if settings is None:
        return None
    unknown = set(settings.stop_kind_accuracy) - set(kinds_of(environment.tasks("dev")))
    if unknown:
        raise ConfigError(
            f"warmup.stop_kind_accuracy: no dev row is of kind {', '.join(sorted(unknown))}, so that the warm-up could "
            f"never stop; the kinds are {', '.join(sorted(set(kinds_of(environment.tasks('dev')))))}"
        )
    return Warmup(
        settings=settings,
        # an order of its own, so that the rows of RL do not depend on how long the warm-up took
        order=Order(
            kinds_of(train.tasks),
            weights=settings.kind_weights,
            seed=config.seed + 1,
            setting="warmup.kind_weights",
        ),
        source=train,
        environment=environment,
        answer_ids=renderer.target,
        make_trainer=lambda: SupervisedTrainer(vlm, settings),
    )


def make_sinks(config: Config, folder: Path, start_step: int) -> list[Sink]:
    """Where metrics go."""
    sinks: list[Sink] = [JsonlSink(folder, resume_step=start_step)]
    if config.log.tensorboard:
        sinks.append(TensorBoardSink(folder / "tensorboard", resume_step=start_step))
    if config.log.wandb_project is not None:
        from fovea.wandb_sink import WandbSink  # an extra: absent packages are named by its own error

        sinks.append(
            WandbSink(
                folder,
                project=config.log.wandb_project,
                settings=config.model_dump(mode="json"),
                resume_step=start_step,
            )
        )
    return sinks


def make_profile(config: Config, folder: Path, start_step: int, progress: Progress) -> StepProfile | None:
    """Where the time goes, if that is asked for and a step is left to take."""
    if not config.profile or start_step >= config.max_steps:
        return None
    return StepProfile(folder, start_step=start_step, max_steps=config.max_steps, say=progress.print)


def peak_tflops(config: Config, device: torch.device, progress: Progress) -> float | None:
    """What `mfu` is a share of, and a line that says so; None without a setting on a CPU or an unknown GPU."""
    if config.log.peak_tflops is not None or device.type != "cuda":
        return config.log.peak_tflops
    name = torch.cuda.get_device_name(device)
    peak = known_peak_tflops(name)
    if peak is None:
        progress.print(f"mfu: not reported, the peak of {name} is not known; set log.peak_tflops (dense bfloat16)")
    else:
        progress.print(f"mfu: a share of {peak:g} TFLOP/s, dense bfloat16 by the data sheet of {name}")
    return peak


def _model_table(parts: ModelParts, vlm: VLM) -> Table:
    device = next(vlm.parameters()).device
    title = Text(f"{parts.name} on {device}, {torch.get_num_threads()} threads")  # a name is text, not markup
    table = Table(title=title, title_justify="left")
    for header in ("part", "trainable", "total"):
        table.add_column(header, justify="left" if header == "part" else "right")
    for row in count_parameters(parts.network):
        table.add_row(row.part, f"{row.trainable:,}", f"{row.total:,}")
    return table
