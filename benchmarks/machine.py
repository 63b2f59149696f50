"""The machine in words, and what it can do."""

import datetime
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess

NATIVE_BFLOAT16 = ("avx512_bf16", "amx_bf16")
PACKAGES = (
    "tensorflow",
    "jax",
    "keras",
    "keras-hub",
    "torch",
    "routing-transformer",
    "local-attention",
)


def describe():
    """Returns date, processor, memory and versions as a dict of words."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": words(),
        "versions": versions(),
    }


def words():
    """Returns one sentence about processor, memory and GPU."""
    cpu = _read("/proc/cpuinfo")
    name = re.search(r"model name\s*:\s*(.*)", cpu)
    flags = [flag for flag in NATIVE_BFLOAT16 if re.search(rf"\b{flag}\b", cpu)]
    parts = [
        f"{os.cpu_count()} cores of {name[1] if name else 'an unknown processor'}",
        f"native bfloat16 ({', '.join(flags)})" if flags else "no native bfloat16",
        f"{memory_bytes('MemTotal') / 2**30:.0f} GiB of memory",
        *_nvidia("name"),
    ]
    return ", ".join(parts)


def versions():
    """Returns the versions of the packages that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def memory_bytes(name="MemAvailable"):
    """Returns a size that Linux tells of the machine; infinity elsewhere."""
    match = re.search(rf"{name}:\s*(\d+) kB", _read("/proc/meminfo"))
    return 1024 * int(match[1]) if match else float("inf")


def available_bytes(device):
    """Returns the memory that a contender may use on `"cpu"` or `"gpu"`."""
    if device == "cpu":
        return memory_bytes()
    free = _nvidia("memory.free")
    return 2**20 * int(free[0].split()[0]) if free else float("inf")


def _read(path):
    path = pathlib.Path(path)
    return path.read_text() if path.exists() else ""


def _nvidia(what):
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stdout.splitlines()[:1] if result.returncode == 0 else []


def has(package):
    """Whether a package is installed."""
    return importlib.util.find_spec(package) is not None
