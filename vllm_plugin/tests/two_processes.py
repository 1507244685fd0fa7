"""A program: does a server with two processes (tensor parallelism) give what `PagedEvictionCache` alone gives?

`python two_processes.py ALLOCATOR`
"""

import os
import random
import sys

import conftest  # noqa: F401  (the environment)

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}

if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    from alone import answer
    from engines import drawn
    from tiny_models import tiny

    (folder, model), allocator = tiny("llama"), sys.argv[1]
    options = {"budget": 64, "policy": "keydiff", "heads": "separate", "allocator": allocator}
    model.set_attn_implementation("paged_eviction")
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        block_size=32,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        additional_config={"paged_eviction": options},
    )
    prompts = [drawn(random.Random(1), 200), drawn(random.Random(2), 300)]
    parameters = SamplingParams(max_tokens=40, temperature=0, detokenize=False, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):  # both fit into one batch
        assert list(output.outputs[0].token_ids) == answer(model, options, prompt, [len(prompt)], 40)
    print("the same tokens")
