"""Which of the machine's GPUs a test runs on."""

import torch

from pilotlight.common.nvml import Gpu, list_gpus


def gpu_of(device: torch.device) -> Gpu:
    """What the driver's library says of a device of torch's: that knows nothing of
    ``CUDA_VISIBLE_DEVICES``, and counts otherwise where some are hidden.
    """
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return next(gpu for gpu in list_gpus() if gpu.uuid.endswith(uuid))
