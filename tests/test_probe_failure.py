"""What exceptions mean: raised for real where that can be done."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from tunewatch.probe.failure import classify, describe

FULL = Path("/dev/full")  # written through a handle: what saves by renaming would replace the device

REASONS = {
    "oom_gpu", "oom_host", "shm", "disk_full", "nccl_timeout", "gpu_lost", "auth", "checkpoint_corrupt", "config",
    "hub", "nan", "data", "missing_file", "rank_killed", "cancelled", "unknown", "nothing_trainable",
}  # fmt: skip


def caught(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except BaseException as error:  # noqa: BLE001 - it is what is asked for
        return error
    raise AssertionError("nothing was raised")


def in_file(name, function, code):
    """An exception whose last frames are in a file and a function of that name."""
    program = f"def {function}():\n    {code}\n"
    space = {"torch": torch}
    exec(compile(program, f"/site-packages/trl/trainer/{name}", "exec"), space)
    return caught(space[function])


# -- raised for real ---------------------------------------------------------------------------------------


def test_host_memory():
    error = caught(torch.empty, 2**50)
    assert classify(error) == "oom_host"
    assert describe(error)["detail"] == "tried to allocate 4194304.0 GiB"
    assert classify(caught(np.zeros, 2**50)) == "oom_host"
    assert classify(caught(bytearray, 2**62)) == "oom_host"


def write_full():
    with FULL.open("wb", buffering=0) as file:
        file.write(b"x")


def save_full():
    with FULL.open("wb", buffering=0) as file:
        torch.save({"a": torch.zeros(100_000)}, file)


def test_a_full_disk():
    error = caught(write_full)
    assert classify(error) == "disk_full"
    assert describe(error)["detail"] == "No space left on device"
    assert classify(caught(save_full)) == "disk_full"
    assert classify(OSError(errno.EDQUOT, "Disk quota exceeded", "/home/me/x")) == "disk_full"
    assert classify(OSError(errno.ENOSPC, "No space left on device", "/dev/shm/torch_1_2")) == "shm"


def truncated(path, keep):
    os.truncate(path, keep)
    return path


def test_a_truncated_checkpoint(tmp_path):
    from safetensors.torch import load_file, save_file

    weights, optimizer, state = (
        tmp_path / "model.safetensors",
        tmp_path / "optimizer.pt",
        tmp_path / "state.json",
    )
    save_file({"a": torch.zeros(1000)}, weights)
    assert classify(caught(load_file, truncated(weights, 200))) == "checkpoint_corrupt"
    torch.save({"a": torch.zeros(1000)}, optimizer)
    half = truncated(optimizer, 1000)
    assert classify(caught(torch.load, half)) == "checkpoint_corrupt"
    for keep in (1000, 10, 0):
        code = f"torch.load({str(truncated(optimizer, keep))!r})"
        error = in_file("trainer.py", "_load_optimizer_and_scheduler", code)
        assert classify(error) == "checkpoint_corrupt", error
    state.write_text("")
    from transformers import TrainerState

    assert classify(caught(TrainerState.load_from_json, str(state))) == "checkpoint_corrupt"
    assert classify(caught(TrainerState.load_from_json, str(tmp_path / "none.json"))) == "checkpoint_corrupt"


def test_data():
    assert classify(in_file("sft_trainer.py", "tokenize", "{}['messages']")) == "data"
    assert classify(in_file("data_collator.py", "torch_call", "int('a row')")) == "data"
    assert classify(caught(torch.nn.Embedding(4, 4), torch.tensor([9]))) == "data"
    assert classify(caught(b"\xff".decode)) == "data"
    assert classify(in_file("somewhere.py", "run", "{}['x']")) == "unknown"
    assert classify(in_file("training_args.py", "__post_init__", "raise ValueError('x')")) == "config"


def test_a_broken_data_file(tmp_path):
    import datasets

    broken = tmp_path / "rows.jsonl"
    broken.write_text('{"a": 1}\n{"a": CANARY\n')
    options = {"data_files": str(broken), "cache_dir": str(tmp_path / "cache")}
    error = caught(datasets.load_dataset, "json", **options)
    assert classify(error) == "data"
    assert "CANARY" not in str(describe(error))
    assert (
        classify(caught(datasets.load_dataset, "json", data_files=str(tmp_path / "none.jsonl")))
        == "missing_file"
    )


class Rows(torch.utils.data.Dataset):
    def __init__(self, act):
        self.act = act

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.act()


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "oom_host"),
        (lambda: {}["CANARY"], "data"),
        (lambda: torch.empty(2**50), "oom_host"),
    ],
    ids=["killed", "KeyError", "memory"],
)
def test_a_dataloader_worker(act, reason):
    error = caught(list, torch.utils.data.DataLoader(Rows(act), num_workers=1))
    assert classify(error) == reason, error
    assert "CANARY" not in str(describe(error))


def test_models_that_are_not_there(monkeypatch, tmp_path):
    from transformers import AutoConfig
    from transformers.utils import hub

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert hub.is_offline_mode()
    # "We couldn't connect", it says; but it was told not to try, and would be again.
    assert classify(caught(AutoConfig.from_pretrained, "nobody/nothing-at-all")) == "config"
    assert classify(caught(AutoConfig.from_pretrained, "./nothing-at-all")) == "config"
    assert classify(caught(AutoConfig.from_pretrained, str(tmp_path))) == "config"


def hub_error(name, status, text):
    import httpx2
    from huggingface_hub import errors

    response = httpx2.Response(status, request=httpx2.Request("GET", "https://huggingface.co/a/b"))
    return getattr(errors, name)(text, response=response)


@pytest.mark.parametrize(
    ("name", "status", "text", "reason"),
    [
        ("GatedRepoError", 403, "403 Client Error. Cannot access gated repo for url https://x", "auth"),
        (
            "RepositoryNotFoundError",
            401,
            "401 Client Error. Repository Not Found for url: https://x.",
            "config",
        ),
        ("RevisionNotFoundError", 404, "404 Client Error. Revision Not Found for url: https://x.", "config"),
        ("HfHubHTTPError", 401, "401 Client Error: Unauthorized for url: https://x", "auth"),
        ("HfHubHTTPError", 403, "403 Forbidden: you do not have the rights", "auth"),
        ("HfHubHTTPError", 504, "Server error '504 Gateway Time-out' for url 'https://x'", "hub"),
    ],
)
def test_the_hub(name, status, text, reason):
    pytest.importorskip("httpx2")
    assert classify(hub_error(name, status, text)) == reason


def test_a_gated_model_as_transformers_wraps_it():
    words = "You are trying to access a gated repo.\nMake sure to have access to it at https://x."
    assert classify(OSError(words)) == "auth"
    words = "a/b is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'"
    assert classify(OSError(words)) == "config"


# -- quoted from reports -----------------------------------------------------------------------------------

SHM = "DataLoader worker (pid 5) is killed by signal: Bus error. It is possible that dataloader's workers are out of"


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total", "oom_gpu"),
        (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "oom_gpu"),
        (RuntimeError, "MPS backend out of memory (MPS allocated: 17 GB)", "oom_gpu"),
        (RuntimeError, "HIP out of memory. Tried to allocate 20.00 MiB", "oom_gpu"),
        (RuntimeError, f"{SHM} shared memory. Please try to raise your shared memory limit.", "shm"),
        (RuntimeError, "unable to write to file </torch_1_2_3>: No space left on device (28)", "shm"),
        (RuntimeError, "DataLoader worker (pid 77) is killed by signal: Killed. ", "oom_host"),
        (RuntimeError, "[enforce fail at inline_container.cc:668] . unexpected pos 704 vs 598", "disk_full"),
        (RuntimeError, "[enforce fail at inline_container.cc:471] . PytorchStreamWriter failed writing file data/1: "
         "file write failed", "disk_full"),
        (Exception, "Error while serializing: IoError(Os { code: 28, kind: StorageFull, message: \"No space left on "
         "device\" })", "disk_full"),
        (RuntimeError, "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE) "
         "ran for 600029 milliseconds before timing out.", "nccl_timeout"),
        (RuntimeError, "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for "
         "recv operation to complete", "nccl_timeout"),
        (RuntimeError, "CUDA error: unspecified launch failure", "gpu_lost"),
        (RuntimeError, "CUDA error: uncorrectable ECC error encountered", "gpu_lost"),
        (RuntimeError, "CUDA error: device-side assert triggered", "data"),
        (ValueError, "Target modules {'q_prj'} not found in the base model.", "config"),
        (ValueError, "Your setup doesn't support bf16/gpu. You need Ampere+ GPU", "config"),
        (ValueError, "No valid checkpoint found in output directory (/x)", "config"),
        (ModuleNotFoundError, "No module named 'flash_attn'", "config"),
        (TypeError, "SFTConfig.__init__() got an unexpected keyword argument 'max_seq_len'", "config"),
        (FloatingPointError, "loss is nan", "nan"),
        (PermissionError, "no", "config"),
        (FileNotFoundError, "no", "missing_file"),
        (KeyboardInterrupt, "", "cancelled"),
        (SystemExit, "1", "unknown"),
        (ValueError, "the words of somebody", "unknown"),
    ],
)  # fmt: skip
def test_texts(kind, text, reason):
    assert reason in REASONS
    error = kind(text)
    assert classify(error) == reason
    assert text not in str(describe(error)) or not text


def named(name, text, module="somewhere", base=Exception):
    """An exception of a library that need not be installed."""
    return type(name, (base,), {"__module__": module})(text)


LIBRARIES = [
    # -- out of memory
    ("OutOfMemoryError", "XPU out of memory. Tried to allocate 1.00 GiB", "oom_gpu"),
    ("RuntimeError", "NPU out of memory. Tried to allocate 1.00 GiB", "oom_gpu"),
    ("RuntimeError", "CUDNN_STATUS_ALLOC_FAILED", "oom_gpu"),
    ("DistBackendError", "ncclUnhandledCudaError: Cuda failure 'out of memory'", "oom_gpu"),
    ("ValueError", "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`", "oom_gpu"),
    ("ArrowMemoryError", "malloc of size 1073741824 failed", "oom_host"),
    # -- a full disk
    ("SafetensorError", "Error while serializing: I/O error: No space left on device (os error 28)", "disk_full"),
    ("SafetensorError", "Error while serializing: I/O error: Disk quota exceeded (os error 122)", "disk_full"),
    # -- the GPU
    ("AcceleratorError", "CUDA error: uncorrectable NVLink error detected during the execution", "gpu_lost"),
    ("AcceleratorError", "CUDA error: an illegal instruction was encountered", "unknown"),
    ("AcceleratorError", "CUDA error: misaligned address", "unknown"),
    ("AcceleratorError", "CUDA error: an illegal memory access was encountered", "unknown"),
    ("AcceleratorError", "CUDA error: device not ready", "unknown"),
    ("AcceleratorError", "CUDA error: device kernel image is invalid", "config"),
    ("AcceleratorError", "CUDA error: CUDA-capable device(s) is/are busy or unavailable", "config"),
    ("RuntimeError", "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "unknown"),
    ("RuntimeError", "cuDNN error: CUDNN_STATUS_VERSION_MISMATCH", "config"),
    ("RuntimeError", "The NVIDIA driver on your system is too old (found version 11040)", "config"),
    ("RuntimeError", "CUDA error: CUDA driver version is insufficient for CUDA runtime version", "config"),
    ("RuntimeError", "Found no NVIDIA driver on your system.", "config"),
    ("RuntimeError", "No CUDA GPUs are available", "config"),
    ("AssertionError", "Torch not compiled with CUDA enabled", "config"),
    ("RuntimeError", "FlashAttention only supports Ampere GPUs or newer.", "config"),
    # -- other ranks
    ("DistBackendError", "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error, NCCL version 2.21.5",
     "nccl_timeout"),
    ("DistBackendError", "NCCL communicator was aborted on rank 1. ncclRemoteError: A call failed possibly due to a "
     "network error or a remote process exiting prematurely", "nccl_timeout"),
    ("RuntimeError", "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer "
     "[127.0.0.1]:4001", "nccl_timeout"),
    ("RuntimeError", "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Read error [127.0.0.1]:1: "
     "Connection reset by peer", "nccl_timeout"),
    ("DistNetworkError", "Failed to recv, got 0 bytes. Broken pipe", "nccl_timeout"),
    ("DistStoreError", "Timed out after 2 seconds waiting for clients. 1/2 clients joined.", "nccl_timeout"),
    ("DistNetworkError", "The server socket has failed to listen on any local network address. port: 29500, useIpv6: "
     "false, code: -98, name: EADDRINUSE, message: address already in use", "config"),
    ("BrokenPipeError", "[Errno 32] Broken pipe", "unknown"),  # of its own output
    # -- the hub
    ("HfHubHTTPError", "429 Client Error: Too Many Requests for url: https://x", "hub"),
    ("HfHubHTTPError", "503 Server Error: Service Unavailable for url: https://x", "hub"),
    ("ConnectionError", "Couldn't reach 'someone/rows' on the Hub (ReadTimeout)", "hub"),
    ("ValueError", "Token is invalid (`read` permission).", "auth"),
    ("BadRequestError", "Invalid credentials in Authorization header", "auth"),
    ("LocalEntryNotFoundError", "Cannot find the requested files in the disk cache and outgoing traffic has been "
     "disabled.", "config"),
    ("OfflineModeIsEnabled", "Cannot reach https://x: offline mode is enabled.", "config"),
    # -- data
    ("DatasetGenerationError", "An error occurred while generating the dataset", "data"),
    ("DatasetGenerationCastError", "All the data files must have the same columns", "data"),
    ("ArrowInvalid", "JSON parse error: Invalid value. in row 0", "data"),
    ("ArrowTypeError", "Expected bytes, got a 'int' object", "data"),
    # -- settings
    ("ValueError", "Asking to pad but the tokenizer does not have a padding token.", "config"),
    ("ValueError", "Cannot handle batch sizes > 1 if no padding token is defined.", "config"),
    ("ValueError", "The checkpoint you are trying to load has model type `x` but Transformers does not recognize this "
     "architecture.", "config"),
    ("OSError", "x/y does not appear to have a file named config.json", "config"),
    ("OSError", "libcudart.so.11.0: cannot open shared object file: No such file or directory", "config"),
    ("ValueError", "numpy.dtype size changed, may indicate binary incompatibility.", "config"),
    ("AttributeError", "module 'numpy' has no attribute 'bool'", "config"),
    ("AttributeError", "Can't pickle local object 'main.<locals>.<lambda>'", "config"),
    ("OSError", "[Errno 24] Too many open files: 'x'", "config"),
    ("RuntimeError", "Error(s) in loading state_dict for LlamaForCausalLM: size mismatch for lm_head.weight", "config"),
    ("ValueError", "loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
     "config"),
    ("UnpicklingError", "pickle data was truncated", "checkpoint_corrupt"),
    ("RuntimeError", "element 0 of tensors does not require grad and does not have a grad_fn", "nothing_trainable"),
    ("Exception", "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.", "nan"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "reason"), LIBRARIES)
def test_what_libraries_say(name, text, reason):
    assert reason in REASONS
    error = ConnectionError(text) if name == "ConnectionError" else named(name, f"{text} CANARY")
    assert classify(error) == reason
    assert "CANARY" not in str(describe(error))


def test_a_connection_that_fails():
    assert classify(named("ConnectError", "[Errno 111] refused", "httpx")) == "hub"
    assert classify(named("ReadTimeout", "The read operation timed out", "requests.exceptions")) == "hub"


def test_json_of_the_user():
    import json

    assert classify(caught(json.loads, '{"CANARY')) == "data"


def test_a_resume_with_another_model_finds_a_sound_checkpoint():
    code = "torch.nn.Linear(2, 2).load_state_dict({'weight': torch.zeros(3, 3)})"
    assert classify(in_file("trainer.py", "_load_from_checkpoint", code)) == "config"


def test_real_words_of_torch():
    assert classify(caught(torch.optim.AdamW, [])) == "nothing_trainable"
    assert classify(caught(torch.zeros(1).sum().backward)) == "nothing_trainable"


def test_the_cause_is_looked_at_when_the_exception_says_nothing():
    def evaluate():
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB")
        except RuntimeError as cause:
            raise RuntimeError("the evaluation failed") from cause

    error = caught(evaluate)
    assert classify(error) == "oom_gpu"
    assert describe(error)["detail"] == "tried to allocate 1.50 GiB"
    assert describe(error)["type"] == "RuntimeError"
    assert describe(error)["bases"] == ["Exception"]


def test_a_cycle_of_causes_ends():
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert classify(first) == "unknown"


def test_our_own_errors_say_their_reason():
    class Stop(Exception):
        tunewatch_reason = "nan"

    assert classify(Stop("the adapter holds NaN")) == "nan"
    assert describe(Stop("the adapter holds NaN"))["detail"] == "the adapter holds NaN"


def test_frames_name_places_and_nothing_else(tmp_path):
    described = describe(in_file("sft_trainer.py", "tokenize", "{}['CANARY-ROW']"))
    assert described["frames"][-1] == "sft_trainer.py:2 tokenize"
    assert "CANARY" not in str(described)

    def deep(level):
        return 1 / 0 if level == 0 else deep(level - 1)

    assert len(describe(caught(deep, 50))["frames"]) == 12
    assert describe(OSError(errno.ENOENT, "No such file", "/home/someone/secret/rows.jsonl"))["detail"] == (
        "No such file or directory: rows.jsonl"
    )


def test_torchrun_names_the_rank_that_was_killed():
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    killed = ProcessFailure(local_rank=1, pid=99, exitcode=-9, error_file="<N/A>")
    error = ChildFailedError("train.py", {1: killed})
    assert classify(error) == "rank_killed"
    assert describe(error)["detail"] == "rank 1 was killed by signal 9"
    raised = ProcessFailure(local_rank=0, pid=98, exitcode=1, error_file="<N/A>")
    error = ChildFailedError("train.py", {0: raised})
    assert classify(error) == "unknown"
    assert describe(error)["detail"] == "rank 0 exited with 1"
