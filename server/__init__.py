"""An HTTP server with OpenAI's protocol, on continuous batching with eviction: `paged-eviction serve`."""
