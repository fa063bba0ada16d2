"""Makes the fixture of conversations as transformers renders and masks them, which `ringspan train` must reproduce.

    pip install -r tools/requirements.txt && python tools/make_chat_fixture.py

Writes below crates/ringspan-train/tests/fixtures/chat: conversations.json, and for each of four templates a folder with
tokenizer.json, tokenizer_config.json, chat_template.jinja and expected.json (the text, the token ids, which of them
the assistant said, and for each message the text that an answer continues with continue_final_message, or null where
transformers refuses). The mask is that of apply_chat_template(return_assistant_tokens_mask=True) where the template has
generation blocks, and for `thinking`, which writes early answers differently when others follow, that of the same
template with blocks put in. Where there are none, it is what each answer adds to the prompt before it.
"""

import argparse
import json
import pathlib
import shutil

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TURNS = """\
{%- if messages[0]['role'] != 'system' -%}
<|begin|>system
Answer briefly.<|end|>
{% endif %}
{% for message in messages %}
    {%- if message['role'] == 'assistant' %}
<|begin|>assistant
{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}

    {%- else %}
<|begin|>{{ message['role'] }}
{{ message['content'] | trim }}<|end|>
    {%- endif %}

{% endfor %}
{%- if add_generation_prompt %}
<|begin|>assistant
{% endif %}
"""

HEADERS = """\
{{- bos_token }}
{%- set ns = namespace(first=true) %}
{%- if tools %}
    {{- '<|head|>tools<|body|>' + (tools | tojson) + '<|turn|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.content is none %}
        {%- set words = '' %}
    {%- else %}
        {%- set words = message.content | trim %}
    {%- endif %}
    {{- '<|head|>' + message['role'] + '<|body|>' }}
    {%- if message.tool_calls is defined and message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}{{- '}' }}
        {%- endfor %}
    {%- endif %}
    {{- words + '<|turn|>' }}
    {%- set ns.first = false %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|head|>assistant<|body|>' }}
{%- endif %}
"""

BRACKETS = """\
{%- if messages[0]['role'] == 'system' -%}
    {%- set system = messages[0]['content'].strip() + '\\n\\n' -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set system = '' -%}
    {%- set turns = messages -%}
{%- endif -%}
{{- bos_token -}}
{%- for message in turns -%}
    {%- if message['role'] not in ['user', 'assistant', 'tool'] -%}
        {{- raise_exception('only user, assistant and tool may speak, not ' ~ message['role']) -}}
    {%- endif -%}
    {%- if message['role'] == 'assistant' -%}
        {{- ' ' ~ message['content'].strip().replace('\\t', '  ') ~ eos_token -}}
    {%- else -%}
        {%- set lead = system if loop.first else '' -%}
        {{- '[ASK] ' ~ lead ~ message['content'].split('||')[0].strip() ~ ' [/ASK]' -}}
    {%- endif -%}
{%- endfor -%}
"""

# The logic of Qwen3's own template: it writes thoughts, even empty ones, only into answers after the last question.
THINKING = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == 'user' and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == 'user') or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or (messages[loop.index0 - 1].role != 'tool') %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != 'tool') %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def with_blocks(template: str) -> str:
    """THINKING with generation blocks, which it lacks, around the text that an answer adds to the prompt before it."""
    head = "'<|im_start|>' + message.role + '\\n"
    start, middle = template.split("    {%- elif message.role == 'assistant' %}\n")
    answer, rest = middle.split("    {%- elif message.role == 'tool' %}\n")
    begin = "        {%- if loop.index0 > ns.last_query_index %}\n"
    assert answer.count(begin) == 1 and answer.count(head) == 3
    opened = "        {{- '<|im_start|>' + message.role + '\\n' }}\n        {%- generation %}\n" + begin
    answer = answer.replace(head + "<think>", "'<think>").replace(head + "' + content", "content").replace(begin, opened)
    parts = [start, "    {%- elif message.role == 'assistant' %}\n", answer, "        {%- endgeneration %}\n"]
    return "".join([*parts, "    {%- elif message.role == 'tool' %}\n", rest])


TEMPLATES = {
    "turns": (TURNS, ["<|begin|>", "<|end|>"], {"eos_token": "<|end|>"}),
    "headers": (HEADERS, ["<|text|>", "<|head|>", "<|body|>", "<|turn|>"], {"bos_token": "<|text|>", "eos_token": "<|turn|>"}),
    "brackets": (BRACKETS, ["<s>", "</s>", "[ASK]", "[/ASK]"], {"bos_token": "<s>", "eos_token": "</s>"}),
    "thinking": (THINKING, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], {"eos_token": "<|im_end|>"}),
}


