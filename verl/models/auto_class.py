"""Choose the auto class of transformers that loads a language model.

Models for images and text are trained on text alone. Depending on the config, transformers loads
the whole model or only its text model::

    Qwen3Config     AutoModelForCausalLM         Qwen3ForCausalLM
    Gemma3Config    AutoModelForCausalLM         Gemma3ForConditionalGeneration    whole model
    Qwen3VLConfig   AutoModelForImageTextToText  Qwen3VLForConditionalGeneration   whole model
    Qwen3_5Config   AutoModelForCausalLM         Qwen3_5ForCausalLM                text model
"""

import inspect
from typing import TYPE_CHECKING, Any

from verl.models.architecture import unsupported_model_error

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig


def choose_auto_class(config: "PreTrainedConfig") -> Any:  # auto classes have no common base class
    """Return the auto class of transformers that loads the language model of ``config``.

    Raises ``UnsupportedArchitectureError`` if transformers has none.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    if hasattr(config, "auto_map"):  # the checkpoint has its class, which the mappings lack
        return AutoModelForCausalLM
    causal_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    image_text_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    if causal_class is None and image_text_class is None:
        why = "transformers has no causal language model of this type"
    elif causal_class is None:
        why = _find_text_problem(config, image_text_class)
    elif image_text_class is not None and not _loads_checkpoint(causal_class, config):
        why = (
            f"its files have the weights of {image_text_class.__name__}, but the causal language "
            f"model of transformers ({causal_class.__name__}) is only the text model"
        )
    else:
        why = ""
    if why:
        raise unsupported_model_error(config, why)
    return AutoModelForImageTextToText if causal_class is None else AutoModelForCausalLM


def _find_text_problem(config: "PreTrainedConfig", image_text_class: Any) -> str:
    """Return why ``image_text_class`` cannot compute text without images, or "" if it can."""
    if config.is_encoder_decoder:
        return "it has an encoder and a decoder"
    parameters = inspect.signature(image_text_class.forward).parameters
    if "input_ids" not in parameters:
        return "its forward pass takes no token ids"
    required_names = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        and name not in ("self", "input_ids")
    ]
    return f"its forward pass requires {', '.join(required_names)}" if required_names else ""


def _loads_checkpoint(causal_class: Any, config: "PreTrainedConfig") -> bool:
    """Return True if ``causal_class`` loads the checkpoint of a model for images and text.

    The class of the whole model loads it. The class of the text model loads it only if the class
    ignores the other tensors of the files.
    """
    return (
        causal_class.config_class is type(config)
        or causal_class.__name__ in (config.architectures or ())
        or bool(causal_class._keys_to_ignore_on_load_unexpected)
    )
