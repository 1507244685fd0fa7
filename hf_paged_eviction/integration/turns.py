"""Check the length of a text that `generate` gets together with a cache that has read another one."""


class SeenTokens(int):
    """Number of tokens per row that a cache has seen, as `generate` gets it at the start of a turn.

    `generate` expects the whole text and subtracts this number from its length. If nothing is left, it would go on with
    an arbitrary part of the text.
    """

    def __rsub__(self, length: int) -> int:
        """Number of new tokens in a text of `length` tokens.

        Raises:
            ValueError: no token is new.
        """
        if length <= self:
            raise ValueError(
                f"generate was given a text of {length} tokens, and this cache has seen {int(self)}: the text must "
                "begin with what was seen, and be longer. For another text use another cache, or call "
                "cache.reset() first. A pipeline hands one cache to all its batches: make a cache and a call for "
                "each batch, or use batch_size=len(prompts) (examples/pipelines.py). Where these are the "
                "new tokens alone, call generate(**cache.follow_up(input_ids), cache=cache). To answer a text that "
                "was read whole, call cache.crop(-1) first."
            )
        return length - int(self)
