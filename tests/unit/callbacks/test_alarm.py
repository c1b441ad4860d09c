"""The spike alarm reaches a function, a command and a webhook, and never ends a run."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from lit_pretrain.callbacks._rollback.alarm import Alarm
from lit_pretrain.errors import ConfigError

FACTS = {"update": 7, "loss": float("nan"), "batches": [14, 15]}


def test_a_function_gets_the_facts() -> None:
    told: list[Any] = []
    Alarm(told.append)(FACTS)
    assert told == [FACTS]


def test_a_command_gets_json(tmp_path: Path) -> None:
    out = tmp_path / "told.json"
    program = f"import sys, pathlib; pathlib.Path({str(out)!r}).write_text(sys.stdin.read())"
    alarm = Alarm([sys.executable, "-c", program])
    alarm(FACTS)
    alarm.close()
    assert json.loads(out.read_text()) == {"update": 7, "loss": "nan", "batches": [14, 15]}


def test_a_webhook_gets_json() -> None:
    got: list[Any] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.headers["Content-Type"], json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Hook)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        alarm = Alarm(f"http://127.0.0.1:{server.server_port}/spike")
        alarm(FACTS)
        alarm.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert got == [("application/json", {"update": 7, "loss": "nan", "batches": [14, 15]})]


@pytest.mark.parametrize(
    "target",
    [lambda facts: 1 / 0, [sys.executable, "-c", "raise SystemExit(3)"], "no-such-program", "http://127.0.0.1:9/"],
)
def test_an_alarm_that_fails_is_a_warning(target: Any, recwarn: pytest.WarningsRecorder) -> None:
    alarm = Alarm(target, timeout_s=20.0)
    alarm(FACTS)
    alarm.close()
    assert any("The spike alarm failed" in str(w.message) for w in recwarn)


def test_a_function_that_hangs_is_left_alone(recwarn: pytest.WarningsRecorder) -> None:
    end = threading.Event()
    alarm = Alarm(lambda facts: end.wait(), timeout_s=0.1)
    alarm(FACTS)
    alarm.close()
    end.set()
    assert any("has not returned after 0.1 s" in str(w.message) for w in recwarn)


@pytest.mark.parametrize("target", [3, [], ["a", 4], "", "  ", "tell 'me", [" "]])
def test_what_is_no_alarm(target: Any) -> None:
    with pytest.raises(ConfigError, match=r"rollback\.alarm="):
        Alarm(target)
