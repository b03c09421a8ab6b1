"""How far estimates for GPUs are off, as far as anyone measured: what each says of itself.

The steps are those in `benchmarks/results/estimates.jsonl` that were kept back when the constants of the model were
set.
"""

STEPS, HALF_WITHIN, WORST = 24, 0.12, 0.19  # how many; shares of the measured seconds, rounded up to whole percent
STATED = f"within {HALF_WITHIN:.0%} of measured steps for half of {STEPS}, {WORST:.0%} for the worst"
