"""Gearshift: GGUF models over several GPUs, prompts in a layer pipeline, answers in tensor parallel."""

__version__ = "0.1.0"
