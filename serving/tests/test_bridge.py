"""transformers' own server with a budget, asked by OpenAI's client on localhost."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import driving
from hf_paged_eviction_eval import embedded

openai = pytest.importorskip("openai", reason="the extra `server` is not installed")
httpx = pytest.importorskip("httpx", reason="the extra `server` is not installed")
pytest.importorskip("uvicorn", reason="the extra `server` is not installed")
pytestmark = [
    pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED),
    pytest.mark.skipif(
        tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24), reason="transformers serve of 5.24"
    ),
]

CHUNK = 64
OPTIONS: dict[str, Any] = {"budget": 96, "block_size": 8, "policy": "keydiff"}
TEMPLATE = "{% for message in messages %}{{ message['role'] }} : {{ message['content'] }}\n{% endfor %}assistant :"
WORDS = "the river ran past the old mill and the keeper of the lamp wrote down what he saw in the book".split()


def text(number: int, length: int) -> str:
    return " ".join(WORDS[(number + at * (number % 5 + 1)) % len(WORDS)] for at in range(length))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model, with a template for chats."""
    path: Path = tmp_path_factory.mktemp("model") / "embedded"
    shutil.copytree(Path(embedded.__file__).parent / "model", path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[Any, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def command(*words: str) -> list[str]:
    """`python -m hf_paged_eviction_serving`, where the package may be on the path alone."""
    package = str(Path(__file__).parents[1])
    code = f"import sys; sys.path.insert(0, {package!r}); from hf_paged_eviction_serving.__main__ import main; main()"
    return [sys.executable, "-c", code, *words]


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that runs in the meantime."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = f"--budget 96 --block-size 8 --policy keydiff --prefill-chunk-size {CHUNK} --device cpu --dtype float32 "
    words += f"--host 127.0.0.1 --port {port} --cb-block-size 16 --cb-num-blocks 64 --cb-max-batch-tokens 128"
    log = tmp_path_factory.mktemp("log") / "server.txt"
    with log.open("w") as output:
        given = command(str(folder), *words.split())
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
        server = subprocess.Popen(given, stdout=output, stderr=subprocess.STDOUT, env=one_thread)
    try:
        while not _is_there(f"http://127.0.0.1:{port}"):
            assert server.poll() is None, log.read_text()
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
        server.terminate()
        assert server.wait(60) in (0, -15), log.read_text()
    finally:
        server.kill()
        server.wait()


def _is_there(url: str) -> bool:
    try:
        return bool(httpx.get(f"{url}/health").status_code == 200)
    except httpx.TransportError:
        return False


@pytest.fixture
def client(url: str) -> Any:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


def alone(loaded: tuple[Any, Any], prompt: str, new: int) -> str:
    """What the request gives by itself, with `PagedEvictionCache` and the same cuts."""
    model, tokenizer = loaded
    tokens = driving.alone(model, tokenizer(prompt).input_ids, new, prefill_chunk_size=CHUNK, **OPTIONS)
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def complete(client: Any, folder: Path, prompt: str, new: int, **options: Any) -> Any:
    return client.completions.create(model=str(folder), prompt=prompt, max_tokens=new, **{"temperature": 0} | options)


@pytest.mark.parametrize("length", [3, 300])
def test_greedy_answers_are_those_of_the_cache_alone(
    client: Any, folder: Path, loaded: tuple[Any, Any], length: int
) -> None:
    prompt = text(1, length)
    answer = complete(client, folder, prompt, 12)
    assert answer.choices[0].text == alone(loaded, prompt, 12)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 12)


def test_chat(client: Any, folder: Path, loaded: tuple[Any, Any]) -> None:
    messages = [{"role": "system", "content": text(2, 40)}, {"role": "user", "content": text(3, 150)}]
    prompt = loaded[1].apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    answer = client.chat.completions.create(model=str(folder), messages=messages, max_tokens=8, temperature=0)
    assert answer.choices[0].message.content == alone(loaded, prompt, 8)


def test_a_stream_gives_the_same(client: Any, folder: Path, loaded: tuple[Any, Any]) -> None:
    prompt = text(4, 200)
    pieces = [piece.choices[0].text for piece in complete(client, folder, prompt, 12, stream=True)]
    assert len(pieces) > 4
    assert "".join(pieces).strip() == alone(loaded, prompt, 12).strip()


def test_many_at_once(client: Any, folder: Path, loaded: tuple[Any, Any]) -> None:
    prompts = [text(number, 20 + 9 * number) for number in range(32)]
    with ThreadPoolExecutor(32) as threads:
        answers = list(threads.map(lambda prompt: complete(client, folder, prompt, 8).choices[0].text, prompts))
    assert answers == [alone(loaded, prompt, 8) for prompt in prompts]


def test_each_request_is_sampled_as_it_asks(client: Any, folder: Path, loaded: tuple[Any, Any]) -> None:
    """Greedy beside hot, seeds, and what transformers' own server takes for another thing or from the first request."""
    prompt = text(5, 120)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.5, "seed": 1},
        {"temperature": 1.5, "seed": 2},
        {"temperature": 1.5, "seed": 1},
        {"temperature": 1.5, "seed": 1, "top_p": 1e-9},
        {"temperature": 0, "logit_bias": {"7": 100}},
        {"temperature": 0, "frequency_penalty": 1.9, "presence_penalty": 1.9},
    ]
    with ThreadPoolExecutor(len(kinds)) as threads:
        answers = list(threads.map(lambda kind: complete(client, folder, prompt, 12, **kind).choices[0].text, kinds))
    greedy = alone(loaded, prompt, 12)
    assert answers[0] == answers[4] == greedy
    assert answers[1] == answers[3] != answers[2]
    assert greedy not in (answers[1], answers[2])
    assert answers[5] == loaded[1].decode([7] * 12, skip_special_tokens=True)
    assert answers[6] != greedy


