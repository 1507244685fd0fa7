"""Models and tokenizers, and the machine that they run on."""
