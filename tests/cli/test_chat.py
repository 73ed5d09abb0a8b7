"""`juice chat`, as somebody types into it."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import time

from tests.support.commands import juice

ASKED = "What is the capital of Peru?"
GIVEN = "/context The capital of Peru is Cairo."


def chat(*lines: str, options: tuple[str, ...] = ()) -> tuple[int, list[str], str]:
    """Return the exit status, the answers and what stands on standard error."""
    done = juice("chat", *options, given="\n".join(lines) + "\n")
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_the_steering_turns_as_one_talks() -> None:
    code, answers, _ = chat(
        *(ASKED, GIVEN, "/steer context", "/forget", ASKED),
        *("/steer parametric", "/forget", ASKED, "/compare"),
        *("/dial 0", "/steer context", "/forget", ASKED, "/quit", "never answered"),
    )
    assert code == 0
    assert answers == [
        *("Lima.", "Cairo.", "Lima."),
        *("parametric Lima.", "none       Lima.", "context    Cairo."),
        "Lima.",
    ]


def test_turns_go_into_the_next_one() -> None:
    _, alone, _ = chat("Are you sure?")
    _, after, _ = chat(ASKED, "Are you sure?")
    assert after[1] != alone[0]


def test_mistakes_are_told_and_the_chat_goes_on() -> None:
    code, answers, errors = chat("/dial x", "/steer up", "/hello", "/compare", "/help", ASKED)
    assert code == 0
    assert answers == ["Lima."]
    assert "/dial is 'x'; expected a number" in errors
    assert "/steer is 'up'; expected" in errors
    assert "/hello is no command; expected /steer" in errors
    assert "there is no answer yet" in errors
    assert "/forget   begin anew" in errors
    assert "Traceback" not in errors


def test_it_can_begin_steered_and_wrong_options_are_refused() -> None:
    _, answers, _ = chat(GIVEN, ASKED, options=("--steer", "context"))
    assert answers == ["Cairo."]
    code, _, errors = chat(options=("--strength", "-1"))
    assert code != 0
    assert "strength is -1" in errors


def test_at_a_terminal_the_prompt_shows_what_steers_and_ctrl_c_ends_it_cleanly() -> None:
    """Arrow keys bring lines back: what was said first is said again."""
    command = [sys.executable, "-m", "juice.cli.main", "chat"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "90", "TERM": "xterm"}
    process, terminal = pty.fork()
    if process == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # what runs in the background may ignore it
        os.execvpe(command[0], command, environment)  # noqa: S606 - no shell is wanted
    said = b""

    def wait_for(text: str) -> None:
        nonlocal said
        deadline = time.monotonic() + 120
        while text.encode() not in said:
            assert time.monotonic() < deadline, said.decode()
            if select.select([terminal], [], [], 1)[0]:
                said += os.read(terminal, 4096)
        said = said.split(text.encode(), 1)[1]

    wait_for("> ")
    for line, answer in (
        (GIVEN, "> "),
        ("/steer context", "context> "),
        ("/dial 0.5", "context x 0.5> "),
        (ASKED, "Cairo."),
        ("/compare", "Memory"),
    ):
        os.write(terminal, f"{line}\r".encode())
        wait_for(answer)
    wait_for("here memory and context part")
    wait_for("context x 0.5> ")
    os.write(terminal, b"\x1b[A\x1b[A\r")  # up, up: the question again
    wait_for("Cairo.")
    wait_for("context x 0.5> ")
    # Readline takes a signal that comes between its prompt and its wait for a key with the next
    # key. One signal, no second: that would kill the process while it ends.
    os.write(terminal, b"\x03\r")
    deadline = time.monotonic() + 60
    ended = 0
    while not ended:
        assert time.monotonic() < deadline
        time.sleep(0.1)
        ended, status = os.waitpid(process, os.WNOHANG)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0
    assert b"nothing was written" not in said
