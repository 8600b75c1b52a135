"""The hook: how the callback gets into a process whose code does not know of it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import tunewatch.probe

PROBE = Path(tunewatch.probe.__file__).parent
ATTACH = PROBE / "attach"
BARE = sys._base_executable  # the interpreter below our venv: it has neither tunewatch nor torch

# A stand-in with the real one's shape: a list of default callbacks, read when a trainer is built.
TRANSFORMERS = {
    "__init__.py": "from .trainer import Trainer\n",
    "trainer_callback.py": "class TrainerCallback: pass\nclass Flow(TrainerCallback): pass\n",
    "trainer.py": """
        from types import SimpleNamespace as Thing
        from .trainer_callback import Flow
        DEFAULT_CALLBACKS = [Flow]
        class Trainer:
            defaults = None
            def __init__(self):
                made = DEFAULT_CALLBACKS if self.defaults is None else self.defaults
                self.callback_handler = Thing(callbacks=[one() for one in made])
                self.control, self.args = Thing(), Thing(output_dir="out")
                self.state = Thing(global_step=0, max_steps=2, epoch=0.0, is_world_process_zero=True)
                self.fire("on_init_end")
            def add_callback(self, one):
                self.callback_handler.callbacks.append(one() if isinstance(one, type) else one)
            def fire(self, name, **more):
                for one in self.callback_handler.callbacks:
                    if hasattr(one, name):
                        getattr(one, name)(self.args, self.state, self.control, **more)
            def training_step(self, model, inputs):
                return 0.5
            def train(self):
                self.fire("on_train_begin")
                for _ in range(2):
                    self.fire("on_step_begin")
                    self.training_step(None, {})
                    self.state.global_step += 1
                    self.fire("on_step_end")
                self.fire("on_train_end")
                return "trained"
    """,
}


@pytest.fixture
def python(tmp_path):
    """Run code in a bare interpreter, with the hook first on PYTHONPATH as `tunewatch exec` puts it."""
    package = tmp_path / "lib" / "transformers"
    package.mkdir(parents=True)
    for name, text in TRANSFORMERS.items():
        (package / name).write_text(textwrap.dedent(text))

    def run(code, *options, attach=ATTACH, **environment):
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(code))
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TUNEWATCH_", "PYTHON"))}
        return subprocess.run(
            [BARE, *options, str(script)], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False,
            env={**kept, "PYTHONPATH": f"{attach}{os.pathsep}{tmp_path / 'lib'}",
                 "TUNEWATCH_RUN_FOLDER": str(tmp_path / "run"), "TUNEWATCH_WAY": "exec", **environment},
        )  # fmt: skip

    return run


def events(tmp_path):
    return [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]


def kinds(tmp_path):
    return [event["event"] for event in events(tmp_path)]


TRAIN = """
from transformers import Trainer
assert Trainer().train() == "trained"
"""


def test_a_training_in_an_interpreter_without_tunewatch(python, tmp_path):
    done = python(TRAIN + "import importlib.util; print(importlib.util.find_spec('tunewatch'))\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "None\n", "")
    found = events(tmp_path)
    assert [event["event"] for event in found if event["event"] not in ("phase", "memory")] == [
        "session", "provenance", "train_begin", "train_end", "train_return", "exit",
    ]  # fmt: skip
    assert found[0]["way"] == "exec"
    assert [event["nan_visibility"] for event in found if event["event"] == "train_begin"] == ["each step"]
    assert (tmp_path / "run" / "pulse.0").exists()
    assert not (tmp_path / "run" / "probe-errors.log").exists()


def test_without_a_run_folder_nothing_is_loaded(python, tmp_path):
    code = (
        "import sys; print([m for m in sys.modules if 'tunewatch' in m], 'tunewatch' in repr(sys.meta_path))"
    )
    assert python(code, TUNEWATCH_RUN_FOLDER="").stdout == "[] False\n"
    assert python(code).stdout.endswith(" True\n")


def test_a_process_that_never_imports_transformers_is_untouched(python, tmp_path):
    done = python(
        "import sys, json; print(sys.argv[1:], sorted(m for m in sys.modules if 'transformers' in m))"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[] []\n", "")
    assert not (tmp_path / "run").exists()
    assert python("raise SystemExit(5)").returncode == 5
    assert not (tmp_path / "run").exists()


def test_an_exception_before_any_trainer_is_told(python, tmp_path):
    done = python("raise KeyError('CANARY')")
    assert done.returncode == 1
    assert "KeyError: 'CANARY'" in done.stderr
    assert kinds(tmp_path) == ["session", "exception", "exit"]
    assert "CANARY" not in (tmp_path / "run" / "events.jsonl").read_text()


def test_an_excepthook_of_the_users_still_runs(python, tmp_path):
    code = """
        import sys
        before = sys.excepthook
        def mine(kind, error, trace):
            print("mine", kind.__name__)
            before(kind, error, trace)
        sys.excepthook = mine
        raise ValueError("x")
    """
    assert python(code).stdout == "mine ValueError\n"
    assert kinds(tmp_path).count("exception") == 1


@pytest.mark.parametrize("text", ["print('theirs')\nHERE = __file__\n", "raise RuntimeError('theirs')\n"])
def test_an_existing_sitecustomize_still_runs(python, tmp_path, text):
    (tmp_path / "lib" / "sitecustomize.py").write_text(text)
    again = """
