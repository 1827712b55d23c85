"""An environment of verifiers, for its own interpreter: a picture in each of three turns."""

import base64
import io

import verifiers.v1 as vf
from PIL import Image

COLOURS = ("red", "green", "blue")


def asked(colour: str) -> dict[str, object]:
    file = io.BytesIO()
    Image.new("RGB", (48, 48), colour).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What colour?"}]
    return {"role": "user", "content": parts}


class GalleryTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def letters(self, trace: vf.Trace) -> float:
        return float(sum(len(message.content or "") for message in trace.assistant_messages))


class Gallery(vf.Taskset[GalleryTask]):
    def load(self) -> list[GalleryTask]:
        return [GalleryTask(vf.TaskData(prompt=None))]


class GalleryEnv(vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task: GalleryTask, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as talk:
            for colour in COLOURS:
                await talk.turn([asked(colour)])


__all__ = ["Gallery", "GalleryEnv"]
