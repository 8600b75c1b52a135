"""Uploads beside a training: transformers' own pushes, against a hub of the test's own on this machine."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import CancelledError, Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
import smalltrain
from smalltrain import events, run_folder
from transformers import Trainer

from tunewatch.probe.pushes import Pushes

CANARY = "CANARY-in-the-answer"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEWATCH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TUNEWATCH_RUN_FOLDER", raising=False)
    return tmp_path / "home"


class Hub:
    """A hub that knows everybody, makes every repository, and refuses what is uploaded."""

    def __init__(self):
        self.refusal = (403, "you are not in the authorized list")
        self.asked = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer()

            def do_POST(self):
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.answer()

            def answer(self):
                hub.asked.append(self.path)
                if self.path.endswith("/repos/create"):
                    self.send(200, '{"url": "http://127.0.0.1/someone/model", "name": "model"}')
                elif "whoami" in self.path:
                    self.send(200, '{"name": "someone", "type": "user", "auth": {}}')
                else:
                    self.send(hub.refusal[0], f'{{"error": "{hub.refusal[1]} {CANARY}"}}')

            def send(self, status, text):
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def hub(monkeypatch):
    import huggingface_hub.constants as constants
    from huggingface_hub import HfApi

    hub = Hub()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    api = HfApi(endpoint=hub.endpoint, token="hf_testtesttest")
    for module in ("transformers.trainer", "transformers.utils.hub"):
        monkeypatch.setattr(f"{module}.hf_api", lambda *a, **k: api, raising=False)
        monkeypatch.setattr(f"{module}.create_repo", api.create_repo, raising=False)
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


@pytest.mark.parametrize(
    ("refusal", "reason"), [((403, "403 Forbidden: no rights"), "auth"), ((400, "broken"), "hub")]
)
def test_a_hub_that_refuses_every_push(home, tmp_path, hub, refusal, reason):
    hub.refusal = refusal
    one = smalltrain.trainer(
        tmp_path / "out", push_to_hub=True, hub_model_id="someone/model", hub_token="hf_testtesttest"
    )
    one.train()  # returns as if nothing had happened
    pushes = events(home, one, "hub_push")
    assert pushes[0]["step"] == 4
    assert {(push["ok"], push["reason"]) for push in pushes} == {(False, reason)}
    assert all(push["type"] for push in pushes)
    text = (run_folder(home, one) / "events.jsonl").read_text()
    assert CANARY not in text
    assert "hf_testtesttest" not in text
    assert text.index('"hub_push"') < text.index('"train_return"')
    assert len(events(home, one, "train_return")) == 1


class Pushing(Trainer):
    """A real trainer whose uploads are futures in the test's hand."""

    futures: ClassVar[dict[int, Future]] = {}

    def init_hf_repo(self, token=None):
        self.push_in_progress = None

    def _push_from_checkpoint(self, checkpoint_folder):
        from transformers.utils.hub import PushInProgress

        if self.push_in_progress is None or self.push_in_progress.is_done():
            self.push_in_progress = PushInProgress([self.futures[self.state.global_step]])


def finished(error=None):
    future = Future()
    future.set_exception(error) if error else future.set_result("a commit")
    return future


def test_good_and_failed_ones(home, tmp_path):
    slow = Future()
    Pushing.futures = {
        2: finished(),
        4: finished(OSError(28, "No space left")),
        6: slow,
        8: finished(KeyError("x")),
    }
    release = threading.Timer(0.5, slow.set_exception, [ConnectionError("reset")])
    release.daemon = True
    one = smalltrain.trainer(
        tmp_path / "out", kind=Pushing, push_to_hub=True, save_steps=2,
        callbacks=(smalltrain.AtStep(8, release.start),),
    )  # fmt: skip
    one.train()
    pushes = [
        (push["step"], push["ok"], push["type"], push["reason"]) for push in events(home, one, "hub_push")
    ]
    # Step 8's was left out by the trainer: that of step 6 was still under way.
    assert pushes == [
        (2, True, None, None), (4, False, "OSError", "disk_full"), (6, False, "ConnectionError", "hub"),
    ]  # fmt: skip


class Notes:
    def __init__(self):
        self.events = []

    def settled(self):
        return contextlib.nullcontext()

    def event(self, kind, **fields):
        self.events.append((kind, fields))

    def error(self):
        raise AssertionError("a fault of ours")


class Odd:
    pass


def test_what_is_seen_twice_is_told_once_and_a_taken_back_one_never():
    notes = Notes()
    pushes = Pushes(notes)
    trainer, taken_back = Odd(), Future()
    pushes.look(None, 1)
    pushes.look(trainer, 1)
    trainer.push_in_progress = None
    pushes.look(trainer, 1)
    trainer.push_in_progress = Odd()
    trainer.push_in_progress.jobs = [finished(), taken_back]
    for step in (2, 4):
        pushes.look(trainer, step)
    assert taken_back.cancel()
    assert notes.events == [("hub_push", {"ok": True, "type": None, "reason": None, "step": 2})]
    trainer.push_in_progress.jobs = [finished(CancelledError())]
    pushes.look(trainer, 6)
    assert len(notes.events) == 1
