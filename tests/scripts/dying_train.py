"""A real training of a two-layer Llama that dies, in the way that is asked for; it does not know of tunewatch.

`dying_train.py DEATH OUTPUT_DIR [STEPS]`. Every death is real where a CPU can die of it; those of a GPU raise torch's
own class with the text that it has there.
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

DEATH, OUTPUT = sys.argv[1], Path(sys.argv[2])
STEPS = int(sys.argv[3]) if len(sys.argv) > 3 else 8
ROW = "CANARY-ROW-TEXT"


# -- while preparing ---------------------------------------------------------------------------------------


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fast = Tokenizer(models.WordLevel({"<unk>": 0, "<pad>": 1, "</s>": 2}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, unk_token="<unk>", pad_token="<pad>", eos_token="</s>"
    )


def no_text():
    """Rows without the field that SFTTrainer looks for."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(str(OUTPUT), dataset_text_field="text", use_cpu=True, bf16=False, report_to="none")
    rows = Dataset.from_list([{"body": ROW}] * 4)
    SFTTrainer(model=smalltrain.model(), args=config, train_dataset=rows, processing_class=tokenizer())


def bad_template():
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    fast = tokenizer()
    fast.chat_template = "{% for message in messages %}{{ message.content }"
    config = SFTConfig(str(OUTPUT), use_cpu=True, bf16=False, report_to="none")
    rows = Dataset.from_list([{"messages": [{"role": "user", "content": ROW}]}] * 4)
    SFTTrainer(model=smalltrain.model(), args=config, train_dataset=rows, processing_class=fast)


def wrong_modules():
    from peft import LoraConfig, get_peft_model

    get_peft_model(smalltrain.model(), LoraConfig(target_modules=["q_prj"]))


def no_bf16():
    smalltrain.arguments(OUTPUT, bf16=True, use_cpu=False)


def from_the_hub():
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained("someone/model-of-nobody")


# -- in the training ---------------------------------------------------------------------------------------


def eat():
    """More memory than its group has: the kernel kills it."""
    taken = []
    while True:
        taken.append(bytearray(os.urandom(1) * 50_000_000))


class Rows:
    """Rows whose worker dies at the fifth."""

    def __init__(self, act):
        self.act, self.rows = act, smalltrain.Rows()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if DEATH.startswith("worker"):
            self.act()
        return self.rows[index]


def key_error():
    raise KeyError(ROW)


def kill(number):
    os.kill(os.getpid(), number)
    time.sleep(60)


AT_STEP = {
    "interrupt": lambda: kill(signal.SIGINT),
    "leave_0": lambda: sys.exit(0),
    "leave_3": lambda: sys.exit(3),
    "os_exit": lambda: os._exit(0),
    "killed": lambda: kill(signal.SIGKILL),
    "segfault": lambda: kill(signal.SIGSEGV),
}
IN_WORKER = {
    "worker_raises": key_error,
    "worker_killed": lambda: kill(signal.SIGKILL),
    "worker_bus_error": lambda: kill(signal.SIGBUS),
}
TEXTS = {
    "gpu_lost": "CUDA error: unspecified launch failure\nCUDA kernel errors might be asynchronously reported",
    "oom_gpu": "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.81 GiB",
    "nccl": "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE) ran for "
    "600029 milliseconds before timing out.",
}


def device_error():
    kinds = {"gpu_lost": getattr(torch, "AcceleratorError", RuntimeError), "oom_gpu": torch.OutOfMemoryError}
    error = kinds.get(DEATH, RuntimeError)
    try:
        raised = error(TEXTS[DEATH])
    except TypeError:  # torch makes this one only itself
        raised = RuntimeError(TEXTS[DEATH])
    raise raised


def train():
    at = int(os.environ.get("DIE_AT", "3"))
    act = AT_STEP.get(DEATH, device_error if DEATH in TEXTS else None)
    callbacks = [smalltrain.AtStep(at, act)] if act else []
    settings = {"save_steps": 2}
    if DEATH.startswith("worker"):
        settings["dataloader_num_workers"] = 1
    if os.environ.get("PUSH"):
        settings.update(push_to_hub=True, hub_model_id="someone/model")

    class Dying(Trainer):
        def _save(self, *args, **kwargs):
            if DEATH == "eats_at_save" and self.state.global_step == 4:
                eat()
            if DEATH == "killed_at_save" and self.state.global_step == 4:
                kill(signal.SIGKILL)
            super()._save(*args, **kwargs)

        def _load_from_checkpoint(self, *args, **kwargs):
            if DEATH == "eats_at_restore":
                eat()
            super()._load_from_checkpoint(*args, **kwargs)

    Dying(
        model=smalltrain.model(), args=smalltrain.arguments(OUTPUT, max_steps=STEPS, **settings),
        train_dataset=Rows(IN_WORKER.get(DEATH)), callbacks=callbacks,
    ).train(resume_from_checkpoint=DEATH == "eats_at_restore" or None)  # fmt: skip


if DEATH == "launcher":  # what `accelerate launch` does of a training that is killed
    import subprocess

    subprocess.run([sys.executable, __file__, "killed", str(OUTPUT)], check=True)

import smalltrain  # noqa: E402
import torch  # noqa: E402
from transformers import Trainer  # noqa: E402

PREPARING = {f.__name__: f for f in (no_text, bad_template, wrong_modules, no_bf16, from_the_hub)}
PREPARING.get(DEATH, train)()
