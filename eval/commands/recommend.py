"""`paged-eviction recommend`."""

from __future__ import annotations

from ..options.recommend import RecommendOptions

EPILOG = """[bold]How[/]

Texts are cut into passages. The full cache reads each once; a candidate reads it as it would in use, in chunks and \
then token by token, and is as good as its next-token distributions are near to those of the full cache (KL divergence \
in nats). No right answers are needed.

A candidate is a policy, an allocator, a number of bits, a way to count positions and a disposal: every combination \
that the model takes, each with as many tokens as fit into the bytes. All candidates read a passage, the better half \
reads more, and so on, until two have read many: a tenth of the cost of reading everything with all.

[bold]Examples[/]

In a minute or two, without a download: the small model that ships with the package

  paged-eviction recommend --budget 128KiB --length 512 --passages 20 --policies keydiff,recency,snapkv,h2o

Texts of your own

  paged-eviction recommend --model Qwen/Qwen3-8B --text reports/*.txt --budget 1GiB

Prompts of your own, at two sizes; records as of eval --task-file, right answers are not needed

  paged-eviction recommend --model Qwen/Qwen3-8B --task-file tickets.jsonl --budget 512MiB,1GiB

Fewer choices, more passages

  paged-eviction recommend --text book.txt --budget 64MiB --bits none,8 --positions text --disposals drop --passages 80
"""


def recommend(options: RecommendOptions) -> None:
    """Which cache suits this model and these texts? The best in so many bytes, and the line of code to paste.

    Rows are written as they are finished: a search that was stopped, by whatever, is continued by the same command.
    With more candidates, sizes or passages it reads what is missing in the folder.
    """
    from ..recommend.run import run_recommend

    run_recommend(options)
