"""B15: the sandbox, probed with canary files only. REQUIRE_SANDBOX=1: a skip is a failure."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import agent

KEY = "sk-canary-0123456789abcdef"
SECRET = "canary-secret"


def sandboxed(folder: Path, timeout: float = 10.0, network: bool = False) -> agent.Shell:
    settings = agent.Settings(timeout=timeout, sandbox="bwrap", network=network)
    return agent.Shell(settings, folder)


@pytest.fixture(scope="module")
def works() -> None:
    """Skip, with the reason, where the system doesn't allow a sandbox."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            sandboxed(Path(folder))
        except agent.ConfigError as error:
            if os.environ.get("REQUIRE_SANDBOX") == "1":
                pytest.fail(f"REQUIRE_SANDBOX=1, but: {error}")
            pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _below_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "guard", lambda command, folder: None)


@pytest.fixture
def outside(works: None) -> Iterator[Path]:
    """A canary folder that the sandbox shows, but only to read (/tmp is hidden altogether)."""
    path = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="canary-"))
    (path / "canary").write_text("alive")
    (path / "canary").chmod(0o640)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def work(works: None, tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


# ---- what must not be possible -------------------------------------------------------------


@pytest.mark.parametrize(
    "probe",
    [
        "echo dead > {out}/canary",
        "echo x >> {out}/canary",
        "rm -f {out}/canary",
        "rmdir {out}/empty",
        "chmod 777 {out}/canary",
        "touch {out}/new",
        "mv {out}/canary {out}/moved",
        "ln {out}/canary hard; echo dead > hard",
        "ln -s {out}/canary soft; echo dead > soft",
        "mount -o remount,rw / ; mount -o remount,rw {out}; echo dead > {out}/canary",
        "unshare -Urm sh -c 'mount -o remount,rw /; echo dead > {out}/canary'",
        "python3 -c 'import os; os.truncate(\"{out}/canary\", 0)'",
    ],
)
def test_b15_outside_nothing_changes(outside: Path, work: Path, probe: str) -> None:
    (outside / "empty").mkdir()
    text = sandboxed(work).run(f"cat {outside}/canary; echo; " + probe.format(out=outside))
    assert text.startswith("alive\n")  # it can be seen: so the probe had its target
    assert (outside / "canary").read_text() == "alive"
    assert (outside / "canary").stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in outside.iterdir()) == ["canary", "empty"]


def test_b15_tmp_is_not_the_real_one(work: Path, tmp_path: Path) -> None:
    (tmp_path / "canary").write_text(SECRET)
    probe = f"cat {tmp_path}/canary; touch {tmp_path}/new /tmp/new-{os.getpid()}"
    text = sandboxed(work).run(probe)
    assert SECRET not in text
    assert not (tmp_path / "new").exists()
    assert not Path(f"/tmp/new-{os.getpid()}").exists()


