"""params.yaml, read into frozen, validated models; and what a machine makes of a variant.

Nothing here imports torch: a mistake in params.yaml is reported in the first second, before any
work, with the path of the key, what was found there and what is allowed.
"""

from __future__ import annotations

from pipeline.config.catalogue import CATALOGUE, asked, entries, entry, exclusions, misplaced, techniques, without
from pipeline.config.catalogue.base import COMPILER, Entry
from pipeline.config.catalogue.classes import TECHNIQUE_CLASSES
from pipeline.config.errors import ConfigError, PipelineError, first_line, redacted
from pipeline.config.loading import PARAMS_FILE, SCHEMA_FILE, load, parse, schema
from pipeline.config.machine import Machine
from pipeline.config.names import OWN_MODELS, check_names, torchvision_models, unknown_model
from pipeline.config.planning import Plan, WhyNotHeldBy, plan, plans, relied_on
from pipeline.config.sections import (
    GRAPH_WARMUP_STEPS,
    Augment,
    Bench,
    Compare,
    Config,
    Fetch,
    Gate,
    Infer,
    Margins,
    Prepare,
    Profile,
    Publish,
    Section,
    Seed,
    Synthetic,
    Train,
    Variant,
    VariantName,
)

__all__ = [
    "CATALOGUE",
    "COMPILER",
    "GRAPH_WARMUP_STEPS",
    "OWN_MODELS",
    "PARAMS_FILE",
    "SCHEMA_FILE",
    "TECHNIQUE_CLASSES",
    "Augment",
    "Bench",
    "Compare",
    "Config",
    "ConfigError",
    "Entry",
    "Fetch",
    "Gate",
    "Infer",
    "Machine",
    "Margins",
    "PipelineError",
    "Plan",
    "Prepare",
    "Profile",
    "Publish",
    "Section",
    "Seed",
    "Synthetic",
    "Train",
    "Variant",
    "VariantName",
    "WhyNotHeldBy",
    "asked",
    "check_names",
    "entries",
    "entry",
    "exclusions",
    "first_line",
    "load",
    "misplaced",
    "parse",
    "plan",
    "plans",
    "redacted",
    "relied_on",
    "schema",
    "techniques",
    "torchvision_models",
    "unknown_model",
    "without",
]
