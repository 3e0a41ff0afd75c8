"""Peak compute rates of devices, as published by the manufacturers."""

import re

# Dense bfloat16 with float32 accumulation, in TFLOP/s. The first key that occurs as a word in the
# name of the device is used.
PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200": 989.0,
    "GH200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A10": 125.0,
    "A10G": 70.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
    "MI300X": 1307.0,
}


def find_peak_tflops(device: str) -> float | None:
    """Return the TFLOP/s of ``torch.cuda.get_device_name``'s device; None if it is not listed."""
    peaks = (peak for name, peak in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", device))
    return next(peaks, None)
