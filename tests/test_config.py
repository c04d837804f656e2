"""Where settings come from, and what happens to keys: A01-A04, F03, F08."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from loopback import Response, Server, error, html, plain, reply
from program import Done, Program

Call = Callable[..., Done]
Dotenv = Callable[[str | bytes], None]

DEEPSEEK = "sk-deepseek-0123456789"
OPENAI = "sk-openai-9876543210"
NO_KEY = ["", "   ", "your-api-key", "YOUR_KEY", "sk-your-key", "sk-xxxxxxxx", "xxx", "<key>", "…"]


def answers() -> Server:
    return Server([reply("Final Answer: 4")], repeat=True)


def one_line(done: Done) -> str:
    """The only thing that a usage error prints."""
    assert done.code == 2
    assert done.out == ""
    lines = done.err.splitlines()
    assert len(lines) == 1, done.err
    return lines[0]


def shown(done: Done, name: str) -> tuple[str, str]:
    """Value and origin of a setting in --show-config."""
    assert done.code == 0, done.err
    found = re.search(rf"^{name}\s+(.*?)\s+(flag|environment|\.env|default)$", done.out, re.M)
    assert found, done.out
    return found[1], found[2]


def bearer(server: Server) -> list[str]:
    return [request.headers["authorization"] for request in server.requests]


# ---- no key


@pytest.mark.parametrize("key", NO_KEY)
def test_a01_without_a_usable_key_the_offline_mode_says_so(call: Call, key: str) -> None:
    done = call("whoami", DEEPSEEK_API_KEY=key, OPENAI_API_KEY=key)
    assert done.code == 0
    assert "ffline" in done.err
    assert "scripted" in done.err


@pytest.mark.parametrize("key", NO_KEY)
def test_a01_placeholders_in_the_env_file_count_as_unset(
    call: Call, dotenv: Dotenv, key: str
) -> None:
    dotenv(f"DEEPSEEK_API_KEY={key}\nOPENAI_API_KEY='{key}'\nMODEL=m\n")
    done = call("whoami")
    assert done.code == 0
    assert "ffline" in done.err


@pytest.mark.parametrize(
    ("args", "env", "variable"),
    [
        (["--model", "m"], {}, "DEEPSEEK_API_KEY"),
        (["--base-url", "https://agent.invalid/v1", "--model", "m"], {}, "_API_KEY"),
        (["--base-url", "https://api.openai.com/v1", "--model", "m"], {}, "OPENAI_API_KEY"),
        ([], {"OPENAI_BASE_URL": "https://agent.invalid/v1", "MODEL": "m"}, "OPENAI_API_KEY"),
        ([], {"DEEPSEEK_BASE_URL": "https://agent.invalid"}, "DEEPSEEK_API_KEY"),
        (
            [],
            {"DEEPSEEK_BASE_URL": "https://agent.invalid", "DEEPSEEK_API_KEY": "<key>"},
            "DEEPSEEK",
        ),
        ([], {"DEEPSEEK_BASE_URL": "https://127.0.0.1.agent.invalid"}, "DEEPSEEK_API_KEY"),
    ],
)
def test_a01_a_remote_address_needs_a_key(
    call: Call, project: Path, args: list[str], env: dict[str, str], variable: str
) -> None:
    line = one_line(call("hi", *args, **env))
    assert variable in line
    assert str(project / ".env") in line


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a01_a_loopback_address_needs_no_key(call: Call, host: str) -> None:
    with answers() as server:
        url = server.url.replace("127.0.0.1", host)
        done = call("-q", "2+2?", OPENAI_BASE_URL=url, MODEL="m")
    assert (done.code, done.out) == (0, "4\n")
    assert bearer(server) == ["Bearer local"]


def test_a01_so_does_one_of_ipv6_or_given_by_flag(call: Call) -> None:
    assert shown(call("--show-config", "--base-url", "http://[::1]:1/v1", "--model", "m"), "model")
    with answers() as server:
        done = call("-q", "2+2?", "--base-url", server.url, "--model", "flag")
    assert done.out == "4\n"
    assert server.requests[0].json["model"] == "flag"


# ---- keys


@pytest.mark.parametrize(
    "written", [f"  {OPENAI} ", f"{OPENAI}\n", f"{OPENAI}\r\n", f'"{OPENAI}"', f"' {OPENAI}'\n"]
)
def test_a02_blanks_newlines_and_quotes_come_off_a_key(call: Call, written: str) -> None:
    with answers() as server:
        done = call("-q", "hi", OPENAI_API_KEY=written, OPENAI_BASE_URL=server.url, MODEL="m")
    assert done.code == 0, done.err
    assert bearer(server) == [f"Bearer {OPENAI}"]


@pytest.mark.parametrize(
    "line", [f'KEY="{OPENAI} "', f"KEY = {OPENAI}  # mine", f"export KEY={OPENAI}"]
)
@pytest.mark.parametrize(("mark", "newline"), [("", "\n"), ("\ufeff", "\r\n")])
def test_a02_of_a_key_in_the_env_file_too(
    call: Call, dotenv: Dotenv, line: str, mark: str, newline: str
) -> None:
    with answers() as server:
        lines = [line.replace("KEY", "OPENAI_API_KEY"), f"OPENAI_BASE_URL={server.url}", "MODEL=m"]
        dotenv(mark + newline.join(lines) + newline)
        assert call("-q", "hi").code == 0
    assert bearer(server) == [f"Bearer {OPENAI}"]


@pytest.mark.parametrize(
    "key",
    ["sk-我的密钥-0123456789", "sk-0123456789abc\u200b", "ｓｋ-0123456789", "sk-0123 456", "a\tb"],
)
def test_a02_a_key_that_no_key_looks_like_is_one_line_and_no_request(call: Call, key: str) -> None:
    with answers() as server:
        done = call("hi", OPENAI_API_KEY=key, OPENAI_BASE_URL=server.url, MODEL="m")
    assert "OPENAI_API_KEY" in one_line(done)
    assert key not in done.err
    assert server.requests == []


def test_a03_a_key_with_a_line_break_inside_is_not_printed(call: Call) -> None:
    first, second = "sk-first-0123456789", "second-0123456789"
    with answers() as server:
        env = {"OPENAI_BASE_URL": server.url, "MODEL": "m"}
        done = call("hi", OPENAI_API_KEY=f"{first}\n{second}", **env)
    assert "OPENAI_API_KEY" in one_line(done)
    assert first not in done.err
    assert second not in done.err
    assert server.requests == []


@pytest.mark.parametrize(
    "response",
    [
        error(401, f"Incorrect API key provided: {OPENAI}"),
        error(400, f"bad header: Bearer {OPENAI}", code=OPENAI),
        html(f"you sent {OPENAI} to a proxy", 403),
        html(f"you sent {OPENAI} to a proxy"),
        plain(f"Final Answer: your key is {OPENAI}"),
        reply(f"Thought: {OPENAI}\nFinal Answer: {OPENAI}", reasoning=OPENAI, size=1000),
        reply(f"Thought: {OPENAI}\nFinal Answer: {OPENAI}", size=7),
        reply(f"Action: run_command\nAction Input: echo {OPENAI}", size=1000),
        reply(f"no label {OPENAI}", size=1000),
        reply(f"cut {OPENAI}", finish=None, size=1000),
    ],
    ids=["401", "400", "html403", "html", "plain", "stream", "pieces", "command", "prose", "cut"],
)
def test_a03_a_key_is_in_no_output_and_no_request(
    call: Call, dotenv: Dotenv, response: Response
) -> None:
    dotenv(f"DEEPSEEK_API_KEY={DEEPSEEK}\n")
    with Server([response, reply(f"Final Answer: {OPENAI} {DEEPSEEK}", size=1000)]) as server:
        env = {"OPENAI_API_KEY": OPENAI, "OPENAI_BASE_URL": server.url, "MODEL": "m"}
        done = call(f"is {OPENAI} or {DEEPSEEK} right?", **env)
        sent = "".join(request.raw.decode() for request in server.requests)
    assert "[key]" in sent
    for text in (done.out, done.err, sent):
        assert OPENAI not in text
        assert DEEPSEEK not in text


def test_f08_a_short_dummy_key_is_sent_and_is_no_secret(call: Call) -> None:
    with Server([reply("Final Answer: ollama is in /usr/local/bin")]) as server:
        env = {"OPENAI_BASE_URL": server.url, "MODEL": "qwen2.5-coder:1.5b"}
        done = call("-q", "where is ollama?", OPENAI_API_KEY="ollama", **env)
    assert done.out == "ollama is in /usr/local/bin\n"
    assert bearer(server) == ["Bearer ollama"]
    request = server.requests[0]
    assert request.path == "/v1/chat/completions"
    assert request.json["model"] == "qwen2.5-coder:1.5b"
    assert request.json["messages"][-1]["content"] == "where is ollama?"


# ---- addresses


@pytest.mark.parametrize(
    ("env", "url", "model"),
    [
        ({"DEEPSEEK_API_KEY": DEEPSEEK}, "https://api.deepseek.com", "deepseek-v4-flash"),
        ({"DEEPSEEK_API_KEY": DEEPSEEK, "DEEPSEEK_BASE_URL": " "}, "https://api.deepseek.com", ""),
        (
            {
                "DEEPSEEK_API_KEY": DEEPSEEK,
                "DEEPSEEK_BASE_URL": "",
                "OPENAI_BASE_URL": "http://x/v1",
            },
            "https://api.deepseek.com",
            "",
        ),
        ({"OPENAI_API_KEY": OPENAI, "MODEL": "m"}, "https://api.openai.com/v1", "m"),
        (
            {"OPENAI_API_KEY": OPENAI, "MODEL": "m", "OPENAI_BASE_URL": ""},
            "https://api.openai.com/v1",
            "",
        ),
        (
            {"OPENAI_API_KEY": OPENAI, "MODEL": "m", "DEEPSEEK_BASE_URL": ""},
            "https://api.openai.com/v1",
            "",
        ),
    ],
)
def test_a04_an_unset_address_is_the_own_providers(
    call: Call, env: dict[str, str], url: str, model: str
) -> None:
    done = call("--show-config", **env)
    assert shown(done, "base_url")[0] == url
    assert model in shown(done, "model")[0]


@pytest.mark.parametrize("url", ["api.deepseek.com", "localhost:11434/v1", "ftp://x/v1", "//x/v1"])
def test_a04_an_address_without_http_is_refused(call: Call, url: str) -> None:
    env = {"DEEPSEEK_API_KEY": DEEPSEEK}
    assert "http" in one_line(call("hi", "--base-url", url, **env))
    assert "http" in one_line(call("hi", DEEPSEEK_BASE_URL=url, **env))


@pytest.mark.parametrize("end", ["/chat/completions", "/chat/completions/"])
def test_a04_a_whole_endpoint_is_named_as_the_mistake(call: Call, end: str) -> None:
    with answers() as server:
        done = call("hi", OPENAI_BASE_URL=server.url + end, OPENAI_API_KEY=OPENAI, MODEL="m")
    assert "/chat/completions" in one_line(done)
    assert server.requests == []


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:port/v1"])
def test_a04_a_broken_address_is_one_line(call: Call, url: str) -> None:
    done = call("-q", "hi", "--base-url", url, "--model", "m", OPENAI_API_KEY=OPENAI)
    assert done.code in (1, 2)
    assert len(done.told) == 1


# ---- which of two


def test_configuration_flag_then_environment_then_file_then_default(
    call: Call, dotenv: Dotenv
) -> None:
    with answers() as flag, answers() as variable, answers() as file:
        dotenv(f"DEEPSEEK_BASE_URL={file.url}\nMODEL=file\n")
        env = {"DEEPSEEK_BASE_URL": variable.url, "MODEL": "variable"}
        flags = ["--base-url", flag.url, "--model", "flag"]
        runs = [
            (flag, "flag", "flag", flags, env),
            (variable, "variable", "environment", [], env),
            (file, "file", ".env", [], {}),
        ]
        for server, model, origin, args, variables in runs:
            done = call("--show-config", *args, **variables)
            assert shown(done, "model") == (model, origin)
            assert shown(done, "base_url") == (server.url, origin)
            assert call("-q", "hi", *args, **variables).code == 0
            assert [request.json["model"] for request in server.requests] == [model]
        assert shown(call("--show-config"), "max_steps") == ("10", "default")


def test_configuration_a_variable_set_to_nothing_hides_the_file(call: Call, dotenv: Dotenv) -> None:
    dotenv(f"DEEPSEEK_API_KEY={DEEPSEEK}\nMODEL=file\n")
    assert shown(call("--show-config"), "model") == ("file", ".env")
    assert shown(call("--show-config", MODEL=""), "model")[0] == "deepseek-v4-flash"
    done = call("whoami", DEEPSEEK_API_KEY="")
    assert done.code == 0
    assert "ffline" in done.err


A, B = "DEEPSEEK", "OPENAI"  # in the table below: whose key and address stand where


@pytest.mark.parametrize(
    ("environment", "file", "winner"),
    [
        ([A, B], [], A),
        ([], [A, B], A),
        ([B], [A], B),
        ([A], [B], A),
        ([B], [], B),
        ([], [B], B),
        ([B], [A, B], B),
    ],
)
def test_configuration_of_two_pairs_the_higher_wins_and_keys_stay_apart(
    call: Call, dotenv: Dotenv, environment: list[str], file: list[str], winner: str
) -> None:
    keys = {A: DEEPSEEK, B: OPENAI}
    with answers() as first, answers() as second:
        servers = {A: first, B: second}

        def variables(names: list[str]) -> dict[str, str]:
            urls = {f"{name}_BASE_URL": servers[name].url for name in names}
            return urls | {f"{name}_API_KEY": keys[name] for name in names}

        dotenv("".join(f"{name}={value}\n" for name, value in variables(file).items()))
        done = call("-q", "hi", MODEL="m", **variables(environment))
    assert done.code == 0, done.err
    [loser] = {A, B} - {winner}
    assert bearer(servers[winner]) == [f"Bearer {keys[winner]}"]
    assert servers[loser].requests == []


@pytest.mark.parametrize("has_key", [True, False])
def test_configuration_an_address_by_flag_gets_its_own_pairs_key(call: Call, has_key: bool) -> None:
    with answers() as deepseek, answers() as openai:
        env = {"DEEPSEEK_API_KEY": DEEPSEEK, "DEEPSEEK_BASE_URL": deepseek.url}
        env |= {"OPENAI_BASE_URL": openai.url, "MODEL": "m"}
        env |= {"OPENAI_API_KEY": OPENAI} if has_key else {}
        assert call("-q", "hi", "--base-url", openai.url, **env).code == 0
        # DeepSeek's own address gets no other key.
        line = one_line(call("-q", "hi", "--base-url", "https://api.DeepSeek.com:443/v1", **env))
    assert "DEEPSEEK_API_KEY" in line
    assert bearer(openai) == [f"Bearer {OPENAI if has_key else 'local'}"]
    assert deepseek.requests == []


def test_configuration_an_address_higher_up_does_not_get_the_key_below(
    call: Call, dotenv: Dotenv
) -> None:
    with answers() as server:
        dotenv(f"DEEPSEEK_API_KEY={DEEPSEEK}\n")
        done = call("-q", "hi", OPENAI_BASE_URL=server.url, MODEL="m")
    assert done.code == 0, done.err
    assert bearer(server) == ["Bearer local"]


@pytest.mark.parametrize("url", ["https://API.OpenAI.com/v1", "https://api.openai.com:443/v1"])
def test_configuration_another_spelling_of_an_address_is_the_same_address(
    call: Call, url: str
) -> None:
    done = call("--show-config", "--base-url", url, "--model", "m", DEEPSEEK_API_KEY=DEEPSEEK)
    assert "OPENAI_API_KEY" in one_line(done)


def test_configuration_the_working_folders_env_file_is_not_read(
    call: Call, program: Program
) -> None:
    (program.folder / ".env").write_text(f"DEEPSEEK_API_KEY={DEEPSEEK}\nMAX_STEPS=3\n")
    done = call("--show-config")
    assert done.code == 0
    assert shown(done, "base_url")[0] == ""


def test_configuration_nothing_is_put_into_the_environment(call: Call, dotenv: Dotenv) -> None:
    dotenv("DEEPSEEK_API_KEY=\nMODEL=file\nCANARY=1\n")
    before = dict(os.environ)
    assert call("whoami").code == 0
    assert dict(os.environ) == before


@pytest.mark.parametrize("base", [{}, {"OPENAI_BASE_URL": "http://127.0.0.1:1/v1"}])
def test_configuration_openai_needs_a_model(call: Call, base: dict[str, str]) -> None:
    assert "MODEL" in one_line(call("hi", OPENAI_API_KEY=OPENAI, **base))


@pytest.mark.parametrize("encoding", ["gbk", "utf-16"])
def test_configuration_an_env_file_in_another_encoding_is_one_line(
    call: Call, dotenv: Dotenv, encoding: str
) -> None:
    dotenv("# 我的密钥\nMODEL=m\n".encode(encoding))
    assert ".env" in one_line(call("hi"))


# ---- what is set


def test_f03_show_config_prints_value_and_origin_and_masks_the_key(
    call: Call, dotenv: Dotenv
) -> None:
    dotenv("MODEL=from-file\n")
    args = ["--max-steps", "7", "--timeout", "2.5", "--trace", "new", "--network"]
    done = call("--show-config", *args, DEEPSEEK_API_KEY=DEEPSEEK)
    assert shown(done, "model") == ("from-file", ".env")
    assert shown(done, "base_url") == ("https://api.deepseek.com", "default")
    assert shown(done, "api_key")[1] == "environment"
    assert shown(done, "max_steps") == ("7", "flag")
    assert shown(done, "timeout") == ("2.5", "flag")
    assert shown(done, "trace") == ("new", "flag")
    assert shown(done, "network") == ("True", "flag")
    assert shown(done, "sandbox") == ("auto", "default")
    assert shown(done, "observation_limit") == ("3000", "default")
    assert shown(done, "read_timeout") == ("120.0", "default")
    assert DEEPSEEK not in done.out + done.err
    assert DEEPSEEK[-8:] not in done.out


def test_f03_show_config_does_not_claim_a_key_that_is_not_set(call: Call) -> None:
    without = shown(call("--show-config"), "api_key")[0]
    assert without != shown(call("--show-config", DEEPSEEK_API_KEY=DEEPSEEK), "api_key")[0]


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--max-steps", "x"], "--max-steps"),
        (["--max-steps", "0"], "max-steps"),
        (["--max-steps", "-1"], "max-steps"),
        (["--timeout", "soon"], "--timeout"),
        (["--timeout", "0"], "timeout"),
        (["--timeout", "-5"], "timeout"),
        (["--timeout", "nan"], "timeout"),
        (["--timeout", "inf"], "timeout"),
        (["--trace", "loud"], "--trace"),
        (["--sandbox", "maybe"], "--sandbox"),
        (["--lang", "fr"], "--lang"),
        (["--skills", "no-such-folder"], "--skills"),
        (["--model"], "--model"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--quie"], "--quie"),
    ],
)
def test_d04_a_bad_flag_is_one_line_that_names_it(call: Call, args: list[str], named: str) -> None:
    line = one_line(call("whoami", *args))
    assert named in line
    assert "usage" not in line.lower()


def test_a03_a_key_that_an_empty_variable_hides_is_a_secret_too(call: Call, dotenv: Dotenv) -> None:
    dotenv(f"DEEPSEEK_API_KEY={DEEPSEEK}\n")
    longer = DEEPSEEK + "-and-more"
    echo = f"Action: run_command\nAction Input: echo {DEEPSEEK[:5]}''{DEEPSEEK[5:]} {longer}"
    with Server([reply(echo), reply("Final Answer: 4")]) as server:
        env = {"DEEPSEEK_API_KEY": "", "OPENAI_API_KEY": longer, "MODEL": "m"}
        done = call("2+2", "--sandbox", "off", OPENAI_BASE_URL=server.url, **env)
        sent = server.requests[1].json["messages"][-1]["content"]
    assert sent.endswith("\n[key] [key]") and "-and-more" not in done.err + sent
    assert DEEPSEEK not in done.err


def test_a03_what_the_sdk_takes_from_the_environment_is_not_sent(call: Call) -> None:
    with answers() as server:
        account = {"OPENAI_ORG_ID": "org-SECRET", "OPENAI_PROJECT_ID": "proj-SECRET"}
        pair = {"DEEPSEEK_BASE_URL": server.url, "DEEPSEEK_API_KEY": DEEPSEEK}
        assert call("2+2", "-q", **account, **pair).code == 0
    assert "SECRET" not in str(server.requests[0].headers)


def test_a04_an_address_by_flag_of_no_pair_gets_no_deepseek_key(call: Call) -> None:
    with answers() as server:
        done = call("-q", "hi", "--base-url", server.url, DEEPSEEK_API_KEY=DEEPSEEK, MODEL="m")
    assert done.code == 0, done.err
    assert bearer(server) == ["Bearer local"]
