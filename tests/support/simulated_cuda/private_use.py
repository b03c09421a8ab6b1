"""The simulated device under a name that PyTorch has not heard of, ``sim``: only `torch.accelerator` tells of it.

PyTorch keeps the dispatch key PrivateUse1 for devices that others build. Which is asked for is said when the device is
compiled (`build.library`); here is the module that PyTorch wants of such a device, with no more than it asks for.
"""

from __future__ import annotations

import ctypes
import types
from typing import Any

import torch

from tests.support.simulated_cuda.build import library
from tests.support.simulated_cuda.install import DEVICES, declared

NAME = "sim"


def install() -> Any:
    """Load the device into this process, for good; what it gives is for what tests ask of the device alone.

    Raises:
        RuntimeError: if it cannot be built.
    """
    loaded = declared(ctypes.CDLL(str(library(private_use=True))))
    torch.utils.rename_privateuse1_backend(NAME)
    module: Any = types.ModuleType(f"torch.{NAME}")
    generators = [torch.ops.simulated_cuda.generator(device) for device in range(DEVICES)]
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: DEVICES
    module.current_device = lambda: int(loaded.simulated_device())
    module.get_device_name = lambda device: f"Simulated {NAME}"
    module.get_device_properties = lambda device: types.SimpleNamespace(L2_cache_size=1 << 20)
    module.get_rng_state = lambda device: generators[torch.device(device).index or 0].get_state()
    module.set_rng_state = lambda state, device: generators[torch.device(device).index or 0].set_state(state)
    module.manual_seed_all = lambda seed: [generator.manual_seed(seed) for generator in generators]
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module._is_in_bad_fork = lambda: False
    torch._register_device_module(NAME, module)
    return loaded
