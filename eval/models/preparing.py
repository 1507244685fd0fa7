"""What `paged-eviction prepare` does."""

from __future__ import annotations

import shutil
from typing import Any

from rich.console import Console

from hf_paged_eviction import Profile
from hf_paged_eviction import prepare as prepare_model
from hf_paged_eviction.internals import whole_file  # as the profile itself is written

from ..console import say
from ..data.texts import read_texts
from ..errors import UserError
from ..options.files import check_files, check_output
from . import loading as models
from .device import model_settings


def run_prepare(options: Any) -> Profile:
    """Load a model, find or measure its profile, and print it.

    Args:
        options: of the command.

    Raises:
        UserError: a file cannot be read or written, or the model cannot be measured.
    """
    notes = Console(stderr=True)
    files, output = options.text or [], options.output
    check_files(files)
    if output is not None:
        check_output(output)
    text = "\n\n".join(source.content for source in read_texts(list(map(str, files)))) if files else None
    settings = model_settings(options)
    tokenizer = models.load_tokenizer(settings)
    say(notes, f"loading {settings.model}")
    model = models.load_model(settings)
    try:
        prepared = prepare_model(
            model,
            tokenizer,
            text=text,
            use=options.use,
            quick=options.quick,
        )
    except (ValueError, OSError) as error:
        raise UserError(f"cannot prepare {settings.model!r}: {error}") from error
    Console(soft_wrap=True, highlight=False).print(str(prepared), markup=False)
    if output is not None:
        try:
            with whole_file(output) as temporary:
                shutil.copyfile(prepared.path, temporary)
        except OSError as error:
            raise UserError(f"--output {output}: {error}") from error
        say(notes, f"written to {output}: prepare(model, profile={str(output)!r})")
    return prepared
