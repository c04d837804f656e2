"""Every fault of a server, one after another in one conversation: a line each, and it goes on."""

from __future__ import annotations

import itertools

import pytest
from loopback import Response, Server, body, cut, error, html, refused, reply, sse
from program import Program
from test_repl import CTRL_D, PROMPT, say

import agent

OVERFLOWS: dict[str, Response] = {
    "openai": error(
        400,
        "This model's maximum context length is 8192 tokens. However, your messages resulted in "
        "9000 tokens.",
        "context_length_exceeded",
    ),
    "deepseek": error(
        400,
        "This model's maximum context length is 131072 tokens. However, you requested 131134 "
        "tokens (122942 in the messages, 8192 in the completion).",
        "invalid_request_error",
    ),
    "vllm": body(
        {
            "object": "error",
            "message": "The decoder prompt (length 10127) is longer than the maximum model length "
            "of 8192.",
            "type": "BadRequestError",
            "param": None,
            "code": 400,
        },
        400,
    ),
    "llama.cpp": body(
        {
            "error": {
                "code": 400,
                "message": "request (4390 tokens) exceeds the available context size (4096 tokens)",
                "type": "exceed_context_size_error",
                "n_prompt_tokens": 4390,
                "n_ctx": 4096,
            }
        },
        400,
    ),
    "anthropic": body(
        {
            "type": "error",
            "error": {
                "type": "invalid_request_error",
                "message": "prompt is too long: 207791 tokens > 200000 maximum",
            },
        },
        400,
    ),
}

GOOD = reply("Final Answer: as ever")
FAULTS: dict[str, list[Response]] = {
    "a page": [html("<h1>Welcome to the portal</h1>")],
    "an error in a 200": [body({"error": {"message": "no credit"}})],
    "choices null": [body({"choices": None})],
    "choices empty": [body({"choices": []})],
    "choices missing": [body({"id": "x"})],
    "a blank body": [body("", kind="text/plain")],
    "a stream of nothing": [sse()],
    "an error frame": [sse({"error": {"message": "out of memory"}})],
    **{str(status): [error(status)] for status in (400, 401, 402, 403, 404, 422)},
    **{str(status): [error(status)] * 3 for status in (408, 409, 429, 500, 503)},
    "a long Retry-After": [body({"error": {"message": "slow down"}}, 429, retry_after="3600")],
    **{f"overflow, {name}": [response] for name, response in OVERFLOWS.items()},
}


def test_a05_a07_a08_each_fault_is_a_line_and_the_conversation_goes_on(program: Program) -> None:
    script = [response for fault in FAULTS.values() for response in (*fault, GOOD)]
    with Server(script) as server:
        env = {"OPENAI_BASE_URL": server.url, "MODEL": "m"}
        with program.terminal("--trace", "off", NO_COLOR="1", **env) as terminal:
            terminal.until(PROMPT)
            for name in FAULTS:
                if name.startswith("overflow"):  # a longer conversation would be compacted
                    say(terminal, "/new")
                told = [line for line in say(terminal, name).splitlines() if line.strip()]
                assert len(told) == 1 and told[0].startswith("error: "), (name, told)
                assert len(told[0]) < 700
                assert "as ever" in say(terminal, "and now?")
            terminal.send(CTRL_D)
            assert terminal.finish() == 0
    assert len(server.requests) == len(script)
    for request in server.requests:
        roles = [message["role"] for message in request.json["messages"]]
        assert roles[0] == "system" and roles[-1] == "user"
        assert all(one != other for one, other in itertools.pairwise(roles))


def test_a10_a13_refused_options_and_cut_replies_need_no_line(program: Program) -> None:
    action = "Thought: x\nAction: run_command\nAction Input: touch ran"
    script = [refused("temperature"), refused("stop"), cut(action), GOOD]
    with Server(script) as server:
        done = program.run("-q", "hi", OPENAI_BASE_URL=server.url, MODEL="m")
    assert (done.code, done.out) == (0, "as ever\n")
    assert not (program.folder / "ran").exists()
    assert "temperature" not in server.requests[-1].json and "stop" not in server.requests[-1].json


NO_OVERFLOW = [error(400), error(401, "context window"), error(422), html("context window", 200)]


@pytest.mark.parametrize("response", [*OVERFLOWS.values(), error(413), *NO_OVERFLOW])
def test_a15_a_context_overflow_can_be_told_from_other_errors(response: Response) -> None:
    with Server([response]) as server, pytest.raises(agent.ModelError) as caught:
        settings = agent.Settings(model="m", base_url=server.url)
        agent.OpenAIModel(settings)([{"role": "user", "content": "hi"}], lambda text, dim: None)
    assert isinstance(caught.value, agent.Overflow) is (response not in NO_OVERFLOW)
    assert ("/new" in str(caught.value)) is (response not in NO_OVERFLOW)
