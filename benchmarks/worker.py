"""One contender in a process of its own, which obeys lines on standard input.

    python -m benchmarks.worker JSON

`benchmarks.processes` starts it and says what it answers. A backend of Keras is chosen
when it is imported, and memory is that of a process: hence one for each contender.
"""

import contextlib
import importlib
import json
import os
import pathlib
import re
import sys
import time

STATUS = pathlib.Path("/proc/self/status")

#: What TensorFlow and Keras import where they find it, and do not need.
OPTIONAL = ("jax", "matplotlib", "sklearn")


def main(arguments):
    """Builds the contender of a JSON object, then obeys until the input ends."""
    answers = take_standard_output()
    try:
        spec = json.loads(arguments[0])
        go_first_when_memory_ends()
        hide_optional_libraries(spec["library"])
        run = build(spec)
        reset_peak()
        answer(answers, {"bytes_before": used_bytes(spec)})
        for line in sys.stdin:
            answer(answers, obey(line.split(), run, spec))
    except Exception as error:
        answer(answers, {"error": f"{type(error).__name__}: {first_line(error)}"})
        raise
    return 0


def first_line(error):
    """Returns the first line of an error's message that tells what went wrong."""
    text = re.sub(r"\x1b\[\d+m", "", str(error))
    lines = [line.strip() for line in text.splitlines()]
    # Keras puts where it happened before what happened.
    lines = [x for x in lines if x and not x.startswith("Exception encountered when")]
    return lines[0] if lines else "no message"


def take_standard_output():
    """Returns standard output; what libraries print there goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def go_first_when_memory_ends():
    """Asks the kernel to end this process before any other."""
    path = pathlib.Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):
        path.write_text("1000")


def hide_optional_libraries(library):
    """Hides from a contender what would count as its memory and serves it nothing."""
    for name in OPTIONAL:
        if name != library:
            sys.modules[name] = None


def build(spec):
    """Returns the function that computes once and returns when the result is there."""
    module, function = spec["build"].split(":")
    return getattr(importlib.import_module(module), function)(**spec["arguments"])


def answer(answers, value):
    """Sends one line."""
    answers.write(json.dumps(value) + "\n")
    answers.flush()


def obey(words, run, spec):
    """Returns the answer to `run N` or `memory`."""
    if words[0] == "run":
        return {"seconds": [timed(run) for _ in range(int(words[1]))]}
    if words[0] == "memory":
        return {"peak_bytes": peak_bytes(spec)}
    raise ValueError(
        f"A line must be `run N` or `memory`. Received: {' '.join(words)!r}"
    )


def timed(run):
    """Returns the seconds of one run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def reset_peak():
    """Sets the largest memory so far to the present one, where Linux allows it."""
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def used_bytes(spec):
    """Returns the memory in use: of the GPU, or resident."""
    if spec["device"] == "gpu":
        return gpu_bytes(spec["library"])[0]
    return status_bytes("VmRSS")


def peak_bytes(spec):
    """Returns the largest memory in use at any time since the first run."""
    if spec["device"] == "gpu":
        return gpu_bytes(spec["library"])[1]
    return status_bytes("VmHWM")


def status_bytes(name):
    """Returns a size that Linux tells of this process; None elsewhere."""
    if not STATUS.exists():
        return None
    return 1024 * int(re.search(rf"{name}:\s*(\d+) kB", STATUS.read_text())[1])


def gpu_bytes(library):
    """Returns bytes in use on the first GPU, now and at most, as a library counts."""
    if library == "torch":
        import torch

        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    if library == "jax":
        import jax

        stats = jax.devices()[0].memory_stats()
        return stats["bytes_in_use"], stats["peak_bytes_in_use"]
    import tensorflow as tf

    stats = tf.config.experimental.get_memory_info("GPU:0")
    return stats["current"], stats["peak"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
