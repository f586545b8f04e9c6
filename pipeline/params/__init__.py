"""Read params.yaml into frozen, validated models, and list what each technique declares.

Nothing here imports torch, so a mistake in params.yaml is reported in the first second, before any work. The message
names the key, the value found and what is allowed.
"""

from __future__ import annotations

from pipeline.params.catalogue import (
    CATALOGUE,
    COMPILER,
    Entry,
    entries,
    entry,
    exclusions,
    misplaced,
    requested,
    techniques,
    without,
)
from pipeline.params.commands import Command
from pipeline.params.conditions import GRAPH_WARMUP_STEPS, Machine
from pipeline.params.loading import PARAMS_FILE, SCHEMA_FILE, Config, check_minutes, load, parse, schema
from pipeline.params.names import OWN_MODELS, check_names, torchvision_models, unknown_model
from pipeline.params.sections import (
    Augment,
    Bench,
    Compare,
    Fetch,
    Gate,
    Launch,
    Margins,
    Prepare,
    Publish,
    Script,
    Section,
    Seed,
    Synthetic,
    Train,
    VariantName,
)
from pipeline.params.variants import Variant, is_file
