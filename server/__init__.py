"""A server that speaks OpenAI's protocol, on top of continuous batching with eviction: `paged-eviction serve`."""
