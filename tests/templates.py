"""Chat templates in the formats of the supported families, written for the tests: system, tools, tool output, thoughts.

Each shows a conversation as the family's published template does, as far as these tests go: roles and their marks, what
ends a turn, how tool messages in a row are joined, which thoughts are dropped, and the generation prompt.
"""

# ruff: noqa: E501 (lines of templates)

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.tiny import make_tiny_tokenizer


@dataclass(frozen=True)
class Family:
    """One family's format.

    Attributes:
        end: what ends an assistant's turn; of `ends` the one for a turn that calls a tool, where it is another.
        special: the other special tokens.
        opening: what the model itself writes before its text, where the template shows it there.
        thinks: the opening of thoughts is part of the generation prompt.
    """

    template: str
    end: str
    special: tuple[str, ...] = ()
    call_end: str = ""
    opening: str = ""
    thinks: bool = False


_CALLS = (
    '{%- for call in m.tool_calls or [] %}{%- set f = call.function or call %}{{- \'\\n<tool_call>\\n{"name": "\' +'
    " f.name + '\", \"arguments\": ' + (f.arguments | tojson) + '}\\n</tool_call>' }}{%- endfor %}"
)
_QWEN_TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else SYSTEM) +"
    " '\\n\\n# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}"
    "{%- elif messages[0].role == 'system' or SYSTEM %}{{- '<|im_start|>system\\n' + (messages[0].content"
    " if messages[0].role == 'system' else SYSTEM) + '<|im_end|>\\n' }}{%- endif %}"
)
_QWEN_TOOL = (
    "{%- elif m.role == 'tool' %}{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{- '<|im_start|>user' }}{%- endif %}{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
)
_IM_END = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"

