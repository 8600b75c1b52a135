"""What an exception means for a fine-tuning run, said without quoting it.

The message of an exception may hold a row of the data, a prompt or a token, so it never leaves the process: it is
looked at here, where it is, and only its kind goes on.
"""

from __future__ import annotations

import errno
import json
import os
import re
import traceback
from typing import Any

# Ordered: the first match decides. Each pattern is looked for in "TypeName: message".
_MESSAGES: tuple[tuple[str, str], ...] = (
    ("shm", r"DataLoader worker.*(Bus error|shared memory)|insufficient shared memory|No space left on device.*/dev/shm|(write to file|shared memory|resize).*</?torch_\d.*No space left|/dev/shm/.*No space left"),
    ("oom_host", r"DataLoader worker.*killed by signal: Killed"),
    ("oom_gpu", r"(CUDA|HIP|XPU|NPU|HPU) out of memory|MPS backend out of memory|CU(BLAS|DNN|SOLVER|SPARSE|FFT)_STATUS_ALLOC_FAILED|(CUDA|HIP|NPU|XPU) error: out of memory|(Cuda|HIP) failure '?out of memory|cudaErrorMemoryAllocation|UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY|No available memory for the cache blocks"),
    ("oom_gpu", r"^(torch\.)?OutOfMemoryError"),
    ("oom_host", r"DefaultCPUAllocator: (can't|not enough)|Cannot allocate memory|^MemoryError|(Array|Arrow)MemoryError|std::bad_alloc"),
    ("disk_full", r"No space left on device|os error 28|Disk quota exceeded|os error 122|file write failed|PytorchStreamWriter failed writing|inline_container\.cc.*unexpected pos"),
    ("nccl_timeout", r"(NCCL|collective operation|ProcessGroup\w+).*(timeout|timed out)|Watchdog caught collective|Timed out waiting \d+ms for (recv|send)"),
    ("gpu_lost", r"unspecified launch failure|fallen off the bus|GPU is lost|GPU_IS_LOST|uncorrectable (ECC|NVLink)|device handle for GPU|\bXid\b|CUDA error: unknown error|CUDNN_STATUS_(INTERNAL|EXECUTION)_FAILED.*launch|system not yet initialized|HIP error: (unspecified launch failure|device lost|unknown error)|UR_RESULT_ERROR_DEVICE_LOST|cudaErrorLaunchFailure|cudaErrorECCUncorrectable"),
    # Of the communication with other ranks, but no word of time: a rank went away, or the network between them did.
    ("nccl_timeout", r"NCCL error|ncclSystemError|ncclRemoteError|Connection closed by (remote )?peer|remote process exited|(gloo|ProcessGroup\w+|TCPStore|^Dist\w*Error).*(Broken pipe|Connection (reset|refused|was likely closed))|^Dist(Network|Store)Error.*(timed out|timeout)"),
    ("config", r"^(RepositoryNotFoundError|RevisionNotFoundError)"),  # the hub says 401 for a name it does not have
    ("auth", r"GatedRepoError|restricted and you are not in the authorized list|Access to model .* is restricted|LocalTokenNotFound|gated repo|\b401\b.*(Unauthorized|Client Error)|\b403\b.*Forbidden|Invalid (user token|credentials in Authorization)|Token is (invalid|required)|Token .{0,40}not valid|Please log in|Unauthorized for url"),
    # A resume with a model, an adapter or an optimizer of another shape: the checkpoint is sound.
    ("config", r"Error\(s\) in loading state_dict|size mismatch for|loaded state dict (has|contains) a (different number of )?parameter group"),
    ("checkpoint_corrupt", r"SafetensorError|Weights only load failed|PytorchStreamReader failed|incomplete metadata, file not fully covered|Can't find a valid checkpoint|checkpoint is corrupt|^UnpicklingError"),
    ("config", r"is not a local folder and is not a valid model identifier|Repo id must|No such (model|repo)|HFValidationError|does not appear to have a file named|does not recognize this architecture"),
    ("config", r"Target modules .* not found|No modules were targeted|unexpected keyword argument|No module named|ImportError|ModuleNotFoundError|PackageNotFoundError|not support(ed)? bf16|doesn't support (bf16|fp16)|Your setup doesn't support|(bf16|bfloat16|fp16|fp8).{0,40}(is )?not supported|no kernel image is available|device kernel image is invalid|invalid device ordinal|Torch not compiled with CUDA|TemplateSyntaxError|TemplateError|UndefinedError|chat_template is not set|Unrecognized argument"),
    ("config", r"No valid checkpoint found|Unrecognized (model|configuration)|is not a valid .*Strategy|ValidationError|requires the .* library|instantiate the backend tokenizer|does not have a padding token|no padding token is defined|Attempting to unscale FP16|fine-tuning on purely quantized|does not support gradient checkpointing"),
    ("config", r"driver (version is insufficient|on your system is too old)|forward compatibility was attempted|No CUDA GPUs are available|no CUDA-capable device|busy or unavailable|Found no NVIDIA driver|only supports? .{0,40}GPUs|requires device with capability|CU(DNN|BLAS)_STATUS_(ARCH_MISMATCH|NOT_SUPPORTED|VERSION_MISMATCH|SUBLIBRARY_VERSION_MISMATCH)|cuDNN version incompatib"),
    ("config", r"cannot open shared object file|undefined symbol|GLIBC(XX)?_[\d.]+.? not found|binary incompatibility|^AttributeError: module '[\w.]+' has no attribute|Failed to find C compiler|\b(can't|can ?not) pickle|PicklingError|EADDRINUSE|Address already in use|Too many open files|received \d items of ancdata"),
    ("nothing_trainable", r"does not require grad and does not have a grad_fn|optimizer got an empty parameter list"),
    ("hub", r"HfHubHTTPError|LocalEntryNotFoundError|Connection ?error.*(hugging|hf\.co)|couldn't connect to|Max retries exceeded|Too Many Requests|\b(429|5\d\d) (Client|Server) Error|(Client|Server) error '(429|5\d\d)"),
    ("nan", r"FloatingPointError|returned nan values|contains either `?inf`?, `?nan`?|loss is (nan|inf)|loss scale already at minimum"),
    ("data", r"DatasetNotFound|DatasetGeneration\w*Error|DataFilesNotFound|EmptyDatasetError|UnicodeDecodeError|^Arrow\w+:|Unable to create tensor|index out of range in self|CUDA error: device-side assert"),
)  # fmt: skip
_COMPILED = tuple((reason, re.compile(pattern, re.IGNORECASE | re.DOTALL)) for reason, pattern in _MESSAGES)