def say(role: str, content: str | None, **more: object) -> dict:
    return {"role": role, "content": content, **more}


CALL = [{"type": "function", "function": {"name": "weather", "arguments": {"town": "Zürich", "days": [1, 2], "wind": None}}}]
CONVERSATIONS = [
    {"messages": [say("user", "What is a ring?"), say("assistant", "A line that meets itself.")]},
    {"messages": [say("system", "  You are terse.\n"), say("user", "2 + 2?"), say("assistant", "4"), say("user", "  And\tthen?  "), say("assistant", "  8, then 16.\n\n")]},
    {"messages": [say("user", "Schreib über Bären. 🐻"), say("assistant", "Bären schlafen – lange.\tUnd träumen 🐻."), say("user", "Mehr!")]},
    {"messages": [say("user", "one || two"), say("assistant", "{% if x %}{{ y }} {# no template #}")]},
    {
        "messages": [
            say("user", "Weather in Zürich?"),
            say("assistant", "", tool_calls=CALL),
            say("tool", "<rain> & \"wind\""),
            say("assistant", "It rains."),
        ],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"town": {"type": "string"}}}}],
    },
    {
        "messages": [
            say("user", "Think."),
            say("assistant", "<think>\nWhat of?\n</think>\n\nOf a ring."),
            say("user", "<think>\n\n</think>\n\nOf a ring."),
            say("assistant", "Of a ring."),
            say("user", "Again."),
            say("assistant", "\nOf a ring.", reasoning_content="Of a ring."),
        ]
    },
]


def tokenizer(folder: pathlib.Path, special: list[str], names: dict, trim: bool) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.ByteLevel(trim_offsets=trim)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    words = [str(m["content"]) for c in CONVERSATIONS[:5] for m in c["messages"]] + ["system user assistant tool Answer briefly."]
    inner.train_from_iterator(sorted(words) * 3, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, **names)
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(names, indent=2) + "\n")
    return fast


def prefix_mask(fast: PreTrainedTokenizerFast, conversation: dict, text: str) -> list[int]:
    messages, tools = conversation["messages"], conversation.get("tools")
    render = lambda part, prompt: fast.apply_chat_template(part, tools=tools, tokenize=False, add_generation_prompt=prompt)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before, upto = render(messages[:index], True), render(messages[: index + 1], False)
            assert upto.startswith(before) and text.startswith(upto)
            spans.append((len(before), len(upto)))
    offsets = fast(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    # Offsets may leave out spaces: a token of spaces alone then has an empty range, after them.
    offsets = [(a, b) if a < b else (b - 1, b) for a, b in offsets]
    return [int(any(start < b and a < end for start, end in spans)) for a, b in offsets]


def continued(fast: PreTrainedTokenizerFast, conversation: dict) -> list[str | None]:
    def upto(index: int) -> str | None:
        messages = conversation["messages"][: index + 1]
        try:
            return fast.apply_chat_template(
                messages, tools=conversation.get("tools"), tokenize=False, continue_final_message=True
            )
        except ValueError:
            return None

    return [upto(index) for index in range(len(conversation["messages"]))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("crates/ringspan-train/tests/fixtures/chat"))
    out = parser.parse_args().out
    shutil.rmtree(out, ignore_errors=True)
    for name, (template, special, names) in TEMPLATES.items():
        folder = out / name
        folder.mkdir(parents=True)
        (folder / "chat_template.jinja").write_text(template)
        # If offsets leave out spaces, transformers finds no token where an answer begins with a space, and masks all of it.
        marked = with_blocks(template) if template is THINKING else template
        blocks = "generation %}" in marked
        fast = tokenizer(folder, special, names, trim=not blocks)
        fast.chat_template = template
        expected = []
        for conversation in CONVERSATIONS:
            messages, tools = conversation["messages"], conversation.get("tools")
            text = fast.apply_chat_template(messages, tools=tools, tokenize=False)
            ids = fast(text, add_special_tokens=False)["input_ids"]
            if blocks:
                both = fast.apply_chat_template(
                    messages,
                    tools=tools,
                    chat_template=marked,
                    tokenize=True,
                    return_dict=True,
                    return_assistant_tokens_mask=True,
                )
                assert both["input_ids"] == ids
                mask = both["assistant_masks"]
            else:
                mask = prefix_mask(fast, conversation, text)
            assert 0 < sum(mask) < len(mask), (name, text)
            expected.append({"text": text, "tokens": ids, "learned": mask, "continued": continued(fast, conversation)})
        (folder / "expected.json").write_text(json.dumps(expected, ensure_ascii=False) + "\n")
    (out / "conversations.json").write_text(json.dumps(CONVERSATIONS, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
