"""The model families that the installed transformers knows, read from its own tables."""

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from families.overrides import VARIANTS

#: The heads a decoder may have, in order: a model that answers to two of them is listed once.
_TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "image": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "multimodal": "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
}


@dataclass(frozen=True)
class Family:
    """A class of models and the configuration it is built from."""

    model_type: str
    task: str
    class_name: str
    variant: str = ""
    settings: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        parts = (self.model_type, "" if self.task == "causal" else self.task, self.variant)
        return "-".join(part for part in parts if part)

    @property
    def config_class(self) -> Any:
        """The class of its configuration."""
        return CONFIG_MAPPING[self.model_type]

    @property
    def model_class(self) -> Any:
        """The class of its models."""
        return getattr(modeling_auto, _TASKS[self.task])[self.config_class]


@cache
def families() -> tuple[Family, ...]:
    """Every class of models with a decoder, once, sorted by name."""
    by_class: dict[tuple[str, str], Family] = {}
    for task, table in _TASKS.items():
        names = getattr(modeling_auto, f"{table}_NAMES", {})  # older releases lack some tables
        for model_type, class_name in names.items():
            first = class_name if isinstance(class_name, str) else class_name[0]
            # Names rather than classes: those would be hundreds of modules to import, in every run of the tests.
            by_class.setdefault((first, CONFIG_MAPPING_NAMES[model_type]), Family(model_type, task, first))
    families = list(by_class.values())
    for variant, model_type, settings in VARIANTS:
        families += [
            replace(family, variant=variant, settings=settings)
            for family in by_class.values()
            if (family.model_type, family.task) == (model_type, "causal")
        ]
    return tuple(sorted(families, key=str))
