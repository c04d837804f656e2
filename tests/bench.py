"""What the agent costs beside a bare loop: `python tests/bench.py` (about a minute).

A stub on loopback answers at once. It and each arm are processes; of three runs the best counts.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import shlex
import signal
import socketserver
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parent.parent
WARM = [{"role": "user", "content": "hi"}]  # asked before the clock starts
FACTS = f"""import sys; sys.path.insert(0, {str(ROOT)!r}); import agent, json
one = agent.Agent(agent.Settings(), agent.ScriptedModel([]))
print(json.dumps([one.messages[0]["content"], one.shell.prefix]))"""


class Stub(socketserver.StreamRequestHandler):
    """Streams an action, another at each step; GET tells how many bytes of bodies it got."""

    sent, disable_nagle_algorithm = 0, True

    def handle(self) -> None:
        while first := self.rfile.readline():
            head = b"".join(iter(self.rfile.readline, b"\r\n"))
            kind, body = "text/plain", str(Stub.sent)
            if first.startswith(b"POST"):
                asked = self.rfile.read(int(re.findall(rb"(?i)length: (\d+)", head)[0]))
                Stub.sent, number = Stub.sent + len(asked), asked.count(b'"role"') // 2
                text = f"Thought: on.\nAction: run_command\nAction Input: echo {number}"
                deltas = [{"content": piece} for piece in re.findall(r"(?s).{1,4}", text)]
                choices = [{"delta": d} for d in deltas] + [{"delta": {}, "finish_reason": "stop"}]
                events = [*(json.dumps({"choices": [choice]}) for choice in choices), "[DONE]"]
                kind, body = "text/event-stream", "".join(f"data: {e}\n\n" for e in events)
            top = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
            self.wfile.write((top + body).encode())


def agent_arm(url: str, steps: int, sandbox: str) -> Callable[[], Any]:
    """Agent.ask, without a trace."""
    sys.path.insert(0, str(ROOT))
    import agent

    settings = agent.Settings(base_url=url, model="m", max_steps=steps, sandbox=sandbox)
    one = agent.Agent(settings, agent.OpenAIModel(settings))
    one.model(WARM, lambda text, dim: None)
    one.shell.run("true")
    return lambda: one.ask("Count.")


def bare_arm(url: str, steps: int, prompt: str) -> Callable[[], Any]:
    """The least that does the same: the SDK, a label, bash."""
    import openai

    client = openai.OpenAI(api_key="local", base_url=url)
    messages = [{"role": "system", "content": prompt}, {"role": "user", "content": "Count."}]

    def call(sent: list[dict[str, str]]) -> str:
        more = {"messages": sent, "temperature": 0, "stream_options": {"include_usage": True}}
        create = client.chat.completions.create
        stream = create(model="m", messages=[], stream=True, extra_body=more)
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    def loop() -> None:
        for step in range(1, steps + 1):
            messages.append({"role": "assistant", "content": (reply := call(messages))})
            if step < steps:  # the agent doesn't run the last one either
                typed = reply.partition("Action Input: ")[2]
                done = subprocess.run(["bash", "-c", typed], capture_output=True, text=True)
                seen = f"Observation: $ {typed}\n{done.stdout.strip()}"
                messages.append({"role": "user", "content": seen})

    call(WARM)
    return loop


def arm(kind: str, url: str, steps: str, more: str) -> None:
    """Runs one and prints its numbers: ms and bytes a step, MB at the peak."""
    run = {"agent": agent_arm, "bare": bare_arm}[kind](f"{url}/v1", int(steps), more)
    before, start = int(urlopen(url).read()), time.perf_counter()
    run()
    ms, sent = (time.perf_counter() - start) * 1000, int(urlopen(url).read()) - before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps([ms / int(steps), sent / int(steps), peak]))


def median_ms(times: int, *argv: str) -> float:
    """Of a command that may end with 0, or 3: no step left."""
    clock = [time.perf_counter()]
    for _ in range(times):
        assert subprocess.run(argv, capture_output=True).returncode in (0, 3), argv
        clock.append(time.perf_counter())
    return statistics.median(b - a for a, b in itertools.pairwise(clock)) * 1000


def child(*argv: str) -> Any:
    """What another Python prints. This one stays small: a child's peak includes its parent's."""
    return json.loads(subprocess.check_output([sys.executable, *argv]))


def show(url: str) -> None:
    run = f"{ROOT}/agent.py -q --sandbox off --model m --max-steps 2 Count. --base-url {url}/v1"
    print("Start-up, median of 7, ms; agent.py: two requests, one command")
    for argv in (["-c", "pass"], ["-c", "import openai"], run.split()):
        name = f"{Path(argv[0]).name} {argv[1]}"
        print(f"  python {name:<20}{median_ms(7, sys.executable, *argv):8.0f}")
    prompt, prefix = child("-c", FACTS)
    arms = [("bare", prompt), ("agent", "off"), *[("agent", "bwrap")] * bool(prefix)]
    print("\nsteps arm          ms/step  ratio  bytes/step  ratio  peak MB")
    for steps in ("10", "50", "200"):  # the arms in turn, so that a busy moment hits all
        rounds = [[child(__file__, a, url, steps, b) for a, b in arms] for _ in range(3)]
        best = [min(runs) for runs in zip(*rounds, strict=True)]
        for (kind, more), (ms, sent, peak) in zip(arms, best, strict=True):
            print(f"{steps:>5} {kind if kind == 'bare' else f'agent, {more}':<12}{ms:8.2f}"
                  f"{ms / best[0][0]:7.2f}{sent:12,.0f}{sent / best[0][1]:7.2f}{peak:9.1f}")
    print("\nbubblewrap, median of 30, ms" if prefix else "\nbubblewrap: not to be had here")
    for command in ("true", f"{shlex.quote(sys.executable)} -c pass") if prefix else ():
        plain, fenced = (median_ms(30, *p, "bash", "-c", command) for p in ([], prefix))
        print(f"  {command.split('/')[-1]:<16}{plain:6.1f} plain{fenced:6.1f} fenced"
              f", ratio {fenced / plain:.2f}")


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(arm(*sys.argv[1:]))
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Stub)
    if not (child_id := os.fork()):
        server.serve_forever()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            show(f"http://127.0.0.1:{server.server_address[1]}")
        finally:
            os.kill(child_id, signal.SIGTERM)
