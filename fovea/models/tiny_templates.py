"""Chat templates of tiny models: those of the Qwen-VL families in fewer words, with tools where a family's has them."""

from __future__ import annotations

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
"""The template of Qwen2-VL and Qwen2.5-VL, which have no place for tools."""
_LIST = """\
{%- if tools -%}
{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' -%}
{%- for part in messages[0].content -%}{{ part.text }}{%- endfor -%}{{ '\\n\\n' }}
{%- set messages = messages[1:] -%}
{%- endif -%}
{{ '<tools>' }}
{%- for tool in tools -%}{{ '\\n' + tool | tojson }}{%- endfor -%}
{{ '\\n</tools>\\nFORM<|im_end|>\\n' }}
{%- endif -%}
"""
_BEGIN = "{{ '<|im_start|>' + message.role + '\\n' }}"
_BEGIN_WITH_RESULTS = """\
{%- if message.role != 'tool' -%}{{ '<|im_start|>' + message.role + '\\n' }}
{%- else -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
{{ '\\n<tool_response>\\n' }}
{%- endif -%}"""
_END = "{{ '<|im_end|>\\n' }}"
_END_WITH_RESULTS = """\
{%- if message.role == 'tool' -%}{{ '\\n</tool_response>' }}{%- endif -%}
{%- if message.role != 'tool' or loop.last or loop.nextitem.role != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}"""
_FORMS = {
    "json": '<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>',
    "xml": "<tool_call>\\n<function=...>\\n<parameter=...>\\n...\\n</parameter>\\n</function>\\n</tool_call>",
}
_FORM_OF_FAMILY = {"qwen3_vl": "json", "qwen3_vl_moe": "json", "qwen3_5": "xml", "qwen3_5_moe": "xml"}


def chat_template(family: str) -> str:
    """The chat template of a tiny model."""
    if family not in _FORM_OF_FAMILY:
        return CHAT_TEMPLATE
    messages = CHAT_TEMPLATE.replace(_BEGIN, _BEGIN_WITH_RESULTS).replace(_END, _END_WITH_RESULTS)
    return _LIST.replace("FORM", _FORMS[_FORM_OF_FAMILY[family]]) + messages
