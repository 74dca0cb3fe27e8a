"""Triton's interpreter under a NumPy that no longer takes arrays of one element for numbers (2.4)."""

from typing import Any

from triton.runtime import interpreter


def mend_scalars() -> None:
    """Let kernels loop up to a number that they have loaded. Call it once, before the first launch."""
    before = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        before(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
