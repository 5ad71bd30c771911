"""Import before anything else: Unsloth as on a GPU, where there is none, as far as its code in Python goes.

Unsloth's own switch for tests (UNSLOTH_ALLOW_CPU) imports the modules for GPUs but leaves TRL's trainers as they are;
they are rewritten here. What asks a driver is answered for it. Triton kernels do not run; nor does 4-bit loading.
"""

import os

os.environ["UNSLOTH_ALLOW_CPU"] = "1"

import torch
import unsloth
import unsloth.models.vision as loader
from unsloth.models.rl import PatchFastRL
from unsloth.trainer import _patch_trl_trainer

os.environ["UNSLOTH_ALLOW_CPU"] = "0"
PatchFastRL(FastLanguageModel=unsloth.FastLanguageModel)
_patch_trl_trainer()
loader.get_device_stats = lambda: ("none", "", 0.0)
torch.cuda.get_device_capability = lambda *_: (8, 0)
torch.cuda.mem_get_info = torch.cuda.memory.mem_get_info = lambda *_: (8 << 30, 8 << 30)
