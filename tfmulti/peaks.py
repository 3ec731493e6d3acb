"""How many floating-point operations a second a GPU can do at most, by its name.

The figures are those of NVIDIA's data sheets for dense matrices (where a sheet has the figure with
sparsity alone, half of it): H200, H100, A100, A40, A30, A10, L40S, L4, T4 and V100 Tensor Core GPU
data sheets, and for GeForce the whitepapers of the GA102 and AD102 architectures.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Peak(NamedTuple):
    """TFLOP/s of one GPU; None where it has no tensor cores for the type.

    `half` is float16 with sums in float32, `bfloat16` the same, `tf32` float32 in tensor cores.
    """

    float32: float
    tf32: float | None
    half: float | None
    bfloat16: float | None


# Looked for in this order: the first pattern that is found in the name counts.
PEAKS: tuple[tuple[str, Peak], ...] = (
    (r"\bH200\b(?!.*NVL)", Peak(67, 494.5, 989, 989)),
    (r"\bH100\b.*PCIe", Peak(51, 378, 756, 756)),
    (r"\bH100\b.*NVL", Peak(60, 417.5, 835.5, 835.5)),
    (r"\bH100\b", Peak(67, 494.5, 989, 989)),
    (r"\bA100\b", Peak(19.5, 156, 312, 312)),
    (r"\bA40\b", Peak(37.4, 74.8, 149.7, 149.7)),
    (r"\bA30\b", Peak(10.3, 82, 165, 165)),
    (r"\bA10\b", Peak(31.2, 62.5, 125, 125)),
    (r"\bL40S\b", Peak(91.6, 183, 362, 362)),
    (r"\bL4\b", Peak(30.3, 60, 121, 121)),
    (r"\bT4\b", Peak(8.1, None, 65, None)),
    (r"\bV100\b.*PCI", Peak(14, None, 112, None)),
    (r"\bV100\b", Peak(15.7, None, 125, None)),
    (r"\bRTX 4090\b(?! (D|Laptop))", Peak(82.6, 82.6, 165.2, 165.2)),
    (r"\bRTX 3090\b(?! Ti)", Peak(35.6, 35.6, 71, 71)),
)


def peak_tflops(device_name: str, compute_dtype: str, *, tf32: bool) -> float | None:
    """Returns the peak of a GPU in TFLOP/s, or None where this table does not know it.

    Args:
        device_name: as `tf.config.experimental.get_device_details` has it.
        compute_dtype: the type that layers compute in.
        tf32: whether float32 products may be rounded to TF32, TensorFlow's default.

    >>> peak_tflops("NVIDIA A100-SXM4-80GB", "bfloat16", tf32=True)
    312
    """
    if "MIG" in device_name:  # a part of a GPU
        return None
    for pattern, peak in PEAKS:
        if re.search(pattern, device_name):
            if compute_dtype == "float32":
                return peak.tf32 if tf32 and peak.tf32 else peak.float32
            return {"float16": peak.half, "bfloat16": peak.bfloat16}.get(compute_dtype)
    return None
