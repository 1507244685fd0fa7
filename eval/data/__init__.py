"""Records and prompts: published benchmarks, files of the user, texts."""
