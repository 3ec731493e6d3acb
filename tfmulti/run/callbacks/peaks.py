"""Lists the peak floating-point operations per second of GPUs by their names.

The figures are those for dense matrices. They come from NVIDIA's data sheets. If a sheet has only a
figure with sparsity, half of it is used here. These are the sheets: "NVIDIA Blackwell Architecture"
(HGX B200 and GB200, for one GPU), "NVIDIA GH200 Grace Hopper Superchip", "NVIDIA H200 Tensor Core
GPU", "NVIDIA H100 Tensor Core GPU" (its SXM and PCIe columns), "NVIDIA H100 NVL GPU", "NVIDIA A100
Tensor Core GPU", "NVIDIA A40", "NVIDIA A30 Tensor Core GPU", "NVIDIA A10 Tensor Core GPU", "NVIDIA
A10G Tensor Core GPU" (of AWS), "NVIDIA L40", "NVIDIA L40S", "NVIDIA L4 Tensor Core GPU", "NVIDIA
T4", "NVIDIA V100 Tensor Core GPU" and "NVIDIA Tesla P100".

The figures for GeForce and the RTX A6000 come from the architecture whitepapers "NVIDIA Ampere
GA102" and "NVIDIA Ada". These have two figures for 16-bit products: one with sums in float32 and
one with sums in float16. The first one is used, because TensorFlow sums in float32. The sheets of
A10, L4 and L40S do not say which figure they have.

A GPU has no figure if its name does not identify the variant. Neither has a part of a GPU. For
these `--peak_tflops` gives the figure.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Peak(NamedTuple):
    """The peak TFLOP/s of one GPU.

    Attributes:
        float32: for float32 without tensor cores.
        tf32: for float32 values that tensor cores round to TF32. None: it has no such tensor cores.
        half: for float16 in tensor cores. None: it has no such tensor cores.
        bfloat16: for bfloat16 in tensor cores. None: it has no such tensor cores.
    """

    float32: float
    tf32: float | None
    half: float | None
    bfloat16: float | None


# The name of a part of a GPU, by MIG or for a virtual machine ("A10-4Q", "T4-16C"). The size of the
# part is unknown.
_PART = re.compile(r"\bMIG\b|\bGRID\b|-\d+[ABCQ]\b")

# The first pattern that is found in the name decides. An A100 of 64 GB is a GPU of another kind. A
# P100 computes float16 twice as fast, but only with sums in float16, which TensorFlow does not use.
PEAKS: tuple[tuple[str, Peak], ...] = (
    (r"\bGB200\b", Peak(80, 1250, 2500, 2500)),
    (r"\bB200\b", Peak(75, 1100, 2250, 2250)),
    (r"\bGH200\b", Peak(67, 494, 990, 990)),
    (r"\bH200 NVL\b", Peak(60, 417.5, 835.5, 835.5)),
    (r"\bH200\b", Peak(67, 494.5, 989, 989)),
    (r"\bH100 NVL\b", Peak(60, 417.5, 835.5, 835.5)),
    (r"\bH100\b.*(PCIe|HBM2e)", Peak(51, 378, 756, 756)),
    (r"\bH100\b.*HBM3", Peak(67, 494.5, 989, 989)),
    (r"\bA100\b(?!.*64GB)", Peak(19.5, 156, 312, 312)),
    (r"\bA40\b", Peak(37.4, 74.8, 149.7, 149.7)),
    (r"\bA30\b", Peak(10.3, 82, 165, 165)),
    (r"\bA10\b", Peak(31.2, 62.5, 125, 125)),
    (r"\bA10G\b", Peak(35, 35, 70, 70)),
    (r"\bL40S\b", Peak(91.6, 183, 362.05, 362.05)),
    (r"\bL40\b", Peak(90.5, 90.5, 181.05, 181.05)),
    (r"\bL4\b", Peak(30.3, 60, 121, 121)),
    (r"\bT4\b", Peak(8.1, None, 65, None)),
    (r"\bV100S\b", Peak(16.4, None, 130, None)),
    (r"\bV100-PCI", Peak(14, None, 112, None)),
    (r"\bV100-SXM2\b", Peak(15.7, None, 125, None)),
    (r"\bP100-PCI", Peak(9.3, None, None, None)),
    (r"\bP100-SXM2\b", Peak(10.6, None, None, None)),
    (r"\bRTX A6000\b", Peak(38.7, 77.4, 154.8, 154.8)),
    (r"\bRTX 4090\b(?! (D|Laptop))", Peak(82.6, 82.6, 165.2, 165.2)),
    (r"\bRTX 3090\b(?! Ti)", Peak(35.6, 35.6, 71, 71)),
)


def peak_tflops(device_name: str, compute_dtype: str, *, tf32: bool) -> float | None:
    """Returns the peak of a GPU in TFLOP/s, or None if the table does not have it.

    Args:
        device_name: the name from `tf.config.experimental.get_device_details`.
        compute_dtype: the type in which layers compute.
        tf32: whether float32 products may be rounded to TF32, which is TensorFlow's default.

    >>> peak_tflops("NVIDIA A100-SXM4-80GB", "bfloat16", tf32=True)
    312
    """
    if _PART.search(device_name):
        return None
    for pattern, peak in PEAKS:
        if re.search(pattern, device_name):
            if compute_dtype == "float32":
                return peak.tf32 if tf32 and peak.tf32 else peak.float32
            return {"float16": peak.half, "bfloat16": peak.bfloat16}.get(compute_dtype)
    return None
