"""Checks a server with clients of others: the official `openai` client over every endpoint, streamed and not, with errors; and
schemathesis over `/openapi.json`.

    check_clients.py --scripted PROGRAM              the example `scripted_engine`, whose every answer is known
    check_clients.py --ringspan PROGRAM              `ringspan serve` with a tiny random model, whose answers are any
"""

import argparse
import base64
import json
import random
import struct
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import openai
from openai import OpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "the weather of a place",
            "parameters": {
                "type": "object",
                "properties": {"place": {"enum": ["Ulm"]}},
                "required": ["place"],
                "additionalProperties": False,
            },
        },
    }
]
CALL = '<tool_call>{"name": "weather", "arguments": {"place": "Ulm"}}</tool_call>'


# Qwen's form without its words.
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if tools %}<tool_call>{% endif %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_model(folder):
    """Writes a tiny Llama with random weights, a tokenizer whose tokens are bytes, and a chat template."""
    hidden, width, heads, groups, head, layers, vocabulary = 32, 48, 4, 2, 8, 2, 259
    config = {
        "model_type": "llama", "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": width,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": head,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 4096, "tie_word_embeddings": True,
        "hidden_act": "silu", "eos_token_id": 256,
    }  # fmt: skip
    shapes = {"model.embed_tokens.weight": [vocabulary, hidden], "model.norm.weight": [hidden]}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "input_layernorm.weight": [hidden],
            at + "post_attention_layernorm.weight": [hidden],
            at + "self_attn.q_proj.weight": [heads * head, hidden],
            at + "self_attn.k_proj.weight": [groups * head, hidden],
            at + "self_attn.v_proj.weight": [groups * head, hidden],
            at + "self_attn.o_proj.weight": [hidden, heads * head],
            at + "mlp.gate_proj.weight": [width, hidden],
            at + "mlp.up_proj.weight": [width, hidden],
            at + "mlp.down_proj.weight": [hidden, width],
        }
    draw, header, data = random.Random(5), {}, bytearray()
    for name, shape in shapes.items():
        values = [1.0] * shape[0] if len(shape) == 1 else [draw.gauss(0, 0.3) for _ in range(shape[0] * shape[1])]
        start = len(data)
        data += struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, len(data)]}
    head_bytes = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head_bytes)) + head_bytes + data)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = iter(range(0x100, 0x200))
    alphabet = {chr(byte if byte in printable else next(rest)): byte for byte in range(256)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    added = [
        {"id": 256 + i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for i, text in enumerate(["<|im_end|>", "<|im_start|>", "<|endoftext|>"])
    ]
    model = {"type": "BPE", "vocab": alphabet, "merges": [], "fuse_unk": False, "byte_fallback": False}
    tokenizer = {"version": "1.0", "added_tokens": added, "pre_tokenizer": byte_level, "decoder": byte_level, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@contextmanager
def server(command):
    """Starts a server and yields its address, which is the first line that it prints."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        if not line.startswith("listening on http://"):
            sys.exit(f"{command[0]} prints {line!r} instead of its address")
        yield line.removeprefix("listening on ").strip()
    finally:
        process.terminate()
        if process.wait(60) not in (0, -15):
            sys.exit(f"{command[0]} ended with {process.returncode}")


def expect(error, status, call, **fields):
    """Checks that a call fails with an error of the client's, a status, and fields of the error's body."""
    try:
        call()
    except error as raised:
        assert raised.status_code == status, raised
        for name, value in fields.items():
            assert getattr(raised, name) == value, (name, raised.body)
        return
    raise AssertionError(f"expected {error.__name__}")


def user(text):
    return [{"role": "user", "content": text}]


def check_any(client, model):
    """What holds with any model."""
    assert [each.id for each in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model
    chat = client.chat.completions.create(model=model, messages=user("Hello"), max_tokens=8, temperature=0, logprobs=True, top_logprobs=3)
    assert chat.choices[0].message.role == "assistant" and chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
    for token in chat.choices[0].logprobs.content:
        assert len(token.top_logprobs) == 3 and token.logprob <= 0 and token.bytes is not None
    streamed = list(
        client.chat.completions.create(
            model=model, messages=user("Hello"), max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    assert text == chat.choices[0].message.content, (text, chat)
    assert streamed[-1].usage.completion_tokens == chat.usage.completion_tokens
    seeded = [
        client.chat.completions.create(model=model, messages=user("Hello"), max_tokens=8, temperature=1, seed=7, n=2).choices
        for _ in range(2)
    ]
    assert [c.message.content for c in seeded[0]] == [c.message.content for c in seeded[1]]

    text = client.completions.create(model=model, prompt="One, two", max_tokens=5, temperature=0, logprobs=2, echo=True)
    logprobs = text.choices[0].logprobs
    assert text.choices[0].text.startswith("One, two") and logprobs.token_logprobs[0] is None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == len(logprobs.top_logprobs)
    scored = client.completions.create(model=model, prompt=[[65, 66, 67], [68, 69]], max_tokens=1, temperature=0, logprobs=1, echo=True)
    assert len(scored.choices) == 2 and len(scored.choices[0].logprobs.token_logprobs) >= 3
    parts = list(client.completions.create(model=model, prompt="One, two", max_tokens=5, temperature=0, stream=True))
    assert "One, two" + "".join(part.choices[0].text for part in parts) == text.choices[0].text

    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    answer = client.chat.completions.create(
        model=model,
        messages=user("Is it so?"),
        max_tokens=200,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}},
    ).choices[0]
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.message.content)["ok"], bool)
    chosen = client.completions.create(
        model=model, prompt="x", max_tokens=20, temperature=0, extra_body={"structured_outputs": {"choice": ["left", "right"]}}
    )
    assert chosen.choices[0].text in ("left", "right"), chosen

    floats = client.embeddings.create(model=model, input=["a", "b b b"], encoding_format="float").data
    coded = client.embeddings.create(model=model, input=["a", "b b b"], encoding_format="base64").data
    for one, two in zip(floats, coded):
        raw = base64.b64decode(two.embedding)
        assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == [struct.unpack("<f", struct.pack("<f", x))[0] for x in one.embedding]
        assert abs(sum(x * x for x in one.embedding) - 1) < 1e-5
    assert len(client.embeddings.create(model=model, input="a", dimensions=2).data[0].embedding) == 2

    response = client.responses.create(model=model, input="Hello", max_output_tokens=8, temperature=0)
    assert response.status in ("completed", "incomplete") and response.output[0].type == "message"
    with client.responses.stream(model=model, input="Hello", max_output_tokens=8, temperature=0) as stream:
        # A response that is cut by its length ends with another event than one that is complete.
        *_, last = stream
        assert last.type in ("response.completed", "response.incomplete") and last.response.output_text == response.output_text

    expect(openai.NotFoundError, 404, lambda: client.completions.create(model="nothing", prompt="x"), code="model_not_found")
    expect(openai.BadRequestError, 400, lambda: client.completions.create(model=model, prompt="x", temperature=-1), param="temperature")
    expect(openai.BadRequestError, 400, lambda: client.completions.create(model=model, prompt="x", suffix="y"), param="suffix")
    expect(
        openai.BadRequestError,
        400,
        lambda: client.completions.create(model=model, prompt="x", max_tokens=10**9),
        code="context_length_exceeded",
    )
    expect(openai.BadRequestError, 400, lambda: client.chat.completions.create(model=model, messages=[]), param="messages")
    expect(openai.NotFoundError, 404, lambda: client.responses.retrieve("resp_1"))


def check_scripted(client, model):
    """What holds where the answers are known."""
    chat = client.chat.completions.create(model=model, messages=user("say:Grüße END x"), stop=[" END"])
    assert chat.choices[0].message.content == "Grüße" and chat.choices[0].finish_reason == "stop"
    again = client.chat.completions.create(model=model, messages=user("say:Grüße END x"))
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    called = client.chat.completions.create(model=model, messages=user("say:Well." + CALL), tools=TOOLS)
    call = called.choices[0].message.tool_calls[0]
    assert (called.choices[0].finish_reason, call.function.name) == ("tool_calls", "weather")
    assert json.loads(call.function.arguments) == {"place": "Ulm"}
    with client.chat.completions.stream(model=model, messages=user("say:" + CALL), tools=TOOLS) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion().choices[0]
        assert final.message.tool_calls[0].function.arguments == '{"place":"Ulm"}' and final.finish_reason == "tool_calls"
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        forced = client.chat.completions.create(
            model=model, messages=user("say:no"), tools=TOOLS, tool_choice=choice, max_tokens=999, parallel_tool_calls=False
        )
        assert forced.choices[0].message.tool_calls[0].function.name == "weather", forced
    functions = [{"type": "function", **TOOLS[0]["function"], "strict": False}]
    response = client.responses.create(model=model, input="say:" + CALL, tools=functions)
    assert response.output[0].type == "function_call" and response.output[0].name == "weather"
    expect(openai.InternalServerError, 500, lambda: client.completions.create(model=model, prompt="FAIL"))
    try:
        list(client.completions.create(model=model, prompt="FAIL", stream=True))
        raise AssertionError("a stream that fails must raise")
    except openai.APIError as error:
        assert "rank 1" in str(error)


def run_schemathesis(url):
    """Sends requests made from the description, valid and not; an answer that the description does not have is an error."""
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    command = [sys.executable, "-m", "schemathesis.cli", "run", url + "/openapi.json", "--checks", checks, "--max-examples", "15"]
    # Loading an adapter reads a folder of the server's machine.
    command += ["--exclude-path-regex", "lora", "--generation-deterministic", "--suppress-health-check", "all", "--phases", "examples,coverage,fuzzing"]
    subprocess.run(command, check=True, timeout=300, cwd=tempfile.gettempdir())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripted", help="the program of the example scripted_engine")
    parser.add_argument("--ringspan", help="the program ringspan")
    parser.add_argument("--ring", default="2")
    parser.add_argument("--schemathesis", action="store_true", help="run schemathesis against --scripted as well")
    args = parser.parse_args()
    if args.scripted:
        with server([args.scripted]) as url:
            client = OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
            check_any(client, "scripted")
            check_scripted(client, "scripted")
            print("openai: the scripted engine answers as expected")
            if args.schemathesis:
                run_schemathesis(url)
    if args.ringspan:
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder))
            (Path(folder) / "keys").write_text("secret\n")
            command = [args.ringspan, "serve", "--model", folder, "--model-name", "tiny", "--port", "0", "--ring", args.ring]
            command += ["--threads", "1", "--kv-cache", "64MiB", "--api-key-file", folder + "/keys"]
            with server(command) as url:
                client = OpenAI(base_url=url + "/v1", api_key="secret", max_retries=0)
                check_any(client, "tiny")
                stranger = OpenAI(base_url=url + "/v1", api_key="wrong", max_retries=0)
                expect(openai.AuthenticationError, 401, lambda: stranger.models.list(), code="invalid_api_key")
                print("openai: ringspan serve answers as expected")


if __name__ == "__main__":
    main()