try:
    import sitecustomize
    print(sitecustomize.__file__)
except RuntimeError:
    print("raised again")
"""
    done = python(again + TRAIN)
    assert done.returncode == 0, done.stderr
    assert kinds(tmp_path).count("train_end") == 1
    if text.startswith("print"):
        assert done.stdout == f"theirs\n{tmp_path / 'lib' / 'sitecustomize.py'}\n"
    else:
        assert "RuntimeError: theirs" in done.stderr  # site says so, and goes on, as it does without us
        assert "not attached" not in done.stderr
        assert done.stdout == "raised again\n"


def test_a_probe_that_can_not_be_loaded_stops_nobody(python, tmp_path):
    broken = tmp_path / "probe" / "attach"
    broken.mkdir(parents=True)
    (broken / "sitecustomize.py").write_text((ATTACH / "sitecustomize.py").read_text())
    (broken.parent / "__init__.py").write_text("")
    done = python("print('goes on')", attach=broken)
    assert (done.returncode, done.stdout) == (0, "goes on\n")
    assert (
        done.stderr
        == "tunewatch: not attached: ModuleNotFoundError: No module named '_tunewatch_probe.hook'\n"
    )


LOOK = "[getattr(one, '__name__', '') for one in transformers.trainer.DEFAULT_CALLBACKS]"


def test_looking_for_the_module_first_does_not_lose_it(python, tmp_path):
    code = f"""
        import importlib, importlib.util, sys
        assert importlib.util.find_spec("transformers.trainer") is not None
        import transformers.trainer
        print({LOOK})
        import inspect
        assert "DEFAULT_CALLBACKS" in inspect.getsource(transformers.trainer)
        try:
            import transformers.nothing
        except ModuleNotFoundError as error:
            print(error.name)
    """
    done = python(code)
    assert done.stdout == "['Flow', 'TunewatchCallback']\ntransformers.nothing\n", done.stderr


def test_a_reloaded_trainer_module_has_it_once(python, tmp_path):
    code = f"""
        import importlib, transformers.trainer
        for _ in range(3):
            importlib.reload(transformers.trainer)
            print({LOOK})
        transformers.trainer.Trainer().train()
        print(hasattr(transformers.trainer.Trainer.train.__wrapped__, "_tunewatch_tap"))
    """
    done = python(code)
    assert done.stdout == "['Flow', 'TunewatchCallback']\n" * 3 + "False\n", done.stderr
    assert kinds(tmp_path).count("train_begin") == 1


def test_a_subclass_with_default_callbacks_of_its_own(python, tmp_path):
    code = """
        from transformers import Trainer
        from transformers.trainer_callback import Flow
        class Own(Trainer):
            defaults = [Flow]
        own = Own()
        own.train()
        own.train()
        print(sum(type(one).__name__ == "TunewatchCallback" for one in own.callback_handler.callbacks))
    """
    done = python(code)
    assert done.stdout == "1\n", done.stderr
    assert kinds(tmp_path).count("train_begin") == 2


def test_a_helper_of_multiprocessing_does_not_take_the_pulse(python, tmp_path):
    """A dataloader worker that is spawned imports what the main script imports; it is not the training."""
    code = """
        import multiprocessing, os
        import transformers.trainer
        def work(number):
            return number + 1
        if __name__ == "__main__":
            folder = os.environ["TUNEWATCH_RUN_FOLDER"]
            before = os.stat(folder + "/pulse.0").st_ino, open(folder + "/events.jsonl").read()
            for method in ("spawn", "forkserver", "fork"):
                with multiprocessing.get_context(method).Pool(2) as pool:
                    print(pool.map(work, [1, 2]))
            print(before == (os.stat(folder + "/pulse.0").st_ino, open(folder + "/events.jsonl").read()))
    """
    done = python(code)
    assert done.stdout == "[2, 3]\n" * 3 + "True\n", done.stderr


def test_a_spawned_rank_reports_under_its_own_rank(python, tmp_path):
    code = """
        import multiprocessing, os
        from transformers import Trainer
        def rank(number):
            os.environ.update(RANK=str(number), WORLD_SIZE="2")
            Trainer().train()
        if __name__ == "__main__":
            ranks = [multiprocessing.get_context("spawn").Process(target=rank, args=(n,)) for n in range(2)]
            for one in ranks:
                one.start()
            for one in ranks:
                one.join()
            print([one.exitcode for one in ranks])
    """
    done = python(code)
    assert done.stdout == "[0, 0]\n", done.stderr
    assert {path.name for path in (tmp_path / "run").glob("pulse.*")} == {"pulse.0", "pulse.1"}
    begins = [event for event in events(tmp_path) if event["event"] in ("train_begin", "train_end", "log")]
    assert {event["rank"] for event in begins} == {0}
    assert {event["rank"] for event in events(tmp_path) if event["event"] == "train_return"} == {0, 1}


def test_two_hooks_of_two_execs(python, tmp_path):
    done = python(TRAIN, attach=f"{ATTACH}{os.pathsep}{ATTACH}")
    assert (done.returncode, done.stderr) == (0, "")
    assert kinds(tmp_path).count("train_begin") == 1


def files():
    return sorted(PROBE.rglob("*.py"))


@pytest.mark.parametrize("path", files(), ids=lambda path: path.name)
def test_the_probe_runs_on_python_3_10_and_the_standard_library(path):
    tree = ast.parse(path.read_text(), feature_version=(3, 10))
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if id(node) in inside:
            continue
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module]
        for name in names:
            top = name.partition(".")[0]
            # The callback needs its base class: it is imported when transformers has been.
            assert top in sys.stdlib_module_names or (path.name, name) == (
                "callback.py",
                "transformers.trainer_callback",
            )


def test_at_the_start_only_the_standard_library_is_imported(python):
    code = (
        "import sys; print(sorted(m for m in sys.modules if m.split('.')[0] not in sys.stdlib_module_names))"
    )
    without = ast.literal_eval(python(code, TUNEWATCH_RUN_FOLDER="").stdout)
    added = set(ast.literal_eval(python(code).stdout)) - set(without)
    probe = "_tunewatch_probe"
    assert added == {probe, *(f"{probe}.{name}" for name in ("hook", "writer", "pulse", "background"))}


REAL = """
    import importlib, warnings
    warnings.simplefilter("ignore")
    import transformers.trainer
    from transformers import Trainer
    first = [one.__name__ for one in transformers.trainer.DEFAULT_CALLBACKS]
    importlib.reload(transformers.trainer)
    second = [one.__name__ for one in transformers.trainer.DEFAULT_CALLBACKS]
    print(first, second)
    taps = [t.train._tunewatch_tap for t in (Trainer, transformers.trainer.Trainer)]
    print(taps, Trainer is transformers.trainer.Trainer)
"""


def test_the_real_transformers(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ATTACH), "TUNEWATCH_RUN_FOLDER": str(tmp_path / "run")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(REAL)], env=environment, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    expected = "['DefaultFlowCallback', 'TunewatchCallback']"
    assert done.stdout == f"{expected} {expected}\n[True, True] False\n", done.stderr