def test_a_cancelled_stream_ends_and_frees_its_pages(client: Any, folder: Path, loaded: tuple[Any, Any]) -> None:
    for number in range(12):  # more than there is room for at once
        stream = complete(client, folder, text(number, 60), 1000, stream=True)
        next(iter(stream))
        stream.close()
    prompt = text(6, 100)
    assert complete(client, folder, prompt, 6).choices[0].text == alone(loaded, prompt, 6)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"stop": ["the"]}, "stop"),
    ({"n": 2}, "n=2"),
    ({"logprobs": 3}, "logprobs"),
    ({"echo": True}, "echo"),
    ({"best_of": 3}, "best_of"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"max_tokens": 0}, "at least one token"),
    ({"seed": "x"}, "seed"),
    ({"logit_bias": {"x": 1}}, "invalid literal"),
    ({"extra_body": {"generation_config": '{"num_beams": 4}'}}, "num_beams"),
    ({"extra_body": {"generation_config": "[1"}}, "Expecting"),
]


@pytest.mark.parametrize(("options", "reason"), WRONG, ids=[next(iter(options)) for options, _ in WRONG])
def test_what_cannot_be_done_is_refused_alone(
    client: Any, folder: Path, loaded: tuple[Any, Any], options: dict[str, Any], reason: str
) -> None:
    prompt = text(7, 90)
    with ThreadPoolExecutor(1) as threads:
        beside = threads.submit(complete, client, folder, prompt, 10)
        with pytest.raises(openai.BadRequestError, match=reason):
            client.completions.create(**{"model": str(folder), "prompt": prompt, "max_tokens": 4} | options)
        assert beside.result().choices[0].text == alone(loaded, prompt, 10)


def test_what_fails_later_ends_alone(client: Any, folder: Path, loaded: tuple[Any, Any]) -> None:
    """A token that this model does not have; an id that a live request has."""
    prompt = text(8, 90)
    with pytest.raises(openai.InternalServerError, match="logit_bias"):
        complete(client, folder, prompt, 4, logit_bias={"999999": 1})
    headers, prompts = {"X-Request-ID": "twin"}, [text(number, 50) for number in range(4)]
    with ThreadPoolExecutor(4) as threads:
        same = threads.map(lambda prompt: complete(client, folder, prompt, 10, extra_headers=headers), prompts)
        assert [one.choices[0].text for one in same] == [alone(loaded, prompt, 10) for prompt in prompts]


def test_nothing_is_loaded_or_unloaded_by_clients(url: str, client: Any, folder: Path) -> None:
    for route in ("/load_model", "/reset", "/v1/systemone", "/v1/audio/transcriptions"):
        assert httpx.post(url + route, json={"model": "other"}).status_code == 404
    with pytest.raises(openai.BadRequestError, match="pinned"):
        client.completions.create(model="another/model", prompt="the", max_tokens=2)
    assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--budget", "64"], "MODEL comes first"),
        (["MODEL"], "--budget"),
        (["MODEL", "--budget", "64", "--policy", "snapvk"], "snapkv"),
        (["MODEL", "--budget", "64", "--no-such", "1"], "--no-such"),
        (["MODEL", "--budget", "64", "--cb-num-blocks", "1", "--cb-block-size", "16"], "num_blocks"),
    ],
)
def test_the_command_refuses_before_it_listens(folder: Path, words: list[str], reason: str) -> None:
    given = [str(folder) if word == "MODEL" else word for word in words]
    cpu = ["--device", "cpu"] if "MODEL" in words else []
    done = subprocess.run(command(*given, *cpu), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0 and reason in done.stderr, done.stderr
    assert "Uvicorn running" not in done.stderr
