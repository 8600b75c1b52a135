"""Put first on PYTHONPATH by `tunewatch exec`; runs at the start of every Python process below it.

It loads the probe from the files beside it, under a name of its own, so that nothing else of tunewatch's environment is
seen by the user's interpreter; and it runs the sitecustomize that would have run without it.
"""

import os
import sys


def _run_shadowed() -> None:
    import importlib.machinery
    import importlib.util

    here = os.path.dirname(os.path.abspath(__file__))
    rest = [entry for entry in sys.path if os.path.abspath(entry or os.getcwd()) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _attach() -> None:
    import importlib.util

    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    spec = importlib.util.spec_from_file_location(
        "_tunewatch_probe", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules["_tunewatch_probe"] = package
    spec.loader.exec_module(package)
    import _tunewatch_probe.hook

    _tunewatch_probe.hook.attach()


# Once: it is imported again when the shadowed one raised, or somebody reloads it.
if os.environ.get("TUNEWATCH_RUN_FOLDER") and "_tunewatch_probe" not in sys.modules:
    try:
        _attach()
    except Exception as error:
        print(f"tunewatch: not attached: {type(error).__name__}: {error}", file=sys.stderr)
_run_shadowed()
