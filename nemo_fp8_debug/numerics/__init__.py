"""Pure functions of low precision: formats, scaling rules, histograms and the metrics made from them. Internal."""