_DATA_FRAMES = (
    "sft_trainer.py",
    "data_collator.py",
    "data_utils.py",
    "arrow_dataset.py",
    "datasets/",
    "torch/utils/data/",
    "tokenization_",
)
_CONFIG_FRAMES = (
    "training_args.py",
    "sft_config.py",
    "configuration_",
    "auto_factory.py",
    "hf_argparser.py",
)
_RESUME_FUNCTIONS = (
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "load_from_json",
    "_load_rng_state",
)

MAX_FRAMES = 12


def describe(error: BaseException) -> dict[str, Any]:
    """Return `type`, `bases`, `reason`, `detail` and `frames` of an exception, free of its message.

    `reason` is one of the closed list of `tunewatch_run_end_info`; "unknown" where nothing fits. `detail` is a
    short text that is safe to show: either words of our own errors, or numbers picked from a known message.
    """
    frames = traceback.extract_tb(error.__traceback__)
    return {
        "type": type(error).__name__,
        "bases": [base.__name__ for base in type(error).__mro__[1:-2]],
        "reason": classify(error),
        "detail": safe_detail(error),
        "frames": [f"{os.path.basename(f.filename)}:{f.lineno} {f.name}" for f in frames[-MAX_FRAMES:]],
    }


def classify(error: BaseException) -> str:
    """Return the reason code of an exception, looking along its causes."""
    for link in _chain(error):
        own = getattr(link, "tunewatch_reason", None)
        if isinstance(own, str):
            return own
        if any(_OFFLINE.search(_named(cause)) for cause in _chain(link)):
            return "config"  # what wraps it speaks of a connection
        failed = _of_torchrun(link)
        if failed is not None:  # a rank that raised has reported that itself
            return "rank_killed" if failed[1] < 0 else "unknown"
        reason = _classify_one(link)
        if reason is not None:
            return reason
    if any(_WORKER_GONE.search(_message(link)) for link in _chain(error)):
        return "shm"  # nothing said what it died of
    return _classify_by_place(error) or "unknown"


