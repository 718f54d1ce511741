"""Triton kernels in tests: natively where there is a GPU, else interpreted on the CPU.

Import this before any module with kernels: it skips where Triton is not installed, and patches the
interpreter, which `conftest.py` has enabled by then.
"""

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if DEVICE == "cpu":
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    # The interpreter of Triton 3.6 stores bf16 as raw bits in uint16: a dot would multiply the
    # bits, and a cast from fp32 truncates where a GPU rounds to nearest even.

    def widened(x: np.ndarray, dtype: tl.dtype) -> np.ndarray:
        return (x.astype(np.uint32) << 16).view(np.float32) if dtype == tl.bfloat16 else x

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        left, right = widened(a.data, a.dtype.scalar), widened(b.data, b.dtype.scalar)
        product = np.matmul(left, right, dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    plain_cast = interpreter.InterpreterBuilder.cast_impl

    def cast_impl(self, source, to):
        if source.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
            bits = source.data.astype(np.float32).view(np.uint32)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            return interpreter.TensorHandle(rounded.astype(np.uint16), to.scalar)
        return plain_cast(self, source, to)

    plain_patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        """NumPy 2.4 no longer turns arrays of one element into integers."""
        plain_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_lang_tensor
    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter.InterpreterBuilder.cast_impl = cast_impl
