"""A program: does a server with two processes (tensor parallelism) give what `PagedEvictionCache` alone gives?"""

import os
import random

import conftest  # noqa: F401  (the environment)

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}

if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    from alone import answer
    from engines import drawn
    from tiny_models import tiny

    (folder, model), options = tiny("llama"), {"budget": 64, "policy": "keydiff", "heads": "separate"}
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
    prompt = drawn(random.Random(1), 200)
    parameters = SamplingParams(max_tokens=40, temperature=0, detokenize=False, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == answer(model, options, prompt, [200], 40)
    print("the same tokens")