def test_b15_home_is_hidden(outside: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = outside / "home"
    for name in (".ssh/id", ".netrc", ".config/git/credentials"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(SECRET)
    (home / ".gitconfig").write_text("[user]\nname = Canary\n")
    (home / "bin").mkdir()
    (home / "bin" / "mytool").write_text("#!/bin/sh\necho tool works\n")
    (home / "bin" / "mytool").chmod(0o755)
    entries = [f"{home}/bin", f"{home}/none", str(home), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(entries))
    monkeypatch.setenv("HOME", str(home))
    runner = sandboxed(work)
    text = runner.run(f"cat ~/.ssh/id ~/.netrc; grep -r canary- {home}; touch ~/new")
    assert SECRET not in text
    assert "No such file" in text
    assert not (home / "new").exists()
    assert runner.run("git config user.name; mytool") == "Canary\ntool works"


@pytest.mark.parametrize("place", ["work", "agent"])
def test_b15_env_file_and_session_log_are_masked(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    root = tmp_path / "agent"
    for folder in (root, work / ".agent" / "sessions"):
        folder.mkdir(parents=True)
    monkeypatch.setattr(agent, "ROOT", root)
    (root / "prompt.md").write_text("a prompt")
    env = {"work": work, "agent": root}[place] / ".env"
    env.write_text(SECRET)
    (work / ".agent" / "sessions" / "log").write_text(SECRET)
    runner = sandboxed(work)
    assert runner.run(f"cat {root}/prompt.md") == "a prompt"
    probes = f"cat {env}; grep -r canary {env.parent} .; umount {env}; cat {env}; cp {env} copy"
    probes += f"; unshare -Urm sh -c 'umount {env}; cat {env}'; rm -f {env}; mv {env} x; cat x"
    assert SECRET not in runner.run(probes)
    assert env.read_text() == SECRET
    assert "a prompt" in runner.run(f"echo x > {root}/prompt.md; cat {root}/prompt.md")
    assert "log" not in runner.run("ls -A .agent").split()
    runner.run("touch .agent/forged")
    assert not (work / ".agent" / "forged").exists()


def test_b15_no_environ_holds_the_key(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPSEEK_API_KEY", KEY)
    holder = subprocess.Popen(["sleep", "30"], env={"PATH": os.environ["PATH"], "KEY": KEY})
    try:
        text = sandboxed(work).run(
            f"cat /proc/{os.getpid()}/environ /proc/{holder.pid}/environ;"
            " cat /proc/[0-9]*/environ | tr '\\0' '\\n'; cat /proc/[0-9]*/cmdline | tr '\\0' ' '"
        )
    finally:
        holder.kill()
        holder.wait()
    assert "PAGER=cat" in text
    assert KEY not in text


@pytest.mark.parametrize("network", [False, True])
def test_b15_tcp_to_loopback_only_with_network(work: Path, network: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        text = sandboxed(work, network=network).run(
            f'python3 -c \'import socket; socket.create_connection(("127.0.0.1", {port}), 3);'
            ' print("connected")\''
        )
    assert text.endswith("connected") is network, text


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_b15_unix_sockets_are_out_of_reach(work: Path, kind: str) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short, socket.socket(socket.AF_UNIX) as server:
        name = f"{short}/sock" if kind == "path" else f"\0canary-{os.getpid()}"
        server.bind(name)
        server.listen()
        probe = f"python3 -c 'import socket; socket.socket(socket.AF_UNIX).connect({name!a})'"
        probe = probe.replace(f"{name!a}", f'"{name!a}"'.replace("'", ""))
        text = sandboxed(work).run(probe + " && echo connected")
        control = agent.Shell(agent.Settings(sandbox="off"), work).run(probe + " && echo connected")
    assert control == "connected"
    assert "connected" not in text and "Error" in text


def test_b15_signals_do_not_reach_outside(work: Path) -> None:
    canary = subprocess.Popen(["sleep", "30"])
    try:
        text = sandboxed(work).run(f"kill -9 {canary.pid}; python3 -c 'print(1)'")
        assert "No such process" in text
        assert canary.poll() is None
    finally:
        canary.kill()
        canary.wait()


@pytest.mark.parametrize("end", ["echo done", "sleep 60"])
def test_b15_nothing_outlives_the_shell(work: Path, end: str) -> None:
    number = f"{300 + os.getpid() % 100}.{threading.get_ident() % 100000}"
    text = sandboxed(work, timeout=0.6).run(f"setsid sleep {number} & sleep {number} & {end}")
    assert ("timed out" in text) is end.startswith("sleep")
    for _ in range(20):
        running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
        if number not in running:
            return
        threading.Event().wait(0.05)
    pytest.fail(f"sleep {number} still runs")


# ---- what must still work ------------------------------------------------------------------


def test_b15_everyday_work_is_possible(work: Path) -> None:
    runner = sandboxed(work)
    assert runner.notice == ""
    assert runner.run("pwd") == str(work.resolve())
    assert runner.run("python3 -c 'import yaml, ssl, json; print(6 * 7)'") == "42"
    assert runner.run("f=$(mktemp) && d=$(mktemp -d) && echo ok > $f && cat $f") == "ok"
    git = "git init -q . && echo x > a && git add a && git -c user.name=a -c user.email=a@b "
    assert runner.run(git + "commit -qm first && git log --oneline | wc -l").strip() == "1"
    assert runner.run("exit 7") == "(no output)\n[exit code 7]"
    assert runner.run("sleep 0.1 | cat; echo x > /dev/null; head -c 4 /dev/zero | wc -c") == "4"
    assert (work / "a").read_text() == "x\n"


def test_b15_a_broken_tmpdir_and_a_symlinked_folder(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hidden").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "hidden"))
    link = tmp_path / "link"
    link.symlink_to(work)
    text = sandboxed(link).run("mktemp > made && cat made && pwd -P")
    assert text.startswith("/tmp/")
    assert text.endswith(str(work.resolve()))
    assert (work / "made").exists()


def test_b15_the_python_of_a_virtual_environment_works(work: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    words = ["-m", "venv", "--without-pip", "--system-site-packages", str(venv)]
    subprocess.run([sys.executable, *words], check=True)
    script = (
        "import agent, pathlib\n"
        "settings = agent.Settings(sandbox='bwrap')\n"
        "shell = agent.Shell(settings, pathlib.Path('.'))\n"
        "print(shell.run('python3 -c \"import sys, json; print(sys.prefix)\"'))\n"
    )
    done = subprocess.run(
        [str(venv / "bin" / "python"), "-c", script],
        cwd=work,
        env={**os.environ, "PYTHONPATH": str(Path(agent.__file__).parent)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(venv), done.stderr


# ---- when there is none --------------------------------------------------------------------


def test_b15_off_is_said_in_one_line(tmp_path: Path) -> None:
    prefix, notice = agent.sandbox_prefix(agent.Settings(sandbox="off"), tmp_path)
    assert prefix == []
    assert notice.startswith("sandbox off: ") and "\n" not in notice


def test_b15_no_bubblewrap_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    prefix, notice = agent.sandbox_prefix(agent.Settings(sandbox="auto"), tmp_path)
    assert prefix == []
    assert notice.startswith("sandbox off: ") and "install bubblewrap" in notice
    assert "\n" not in notice
    with pytest.raises(agent.ConfigError, match="install bubblewrap"):
        agent.sandbox_prefix(agent.Settings(sandbox="bwrap"), tmp_path)


def test_b15_a_bubblewrap_that_fails_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: no permissions for a namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    runner = agent.Shell(agent.Settings(sandbox="auto"), tmp_path)
    assert runner.prefix == []
    assert "no permissions for a namespace" in runner.notice and "\n" not in runner.notice
    assert runner.run("echo works") == "works"
    with pytest.raises(agent.ConfigError):
        agent.Shell(agent.Settings(sandbox="bwrap"), tmp_path)


@pytest.mark.parametrize("folder", ["/", "home", "above"])
def test_b15_home_as_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    home = tmp_path / "above" / "home"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    path = {"/": Path("/"), "home": home, "above": home.parent}[folder]
    prefix, notice = agent.sandbox_prefix(agent.Settings(sandbox="auto"), path)
    assert prefix == []
    assert notice.startswith("sandbox off: ") and "\n" not in notice
    with pytest.raises(agent.ConfigError):
        agent.sandbox_prefix(agent.Settings(sandbox="bwrap"), path)


# ---- What the folder holds, or an odd home, must not take the fence away ---------------------


def test_b15_a_link_called_agent_keeps_the_fence(work: Path, outside: Path) -> None:
    (work / ".agent").symlink_to(outside)
    runner = sandboxed(work)
    assert runner.notice == ""
    runner.run(f"echo x > {outside}/canary; rm -f .agent/canary")
    assert (outside / "canary").read_text() == "alive"


@pytest.mark.parametrize("home", ["/", "", "/nowhere"])
def test_b15_an_odd_home_keeps_the_fence(
    work: Path, outside: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    monkeypatch.setenv("HOME", home)
    runner = sandboxed(work)
    assert runner.notice == ""
    assert runner.run(f"echo x > {outside}/canary || echo no").splitlines()[-1] == "no"
    assert (outside / "canary").read_text() == "alive"
