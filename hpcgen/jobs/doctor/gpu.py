"""GPUs, and whether driver, torch and kernel libraries agree."""

import ctypes
import importlib.metadata
import importlib.util
import os
from pathlib import Path

from hpcgen.jobs.doctor.check import Check, Level


def has_nvidia() -> bool:
    """Whether the driver's devices are here."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()


def gpu() -> Check:
    """Whether torch and the driver agree."""
    import torch

    built, present = torch.version.cuda, has_nvidia()
    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
        finding = f"{torch.cuda.device_count()} x {', '.join(sorted(names))}, torch {torch.__version__}, CUDA {built}"
        return Check("GPU", Level.OK, finding)
    if not present:
        return Check("GPU", Level.SKIPPED, f"no NVIDIA device here; torch {torch.__version__} computes on the CPU")
    if built is None:
        remedy = "install a torch built for CUDA: see pytorch.org for the index of your driver's CUDA version"
        return Check(
            "GPU", Level.ERROR, f"there are NVIDIA devices, but torch {torch.__version__} is a CPU build", remedy
        )
    driver = _driver_cuda()
    if driver is not None and driver < tuple(map(int, built.split(".")[:2])):
        finding = f"the driver supports CUDA {driver[0]}.{driver[1]}, torch {torch.__version__} is built for {built}"
        return Check("GPU", Level.ERROR, finding, "install an older torch build, or a newer driver")
    remedy = (
        "look at nvidia-smi; in Slurm ask for GPUs (--gpus-per-node), in a container pass them in (--nv), and see that "
        f"CUDA_VISIBLE_DEVICES ({os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')!r}) names some"
    )
    return Check("GPU", Level.ERROR, "there are NVIDIA devices, but torch cannot use them", remedy)


def gpu_libraries(present: bool | None = None) -> list[Check]:
    """The packages that CUDA kernels come from."""
    present = has_nvidia() if present is None else present
    found = []
    for module, package, use in (
        ("flashinfer", "flashinfer-python", "attention and experts"),
        ("deep_ep", "sgl-deep-ep", "expert parallelism over NVLink and RDMA"),
    ):
        if not present:
            found.append(Check(module, Level.SKIPPED, "needs a GPU"))
            continue
        try:
            imported = importlib.util.find_spec(module) is not None
            if imported:
                __import__(module)
        except Exception as error:  # what a broken installation raises is not foreseeable
            remedy = f"pip install --force-reinstall 'hpcgen[gpu]': {package} must match torch and CUDA"
            found.append(Check(module, Level.ERROR, f"cannot be imported: {error}", remedy))
            continue
        if imported:
            found.append(Check(module, Level.OK, importlib.metadata.version(package)))
        else:
            found.append(
                Check(module, Level.WARNING, f"not installed; {use} will be slower", "pip install 'hpcgen[gpu]'")
            )
    return found


def _driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA version that the driver supports."""
    try:
        version = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
            return version.value // 1000, version.value % 1000 // 10
    except OSError:
        pass
    return None
