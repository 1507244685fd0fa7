"""Compiles the kernels of a decode step for sm_90 (H100, H200) on a machine without a GPU.

    python benchmarks/gpu_kernels.py      # `make gpu-dry` does so, too

A step of a static cache is traced on the CPU, its graph is moved to a CUDA device that nobody has, inductor writes the
kernels for it as it would on an H100, and Triton and ptxas compile each of them. None is run. It needs the package
`triton`, which comes with a torch for CUDA and otherwise by `pip install triton`; tried with torch 2.13 and triton 3.9.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

CUDA = torch.device("cuda", 0)
#: One layer of Llama 3.2 1B; a smaller vocabulary, which no kernel of the cache sees.
SIZES = {"num_hidden_layers": 1, "vocab_size": 1024}
CASES: tuple[dict[str, Any], ...] = (
    {"policy": "paged_eviction"},
    {"policy": "h2o", "bits": 4},
    {"policy": "keydiff", "bits": (8, 3), "heads": "separate"},
)
_H100 = {
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
}
_SHARED_MEMORY = 232_448


def traced(settings: dict[str, Any], budget: int) -> tuple[Any, list[Any]]:
    """The graph of one step on the CPU, and what goes into it."""
    from transformers import AutoModelForCausalLM

    from hf_paged_eviction import PagedEvictionCache
    from hf_paged_eviction.integration.cache_argument import cache_kwargs
    from hf_paged_eviction.queries.attention import PAGED_EVICTION
    from hf_paged_eviction_eval.bench.shapes import config_of

    config = config_of("llama-3.2-1b")
    for name, value in SIZES.items():
        setattr(config, name, value)
    config._attn_implementation = PAGED_EVICTION
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    cache = PagedEvictionCache(model.config, budget=budget, static=True, **settings)
    cache_arguments = cache_kwargs(model, cache)
    graphs = []

    def keep(graph: Any, inputs: list[Any]) -> Any:
        graphs.append((graph, inputs))
        return graph.forward

    step = torch.compile(model.forward, fullgraph=True, dynamic=False, backend=keep)
    with torch.no_grad():
        model(torch.full((1, budget + 1), 7), **cache_arguments)
        for forward in (model, step):
            cache.prepare_step()
            forward(torch.full((1, 1), 7), position_ids=torch.full((1, 1), cache.get_seq_length()), **cache_arguments)
    torch._dynamo.reset()
    (compiled,) = graphs
    return compiled


def moved(value: Any) -> Any:
    """The same with every device exchanged."""
    if isinstance(value, torch.device):
        return CUDA
    if isinstance(value, (tuple, list)):
        return type(value)(map(moved, value))
    return {name: moved(inner) for name, inner in value.items()} if isinstance(value, dict) else value


@contextmanager
def as_if_on_an_h100() -> Iterator[list[tuple[str, str]]]:
    """Inductor and Triton see the device; yields names and sources of the kernels that are asked for."""
    import torch._inductor.scheduler
    from torch._dynamo.device_interface import CudaInterface
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.hints import DeviceProperties
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    sources: list[tuple[str, str]] = []
    properties, h100 = (
        SimpleNamespace(name="NVIDIA H100", gcnArchName="", **_H100),
        DeviceProperties(type="cuda", index=0, cc=90, **_without_minor()),
    )
    target = SimpleNamespace(
        utils=SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": _SHARED_MEMORY, "warpSize": 32}),
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: CUDA,
        is_active=lambda: True,
    )
    driver.set_active(target)
    with ExitStack() as stack:
        for place, name, value in (
            (torch.cuda, "get_device_properties", lambda *_: properties),
            (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
            (torch.cuda, "current_device", lambda: 0),
            (CudaInterface, "get_device_properties", staticmethod(lambda *_: properties)),
            (CudaInterface, "get_compute_capability", staticmethod(lambda *_: 90)),
            (CudaInterface, "is_bf16_supported", staticmethod(lambda *_, **__: True)),
            (CudaInterface.Worker, "get_device_properties", staticmethod(lambda *_: properties)),
            (CudaInterface.Worker, "current_device", staticmethod(lambda: 0)),
            (DeviceProperties, "create", classmethod(lambda *_: h100)),
            (torch._inductor.scheduler, "has_triton", lambda: True),
            (triton_helpers, "set_driver_to_gpu", lambda: None),
            (AsyncCompile, "triton", lambda _, name, source, **__: sources.append((name, source))),
        ):
            stack.enter_context(patch.object(place, name, value))
        # Written into what inductor writes, and called by nobody.
        stack.enter_context(patch.object(torch._C, "_cuda_getCurrentRawStream", lambda *_: 0, create=True))
        stack.enter_context(inductor.patch(compile_threads=1, fx_graph_cache=False))
        stack.enter_context(functorch.patch(enable_autograd_cache=False))
        yield sources


def _without_minor() -> dict[str, int]:
    return {name: value for name, value in _H100.items() if name != "minor"}


def kernels(graph: Any, inputs: list[Any]) -> list[dict[str, Any]]:
    """The kernels of this graph, compiled: names, and bytes of code of each way to launch them."""
    from torch._guards import detect_fake_mode
    from torch._inductor.async_compile import _load_triton_kernel_from_source as load
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    with as_if_on_an_h100() as sources:

        def elsewhere(graph: Any, inputs: list[Any], **arguments: Any) -> Any:
            for node in graph.graph.nodes:
                node.args, node.kwargs = moved(node.args), moved(node.kwargs)
            graph.recompile()
            mode: Any = detect_fake_mode(inputs)
            with mode:
                there = [_like(value) if isinstance(value, Tensor) else value for value in inputs]
            FakeTensorProp(graph, mode=mode).propagate_dont_convert_inputs(*there)
            return compile_fx_inner(graph, there, **arguments)

        with torch.no_grad(), nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            compile_fx(graph, inputs, inner_compile=elsewhere)
        compiled = []
        for name, source in sources:
            kernel = load(name, source)
            kernel.precompile(warm_cache_only=True)
            codes = [_code(result.kernel) for result in kernel.compile_results]
            compiled.append({"name": name, "bytes": [len(code) for code in codes]})
    return compiled


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CUDA)


def _code(kernel: Any) -> bytes:
    code: bytes = kernel.cubin_raw if hasattr(kernel, "cubin_raw") else kernel.asm["cubin"]
    if code[:4] != b"\x7fELF":
        raise RuntimeError(f"{kernel} holds no code for a GPU")
    return code


def main() -> int:
    """0 if every kernel of every case is compiled, or there is no Triton to try it with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--output", type=Path, help="a JSON file with all kernels")
    options = parser.parse_args()
    if find_spec("triton") is None:
        print("not tried: no kernel can be compiled without the package triton (pip install triton, 290 MB)")
        return 0
    rows = []
    for settings in CASES:
        begun = time.perf_counter()
        compiled = kernels(*traced(settings, options.budget))
        seconds = time.perf_counter() - begun
        rows.append({"settings": settings, "kernels": compiled, "seconds": round(seconds, 1)})
        ways = sum(len(kernel["bytes"]) for kernel in compiled)
        print(f"{settings}: {len(compiled)} kernels for sm_90 in {ways} ways, {seconds:.0f} s", flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps({"budget": options.budget, "cases": rows}, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
