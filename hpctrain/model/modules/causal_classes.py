"""Classes of `transformers` for causal language models, by the type in a config.json."""

from __future__ import annotations

from typing import Any

TEXT_PART = "text_config"
"""Key of the text model in the configuration of a model of images and text."""

_LANGUAGE_MODEL = "ForCausalLM"
"""End of the names of classes that compute no more than a language model."""


def causal_classes(kind: str) -> tuple[str, ...]:
    """Return the names of the classes of `transformers` for causal language models of a type.

    `transformers` itself does not find the class of the text model of some models of images and text, such as
    "emu3_text_model". That class is registered for the type of the complete model.

    Args:
        kind: A model_type that `transformers` knows.
    """
    import transformers
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    if kind in CLASSES:
        return _as_tuple(CLASSES[kind])
    if getattr(transformers.CONFIG_MAPPING[kind], "base_config_key", "") != TEXT_PART:
        return ()
    module = model_type_to_module_name(kind)
    of_module = (names for other, names in CLASSES.items() if model_type_to_module_name(other) == module)
    return tuple(
        name
        for names in of_module
        for name in _as_tuple(names)
        if getattr(transformers, name).config_class.model_type == kind
    )


def causal_class(kind: str, named: object) -> Any:
    """Return the class of `transformers` for a causal language model of a type, which has at least one.

    Args:
        kind: The model_type.
        named: Names of classes in the config.json; None if it names none.
    """
    import transformers

    names = causal_classes(kind)
    chosen = [name for name in names if isinstance(named, list) and name in named]
    return getattr(transformers, (chosen or names)[0])


def is_of_text(name: str, config_class: type) -> bool:
    """Return True if a class may be a language model alone, although its configuration has other parts.

    An example is that of Moshi, which ignores the configuration of the audio encoder.

    Args:
        name: Name of the class.
        config_class: Class of the configuration.
    """
    import transformers

    return name.endswith(_LANGUAGE_MODEL) and getattr(transformers, name).config_class is config_class


def _as_tuple(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
