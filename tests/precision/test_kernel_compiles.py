"""The Triton kernels are compiled, as they are launched, for GPUs that are not there: none is run."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", "3.6")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.knobs import nvidia

from coded_cases import Case
from hf_paged_eviction.attention.weights import Logits
from hf_paged_eviction.precision import fused, kernels, launching, native

TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "u8", "int32": "i32", "int64": "i64"}
#: Bytes: of shared memory a block has everywhere from 8.0 on; of registers a thread may spill.
SHARED, SPILLED = 101_376, 1024
CASES: dict[str, dict[str, Any]] = {
    "usual": {"bits": (4, 4), "key_dim": 128, "dim": 128, "kind": "halves", "ragged": False, "shared": False},
    "ragged": {"bits": (3, 2), "key_dim": 64, "dim": 64, "kind": "turns", "ragged": True, "shared": False},
    "largest": {"bits": (8, None), "key_dim": 256, "dim": 256, "kind": "halves", "ragged": False, "shared": True},
}


class Compiled:
    """Stands for a kernel, and compiles it for what it is called with."""

    def __init__(self, function: Any, capability: int) -> None:
        self.function, self.capability, self.code = function, capability, None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.launch

    def launch(self, num_stages: int = 3, num_warps: int = 4, **arguments: Any) -> None:
        values = [arguments[name] for name in self.function.arg_names]
        fixed = {(at,): value for at, value in enumerate(values) if self.is_fixed(at, value)}
        pointers = [at for at, value in enumerate(values) if isinstance(value, torch.Tensor)]
        source = ASTSource(
            fn=self.function,
            signature={name: self.type_of(at, arguments[name]) for at, name in enumerate(self.function.arg_names)},
            constexprs=fixed,
            attrs={(at,): [["tt.divisibility", 16]] for at in pointers},
        )
        target = GPUTarget("cuda", self.capability, 32)
        self.code = triton.compile(source, target=target, options={"num_stages": num_stages, "num_warps": num_warps})

    def is_fixed(self, at: int, value: Any) -> bool:
        return value is None or self.function.params[at].is_constexpr

    def type_of(self, at: int, value: Any) -> str:
        if self.is_fixed(at, value):
            return "constexpr"
        if isinstance(value, torch.Tensor):
            return "*" + TYPES[str(value.dtype).removeprefix("torch.")]
        return "fp32" if isinstance(value, float) else "i32"


def spilled(code: bytes, folder: Path) -> int:
    """Bytes per thread that lie in memory instead of registers."""
    (folder / "code").write_bytes(code)
    words = [nvidia.cuobjdump.path, "-res-usage", str(folder / "code")]
    output = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    (bytes_of_stack,) = re.findall(r"STACK:(\d+)", output)
    return int(bytes_of_stack)


@pytest.mark.parametrize(
    ("case", "capability"), [("usual", 80), ("usual", 90), ("usual", 100), ("ragged", 90), ("largest", 80)]
)
def test_compiles(case: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    names = "prepare", "read_part", "join_parts"
    stand_ins = {name: Compiled(getattr(kernels, name), capability) for name in names}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(kernels, name, stand_in)
    monkeypatch.setattr(native, "launch", launching.launch)
    drawn = Case(7, "cpu", dtype=torch.bfloat16, rows=1, heads=2, group=4, **CASES[case])
    mask = drawn.visible if case == "ragged" else None
    logits = Logits(0.1, 30.0, torch.zeros(8)) if case == "ragged" else Logits(0.1)
    fused.read(drawn.held(), torch.zeros(1, 8, 1, drawn.key_dim, dtype=drawn.dtype), mask, logits)
    for stand_in in stand_ins.values():
        code = stand_in.code.asm["cubin"]
        assert code[:4] == b"\x7fELF"
        assert stand_in.code.metadata.shared <= SHARED
        assert spilled(code, tmp_path) <= SPILLED
