"""A Hugging Face class by itself: a config, inputs and labels that fit it, where the user gives none."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from optexp.errors import ConfigError
from optexp.schema import suggest
from optexp.user_code.described_input import Input
from optexp.user_code.objects import Described, made

BATCH, SEQUENCE = 4, 64  # sizes where `shapes` names no batch and no sequence
CLASSES = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")
WORDS = ("ForCausalLM", "ForMaskedLM", "LMHeadModel", "ForConditionalGeneration")


def may_describe_itself(target: str) -> bool:
    """Whether a target names something of transformers; imports nothing."""
    return target.partition(":")[0].partition(".")[0] == "transformers"


def with_config(found: Any, args: Sequence[Any], kwargs: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Keyword arguments of a class, with the config that it needs.

    Args:
        found: The class; anything without a `config_class` needs no config.
        args: Its positional arguments; one of them is the config, where there are any.
        kwargs: Its keyword arguments; a mapping `config` without `_target_` has options of the config.
        key: Of the keyword arguments, for messages.

    Raises:
        ConfigError: the config has no such option.
    """
    kind = getattr(found, "config_class", None)
    given = kwargs.get("config", {})
    if not isinstance(found, type) or not isinstance(kind, type) or args or not isinstance(given, dict):
        return dict(kwargs)
    _require_known(kind, given, f"{key}.config")
    return {**kwargs, "config": Described(f"{key}.config", f"{kind.__module__}:{kind.__qualname__}", [], given, False)}


def _require_known(kind: type, given: Mapping[str, Any], key: str) -> None:
    """Raises ConfigError where a config has no such option: it keeps any name, and no model reads the name."""
    options = list(inspect.signature(kind).parameters)
    known = {*options, *dir(kind), *getattr(kind, "attribute_map", {}), "attn_implementation"}
    if unknown := [name for name in given if name not in known]:
        raise ConfigError(f"{key}: {kind.__name__} has no {unknown[0]!r}{suggest(unknown[0], options)}")


def inputs_of(found: Any, kwargs: Mapping[str, Any], sizes: Sequence[str], learns: bool) -> list[Input]:
    """The inputs of a batch that fits a class: token ids or images, and labels; empty where nothing is known.

    Args:
        found: The class.
        kwargs: With the config.
        sizes: Names of sizes that the user gives: "batch", "sequence".
        learns: A loss is needed, which labels give.
    """
    main, config = getattr(found, "main_input_name", None), made(kwargs.get("config"))
    batch: Any = "batch" if "batch" in sizes else BATCH
    if main == "pixel_values" and hasattr(config, "image_size"):
        side = config.image_size
        height, width = (side, side) if isinstance(side, int) else side
        shape = [batch, getattr(config, "num_channels", 3), height, width]
        return [Input(shape, name=main), *_labels(found, config, shape, learns)]
    if main != "input_ids" or not hasattr(config, "get_text_config"):
        return []
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or SEQUENCE
    shape = [batch, "sequence" if "sequence" in sizes else min(SEQUENCE, longest)]
    names = ["input_ids", *["decoder_input_ids"] * bool(getattr(config, "is_encoder_decoder", False))]
    tokens = [Input(shape, "int64", name, high=text.vocab_size) for name in names]
    mask = Input(shape, "int64", "attention_mask", low=1, high=2)  # nothing is padding
    return [*tokens, mask, *_labels(found, config, shape, learns)]


def _labels(found: type, config: Any, shape: list[Any], learns: bool) -> list[Input]:
    name = found.__name__
    if not learns:
        return []
    if name.endswith(WORDS):
        return [Input(shape, "int64", "labels", high=config.get_text_config().vocab_size)]
    if not name.endswith((*CLASSES, "ForTokenClassification")):
        return []
    where = shape[:1] if name.endswith(CLASSES) else shape
    if config.num_labels == 1:  # a regression
        return [Input(where, name="labels")]
    return [Input(where, "int64", "labels", high=config.num_labels)]
