"""Costs before computing: rooflines, the graph of a layer, the search for a configuration, and the simulator."""
