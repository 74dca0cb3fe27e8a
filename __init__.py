"""Gearshift: GGUF models over several GPUs, prompts in a layer pipeline, answers in tensor parallel."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .proto.client import AsyncClient as AsyncClient
    from .proto.client import Client as Client

__version__ = "0.1.0"

_CLIENTS = ("AsyncClient", "Client")


def __getattr__(name: str) -> Any:
    """The clients are imported when first asked for: `import gearshift` alone stays cheap."""
    if name in _CLIENTS:
        from .proto import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_CLIENTS])
