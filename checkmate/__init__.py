"""checkmate: train within a byte budget, at the least recomputation that can be proven."""
