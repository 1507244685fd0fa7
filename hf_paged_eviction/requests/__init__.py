"""Requests of a server that evicts: what continuous batching and the plugin for vLLM share."""