QWEN25 = (
    "{%- set SYSTEM = 'You are a helpful assistant.' %}" + _QWEN_TOOLS + "{%- for m in messages %}"
    "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- elif m.role == 'assistant' %}{{- '<|im_start|>assistant' }}"
    "{%- if m.content %}{{- '\\n' + m.content }}{%- endif %}"
    + _CALLS
    + "{{- '<|im_end|>\\n' }}"
    + _QWEN_TOOL
    + "{%- endif %}{%- endfor %}"
    + _IM_END
)
QWEN3 = (
    "{%- set SYSTEM = '' %}" + _QWEN_TOOLS + "{%- set ns = namespace(last=messages | length - 1, found=false) %}"
    "{%- for m in messages[::-1] %}{%- if not ns.found and m.role == 'user' and not"
    " (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}"
    "{%- set ns.found = true %}{%- set ns.last = messages | length - 1 - loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- elif m.role == 'assistant' %}{%- set content = m.content or '' %}"
    "{%- set thought = m.reasoning_content or '' %}{%- if not thought and '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\\n' }}{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}"
    "{%- else %}{{- content }}{%- endif %}"
    + _CALLS
    + "{{- '<|im_end|>\\n' }}"
    + _QWEN_TOOL
    + "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM.<|im_end|>\n{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{- bos_token }}{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' %}"
    "{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}{%- if tools %}{{- 'Environment: ipython\\n' }}{%- endif %}"
    "{{- 'Cutting Knowledge Date: December 2023\\nToday Date: 26 Jul 2024\\n\\n' + system + '<|eot_id|>' }}"
    "{%- if tools %}{{- '<|start_header_id|>user<|end_header_id|>\\n\\nYou have these functions.\\n\\n' }}"
    "{%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}"
    "{{- rest[0].content | trim + '<|eot_id|>' }}{%- set rest = rest[1:] %}{%- endif %}"
    "{%- for m in rest %}{%- if m.role == 'tool' %}{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}"
    "{{- m.content | tojson + '<|eot_id|>' }}{%- elif m.tool_calls %}{%- set f = m.tool_calls[0].function %}"
    '{{- \'<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "\' + f.name + \'", "parameters": \' }}'
    "{{- f.arguments | tojson + '}<|eot_id|>' }}{%- else %}"
    "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
GLM4 = (
    "{{- '[gMASK]<sop>' }}{%- if tools %}{{- '<|system|>\\n# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson }}"
    "{%- endfor %}{%- endif %}{%- for m in messages %}"
    "{{- '<|' + ('observation' if m.role == 'tool' else m.role) + '|>' }}{{- '\\n' + m.content }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"
)
GLM45 = (
    "{{- '[gMASK]<sop>' }}{%- if tools %}{{- '<|system|>\\n# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson +"
    " '\\n' }}{%- endfor %}{%- endif %}{%- set ns = namespace(last=-1) %}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{{- '<|user|>\\n' + m.content }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '/nothink' }}{%- endif %}"
    "{%- elif m.role == 'assistant' %}{%- set content = m.content or '' %}{%- set thought = '' %}"
    "{%- if '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}{{- '<|assistant|>' }}"
    "{%- if loop.index0 > ns.last and thought %}{{- '\\n<think>' + thought.strip() + '</think>' }}"
    "{%- else %}{{- '\\n<think></think>' }}{%- endif %}{%- if content.strip() %}{{- '\\n' + content.strip() }}{%- endif %}"
    "{%- for call in m.tool_calls or [] %}{%- set f = call.function or call %}{{- '\\n<tool_call>' + f.name + '\\n' }}"
    "{%- for key, value in f.arguments.items() %}{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}"
    "{{- (value if value is string else value | tojson) + '</arg_value>\\n' }}{%- endfor %}{{- '</tool_call>' }}"
    "{%- endfor %}{%- elif m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}{%- else %}{{- '<|system|>\\n' + m.content }}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '\\n<think></think>' }}{%- endif %}{%- endif %}"
)
DEEPSEEK_R1 = (
    "{%- set ns = namespace(tool=false, first=true) %}{{- bos_token }}"
    "{%- for m in messages %}{%- if m.role == 'system' %}{{- m.content }}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.tool = false %}{{- '<｜User｜>' + m.content }}"
    "{%- elif m.role == 'assistant' %}{%- if m.tool_calls %}{%- set ns.tool = false %}"
    "{{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}{%- for call in m.tool_calls %}{{- '<｜tool▁call▁begin｜>function"
    "<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' + call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}"
    "{%- endfor %}{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}"
    "{%- elif ns.tool %}{{- '<｜tool▁outputs▁end｜>' + m.content + '<｜end▁of▁sentence｜>' }}{%- set ns.tool = false %}"
    "{%- else %}{{- '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{%- endif %}"
    "{%- elif m.role == 'tool' %}{%- set ns.tool = true %}"
    "{{- '<｜tool▁outputs▁begin｜>' if ns.first else '\\n' }}{%- set ns.first = false %}"
    "{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{%- endif %}{%- endfor %}"
    "{%- if ns.tool %}{{- '<｜tool▁outputs▁end｜>' }}{%- elif add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}"
    "{%- endif %}"
)
DEEPSEEK_V3 = DEEPSEEK_R1.replace("<think>\\n' }}{%- endif %}", "' }}{%- endif %}")
DEEPSEEK_V31 = (
    "{%- set thinks = thinking is defined and thinking %}{%- set ns = namespace(tool=false, user=false) %}"
    "{{- bos_token }}{%- for m in messages %}{%- if m.role == 'system' %}{{- m.content }}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.tool = false %}{%- set ns.user = true %}"
    "{{- '<｜User｜>' + m.content }}{%- elif m.role == 'assistant' %}"
    "{%- if ns.user %}{{- '<｜Assistant｜></think>' }}{%- endif %}{%- set ns.user = false %}"
    "{%- if m.tool_calls %}{{- (m.content or '') + '<｜tool▁calls▁begin｜>' }}{%- for call in m.tool_calls %}"
    "{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments +"
    " '<｜tool▁call▁end｜>' }}{%- endfor %}{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}"
    "{%- elif ns.tool %}{{- m.content + '<｜end▁of▁sentence｜>' }}"
    "{%- else %}{{- m.content.split('</think>', 1)[-1] + '<｜end▁of▁sentence｜>' }}{%- endif %}{%- set ns.tool = false %}"
    "{%- elif m.role == 'tool' %}{%- set ns.user = false %}{%- set ns.tool = true %}"
    "{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt and ns.user and not ns.tool %}"
    "{{- '<｜Assistant｜>' + ('<think>' if thinks else '</think>') }}{%- endif %}"
)
KIMI = (
    "{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}{%- endif %}"
    "{%- for m in messages %}{%- if loop.first and m.role != 'system' %}"
    "{{- '<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>' }}{%- endif %}"
    "{{- {'system': '<|im_system|>system', 'user': '<|im_user|>user', 'assistant': '<|im_assistant|>assistant',"
    " 'tool': '<|im_system|>tool'}[m.role] + '<|im_middle|>' }}"
    "{%- if m.role == 'tool' and m.tool_call_id %}{{- '## Return of ' + m.tool_call_id + '\\n' }}{%- endif %}"
    "{{- m.content or '' }}{%- if m.tool_calls %}{{- '<|tool_calls_section_begin|>' }}{%- for call in m.tool_calls %}"
    "{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' + (call.function.arguments if"
    " call.function.arguments is string else call.function.arguments | tojson) + '<|tool_call_end|>' }}{%- endfor %}"
    "{{- '<|tool_calls_section_end|>' }}{%- endif %}{{- '<|im_end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}"
)

_GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|assistant|>", "<|observation|>")
_DEEPSEEK = (
    *("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>"),
    *("<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)
_KIMI = (
    *("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|tool_calls_section_begin|>"),
    *("<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
FAMILIES = {
    "qwen2.5": Family(QWEN25, "<|im_end|>"),
    "qwen3": Family(QWEN3, "<|im_end|>"),
    "smollm2": Family(CHATML, "<|im_end|>"),
    "llama3": Family(
        LLAMA3, "<|eot_id|>", ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>")
    ),
    "glm4": Family(GLM4, "<|user|>", _GLM, call_end="<|observation|>"),
    "glm4.5": Family(GLM45, "<|user|>", _GLM, call_end="<|observation|>", opening="\n<think></think>\n"),
    "deepseek-v3": Family(DEEPSEEK_V3, "<｜end▁of▁sentence｜>", _DEEPSEEK),
    "deepseek-r1": Family(DEEPSEEK_R1, "<｜end▁of▁sentence｜>", _DEEPSEEK, thinks=True),
    "deepseek-v3.1": Family(DEEPSEEK_V31, "<｜end▁of▁sentence｜>", _DEEPSEEK),
    "kimi-k2": Family(KIMI, "<|im_end|>", _KIMI),
    "moonlight": Family(KIMI, "<|im_end|>", _KIMI),
}


def make_tokenizer(path: Path, name: str) -> Any:
    """A tiny tokenizer with a family's special tokens and template, written to `path`."""
    family = FAMILIES[name]
    tokenizer = make_tiny_tokenizer(path)
    special = [token for token in (family.end, family.call_end, *family.special) if token]
    tokenizer.add_special_tokens({"additional_special_tokens": list(dict.fromkeys(special))})
    end = "<|endoftext|>" if family.call_end else family.end
    begin = next((token for token in special if "begin" in token and "of" in token), end)
    tokenizer.add_special_tokens({"eos_token": end, "bos_token": begin})
    tokenizer.chat_template = family.template
    tokenizer.save_pretrained(path)
    return tokenizer
