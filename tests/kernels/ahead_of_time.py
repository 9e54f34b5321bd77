"""Compiles the kernels for a Hopper GPU, which needs none, and prints what came out: a dictionary of JSON.

Runs in a process of its own, where Triton does not interpret. The package's own functions make the launches, so that
the arguments, block sizes and numbers of warps are those of a real call.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vocab_parallel.loss.kernels import epilogue, statistics

POINTERS = {
    torch.float32: "*fp32", torch.float64: "*fp64", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.int64: "*i64",
}  # fmt: skip
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Compiler:
    """Stands in for a kernel: compiles what would be launched, as Triton would specialise it."""

    def __init__(self, kernel: Any, found: dict[str, Any]) -> None:
        self._kernel, self._found, self.name = kernel, found, ""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._launch

    def _launch(self, *args: Any, num_warps: int, enable_fp_fusion: bool, **constants: Any) -> None:
        signature: dict[str, str] = {}
        attributes: dict[tuple[int], Any] = {}
        for at, (name, value) in enumerate(zip(self._kernel.arg_names, args, strict=False)):
            if value is None or (isinstance(value, int) and value == 1):
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, float):
                signature[name] = "fp64"
            else:
                signature[name] = POINTERS[value.dtype] if isinstance(value, Tensor) else "i32"
                if isinstance(value, Tensor) or value % 16 == 0:
                    attributes[(at,)] = [["tt.divisibility", 16]]
        signature |= dict.fromkeys(constants, "constexpr")
        compiled = triton.compile(
            ASTSource(self._kernel, signature, constants, attributes),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": num_warps, "enable_fp_fusion": enable_fp_fusion},
        )
        accesses = re.findall(r"\b((?:ld|st)\.global[.\w]*)", compiled.asm["ptx"])
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            usage = subprocess.run(
                [CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
            ).stdout
        spilled = [int(size) for size in re.findall(r"(?:STACK|LOCAL):(\d+)", usage)]
        assert spilled, usage
        self._found[self.name] = {"accesses": dict(Counter(accesses)), "spilled": sum(spilled), "warps": num_warps}


def matrix(rows: int, columns: int, dtype: torch.dtype, stride: int | None = None) -> Tensor:
    """`[rows, columns]` without memory."""
    return torch.empty(rows, stride or columns, dtype=dtype, device="meta")[:, :columns]


def main() -> None:
    found: dict[str, Any] = {}
    kernel = statistics.statistics_kernel = Compiler(statistics.statistics_kernel, found)
    target = torch.empty(64, dtype=torch.int64, device="meta")
    plain: dict[str, Any] = {"softcap": None, "temperature": 1.0, "shifted_sum": False, "expected": False, "top": False}
    everything = {"softcap": 30.0, "temperature": 0.7, "shifted_sum": True, "expected": True, "top": True}
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for columns in (8192, 131072):
            kernel.name = f"plain {dtype} {columns}"
            statistics.statistics(matrix(64, columns, dtype), **plain, in_place=True, target=target)
    for columns in (8192, 131072):
        kernel.name = f"everything {columns}"
        statistics.statistics(matrix(64, columns, torch.bfloat16), **everything, in_place=True, target=target)
    kernel.name = "not in place"
    statistics.statistics(matrix(64, 131072, torch.bfloat16), **plain | {"expected": True}, in_place=False)
    kernel.name = "ragged"
    statistics.statistics(matrix(64, 50257, torch.bfloat16, 50304), **plain, in_place=True)
    kernel.name = "one column"
    statistics.statistics(matrix(64, 1, torch.float32), **everything, in_place=True)
    kernel.name = "no column"
    statistics.statistics(matrix(64, 0, torch.float32), **plain, in_place=True)

    kernel = epilogue.merge_kernel = Compiler(epilogue.merge_kernel, found)
    payload = torch.empty(8, 3, 4096, device="meta")
    kernel.name = "merge"
    epilogue.merge(payload[:, 0], payload[:, 1], payload[:, 2])

    kernel = epilogue.scale_kernel = Compiler(epilogue.scale_kernel, found)
    big = [matrix(rows, 4096, torch.bfloat16) for rows in (64, 64, 16384)]
    vectors = [torch.empty(64, device="meta") for _ in range(5)]
    kernel.name = "scale"
    epilogue.scale(*big, target, *vectors, torch.empty(4096, device="meta"))
    kernel.name = "scale of a frozen head"
    epilogue.scale(*big, target, *vectors[:3], None)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
