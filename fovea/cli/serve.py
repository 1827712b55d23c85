"""The command `fovea serve`. Imports are deferred, because importing torch takes seconds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from fovea.cli.errors import one_line_errors
from fovea.cli.options import Debug, Trust
from fovea.config.base import Tree, over
from fovea.config.recipes import parse_override
from fovea.errors import ConfigError

WORDS_HELP = "Arguments of the engine under its own names, such as max_model_len=8192 (vLLM)."


def serve(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|FOLDER", help="A run (its newest checkpoint, exported), a checkpoint, or a model folder."
        ),
    ],
    words: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help=WORDS_HELP)] = None,
    *,
    host: Annotated[
        str, typer.Option(help="Address to listen at; other than this machine's own, it needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen at.")] = 8000,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the model in requests; default: its folder's.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="VARIABLE", help="Environment variable with the key that requests must bring.")
    ] = None,
    for_training: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Serve a trainer, which brings its weights through this folder of both."),
    ] = None,
    engine: Annotated[Literal["vllm", "sglang"], typer.Option(help="Engine whose server is started.")] = "vllm",
    allow_urls: Annotated[
        bool, typer.Option("--allow-urls", help="Read images of requests at http(s) URLs, public ones only.")
    ] = False,
    allow_private_addresses: Annotated[
        bool, typer.Option("--allow-private-addresses", help="Read them from this machine and its network as well.")
    ] = False,
    start_seconds: Annotated[float, typer.Option(min=1, help="Longest time to wait until it answers.")] = 900.0,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """Serve a model by OpenAI's interface.

    Examples: fovea serve runs/geo3k; fovea serve exported/geo3k --port 8001 max_model_len=8192.
    """
    with one_line_errors(debug=debug):
        arguments: Tree = {}
        for word in words or []:
            arguments = over(arguments, parse_override(word))
        if allow_private_addresses and not allow_urls:
            raise ConfigError("--allow-private-addresses says which images are read at URLs; add --allow-urls")
        from fovea.data.fetch import UrlLimits
        from fovea.rollout.server import LaunchesServers
        from fovea.serve.serve import Address, Served
        from fovea.serve.serve import serve as serve_model

        launch: LaunchesServers
        # each an optional extra
        if engine == "sglang":
            from fovea.rollout.sglang.server import launch
        else:
            from fovea.rollout.vllm.server import launch
        limits = UrlLimits(retries=0, allow_private_addresses=allow_private_addresses) if allow_urls else None
        served = Served(
            source=source, name=name, arguments=arguments, weights_dir=for_training, url_limits=limits, trust=trust
        )
        address = Address(host=host, port=port, api_key_env=api_key_env)
        try:
            serve_model(served, address, launch, _say, start_seconds=start_seconds)
        except KeyboardInterrupt:
            _say("stopped")
            raise typer.Exit(130) from None


def _say(text: str) -> None:
    typer.echo(text)
    sys.stdout.flush()
