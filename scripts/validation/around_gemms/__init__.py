"""How surely `diagnose` names what goes wrong between GEMMs and in the steps of weights."""
