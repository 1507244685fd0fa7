"""A run in one YAML file: the options of `paged-eviction eval` by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..errors import UserError
from .base import Options, nearest, problem
from .files import read_text
from .settings import Settings, TextSettings

NAME = "run.yaml"


def read_run_file(path: Path, options: type[Options]) -> dict[str, Any]:
    """Options by name; those without a value are left out.

    Args:
        path: a YAML file with a mapping, names with hyphens or underscores.
        options: those that it may have, but `config`.

    Raises:
        UserError: the file cannot be read, a key is unknown or there twice, or a value cannot be used.
    """
    import yaml

    text = read_text("--config", path)
    known = [name.replace("_", "-") for name in options.offered() if name != "config"]
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise UserError(f"--config {path} has an alias (*name): write the value itself")
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not isinstance(node, yaml.MappingNode):
        raise UserError(f"--config {path} has no options in it: write one in each line, such as `limit: 10`")
    seen: set[str] = set()
    for key, _ in node.value:
        name, line = str(key.value).replace("_", "-"), key.start_mark.line + 1
        if name not in known:
            raise UserError(f"{path}, line {line}: unknown option {key.value!r}, {nearest(name, known)}")
        if name in seen:
            raise UserError(f"{path}, line {line}: {key.value!r} is there twice")
        seen.add(name)
    values = {key.replace("-", "_"): value for key, value in content.items() if value is not None}
    try:
        options.model_validate(values, strict=True)
    except ValidationError as error:
        name, value, expected = problem(options, error)
        shown = f"{name.replace('_', '-')}: {value!r}"[:200]
        raise UserError(f"{path}: {shown} cannot be used: {expected}") from error
    return values


#: Settings whose option has another name.
_OPTIONS = {"lengths": "length", "files": "text"}


def as_run_file(settings: Settings, output: Path) -> str:
    """The YAML that `--config` reads back as the same settings and the same folder."""
    import yaml

    options: dict[str, Any] = {"text": []} if isinstance(settings, TextSettings) else {}
    for name, value in settings.as_json().items():
        if value is not None and value != []:
            options[_OPTIONS.get(name, name)] = value
    options.setdefault("policies", ["full"])
    options["output"] = str(output)
    named = {name.replace("_", "-"): value for name, value in options.items()}
    return (
        f"# All settings of a run: `paged-eviction eval --config {output / NAME}` repeats or continues it.\n"
        f"{yaml.safe_dump(named, sort_keys=False, allow_unicode=True, width=110)}"
    )