_OFFLINE = re.compile(r"outgoing traffic has been disabled|^OfflineModeIsEnabled")
"""The settings say that the hub may not be asked (HF_HUB_OFFLINE): to try again changes nothing."""

_WORKER_GONE = re.compile(r"DataLoader worker.*exited unexpectedly")


def _of_torchrun(error: BaseException) -> tuple[int, int] | None:
    """The rank and exit code that torchrun's agent saw fail first (-N for signal N), from its ChildFailedError."""
    find = getattr(error, "get_first_failure", None)
    if type(error).__name__ != "ChildFailedError" or not callable(find):
        return None
    rank, failure = find()
    return int(rank), int(failure.exitcode)


def safe_detail(error: BaseException) -> str:
    """Return words about the exception that quote no data: ours, or figures of a known message."""
    for link in _chain(error):
        if isinstance(getattr(link, "tunewatch_reason", None), str):
            return _message(link)[:500]
        failed = _of_torchrun(link)
        if failed is not None:
            return (
                f"rank {failed[0]} was killed by signal {-failed[1]}"
                if failed[1] < 0
                else f"rank {failed[0]} exited with {failed[1]}"
            )
        tried = re.search(r"Tried to allocate ([\d.]+ [KMGT]iB)", _message(link))
        if tried:
            return f"tried to allocate {tried.group(1)}"
        tried = re.search(r"you tried to allocate (\d+) bytes", _message(link))
        if tried:
            return f"tried to allocate {int(tried.group(1)) / 2**30:.1f} GiB"
        if isinstance(link, OSError) and link.errno is not None:
            name = os.path.basename(str(link.filename)) if link.filename else ""
            return f"{os.strerror(link.errno)}{': ' + name if name else ''}"[:200]
        if isinstance(link, ModuleNotFoundError) and link.name:
            return f"no module named {link.name}"[:200]
    return ""


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {_message(error)}"[:20_000]


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a class of the user's whose text can not be made
        return ""


def _chain(error: BaseException) -> list[BaseException]:
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and all(link is not known for known in links) and len(links) < 8:
        links.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return links


def _classify_one(error: BaseException) -> str | None:
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return "cancelled" if isinstance(error, KeyboardInterrupt) else None
    if type(error).__name__ == "CalledProcessError":  # of a launcher, about the training that it started
        code = getattr(error, "returncode", 0)
        number = -code if code < 0 else code - 128 if 128 < code < 193 else 0
        return f"killed_signal_{number}" if number else None
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "shm" if str(getattr(error, "filename", "")).startswith("/dev/shm/") else "disk_full"
    if number == errno.ENOMEM:
        return "oom_host"
    text = _named(error)
    for reason, pattern in _COMPILED:
        if pattern.search(text):
            return reason
    if _in_functions(error, _RESUME_FUNCTIONS):
        return "checkpoint_corrupt"
    if isinstance(error, FileNotFoundError):
        return "missing_file"
    if isinstance(error, (PermissionError, NotADirectoryError, IsADirectoryError)):
        return "config"
    if type(error).__module__.partition(".")[0] in _NETWORK or type(error) is ConnectionError:
        return "hub"
    return None


_NETWORK = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "aiohttp")
"""Packages whose exceptions tell of a connection to the hub, or to a service like it."""


def _classify_by_place(error: BaseException) -> str | None:
    if not isinstance(error, (KeyError, ValueError, TypeError, IndexError, AttributeError)):
        return None
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    for filename in reversed(frames):
        if any(part in filename for part in _CONFIG_FRAMES):
            return "config"
        if any(part in filename for part in _DATA_FRAMES):
            return "data"
    return "data" if isinstance(error, json.JSONDecodeError) else None


def _in_functions(error: BaseException, names: tuple[str, ...]) -> bool:
    return any(frame.name in names for frame in traceback.extract_tb(error.__traceback__))
