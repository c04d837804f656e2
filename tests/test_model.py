"""The model client against a real server on the loopback address."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loopback import (
    SSE,
    Response,
    Server,
    body,
    cut,
    delta,
    error,
    hang,
    html,
    plain,
    refused,
    reply,
    sse,
)
from program import Done

import agent
from agent import ModelError, OpenAIModel, Reply, ScriptedModel, Settings

KEY = "sk-test-0123456789abcdef"
ASK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2? 二加二？"}]
HINTS = {status: hint for status, (_, hint) in agent.read_table("help.yaml")["hints"].items()}
BASE = Settings(model="m", api_key=KEY, secrets=(KEY,), read_timeout=5)
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    # The SDK's pause before it tries again, where no server tells how long to wait.
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)


def model_for(server: Server, **changes: Any) -> OpenAIModel:
    return OpenAIModel(replace(BASE, base_url=server.url, **changes))


def ask(server: Server, **changes: Any) -> tuple[Reply, list[tuple[str, bool]]]:
    """One reply, and the pieces that were shown but for empty ones."""
    shown: list[tuple[str, bool]] = []
    answer = model_for(server, **changes)(ASK, lambda text, dim: shown.append((text, dim)))
    return answer, [piece for piece in shown if piece[0]]


def fail(server: Server, **changes: Any) -> ModelError:
    """The error of one call; always one line of a sane length, without the key."""
    with pytest.raises(ModelError) as caught:
        ask(server, **changes)
    line = str(caught.value)
    assert "\n" not in line and KEY not in line
    assert 0 < len(line) < 640
    return caught.value


# ── the request ──


def test_f02_request_carries_the_messages_and_options_as_they_are() -> None:
    with Server([reply("4")]) as server:
        answer, shown = ask(server)
    request = server.requests[0]
    assert request.path == "/v1/chat/completions"
    assert request.json["messages"] == ASK
    assert "二加二？".encode() in request.raw
    options = {"temperature", "stop", "stream_options"}
    assert request.json.keys() == {"model", "messages", "stream"} | options
    assert request.json["temperature"] == 0.0
    assert request.json["stop"] == ["\nObservation:", "\n观察"]
    assert request.json["stream"] is True
    assert request.json["stream_options"] == {"include_usage": True}
    assert request.headers["authorization"] == f"Bearer {KEY}"
    assert answer == Reply("4") and answer.finish not in agent.CUT
    assert shown == [("4", False)]


def test_no_stop_setting_sends_no_stop_parameter() -> None:
    with Server([reply("4")]) as server:
        ask(server, stop=())
    assert "stop" not in server.requests[0].json


def test_f07_import_loads_no_sdk() -> None:
    code = "import agent, sys; print('openai' in sys.modules, 'httpx' in sys.modules)"
    folder = Path(agent.__file__).parent
    run = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("False False\n", "")


@pytest.mark.parametrize("key", [f" {KEY}\n", f'"{KEY}"', f"'{KEY}'\r\n"])
def test_a02_key_is_stripped(call: Callable[..., Done], key: str) -> None:
    with Server([reply("Final Answer: 4")]) as server:
        env = {"OPENAI_API_KEY": key, "OPENAI_BASE_URL": server.url, "MODEL": "m"}
        assert call("-q", "2+2?", **env) == Done(0, "4\n", "")
    assert server.requests[0].headers["authorization"] == f"Bearer {KEY}"


def test_a02_key_that_is_not_ascii_makes_no_request() -> None:
    with Server([reply("4")]) as server:
        line = str(fail(server, api_key="sk-密钥-0123456789", secrets=("sk-密钥-0123456789",)))
        assert "key" in line and "密钥" not in line
    assert server.requests == []


def test_f08_empty_key_is_sent_as_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-somebody-else")
    with Server([reply("4")]) as server:
        ask(server, api_key="", secrets=())
    assert server.requests[0].headers["authorization"] == "Bearer local"


def test_a04_base_url_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with Server([reply("right")]) as server, Server([reply("wrong")]) as other:
        monkeypatch.setenv("OPENAI_BASE_URL", other.url)
        assert ask(server)[0].text == "right"
    assert other.requests == []


# ── good replies ──


def test_a03_key_in_a_reply_is_redacted() -> None:
    with Server([reply(f"it is {KEY}.", reasoning=f"{KEY}!", size=500)]) as server:
        answer, shown = ask(server)
    assert (answer.text, answer.reasoning) == ("it is [key].", "[key]!")
    assert KEY not in str(shown)


@pytest.mark.parametrize("size", [1, 3, 7])
def test_a03_key_that_comes_in_pieces_is_neither_shown_nor_kept(size: int) -> None:
    text = f"Before it, words. It is {KEY}, or not: {KEY[:-1]}?"
    with Server([reply(text, size=size)]) as server:
        answer, shown = ask(server)
    assert answer.text == text.replace(KEY, "[key]", 1)
    assert "".join(piece for piece, _ in shown) == answer.text
    assert len(shown) > 3  # it streams all the same


def test_a03_key_in_pieces_of_the_reasoning_is_neither_shown_nor_kept() -> None:
    with Server([reply("4", reasoning=f"it is {KEY}.", size=5)]) as server:
        answer, shown = ask(server)
    assert answer.reasoning == "it is [key]."
    assert KEY not in "".join(piece for piece, is_reasoning in shown if is_reasoning)


def test_a03_key_that_a_server_echoes_is_redacted_even_at_the_cut() -> None:
    for filler in (0, 480, 490):
        with Server([error(401, "x" * filler + f" Incorrect API key: {KEY}")]) as server:
            assert KEY[:12] not in str(fail(server))


def test_a05_plain_reply_is_used() -> None:
    with Server([plain("4", usage={"prompt_tokens": 3, "completion_tokens": 1})]) as server:
        answer, shown = ask(server)
    assert answer == Reply("4", usage={"prompt_tokens": 3, "completion_tokens": 1})
    assert shown == [("4", False)]


def test_a05_plain_reply_without_text_is_an_empty_reply() -> None:
    with Server([body({"choices": [{}]})]) as server:
        assert ask(server)[0] == Reply("")


def test_a05_plain_reply_without_finish_reason_is_whole() -> None:
    with Server([plain("4", finish=None)]) as server:
        assert ask(server)[0].finish not in agent.CUT


PARTS = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(("content", "text"), [(None, ""), (PARTS, "ab"), ("", "")])
def test_a06_content_null_or_list(content: Any, text: str) -> None:
    streamed = sse(delta(content=content), delta("stop"))
    with Server([plain(content), streamed]) as server:
        assert ask(server)[0] == Reply(text)
        assert ask(server)[0] == Reply(text)


def test_a12_odd_chunks_do_no_harm() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_cache_hit_tokens": 5}
    chunks = [
        {"usage": usage},
        {"usage": None},
        {"choices": None},
        {"choices": [{"delta": None}]},
        {},
        "null",
        delta(reasoning_content="hm"),
        delta(reasoning="m"),
        delta(content="f\u2028o"),
        delta("stop", content="ur"),
        {"choices": []},
    ]
    with Server([sse(*chunks)]) as server:
        answer, shown = ask(server, secrets=())  # nothing is held back
    assert answer == Reply("f\u2028our", "hmm", "stop", usage)
    assert shown == [("hm", True), ("m", True), ("f\u2028o", False), ("ur", False)]


def test_a14_reply_is_valid_utf8_without_control_characters() -> None:
    with Server([sse('{"choices":[{"delta":{"content":"a\\ud83d\\u001b[31mb"}}]}')]) as server:
        answer, shown = ask(server)
    for text in (answer.text, shown[0][0]):
        text.encode("utf-8")
        assert text.startswith("a") and text.endswith("b") and "\x1b" not in text


# ── cut replies ──


@pytest.mark.parametrize(
    "response",
    [
        cut("half"),
        reply("half", finish=None),
        reply("half", finish=None, done=False),
        reply("half", finish="length"),
    ],
)
def test_a13_cut_reply_is_marked(response: Response) -> None:
    with Server([response]) as server:
        answer, _ = ask(server)
    assert answer.text == "half" and answer.finish in agent.CUT
    assert len(server.requests) == 1


@pytest.mark.parametrize("usage", [{"prompt_tokens": "12"}, "n/a", [1], 5, {"prompt_tokens": None}])
def test_a12_odd_usage_costs_no_answer(call: Callable[..., Done], usage: Any) -> None:
    with Server([reply("Final Answer: 4", usage=usage)]) as server:
        done = call("2+2", OPENAI_BASE_URL=server.url, MODEL="m")
    assert (done.code, done.out) == (0, "4\n")
    assert "[tokens: n/a]" in done.err


@pytest.mark.parametrize("finish", [["stop"], {"reason": "stop"}, 1])
def test_a12_an_odd_finish_reason_costs_no_answer(finish: Any, tmp_path: Path) -> None:
    with Server([reply("Final Answer: 4", finish=finish)]) as server:
        settings = replace(BASE, base_url=server.url, sandbox="off")
        assert agent.Agent(settings, OpenAIModel(settings), tmp_path).ask("2+2").answer == "4"


def test_a13_stream_that_stalls_is_cut() -> None:
    with Server([reply("half", pause=20)]) as server:
        start = time.monotonic()
        assert ask(server, read_timeout=0.3)[0].finish in agent.CUT
        assert time.monotonic() - start < 10


def test_a13_half_an_event_at_the_end_is_dropped() -> None:
    pieces = [*cut("half").pieces, b'data: {"choices": [{"del']
    with Server([Response(pieces, kind=SSE, broken=True)]) as server:
        answer, _ = ask(server)
    assert answer == Reply("half", finish="")


# ── what is no reply ──

NO_REPLY = {
    "html": html("Welcome to the portal"),
    "error object": body({"error": {"message": "Welcome to the portal"}}),
    "choices null": body({"choices": None, "note": "Welcome to the portal"}),
    "choices empty": body({"choices": [], "note": "Welcome to the portal"}),
    "choices missing": body({"note": "Welcome to the portal"}),
    "choices empty, usage": body({"choices": [], "usage": {"note": "Welcome to the portal"}}),
    "a list": body(["Welcome to the portal"]),
    "error frame": sse(delta(content="a"), {"error": {"message": "Welcome to the portal"}}),
    "error frame of text": sse({"error": "Welcome to the portal"}),
    "text in a stream": sse("Welcome to the portal"),
}


@pytest.mark.parametrize("name", NO_REPLY)
def test_a05_what_is_no_reply_is_one_line_with_the_servers_text(name: str) -> None:
    with Server([NO_REPLY[name]]) as server:
        assert "Welcome to the portal" in str(fail(server))
    assert len(server.requests) == 1


BLANK = {
    "blank": body(""),
    "blank html": body(" \n", kind="text/html"),
    "blank stream": sse(done=False),
    "only done": sse(),
    "choices null in a stream": sse({"choices": None}),
    "choices empty in a stream": sse({"choices": []}),
    "choices missing in a stream": sse({"id": "x"}),
    "odd choices": body({"choices": "abc"}),
    "odd choices in a stream": sse({"choices": {"a": 1}}),
    "stream breaks at once": sse(done=False, broken=True),
}


@pytest.mark.parametrize("name", BLANK)
def test_a05_blank_or_odd_reply_is_one_line(name: str) -> None:
    with Server([BLANK[name]]) as server:
        assert HINTS[0] in str(fail(server))
    assert len(server.requests) == 1


def test_a05_long_page_is_shortened() -> None:
    with Server([html("<p>\x1b[31mlong\n</p>" * 5000), html("y" * 9999, status=404)]) as server:
        assert "long" in str(fail(server))
        assert str(fail(server)).count("y") <= 500


# ── status codes ──


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 413, 418, 422])
def test_a07_refusal_is_one_request_with_a_hint(status: int) -> None:
    with Server([error(status, "the words of the server")]) as server:
        line = str(fail(server))
    assert len(server.requests) == 1
    assert "the words of the server" in line and str(status) in line
    assert line.startswith(HINTS.get(status, "the server refused the request"))


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503])
def test_a07_trouble_is_tried_three_times(status: int) -> None:
    with Server([error(status, "busy")], repeat=True) as server:
        line = str(fail(server))
    assert len(server.requests) == 3
    assert HINTS.get(min(status, 500), "refused") in line


def test_a07_retry_can_succeed() -> None:
    with Server([error(503), error(429), reply("4")]) as server:
        assert ask(server)[0].text == "4"


def test_a07_quota_is_not_asked_for_ever() -> None:
    quota = error(429, "You exceeded your quota", "insufficient_quota")
    with Server([quota], repeat=True) as server:
        assert str(fail(server)).startswith(HINTS[402])
    assert len(server.requests) <= 3


@pytest.mark.parametrize("header", [{"retry_after": "61"}, {"retry_after_ms": "90000"}])
def test_a07_long_retry_after_is_not_waited_for(header: dict[str, str]) -> None:
    with Server([body({"error": {"message": "slow down"}}, 429, **header)]) as server:
        start = time.monotonic()
        assert str(fail(server)).startswith(HINTS[429])
        assert time.monotonic() - start < 10
    assert len(server.requests) == 1


def test_a07_timeout_is_tried_three_times() -> None:
    with Server([hang(20)], repeat=True) as server:
        assert str(fail(server, read_timeout=0.2)).startswith(HINTS[408])
    assert len(server.requests) == 3


def test_a07_no_server_is_one_line() -> None:
    with socket.socket() as held:  # bound but not listening: connections are refused
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}/v1"
        with pytest.raises(ModelError) as caught:
            OpenAIModel(replace(BASE, base_url=url))(ASK, lambda text, dim: None)
    assert HINTS[0] in str(caught.value) and "\n" not in str(caught.value)


def test_a08_model_works_after_a_failure() -> None:
    with Server([error(401), html("no"), cut("x"), reply("4")]) as server:
        model = model_for(server)
        for _ in range(2):
            with pytest.raises(ModelError):
                model(ASK, lambda text, dim: None)
        assert model(ASK, lambda text, dim: None).finish in agent.CUT
        assert model(ASK, lambda text, dim: None).text == "4"
    assert all(request.json["messages"] == ASK for request in server.requests)


# ── what escapes the SDK ──


def test_a09_broken_json_and_bytes_in_a_stream() -> None:
    broken = sse(delta(content="a"), '{"choices": [')
    latin = Response([b'data: {"choices": "\xff"}\n\n'], kind=SSE)
    not_json = body("{", kind="application/json")
    with Server([broken, latin, not_json]) as server:
        for _ in range(3):
            fail(server)
    assert len(server.requests) == 3


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:9", "ftp://127.0.0.1:9"])
def test_a09_proxy_that_cannot_work(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    with Server([reply("4")]) as server:
        assert str(fail(server)).startswith(HINTS[0])
    assert server.requests == []


def test_a09_address_that_cannot_work() -> None:
    with pytest.raises(ModelError):
        OpenAIModel(replace(BASE, base_url="http://["))(ASK, lambda text, dim: None)


def test_a09_lone_surrogate_in_a_message_is_no_traceback() -> None:
    with Server([reply("4")]) as server, pytest.raises(ModelError):
        model_for(server)([{"role": "user", "content": "\ud83d"}], lambda text, dim: None)


def test_a09_error_of_the_screen_is_not_the_models() -> None:
    def closed_screen(text: str, is_reasoning: bool) -> None:
        raise BrokenPipeError

    with Server([reply("4")]) as server, pytest.raises(BrokenPipeError):
        model_for(server)(ASK, closed_screen)


def test_d07_ctrl_c_in_mid_stream_hangs_up_at_once() -> None:
    def interrupt(text: str, is_reasoning: bool) -> None:
        raise KeyboardInterrupt

    endless = reply("word " * 400, size=5, pause=0.02)
    with Server([endless, reply("4")]) as server:
        model = model_for(server)
        with pytest.raises(KeyboardInterrupt) as kept:  # kept: its frames hold the stream
            model(ASK, interrupt)
        assert server.hung_up.wait(4)
        assert kept.traceback
        assert model(ASK, lambda text, dim: None).text == "4"


# ── options that a server refuses ──


@pytest.mark.parametrize("name", ["temperature", "stop", "stream_options"])
def test_a10_refused_option_is_dropped_for_the_run(name: str) -> None:
    with Server([refused(name), reply("4"), reply("5")]) as server:
        model = model_for(server)
        assert model(ASK, lambda text, dim: None).text == "4"
        assert model(ASK, lambda text, dim: None).text == "5"
    sent = [name in request.json for request in server.requests]
    assert sent == [True, False, False]
    kept = {"temperature", "stop", "stream_options"} - {name}
    assert kept <= server.requests[1].json.keys()


def test_a10_an_option_refused_with_422_is_dropped_too() -> None:
    said = {"detail": [{"type": "extra_forbidden", "loc": ["body", "stream_options"]}]}
    with Server([body(said, 422), reply("4")]) as server:
        assert ask(server)[0].text == "4"
        assert "stream_options" not in server.requests[1].json


def test_a10_all_three_can_be_refused_and_none_twice() -> None:
    names = ["stop", "temperature", "stream_options", "stop"]
    with Server([refused(name) for name in names]) as server:
        assert "stop" in str(fail(server))
    assert len(server.requests) == 4


@pytest.mark.parametrize("text", ["stopped: bad request", "stop_sequences is unknown", "no"])
def test_a10_other_400_is_not_retried(text: str) -> None:
    with Server([error(400, text)]) as server:
        fail(server)
    assert len(server.requests) == 1


# ── the scripted model ──


def test_scripted_model_plays_its_list_and_remembers() -> None:
    model = ScriptedModel(["one\ntwo", "three"])
    messages = [{"role": "user", "content": "q"}]
    shown: list[tuple[str, bool]] = []
    assert model(messages, lambda text, dim: shown.append((text, dim))) == Reply("one\ntwo")
    assert shown == [("one\ntwo", False)]
    messages[0]["content"] = "changed"
    messages.append({"role": "assistant", "content": "a"})
    assert model.seen == [[{"role": "user", "content": "q"}]]
    assert model(messages, lambda text, dim: None).text == "three"
    with pytest.raises(IndexError):  # a fault of the test that wrote the list
        model(messages, lambda text, dim: None)
    assert model.name == "scripted model"


def test_reply_can_be_stored_as_json() -> None:
    answer = Reply("a", usage={"prompt_tokens": 1})
    assert json.loads(json.dumps(answer._asdict()))["usage"] == {"prompt_tokens": 1}


@pytest.mark.parametrize(
    ("observation", "output"),
    [
        ("Observation: $ ls\na.txt\nb.txt", "a.txt\nb.txt"),
        ("Observation: 7 lines\n[exit code 1]", "7 lines"),
        ("Observation: $ false\n[exit code 1]", ""),
        ("Observation: $ true\n(no output)", "(no output)"),
        ("Observation: a\n[… 1234 characters left out …]\nb [x]\n[repeat]", "a\nb [x]"),
    ],
)
def test_scripted_model_quotes_the_last_output(observation: str, output: str) -> None:
    messages = [
        {"role": "user", "content": "Observation: older"},
        {"role": "assistant", "content": "Observation: not this one"},
        {"role": "user", "content": observation},
    ]
    model = ScriptedModel(["Final Answer: <{output}>"])
    assert model(messages, lambda text, dim: None).text == f"Final Answer: <{output}>"
