"""Have lmms-eval ask a server for its task MATH-Vision: its own client, prompts and verdicts.

Run by an interpreter that has lmms-eval: `lmms_client.py URL KEY MODEL FOLDER`. The last line printed is JSON: the
answers, the verdicts and the score of the rows in FOLDER/test.jsonl.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

from lmms_eval.api.task import ConfigurableMessagesTask
from lmms_eval.models.chat.openai import OpenAICompatible
from lmms_eval.tasks.mathvision import utils
from PIL import Image

url, key, model, folder = sys.argv[1:]
docs = [json.loads(line) for line in (Path(folder) / "test.jsonl").read_text().splitlines()]
for doc in docs:
    doc["decoded_image"] = Image.open(Path(folder) / doc["image"])
SETTINGS = {"mc_prompt": "Answer the question with the option's letter from the given choices directly."}


def messages(doc: dict) -> list:
    text = utils.mathvision_doc_to_text(doc, SETTINGS)
    return ConfigurableMessagesTask._build_user_turn(utils.mathvision_doc_to_visual(doc), text)


client = OpenAICompatible(model_version=model, base_url=f"{url}/v1", api_key=key, timeout=120)
client.task_dict = {"mathvision_test": {"test": docs}}
arguments = [("", messages, {"max_new_tokens": 12}, place, "mathvision_test", "test") for place in range(len(docs))]
texts = [each.text for each in client.generate_until([SimpleNamespace(args=each) for each in arguments])]
found = [utils.mathvision_process_results(doc, [text]) for doc, text in zip(docs, texts, strict=True)]
results = [each["mathvision_standard_eval"] for each in found]
score = utils.mathvision_aggregate_results_eval(results)
print(json.dumps({"texts": texts, "right": [each["scores"][0] for each in results], "percent": score}))
