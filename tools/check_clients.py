"""Checks a server with third-party clients: the official `openai` client over every endpoint, streamed and not, with errors; the
official `anthropic` client; schemathesis over `/openapi.json`; and compatcanary, which judges how compatible a server is with OpenAI's
interface.

    check_clients.py --scripted PROGRAM              the example `scripted_engine`, whose every answer is known
    check_clients.py --ringspan PROGRAM              `ringspan serve` with a tiny random model, whose answers are any
"""

import argparse
import base64
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import anthropic
import openai
from anthropic import Anthropic
from openai import OpenAI
from tiny_server import server, write_model

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
    """Checks that hold with any model."""
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

    texts = ["a", "b b b"]
    # Whether texts of one request are computed in one step depends on when they arrive, and so does how their sums are rounded.
    both = client.embeddings.create(model=model, input=texts, encoding_format="float").data
    for single, together in zip(texts, both, strict=True):
        one = client.embeddings.create(model=model, input=single, encoding_format="float").data[0].embedding
        raw = base64.b64decode(client.embeddings.create(model=model, input=single, encoding_format="base64").data[0].embedding)
        assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == [struct.unpack("<f", struct.pack("<f", x))[0] for x in one]
        assert max(abs(x - y) for x, y in zip(one, together.embedding, strict=True)) < 1e-5
        assert abs(sum(x * x for x in one) - 1) < 1e-5
    assert len(client.embeddings.create(model=model, input="a", dimensions=2).data[0].embedding) == 2

    response = client.responses.create(model=model, input="Hello", max_output_tokens=8, temperature=0)
    assert response.status in ("completed", "incomplete") and response.output[0].type == "message"
    with client.responses.stream(model=model, input="Hello", max_output_tokens=8, temperature=0) as stream:
        # A response that is cut by its length ends with another event than one that is complete.
        *_, last = stream
        assert last.type in ("response.completed", "response.incomplete") and last.response.output_text == response.output_text

    assert client.responses.retrieve(response.id).output_text == response.output_text
    assert [item.content[0].text for item in client.responses.input_items.list(response.id)] == ["Hello"]
    following = client.responses.create(model=model, input="And then?", previous_response_id=response.id, max_output_tokens=8, temperature=0)
    turns = [("user", "Hello"), ("assistant", response.output_text), ("user", "And then?")]
    whole = [{"role": role, "content": text} for role, text in turns]
    whole = client.responses.create(model=model, input=whole, max_output_tokens=8, temperature=0, store=False)
    assert following.usage.input_tokens == whole.usage.input_tokens and following.output_text == whole.output_text
    client.responses.delete(response.id)
    expect(openai.NotFoundError, 404, lambda: client.responses.retrieve(response.id))
    begun = client.responses.create(model=model, input="Hello", max_output_tokens=8, temperature=0, background=True)
    while (later := client.responses.retrieve(begun.id)).status in ("queued", "in_progress"):
        time.sleep(0.02)
    assert later.output_text == response.output_text
    assert client.responses.cancel(begun.id).status == later.status
    long = client.responses.create(model=model, input="Hello", max_output_tokens=3000, background=True, extra_body={"ignore_eos": True})
    # A fast engine may have ended it: what has ended stays as it is.
    cancelled = client.responses.cancel(long.id).status
    assert cancelled in ("cancelled", "completed", "incomplete") and client.responses.retrieve(long.id).status == cancelled

    opened = [*user("Hello"), {"role": "assistant", "content": text.choices[0].text}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    continued = client.chat.completions.create(model=model, messages=opened, max_tokens=4, extra_body=fields)
    assert continued.usage.prompt_tokens > chat.usage.prompt_tokens

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
    expect(openai.BadRequestError, 400, lambda: client.responses.create(model=model, input="x", previous_response_id="resp_1"))


def check_scripted(client, model):
    """Checks that need known answers."""
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


def check_anthropic(client, model):
    """Checks of Anthropic's interface that hold with any model."""
    # This client does not know of temperatures any more.
    asked = {"model": model, "messages": user("Say something."), "max_tokens": 8, "extra_body": {"temperature": 0}}
    message = client.messages.create(**asked, system="Be brief.")
    assert (message.role, message.type, message.content[0].type) == ("assistant", "message", "text"), message
    assert message.stop_reason in ("end_turn", "max_tokens") and message.usage.output_tokens <= 8, message
    with client.messages.stream(**asked, system="Be brief.") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == message.content[0].text, (text, message)
    assert final.usage.output_tokens == message.usage.output_tokens
    counted = client.messages.count_tokens(model=model, messages=asked["messages"], system="Be brief.")
    cached = message.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == message.usage.input_tokens + cached, (counted, message.usage)
    # A message of the assistant at the end is continued.
    begun = [*user("Say something."), {"role": "assistant", "content": text[:3] or "a"}]
    longer = client.messages.count_tokens(model=model, messages=begun).input_tokens
    assert longer < client.messages.count_tokens(model=model, messages=[*begun, *user("x")]).input_tokens
    assert client.messages.create(**asked | {"messages": begun}).content is not None
    tools = [{"name": "weather", "input_schema": TOOLS[0]["function"]["parameters"]}]
    forced = client.messages.create(**asked | {"max_tokens": 999}, tools=tools, tool_choice={"type": "tool", "name": "weather"})
    called = next(block for block in forced.content if block.type == "tool_use")
    assert (called.name, called.input, forced.stop_reason) == ("weather", {"place": "Ulm"}, "tool_use"), forced
    result = [{"type": "tool_result", "tool_use_id": called.id, "content": "sunny"}]
    history = [*asked["messages"], {"role": "assistant", "content": forced.content}, {"role": "user", "content": result}]
    assert client.messages.create(**asked | {"messages": history}, tools=tools).content is not None
    for error, status, wrong in [
        (anthropic.BadRequestError, 400, {"messages": []}),
        (anthropic.BadRequestError, 400, {"max_tokens": 0}),
        (anthropic.NotFoundError, 404, {"model": "nothing"}),
    ]:
        expect(error, status, lambda wrong=wrong: client.messages.create(**asked | wrong))


def run_schemathesis(url):
    """Sends requests made from the description, valid and not; an answer that the description does not have is an error."""
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    command = [sys.executable, "-m", "schemathesis.cli", "run", url + "/openapi.json", "--checks", checks, "--max-examples", "15"]
    command += ["--generation-deterministic", "--suppress-health-check", "all", "--phases", "examples,coverage,fuzzing"]
    subprocess.run(command, check=True, timeout=300, cwd=tempfile.gettempdir())


def run_compatcanary(program, url, model, key):
    """Runs compatcanary's probes, all of which must pass, those that it does not require as well. A random model writes long texts, so
    the time is generous."""
    node = Path(sys.executable).with_name("node")
    command = [node, program, "scan", "--base-url", url + "/v1", "--model", model, "--profile", "modern", "--timeout", "120"]
    subprocess.run([*command, "--fail-on", "any"], check=True, timeout=300, env=os.environ | {"OPENAI_API_KEY": key})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripted", help="the program of the example scripted_engine")
    parser.add_argument("--ringspan", help="the program ringspan")
    parser.add_argument("--ring", default="2")
    parser.add_argument("--schemathesis", action="store_true", help="run schemathesis against each server as well")
    parser.add_argument("--compatcanary", help="compatcanary's program, which is run against --ringspan as well")
    args = parser.parse_args()
    if args.scripted:
        with server([args.scripted]) as (url, _):
            client = OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
            check_any(client, "scripted")
            check_scripted(client, "scripted")
            check_anthropic(Anthropic(base_url=url, api_key="none", max_retries=0), "scripted")
            print("openai and anthropic: the scripted engine answers as expected")
            if args.schemathesis:
                run_schemathesis(url)
    if args.ringspan:
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder))
            (Path(folder) / "keys").write_text("secret\n")
            command = [args.ringspan, "serve", "--model", folder, "--model-name", "tiny", "--port", "0", "--ring", args.ring]
            command += ["--threads", "1", "--kv-cache", "64MiB"]
            if args.schemathesis:
                # Texts of a random model would take long.
                with server([*command, "--max-model-len", "512"]) as (url, _):
                    run_schemathesis(url)
            with server([*command, "--api-key-file", folder + "/keys"]) as (url, _):
                client = OpenAI(base_url=url + "/v1", api_key="secret", max_retries=0)
                check_any(client, "tiny")
                stranger = OpenAI(base_url=url + "/v1", api_key="wrong", max_retries=0)
                expect(openai.AuthenticationError, 401, lambda: stranger.models.list(), code="invalid_api_key")
                check_anthropic(Anthropic(base_url=url, api_key="secret", max_retries=0), "tiny")
                strange = Anthropic(base_url=url, api_key="wrong", max_retries=0)
                expect(anthropic.AuthenticationError, 401, lambda: strange.models.list())
                print("openai and anthropic: ringspan serve answers as expected")
                if args.compatcanary:
                    run_compatcanary(args.compatcanary, url, "tiny", "secret")


if __name__ == "__main__":
    main()
