"""Chat templates: some like those of well-known models, and small ones that leave out or refuse parts of a chat, as published ones do."""

from __future__ import annotations

from pathlib import Path

PUBLISHED = Path(__file__).parents[2] / "shared" / "templates"
"""Templates that others publish, beside the checkout, where that exists."""

HERMES = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1) %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content and loop.index0 == ns.last %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + strftime_now("%d %b %Y") + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson(sort_keys=true, separators=(',', ':')) }}
        {{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content + "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}{%- set system = messages[0]["content"] %}{%- set turns = messages[1:] %}
{%- else %}{%- set turns = messages %}{%- endif %}
{%- set users = turns | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system is defined %}{{- "[INST] " + system + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
        {%- if tools is not none and message == users[-1] %}{{- "[AVAILABLE_TOOLS] " + tools | tojson + "[/AVAILABLE_TOOLS]" }}{%- endif %}
    {%- elif message["role"] == "tool" %}
        {%- if message.tool_call_id is undefined or message.tool_call_id | length != 9 %}
            {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
        {%- endif %}
        {{- "[TOOL_RESULTS] " + {"content": message.content, "call_id": message.tool_call_id} | tojson + "[/TOOL_RESULTS]" }}
    {%- elif message.tool_calls is defined %}
        {{- "[TOOL_CALLS] " + message.tool_calls | tojson + eos_token }}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] + eos_token }}
    {%- else %}
        {{- raise_exception("Only user, assistant and tool roles are supported") }}
    {%- endif %}
{%- endfor %}"""

DOCUMENTS = """\
{% for document in documents or [] %}
    {% if loop.index > 2 %}{% break %}{% endif %}
Document {{ loop.index }}: {{ document.title }}
{{ document.text }}
{% endfor %}
{% for m in messages %}{{ m.role | upper }}: {{ m.content }}{{ '\\n' }}{% endfor %}
{% if add_generation_prompt %}ASSISTANT:{% endif %}
"""

GENERATION = """\
{%- set mark = 'outside' %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- set mark = 'inside' %}
        {{- m.content + '<|im_end|>' + mark }}
        {%- endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{{- mark }}"""

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SAID = "{% for m in messages %}{{ m.content }}{% endfor %}"
TEMPLATES = {
    "hermes": HERMES,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "documents": DOCUMENTS,
    "generation": GENERATION,
    "plain": PLAIN,
}

_SAY = "<|{{ m.role }}|>{{ m.content }}<|end|>"
_CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}"
_ANSWER = "{% if add_generation_prompt %}<|assistant|>{% endif %}"


def _each(body: str) -> str:
    return f"{{% for m in messages %}}{body}{{% endfor %}}{_ANSWER}"


def _raise_if(condition: str, message: str) -> str:
    return f"{{% if {condition} %}}{{{{ raise_exception('{message}') }}}}{{% endif %}}"


DROPPING = {
    "unknown roles": _each(f"{{% if m.role in ('system', 'user', 'assistant', 'tool') %}}{_SAY}{_CALLS}{{% endif %}}"),
    "later system messages": _each(f"{{% if m.role != 'system' or loop.first %}}{_SAY}{_CALLS}{{% endif %}}"),
    "all system messages": _each(f"{{% if m.role != 'system' %}}{_SAY}{_CALLS}{{% endif %}}"),
    "all system messages but the last": (
        "{% set n = namespace(s='') %}{% for m in messages if m.role == 'system' %}{% set n.s = m.content %}{% endfor %}{{ n.s }}"
        + _each(f"{{% if m.role != 'system' %}}{_SAY}{_CALLS}{{% endif %}}")
    ),
    "the system message if the user does not speak last": _each(
        f"{{% if m.role != 'system' %}}{_SAY}{_CALLS}{{% elif messages[-1].role == 'user' %}}{_SAY}{{% endif %}}"
    ),
    "calls": _each(f"{{% if m.tool_calls %}}{{% else %}}{_SAY}{{% endif %}}"),
    "results": _each(f"{{% if m.role != 'tool' %}}{_SAY}{_CALLS}{{% endif %}}"),
    "text beside calls": _each(f"{{% if m.tool_calls %}}<|assistant|>{_CALLS}{{% else %}}{_SAY}{{% endif %}}"),
    "calls beside text": _each(f"{{% if m.content %}}{_SAY}{{% else %}}<|assistant|>{_CALLS}{{% endif %}}"),
    "calls after the first": _each(_SAY + "{% if m.tool_calls %}<call>{{ m.tool_calls[0].function | tojson }}</call>{% endif %}"),
}
"""By what they leave out."""

REFUSING = {
    "the role system": _each(_raise_if("m.role == 'system'", "System role not supported") + _SAY + _CALLS),
    "two messages of one role": _each(
        _raise_if("(m.role == 'user') != (loop.index0 % 2 == 0)", "Conversation roles must alternate") + _SAY,
    ),
    "turns that do not alternate": (
        "{% set n = namespace(i=0) %}"
        + _each(
            "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
            + _raise_if("(m.role == 'user') != (n.i % 2 == 0)", "Conversation roles must alternate")
            + "{% set n.i = n.i + 1 %}{% endif %}{% if m.tool_calls %}<|assistant|>"
            + _CALLS
            + f"{{% else %}}{_SAY}{{% endif %}}"
        )
    ),
    "an empty answer": _each(_raise_if("m.role == 'assistant' and not m.content and not m.tool_calls", "Empty answer") + _SAY + _CALLS),
    "several calls": _each(_raise_if("m.tool_calls | length > 1", "Only single tool-calls") + _SAY + _CALLS),
    "long ids": _each(_raise_if("m.role == 'tool' and m.tool_call_id | length != 9", "Ids of length 9!") + _SAY + _CALLS),
    "arguments as text": _each(
        _SAY
        + "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
        + "{% endfor %}"
    ),
    "arguments as objects": _each(_SAY + "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}"),
    "no tools": "{% for tool in tools %}{{ tool | tojson }}{% endfor %}" + _each(_SAY + _CALLS),
    "a chat without a user": _raise_if("not messages | selectattr('role', 'equalto', 'user') | list", "No user query")
    + _each(_SAY + _CALLS),
}
"""By what they refuse."""
