"""Families of models that occur nowhere else in the validation: no language model, ViT or diffusion transformer."""

from __future__ import annotations

#: modules by the name of each family
MODULES = {
    "conformer": "held_out.families.speech",
    "unet": "held_out.families.images",
    "dlrm": "held_out.families.recommender",
    "mixer": "held_out.families.forecast",
    "graph": "held_out.families.graphs",
    "points": "held_out.families.graphs",
    "flow": "held_out.families.densities",
    "operator": "held_out.families.densities",
}
FAMILIES = tuple(MODULES)
